"""The grammar of host text: `h1,h2`, `gpu[01-16]`, `alice@h2:2222`, `[fe80::1]:22`, `h3 slots=2`.

Everything here is text in, value out. Characters that a shell, ssh or mpirun would read as something else are
refused here, once, so that no later part meets them.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

from provision.errors import HostTextError

MAX_HOSTS = 10_000
MAX_SLOTS = 65_535
# A number from 1 to 21 after a colon is far more often meant as slots (horovodrun) than as an SSH port.
LOWEST_PLAIN_PORT = 22

_EXPECTED = "expected hosts like `h1,h2`, `gpu[01-16]`, `alice@h2:2222` or `h3 slots=2`"
_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9])?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,63}")
_SCOPE = re.compile(r"[A-Za-z0-9_.-]{1,32}")
_RANGE_PIECE = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?:/(\d{1,9}))?)?", re.ASCII)
_KEYS = {
    "slots": ("slots", "slot", "cpus", "cpu", "count"),
    "max_slots": ("max_slots", "max-slots", "slots_max", "slots-max"),
    "port": ("port",),
    "user": ("user", "username", "user_name", "user-name"),
}
_FIELD_OF_KEY = {key: name for name, keys in _KEYS.items() for key in keys}


@dataclass(frozen=True)
class Place:
    """Where a text came from, for messages: an option or file, and a line counted from 1."""

    source: str
    line: int | None = None

    def error(self, message: str, *, part: str = "", remedy: str | None = None) -> HostTextError:
        return HostTextError(message, part=part, source=self.source, line=self.line, remedy=remedy)


@dataclass(frozen=True)
class HostSpec:
    """One host as a text names it; None is "not said" and may be filled from the SSH configuration."""

    host: str
    place: Place
    user: str | None = None
    port: int | None = None
    slots: int | None = None
    max_slots: int | None = None
    identity_files: tuple[str, ...] = ()
    identities_only: bool = False
    proxy_jump: str | None = None
    alias: str | None = None  # the inventory's own name for it; None: the host itself

    @property
    def key(self) -> tuple[str, int, str | None]:
        """Equal for two mentions of one machine; one address behind two jump hosts is two machines."""
        return (self.host.lower(), self.port or 22, self.proxy_jump)

    @property
    def is_local(self) -> bool:
        return self.host.lower() == "localhost" and self.user is None and self.port is None


def parse_hosts(text: str, *, source: str = "--hosts") -> tuple[HostSpec, ...]:
    """Reads a list of hosts separated by commas, spaces or line ends; a host named twice counts once.

    `key=value` words belong to the host word directly before them. HostTextError names the faulty part.
    """
    place = Place(source)
    specs: list[HostSpec] = []
    for item in split_items(text, place):
        words = split_words(item)
        while words:
            word = words.pop(0)
            settings = []
            while words and "=" in words[0]:
                settings.append(words.pop(0))
            specs += parse_host(word, settings, place)
            if len(specs) > MAX_HOSTS:
                raise place.error(f"more than {MAX_HOSTS} hosts", part=word)
    if not specs:
        raise place.error("names no host", part=text, remedy=_EXPECTED)
    return merge_mentions(specs)


def split_items(text: str, place: Place) -> list[str]:
    """Cuts at commas and line ends outside brackets; leaves out what is empty."""
    items, start, depth = [], 0, 0
    for i, character in enumerate(text):
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        if depth not in (0, 1):
            raise place.error(f"brackets do not match in {text[start : i + 1]!r}", part=text[start : i + 1])
        if character == "\n" or (character == "," and depth == 0):
            items.append(text[start:i])
            start = i + 1
    if depth:
        raise place.error(f"a bracket is not closed in {text[start:]!r}", part=text[start:])
    items.append(text[start:])
    return [item for item in items if item.strip(" \t\r")]


def split_words(text: str) -> list[str]:
    """Words between spaces and tabs; `slots = 2` is one word, `slots=2`."""
    return [word for word in re.split(r"[ \t\r]+", re.sub(r"[ \t]*=[ \t]*", "=", text)) if word]


def parse_host(word: str, settings: Sequence[str], place: Place) -> list[HostSpec]:
    """One host word, maybe a range, with its `key=value` words."""
    if word.startswith("-"):
        raise place.error(f"{word!r}: a host cannot start with a dash: ssh would read an option", part=word)
    if "=" in word:
        raise place.error(f"{word!r} follows no host", part=word, remedy="write it after one: `h1 slots=2`")
    user, at, rest = word.rpartition("@")
    given: dict[str, str | int] = {}
    if at:
        given["user"] = check_user(user, place, part=word)
    hosts, port = _split_port(rest, word, place)
    if port is not None:
        given["port"] = _plain_port(port, word, place)
    for setting in settings:
        key, _, value = setting.partition("=")
        name = _FIELD_OF_KEY.get(key.lower())
        if name is None:
            raise place.error(
                f"unknown setting {setting!r}, expected one of {', '.join(_KEYS)}", part=setting
            )
        if name == "user":
            read: str | int = check_user(value, place, part=setting)
        else:
            read = read_number(value, name, setting, place)
        if given.setdefault(name, read) != read:
            raise place.error(f"{name} is given twice for {word!r}: {given[name]} and {read}", part=setting)
    check_slots(given.get("slots"), given.get("max_slots"), place, part=word)
    return [HostSpec(host=host, place=place, **given) for host in hosts]  # type: ignore[arg-type]


def _split_port(rest: str, word: str, place: Place) -> tuple[list[str], str | None]:
    if rest.startswith("["):
        inside, closed, after = rest[1:].partition("]")
        if not closed or (after and not after.startswith(":")):
            raise place.error(
                f"{word!r}: what follows `]` is not `:port`",
                part=word,
                remedy="a range needs letters first: `n[1-3]`",
            )
        if ":" not in inside and not re.search("[A-Za-z]", inside):
            raise place.error(f"{word!r}: a range needs letters before it, as in `n[1-3]`", part=word)
        return [check_host(inside, place, part=word)], after[1:] if after else None
    if re.search(r"\[[^\]]*:", rest):
        raise place.error(f"{word!r}: ranges are written with a dash, `h[01-16]`", part=word)
    if rest.count(":") > 1:
        return [check_host(rest, place, part=word)], None
    pattern, colon, port = rest.partition(":")
    return expand_range(pattern, place, part=word), port if colon else None


def _plain_port(text: str, word: str, place: Place) -> int:
    shown = word.rpartition(":")[0]
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > 65_535:
        raise place.error(
            f"{word!r}: got {text!r} after the colon, expected an SSH port from {LOWEST_PLAIN_PORT} to 65535",
            part=word,
        )
    if int(text) < LOWEST_PLAIN_PORT:
        raise place.error(
            f"{word!r}: {text} is no usual SSH port (22 and above)",
            part=word,
            remedy=f"for slots write `{shown} slots={int(text)}`, for a port `{shown} port=N`",
        )
    return int(text)


def read_number(value: str, name: str, part: str, place: Place) -> int:
    low, high = {"slots": (0, MAX_SLOTS), "max_slots": (1, MAX_SLOTS), "port": (1, 65_535)}[name]
    if not re.fullmatch(r"[0-9]{1,5}", value) or not low <= int(value) <= high:
        raise place.error(f"{name}: got {value!r}, expected a whole number from {low} to {high}", part=part)
    return int(value)


def check_slots(slots: object, max_slots: object, place: Place, *, part: str) -> None:
    if isinstance(slots, int) and isinstance(max_slots, int) and max_slots < slots:
        raise place.error(f"{part}: max_slots={max_slots} is below slots={slots}", part=part)


def check_user(user: str, place: Place, *, part: str) -> str:
    if not _USER.fullmatch(user):
        raise place.error(
            f"{part!r}: {user!r} is no user name",
            part=part,
            remedy="expected letters, digits, `_`, `.`, `+`, `-`, not starting with a dash",
        )
    return user


def check_host(host: str, place: Place, *, part: str) -> str:
    """A DNS name or an IP address (a scope is kept, `fe80::1%eth0`); anything else is HostTextError."""
    if ":" in host:
        address, percent, scope = host.partition("%")
        if _is_ip(address, 6) and (not percent or _SCOPE.fullmatch(scope)):
            return host
        raise place.error(f"{part!r}: {host!r} is neither host:port nor an IPv6 address", part=part)
    if host.startswith("-"):
        raise place.error(f"{part!r}: a host cannot start with a dash: ssh would read an option", part=part)
    labels = host.split(".")
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise place.error(
            f"{part!r}: {host!r} is no host name",
            part=part,
            remedy="expected letters, digits, dots, `-` and `_`, or an IP address",
        )
    if labels[-1].isdigit() and not _is_ip(host, 4):
        raise place.error(f"{part!r}: {host!r} ends in a number but is no IPv4 address", part=part)
    return host


def _is_ip(text: str, version: int) -> bool:
    try:
        return ipaddress.ip_address(text).version == version
    except ValueError:
        return False


def check_proxy_jump(value: str | None, place: Place) -> str | None:
    """`[user@]host[:port]`, several with commas, each perhaps as `ssh://…`; `none` is None."""
    if value is None or value.lower() == "none":
        return None
    hops = [hop.strip().removeprefix("ssh://") for hop in value.split(",")]
    for hop in hops:
        if not hop or len(hop.split()) != 1 or "=" in hop or len(parse_hosts(hop, source=place.source)) != 1:
            raise place.error(f"ProxyJump {value!r}: {hop!r} is no host", part=hop)
    return ",".join(hops)


def expand_range(pattern: str, place: Place, *, part: str) -> list[str]:
    """The hosts of `gpu[01-16]` in rising order; sizes are checked before anything is expanded."""
    if "[" not in pattern and "]" not in pattern:
        return [check_host(pattern, place, part=part)]
    sizes = []
    for inside in re.findall(r"\[([^\]]*)\]?", pattern):
        pieces = [_RANGE_PIECE.fullmatch(piece) for piece in inside.split(",")]
        if not all(pieces):
            raise place.error(
                f"{part!r}: {inside!r} is no range, expected numbers like `[01-16]` or `[1-3,7]`", part=part
            )
        sizes.append(
            sum(abs(int(p[2] or p[1]) - int(p[1])) // max(int(p[3] or 1), 1) + 1 for p in pieces if p)
        )
    if prod(sizes) > MAX_HOSTS:
        raise place.error(f"{part!r}: {prod(sizes)} hosts, expected at most {MAX_HOSTS}", part=part)
    # NodeSet has operators (`!`, `&`, `^`, `@`, `*`): only plain characters may reach it.
    if not re.fullmatch(r"[A-Za-z0-9._/,\[\]-]+", pattern):
        raise place.error(f"{part!r}: {pattern!r} is no host name or range", part=part, remedy=_EXPECTED)
    try:
        hosts = [str(host) for host in NodeSet(pattern, resolver=RESOLVER_NOGROUP)]
    except NodeSetException as error:
        raise place.error(f"{part!r}: {error}", part=part) from error
    return [check_host(host, place, part=part) for host in hosts]


def merge_mentions(specs: Iterable[HostSpec]) -> tuple[HostSpec, ...]:
    """One spec a machine, in order of first mention; HostTextError where mentions contradict each other."""
    merged: dict[tuple[str, int, str | None], HostSpec] = {}
    for spec in specs:
        known = merged.get(spec.key)
        merged[spec.key] = spec if known is None else _merge_two(known, spec)
    return tuple(merged.values())


def _merge_two(first: HostSpec, second: HostSpec) -> HostSpec:
    both: dict[str, object] = {}
    for name in ("user", "port", "slots", "max_slots", "alias"):
        one, other = getattr(first, name), getattr(second, name)
        if one is not None and other is not None and one != other:
            raise second.place.error(
                f"{second.host} is given twice, with {name} {one} and {other}",
                part=second.host,
                remedy="a machine is one node: name it once",
            )
        both[name] = other if one is None else one
    check_slots(both["slots"], both["max_slots"], second.place, part=second.host)
    both["identity_files"] = first.identity_files or second.identity_files
    both["identities_only"] = first.identities_only or second.identities_only
    return dataclasses.replace(first, **both)  # type: ignore[arg-type]
