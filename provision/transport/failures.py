"""Why a connection could not be made, in words: the server, what it did, what to do, a command to try."""

from __future__ import annotations

import shlex
import socket
from dataclasses import dataclass

from paramiko.ssh_exception import ChannelException, IncompatiblePeer

from provision.errors import NodeUnreachable
from provision.transport.endpoints import Endpoint
from provision.transport.hostkeys import known_name
from provision.transport.userkeys import DEFAULT_FILES, KeysRefused


class NoAddressInTime(TimeoutError):
    """The resolver took too long."""


@dataclass(frozen=True)
class Description:
    """What was tried, and how its failure is put into words."""

    node: str
    target: Endpoint
    hops: tuple[Endpoint, ...]
    timeout_s: float
    config_file: str | None = None  # given with --ssh-config

    @property
    def at(self) -> str:
        return (
            known_name(self.target.host, self.target.port)
            if ":" in self.target.host
            else (f"{self.target.host}:{self.target.port}")
        )

    @property
    def way(self) -> str:
        """` (jump host j1)`, ` (through jump host j1, j2)` or nothing."""
        if self.target.name != self.node:
            return f"jump host {self.target.name} ({self.at}): "
        return f"through jump host {', '.join(hop.name for hop in self.hops)}: " if self.hops else ""

    @property
    def try_command(self) -> str:
        target = self.target
        words = ["ssh", *(("-F", self.config_file) if self.config_file else ()), "-o", "BatchMode=yes"]
        if self.hops:
            words += ["-J", ",".join(f"{hop.user}@{hop.host}:{hop.port}" for hop in self.hops)]
        words += [] if target.port == 22 else ["-p", str(target.port)]
        words += [word for file in target.identity_files[:1] for word in ("-i", file)]
        # By the name that the configuration knows, so that its settings for that host count.
        return shlex.join([*words, f"{target.user}@{target.rules.asked or target.host}", "true"])

    def error(self, cause: BaseException, after_s: float) -> NodeUnreachable:
        text, remedy = self._words(cause)
        remedy = f"{remedy}; to see it by hand: `{self.try_command}`"
        after = f" (after {after_s:.1f} s)" if after_s >= 1 else ""
        return NodeUnreachable(self.node, f"{self.way}{text}{after}", remedy=remedy)

    def _words(self, cause: BaseException) -> tuple[str, str]:
        limit, target = f"{self.timeout_s:g} s", self.target
        if isinstance(cause, KeysRefused):
            return self._refused(cause)
        if isinstance(cause, socket.gaierror):
            text = f"the name {target.host!r} cannot be resolved ({cause.strerror})"
            return text, "check its spelling, DNS or /etc/hosts"
        if isinstance(cause, ChannelException):
            last = self.hops[-1].name if self.hops else "the jump host"
            return (
                f"{last} could not connect to {self.at}: {cause.text or cause}",
                f"check that sshd is up on {target.host}",
            )
        if isinstance(cause, NoAddressInTime):
            return f"resolving {target.host!r} took longer than {limit}", "check DNS"
        if isinstance(cause, TimeoutError) and "login" in str(cause):
            return (
                f"{self.at} did not answer the login within {limit}",
                "check whether the machine is overloaded",
            )
        if isinstance(cause, (TimeoutError, socket.timeout)):
            text = f"no answer from {self.at} within {limit}"
            return text, "check that it is up and that no firewall drops that port"
        if isinstance(cause, ConnectionRefusedError):
            return f"connection refused by {self.at}", "start sshd there, or give its port as host:port"
        if isinstance(cause, IncompatiblePeer):
            return f"no common SSH algorithms with {self.at}: {cause}", "update its sshd"
        text = str(cause) or type(cause).__name__
        # paramiko says the last of these when a handshake that has begun takes too long.
        if any(part in text for part in ("banner", "Timeout", "timeout", "No existing session")):
            text = f"{self.at} accepts connections but did not greet as an SSH server within {limit}"
            return text, "check that it is sshd that listens there and that it still reacts"
        if isinstance(cause, OSError):
            return f"cannot connect to {self.at}: {cause.strerror or cause}", "check address and route"
        return f"SSH with {self.at} failed: {text}", "look at sshd's log there"

    def _refused(self, cause: KeysRefused) -> tuple[str, str]:
        who = f"{self.target.user}@{self.target.host}"
        if not cause.tried:
            text = f"no key to log in as {who}: the agent has none, and of these files there is none: "
            text += ", ".join(self.target.identity_files or DEFAULT_FILES)
        else:
            text = f"no key was accepted for {who}: {'; '.join(cause.tried)}"
        port = "" if self.target.port == 22 else f"-p {self.target.port} "
        return text, f"put your public key there (`ssh-copy-id {port}{who}`) or give the right user or key"
