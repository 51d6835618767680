"""Reads OpenSSH client configuration and fills in what a host text left open.

paramiko.SSHConfig does the matching. What it lacks is done before: `Include`, comments after a value, and
refusing `Match` keywords that it would silently take for a match.
"""

from __future__ import annotations

import dataclasses
import getpass
import glob
import hashlib
import os
import re
import shlex
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paramiko.config import SSHConfig
from paramiko.ssh_exception import SSHException

from provision.errors import HostTextError
from provision.hosttext import HostSpec, Place, check_host, check_proxy_jump, check_user

USER_CONFIG = "~/.ssh/config"
SYSTEM_CONFIG = "/etc/ssh/ssh_config"
MAX_INCLUDE_DEPTH = 16  # OpenSSH's own limit

USER_KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
GLOBAL_KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")

# Values of several words: joined by NUL when they are handed to paramiko, which strips quotes but splits nothing.
_FILE_LISTS = frozenset({"userknownhostsfile", "globalknownhostsfile"})
_BARE_MATCH = frozenset({"all", "canonical", "final"})
_MATCH_WITH_VALUE = frozenset({"host", "originalhost", "user", "localuser", "exec"})
Reader = Callable[[str, str], Sequence[tuple[str, str]]]  # (pattern, folder) -> [(path, text)]


@dataclass(frozen=True)
class SSHSettings:
    """Configuration text with its Includes expanded; the first value found wins."""

    text: str
    source: str
    file: str | None = None  # the one given with --ssh-config, for `ssh -F`

    def lookup(self, host: str, *, user: str | None = None, port: int | None = None) -> Mapping[str, Any]:
        """One host's settings, keys in lower case; a user or port given here counts as ssh's options do."""
        given = "Host *\n"
        given += f"User {user}\n" if user else ""
        given += f"Port {port}\n" if port else ""
        try:
            found: Mapping[str, Any] = self._parse(given).lookup(host)
        except SSHException as error:
            raise HostTextError(f"SSH configuration for {host}: {error}", source=self.source) from error
        return found

    def names(self) -> list[str]:
        """The names that its Host lines spell out, in their order."""
        lines = re.findall(r"(?im)^host(?:\s*=\s*|\s+)(.*)$", self.text)
        words = (word.strip('"') for line in lines for word in line.split())
        return [word for word in words if not set(word) & set("*?!")]

    def check(self) -> SSHSettings:
        """Itself, or HostTextError for a damaged file: before any host is looked up."""
        self._parse("")
        return self

    def _parse(self, given: str) -> SSHConfig:
        try:
            return SSHConfig.from_text(given + self.text)
        except (SSHException, ValueError) as error:
            raise HostTextError(f"is no SSH configuration: {error}", source=self.source) from error


def load_ssh_config(path: str | os.PathLike[str] | None = None) -> SSHSettings:
    """The given file alone, or the user's and then the system's configuration, where they exist."""
    if path is not None:
        try:
            text = Path(path).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise HostTextError(f"cannot be read: {error}", source=f"--ssh-config {path}") from error
        settings = parse_ssh_config([(str(path), text, os.path.expanduser("~/.ssh"))], read_included)
        return dataclasses.replace(settings, file=os.path.expanduser(path))
    files = []
    for name in (os.path.expanduser(USER_CONFIG), SYSTEM_CONFIG):
        for source, text in read_included(name, "/"):
            files.append((source, text, os.path.dirname(name)))
    return parse_ssh_config(files, read_included)


def read_included(pattern: str, folder: str) -> list[tuple[str, str]]:
    """The files that an Include word names, in name order; missing ones are left out, as in OpenSSH."""
    found = []
    for path in sorted(glob.glob(os.path.join(folder, os.path.expanduser(pattern)))):
        try:
            found.append((path, Path(path).read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError) as error:
            raise HostTextError(f"cannot be read: {error}", source=path) from error
    return found


def parse_ssh_config(files: Sequence[tuple[str, str, str]], read: Reader) -> SSHSettings:
    """`files` are (source, text, folder for relative Includes), first value wins across all of them."""
    lines: list[str] = []
    for source, text, folder in files:
        lines.append("Host *")  # ends the block in which the file before may have stopped
        lines += _plain_lines(source, text, folder, read, depth=0)
    names = ", ".join(source for source, _, _ in files)
    return SSHSettings("\n".join(lines) + "\n", names or "no file").check()


def _plain_lines(source: str, text: str, folder: str, read: Reader, depth: int) -> Iterator[str]:
    block = ""  # the Host or Match line that the current line belongs to
    for number, raw in enumerate(text.lstrip("\ufeff").splitlines(), start=1):
        place = Place(source, number)
        line = raw.strip()
        if '"' not in line:
            line = re.sub(r"(^|\s)#.*$", "", line).rstrip()
        elif line.startswith("#"):
            continue
        if not line:
            continue
        key, _, value = re.sub(r"\s*=\s*|\s+", " ", line, count=1).partition(" ")
        if not re.fullmatch(r"\w+", key) or not value:
            raise place.error(f"{line!r} is no `Keyword value` line", part=line)
        if key.lower() == "match":
            line = _match_line(value, place)
        if key.lower() in ("host", "match"):
            block = line
        if key.lower() in _FILE_LISTS:
            line = f"{key} " + "\0".join(_words(value, place))
        if key.lower() != "include":
            yield line
            continue
        if depth >= MAX_INCLUDE_DEPTH:
            raise place.error(f"Include goes deeper than {MAX_INCLUDE_DEPTH} files", part=value)
        for pattern in _words(value, place):
            for name, content in read(pattern, folder):
                included = list(_plain_lines(name, content, folder, read, depth + 1))
                opens_block = any(re.match(r"(?i)(host|match)\b", each) for each in included)
                if opens_block and block and not re.fullmatch(r"(?i)host[\s=]+\*|match[\s=]+all", block):
                    raise place.error(
                        f"Include of {name}, which has Host or Match lines, inside `{block}` is not read",
                        part=value,
                        remedy="move the Include line to the top of the file",
                    )
                yield from included
                if opens_block:
                    yield "Host *"


def _match_line(value: str, place: Place) -> str:
    words = _words(value, place)
    shown = ["Match"]
    while words:
        word = words.pop(0)
        bare = word.lower().lstrip("!")
        if bare in _BARE_MATCH:
            shown.append(word.lower())
        elif bare in _MATCH_WITH_VALUE and words:
            shown += [word.lower(), shlex.quote(words.pop(0))]
        else:
            known = ", ".join(sorted(_BARE_MATCH | _MATCH_WITH_VALUE))
            raise place.error(
                f"Match {word!r} is not read, expected one of {known} with its value", part=word
            )
    return " ".join(shown)


def _words(value: str, place: Place) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError as error:
        raise place.error(f"{value!r}: {error}", part=value) from error


def apply_ssh_config(
    spec: HostSpec, settings: SSHSettings, *, environ: Mapping[str, str] | None = None
) -> HostSpec:
    """`spec` with what the configuration says for its host; what the host text says itself wins.

    The alias keeps the host as typed, so that tables show what the user knows it by.
    """
    found = settings.lookup(spec.host, user=spec.user, port=spec.port)
    place = Place(f"{settings.source} (for {spec.host})")
    proxy_jump = spec.proxy_jump or found.get("proxyjump")
    if not proxy_jump and found.get("proxycommand"):
        raise place.error(
            "ProxyCommand is not supported",
            part=str(found["proxycommand"]),
            remedy="use ProxyJump there, or give another file with --ssh-config",
        )
    return dataclasses.replace(
        spec,
        host=check_host(found.get("hostname", spec.host), place, part="HostName"),
        alias=spec.alias or spec.host,
        user=spec.user or _user(found.get("user"), place),
        port=spec.port or _port(found.get("port"), place),
        identity_files=spec.identity_files or _identity_files(found.get("identityfile", ()), environ, place),
        identities_only=spec.identities_only or found.get("identitiesonly", "no").lower() == "yes",
        proxy_jump=check_proxy_jump(proxy_jump, place),
    )


def _user(value: str | None, place: Place) -> str | None:
    return None if value is None else check_user(value, place, part="User")


def _port(value: str | None, place: Place) -> int | None:
    if value is None:
        return None
    if not re.fullmatch(r"[0-9]{1,5}", value) or not 1 <= int(value) <= 65_535:
        raise place.error(f"Port: got {value!r}, expected a number from 1 to 65535", part=value)
    return int(value)


def _identity_files(
    values: Sequence[str], environ: Mapping[str, str] | None, place: Place
) -> tuple[str, ...]:
    known = os.environ if environ is None else environ

    def from_environment(match: re.Match[str]) -> str:
        if match[1] not in known:
            raise place.error(f"IdentityFile: the environment variable {match[1]} is not set", part=match[0])
        return known[match[1]]

    expanded = (re.sub(r"\$\{(\w+)\}", from_environment, value) for value in values)
    return tuple(path for path in expanded if path.lower() != "none")


@dataclass(frozen=True)
class HostKeyRules:
    """What the configuration says about one server's host key."""

    files: tuple[str, ...] = ()  # known_hosts files, absolute or relative to here; need not exist
    strict: bool = False  # StrictHostKeyChecking yes: an unknown key is not accepted
    alias: str | None = None  # HostKeyAlias: the server's name in known_hosts files
    asked: str = ""  # the name that the configuration knows the server by


def host_key_rules(
    settings: SSHSettings,
    names: Sequence[str],
    host: str,
    *,
    user: str,
    port: int,
    environ: Mapping[str, str] | None = None,
) -> HostKeyRules:
    """The rules for the server at `host`, as the first of `names` that leads there says, else `host` itself.

    `names` are what the user may have typed. Tokens as in OpenSSH's TOKENS; HostTextError for an unknown one.
    """
    known = os.environ if environ is None else environ
    for asked in (*names, host):
        found = settings.lookup(asked, user=user, port=port)
        if str(found.get("hostname", asked)).lower() == host.lower():
            break
    place = Place(f"{settings.source} (for {asked})")
    alias = found.get("hostkeyalias")
    local = socket.gethostname()
    jump = str(found.get("proxyjump") or "")
    values = {
        "%": "%",
        "d": os.path.expanduser("~"),
        "h": host,
        "i": str(os.getuid()),
        "j": jump,
        "k": alias or host,
        "L": local.split(".")[0],
        "l": local,
        "n": asked,
        "p": str(port),
        "r": user,
        "u": getpass.getuser(),
        "C": hashlib.sha1(f"{local}{host}{port}{user}{jump}".encode()).hexdigest(),
    }

    def value_of(match: re.Match[str]) -> str:
        name, token = match[1], match[2]
        value = known.get(name) if name else values.get(token)
        if value is None:
            raise place.error(
                f"UserKnownHostsFile: {match[0]!r} has no value, expected a token of ssh_config(5) "
                "or an environment variable that is set",
                part=match[0],
            )
        return value

    files = []
    for key, default in (
        ("userknownhostsfile", USER_KNOWN_HOSTS),
        ("globalknownhostsfile", GLOBAL_KNOWN_HOSTS),
    ):
        words = found[key].split("\0") if key in found else default
        for word in words:
            if word.lower() == "none":
                continue
            if key == "userknownhostsfile":
                word = re.sub(r"\$\{(\w+)\}|%(.?)", value_of, word)
            files.append(os.path.expanduser(word))
    strict = str(found.get("stricthostkeychecking", "ask")).lower() in ("yes", "true")
    return HostKeyRules(tuple(files), strict, alias, asked)
