"""Host keys: pinned at first contact, required ever after; the user's own known_hosts files are only read."""

from __future__ import annotations

import base64
import binascii
import fcntl
import fnmatch
import hashlib
import hmac
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import paramiko

from provision.errors import HostKeyChanged, NodeUnreachable, PreconditionError, UsageError
from provision.sshconfig import HostKeyRules


@dataclass(frozen=True)
class KnownKey:
    type: str  # as in the file: ssh-ed25519, ssh-rsa...
    blob: bytes
    source: str  # file:line
    revoked: bool = False

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.blob)


def fingerprint(blob: bytes) -> str:
    """`SHA256:…`, as ssh-keygen -l shows it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def known_name(host: str, port: int) -> str:
    """How known_hosts names a server."""
    return host.lower() if port == 22 else f"[{host.lower()}]:{port}"


def keys_of(text: str, name: str, source: str) -> list[KnownKey]:
    """The keys that known_hosts text holds for `name`; unreadable lines are left out, as in OpenSSH."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        marker = words.pop(0) if words and words[0].startswith("@") else ""
        if len(words) < 3 or words[0].startswith("#") or marker not in ("", "@revoked"):
            continue
        try:
            blob = base64.b64decode(words[2], validate=True)
        except binascii.Error:
            continue
        if _matches(words[0], name):
            found.append(KnownKey(words[1], blob, f"{source}:{number}", revoked=bool(marker)))
    return found


def _matches(patterns: str, name: str) -> bool:
    if patterns.startswith("|1|"):
        try:
            salt, digest = (base64.b64decode(part) for part in patterns.split("|")[2:4])
        except (binascii.Error, ValueError):
            return False
        return hmac.compare_digest(hmac.new(salt, name.encode(), hashlib.sha1).digest(), digest)
    hit = False
    for pattern in patterns.lower().split(","):
        negated = pattern.startswith("!")
        # Only * and ? are special in known_hosts; brackets stand for themselves.
        plain = pattern.lstrip("!").replace("[", "[[]")
        if fnmatch.fnmatchcase(name, plain):
            if negated:
                return False
            hit = True
    return hit


def preferred_algorithms(known: Sequence[KnownKey], offered: Sequence[str]) -> list[str]:
    """`offered` with those first for which a key is known: only these can be judged."""
    wanted = []
    for key in known:
        names = ("rsa-sha2-512", "rsa-sha2-256") if key.type == "ssh-rsa" else (key.type,)
        wanted += [name for name in names if name in offered and name not in wanted]
    return wanted + [name for name in offered if name not in wanted]


class HostKeys:
    """The pinned keys of one state directory, safe for several threads and processes."""

    def __init__(self, path: Path, *, on_pin: Callable[[str], None] | None = None) -> None:
        self._path = path
        self._on_pin = on_pin
        self._lock = threading.Lock()
        self.pinned: list[str] = []  # what was pinned here: "pinned host key of h1: ssh-ed25519 SHA256:…"

    def known(self, name: str, files: Sequence[str]) -> list[KnownKey]:
        """Every key that the pins and the user's `files` hold for `name`, pins first; UsageError for the pins."""
        found = []
        for path in (self._path, *map(Path, files)):
            try:
                text = path.read_text(encoding="utf-8", errors="replace")
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                if path == self._path:
                    text = f"{path}, the pinned host keys, cannot be read: {error.strerror}"
                    raise UsageError(text, remedy="make it a file that you may read and write") from error
                continue  # as OpenSSH does
            found += keys_of(text, name, str(path))
        return found

    def check(self, node: str, name: str, key: paramiko.PKey, rules: HostKeyRules) -> None:
        """Accepts the known key, pins one for a name without any, raises HostKeyChanged for another.

        NodeUnreachable instead of pinning where the rules are strict; PreconditionError if it cannot be written.
        """
        blob = key.asbytes()
        with self._lock:
            # What is known needs no writing: a read-only directory will do.
            known = self.known(name, rules.files)
            if not known and rules.strict:
                raise unknown(node, name, key.get_name(), blob, rules.files)
            if not known:
                known = self._pin(name, key.get_name(), blob, rules.files)
        if not known:
            shown = name if name == node else f"{node} ({name})"
            text = f"pinned host key of {shown}: {key.get_name()} {fingerprint(blob)}"
            self.pinned.append(text)
            if self._on_pin is not None:
                self._on_pin(text)
            return
        judge(node, name, key.get_name(), blob, known)

    def _pin(self, name: str, key_type: str, blob: bytes, files: Sequence[str]) -> list[KnownKey]:
        """Writes the key, or returns what another process has pinned for `name` in the meantime."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(descriptor, "a", encoding="utf-8") as stream:
                fcntl.flock(stream, fcntl.LOCK_EX)
                known = self.known(name, files)
                if not known:
                    before = self._path.read_text(encoding="utf-8", errors="replace")
                    newline = "\n" if before and not before.endswith("\n") else ""
                    stream.write(f"{newline}{name} {key_type} {base64.b64encode(blob).decode()}\n")
        except OSError as error:
            text = f"the host key of {name} cannot be written to {self._path.absolute()}: {error.strerror or error}"
            remedy = "start the task in a directory that you may write to, or make that file writable"
            raise PreconditionError(text, remedy=remedy) from error
        return known


def unknown(node: str, name: str, key_type: str, blob: bytes, files: Sequence[str]) -> NodeUnreachable:
    """The refusal of a host whose key stands nowhere, where the configuration wants it to be known."""
    places = ", ".join(files) or "no file"
    return NodeUnreachable(
        node,
        f"its host key {key_type} {fingerprint(blob)} is unknown: {name} stands in none of {places}, "
        "and the SSH configuration says StrictHostKeyChecking yes",
        remedy="compare that fingerprint with the machine's own (`ssh-keygen -lf` of its .pub file) and add the "
        "key to one of those files, or set StrictHostKeyChecking to accept-new for this host",
    )


def judge(node: str, name: str, key_type: str, blob: bytes, known: Sequence[KnownKey]) -> None:
    """HostKeyChanged unless every file that knows the host has this very key; `known` is not empty."""
    got = f"{key_type} {fingerprint(blob)}"
    if any(key.revoked and key.blob == blob for key in known):
        raise HostKeyChanged(
            node, f"the host key {got} of {name} is marked as revoked", remedy="do not use it"
        )
    by_file: dict[str, list[KnownKey]] = {}
    for key in known:
        if not key.revoked:
            by_file.setdefault(key.source.rpartition(":")[0], []).append(key)
    for path, keys in by_file.items():
        if any(key.blob == blob for key in keys):
            continue
        same = next((key for key in keys if key.type == key_type), keys[0])
        raise HostKeyChanged(
            node,
            f"the host key of {name} has changed: got {got}, "
            f"expected {same.type} {same.fingerprint} ({same.source})",
            remedy="if that machine was installed anew, forget the old key with "
            f"`ssh-keygen -R '{name}' -f {path}` and run the task again; if not, somebody may be between",
        )


class PinningPolicy:
    """Hands paramiko's question to HostKeys; paramiko itself is given no keys, so that it always asks."""

    def __init__(self, keys: HostKeys, node: str, name: str, rules: HostKeyRules) -> None:
        self._keys = keys
        self._node = node
        self._name = name
        self._rules = rules

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        self._keys.check(self._node, self._name, key, self._rules)
