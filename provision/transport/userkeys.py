"""Logs in with the user's keys, in OpenSSH's order, and never asks for anything."""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import paramiko
from paramiko.ssh_exception import BadAuthenticationType, PasswordRequiredException, SSHException

DEFAULT_FILES = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")


class KeysRefused(Exception):
    """No key was accepted. `tried` has a phrase for each key, `methods` what the server takes instead."""

    def __init__(self, tried: Sequence[str], methods: Sequence[str] = ()) -> None:
        super().__init__("; ".join(tried) or "there is no key to try")
        self.tried = tuple(tried)
        self.methods = tuple(methods)


class KeyLogin:
    """What paramiko calls an auth strategy: the identity files, then the agent's keys.

    Without identity files the default ones are tried. A missing file is passed over, as in OpenSSH. A file with
    a passphrase is used if the agent holds that key (its `.pub` file tells). `identities_only` keeps the agent's
    other keys out.
    """

    def __init__(self, user: str, files: Sequence[str], *, identities_only: bool, timeout_s: float) -> None:
        self._user = user
        self._files = [Path(name).expanduser() for name in (files or DEFAULT_FILES)]
        self._identities_only = identities_only
        self._timeout_s = timeout_s

    def authenticate(self, transport: paramiko.Transport) -> None:
        """KeysRefused if no key is accepted; an SSHException if the connection fails."""
        deadline = time.monotonic() + self._timeout_s
        tried: list[str] = []
        methods: Sequence[str] = ()
        for label, key, problem in self._keys():
            if key is None:
                tried.append(f"{label} {problem}")
                continue
            transport.auth_timeout = max(0.1, deadline - time.monotonic())
            try:
                more = transport.auth_publickey(self._user, key)
            except BadAuthenticationType as error:
                methods = error.allowed_types
                tried.append(f"{label} (not allowed: the server takes {', '.join(methods)} only)")
                break
            except SSHException as error:
                if time.monotonic() >= deadline:
                    raise TimeoutError("no answer to the login") from error
                tried.append(f"{label} (refused)")
                if not transport.is_active():
                    tried.append(f"then the server closed the connection: {error}")
                    break
                continue
            if not more:
                return
            methods = tuple(more)
            tried.append(f"{label} (accepted, but {', '.join(methods)} is wanted as well)")
            break
        raise KeysRefused(tried, methods)

    def _keys(self) -> Iterator[tuple[str, paramiko.PKey | None, str]]:
        """(name for messages, key or None, why there is none), each key once."""
        agent = {key.asbytes(): key for key in _agent_keys()}
        for path in self._files:
            if not path.is_file():
                continue
            if path.suffix == ".pub":
                key = agent.pop(_public_blob(path), None)
                yield str(path), key, "(its private half is not in the agent)"
                continue
            try:
                loaded = paramiko.PKey.from_path(path)
            except (TypeError, PasswordRequiredException):
                key = agent.pop(_public_blob(path.with_name(path.name + ".pub")), None)
                yield str(path), key, "(has a passphrase and is not in the agent: run ssh-add)"
            except (OSError, ValueError, SSHException, paramiko.pkey.UnknownKeyType) as error:
                yield str(path), None, f"(cannot be read: {error})"
            else:
                agent.pop(loaded.asbytes(), None)
                yield str(path), loaded, ""
        if not self._identities_only:
            for key in agent.values():
                yield f"{key.get_name()} key of the agent", key, ""


def _agent_keys() -> Sequence[paramiko.PKey]:
    try:
        keys: Sequence[paramiko.PKey] = paramiko.Agent().get_keys()
    except (SSHException, OSError):
        return ()
    return keys


def _public_blob(path: Path) -> bytes:
    try:
        return base64.b64decode(path.read_text(encoding="utf-8").split()[1])
    except (OSError, UnicodeDecodeError, IndexError, binascii.Error):
        return b""
