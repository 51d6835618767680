"""Opens SSH connections, through jump hosts if need be; each failure as one clear error, within its time."""

from __future__ import annotations

import contextlib
import getpass
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import fabric
import paramiko
from paramiko.ssh_exception import ChannelException, IncompatiblePeer, SSHException

from provision.cluster import Node
from provision.errors import NodeError, NodeUnreachable
from provision.hosttext import parse_hosts
from provision.sshconfig import SSHSettings, apply_ssh_config
from provision.transport.hostkeys import HostKeys, PinningPolicy, known_name, preferred_algorithms
from provision.transport.userkeys import KeyLogin, KeysRefused

T = TypeVar("T")

KEEPALIVE_S = 15
WINDOW_BYTES = 16 << 20
_PACKET_BYTES = 1 << 15
_MAX_HOPS = 8
_TCP_USER_TIMEOUT_MS = 60_000


@dataclass(frozen=True)
class Endpoint:
    """An sshd: the node's own or a jump host's."""

    name: str  # for messages
    host: str
    user: str
    port: int
    identity_files: tuple[str, ...] = ()
    identities_only: bool = False


def endpoint_of(node: Node) -> Endpoint:
    return Endpoint(
        node.name,
        node.host,
        node.user or getpass.getuser(),
        node.port or 22,
        node.identity_files,
        node.identities_only,
    )


def hops_of(node: Node, settings: Callable[[], SSHSettings]) -> tuple[Endpoint, ...]:
    """The jump hosts on the way to `node`, first one first; their own settings come from `settings()`.

    As in OpenSSH, the first hop's own ProxyJump is followed. A hop without keys of its own gets the node's.
    """
    if not node.proxy_jump:
        return ()
    config = settings()
    hops: list[Endpoint] = []
    jump: str | None = node.proxy_jump
    while jump:
        before: list[Endpoint] = []
        first = None
        for text in jump.split(","):
            spec = apply_ssh_config(parse_hosts(text, source="ProxyJump")[0], config)
            first = spec if first is None else first
            files = spec.identity_files or node.identity_files
            only = spec.identities_only or (node.identities_only and not spec.identity_files)
            user = spec.user or getpass.getuser()
            before.append(Endpoint(text.strip(), spec.host, user, spec.port or 22, files, only))
        hops = before + hops
        if len(hops) > _MAX_HOPS:
            raise NodeUnreachable(
                node.name, f"more than {_MAX_HOPS} jump hosts: does ProxyJump go in a circle?"
            )
        jump = first.proxy_jump if first is not None else None
    return tuple(hops)


def open_connection(
    node: str,
    target: Endpoint,
    *,
    via: fabric.Connection | None,
    hops: tuple[Endpoint, ...],
    keys: HostKeys,
    timeout_s: float,
) -> fabric.Connection:
    """A logged-in connection to `target`; TCP, greeting and login each take at most `timeout_s`.

    `via` is the open connection to the last of `hops`. NodeUnreachable and HostKeyChanged speak of `node`.
    """
    _quiet_paramiko()
    describe = _Description(node, target, hops, timeout_s)
    attempts = 3
    while True:
        attempts -= 1
        begun = time.monotonic()
        try:
            return _open(describe, via, keys)
        except NodeError:
            raise
        except (EOFError, OSError, SSHException, KeysRefused) as error:
            # A busy sshd (MaxStartups) closes connections at once, before its greeting.
            early = isinstance(error, (EOFError, ConnectionResetError)) or "banner" in str(error)
            if not early or time.monotonic() - begun > timeout_s / 4 or attempts == 0:
                raise describe.error(error, time.monotonic() - begun) from error
            time.sleep(0.5 * (3 - attempts))


def _open(describe: _Description, via: fabric.Connection | None, keys: HostKeys) -> fabric.Connection:
    target, timeout_s = describe.target, describe.timeout_s
    name = known_name(target.host, target.port)
    sock = _tcp(target, timeout_s) if via is None else _through(via, target, timeout_s)
    known = keys.known(name)

    def make_transport(sock: Any, **options: Any) -> paramiko.Transport:
        transport = paramiko.Transport(
            sock, default_window_size=WINDOW_BYTES, default_max_packet_size=_PACKET_BYTES, **options
        )
        security = transport.get_security_options()
        security.key_types = preferred_algorithms(known, security.key_types)
        # Authenticated ciphers save a pass over the data in Python: measured, they move bulk data faster.
        security.ciphers = sorted(security.ciphers, key=lambda cipher: "gcm" not in cipher)
        return transport

    connection = fabric.Connection(
        target.host,
        user=target.user,
        port=target.port,
        # The user's SSH configuration was already read, when hosts were resolved.
        config=fabric.Config(lazy=True, ssh_config=paramiko.SSHConfig()),
        connect_timeout=timeout_s,
        connect_kwargs={
            "sock": sock,
            "banner_timeout": timeout_s,
            "transport_factory": make_transport,
            "auth_strategy": KeyLogin(
                target.user,
                target.identity_files,
                identities_only=target.identities_only,
                timeout_s=timeout_s,
            ),
        },
    )
    connection.client.set_missing_host_key_policy(PinningPolicy(keys, describe.node, name))
    try:
        connection.open()
    except BaseException:
        soon(connection.client.close)
        with contextlib.suppress(OSError):
            sock.close()
        raise
    connection.transport.set_keepalive(KEEPALIVE_S)
    return connection


def _tcp(target: Endpoint, timeout_s: float) -> socket.socket:
    deadline = time.monotonic() + timeout_s

    def resolve() -> list[Any]:
        return list(socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM))

    addresses = bounded(resolve, timeout_s)  # getaddrinfo itself knows no deadline
    failure: OSError = OSError(f"{target.host} has no address")
    for index, (family, kind, protocol, _, address) in enumerate(addresses):
        sock = socket.socket(family, kind, protocol)
        try:
            # Several addresses share the time that is left.
            sock.settimeout(max(0.1, (deadline - time.monotonic()) / (len(addresses) - index)))
            sock.connect(address)
        except OSError as error:
            sock.close()
            failure = error
            continue
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Heartbeats go out all the time: a cut cable shows after a minute, not after the kernel's 15.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _TCP_USER_TIMEOUT_MS)
        return sock
    raise failure


def _through(via: fabric.Connection, target: Endpoint, timeout_s: float) -> Any:
    return via.transport.open_channel(
        "direct-tcpip", (target.host, target.port), ("127.0.0.1", 0), timeout=timeout_s
    )


@dataclass(frozen=True)
class _Description:
    """Puts an exception into words."""

    node: str
    target: Endpoint
    hops: tuple[Endpoint, ...]
    timeout_s: float

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
        words = ["ssh", "-o", "BatchMode=yes"]
        if self.hops:
            words += ["-J", ",".join(f"{hop.user}@{hop.host}:{hop.port}" for hop in self.hops)]
        words += [] if target.port == 22 else ["-p", str(target.port)]
        words += [word for file in target.identity_files[:1] for word in ("-i", file)]
        return " ".join([*words, f"{target.user}@{target.host}", "true"])

    def error(self, cause: BaseException, after_s: float) -> NodeUnreachable:
        text, remedy = self._words(cause)
        remedy = f"{remedy}; to see it by hand: `{self.try_command}`"
        return NodeUnreachable(self.node, f"{self.way}{text} (after {after_s:.1f} s)", remedy=remedy)

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
                f"is sshd up on {target.host}?",
            )
        if isinstance(cause, _NoAddress):
            return f"resolving {target.host!r} took longer than {limit}", "check DNS"
        if isinstance(cause, TimeoutError) and "login" in str(cause):
            return f"{self.at} did not answer the login within {limit}", "is the machine overloaded?"
        if isinstance(cause, (TimeoutError, socket.timeout)):
            text = f"no answer from {self.at} within {limit}"
            return text, "is it up, and does a firewall drop that port?"
        if isinstance(cause, ConnectionRefusedError):
            return f"connection refused by {self.at}", "start sshd there, or give its port as host:port"
        if isinstance(cause, IncompatiblePeer):
            return f"no common SSH algorithms with {self.at}: {cause}", "update its sshd"
        text = str(cause) or type(cause).__name__
        if "banner" in text or "Timeout" in text or "timeout" in text:
            text = f"{self.at} accepts connections but sent no SSH greeting within {limit}"
            return text, "is it sshd that listens there, and does it still react?"
        if isinstance(cause, OSError):
            return f"cannot connect to {self.at}: {cause.strerror or cause}", "check address and route"
        return f"SSH with {self.at} failed: {text}", "look at sshd's log there"

    def _refused(self, cause: KeysRefused) -> tuple[str, str]:
        who = f"{self.target.user}@{self.target.host}"
        if not cause.tried:
            text = f"no key to log in as {who}: there is no identity file, and no agent with keys"
        else:
            text = f"no key was accepted for {who}: {'; '.join(cause.tried)}"
        port = "" if self.target.port == 22 else f"-p {self.target.port} "
        return text, f"put your public key there (`ssh-copy-id {port}{who}`) or give the right user or key"


class _NoAddress(TimeoutError):
    pass


def bounded(work: Callable[[], T], timeout_s: float) -> T:
    """`work()`, in a thread that is left behind when it takes too long."""
    answers: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue()

    def body() -> None:
        try:
            answers.put((work(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=body, name="resolve", daemon=True).start()
    try:
        value, error = answers.get(timeout=timeout_s)
    except queue.Empty:
        raise _NoAddress from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def soon(work: Callable[[], object], wait_s: float = 2.0) -> None:
    """Runs a closing step that may block on a dead network; goes on without it after `wait_s`."""

    def body() -> None:
        with contextlib.suppress(OSError, EOFError, SSHException):
            work()

    thread = threading.Thread(target=body, name="close", daemon=True)
    thread.start()
    thread.join(wait_s)


def _quiet_paramiko() -> None:
    """paramiko logs tracebacks of failed handshakes; without any handler they would land on the terminal."""
    logger = logging.getLogger("paramiko")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
