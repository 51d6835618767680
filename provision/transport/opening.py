"""Opens SSH connections, through jump hosts if need be; each failure as one clear error, within its time."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import fabric
import paramiko
from paramiko.ssh_exception import SSHException

from provision.errors import RingmasterError
from provision.transport.endpoints import Endpoint
from provision.transport.failures import Description, NoAddressInTime
from provision.transport.hostkeys import HostKeys, PinningPolicy, preferred_algorithms
from provision.transport.userkeys import KeyLogin, KeysRefused
from provision.transport.waiting import waiting

T = TypeVar("T")

KEEPALIVE_S = 15
# paramiko moves all that is buffered at each read: a larger window made downloads six times slower.
WINDOW_BYTES = 2 << 20
_PACKET_BYTES = 1 << 15
_TCP_USER_TIMEOUT_MS = 60_000


def open_connection(
    node: str,
    target: Endpoint,
    *,
    via: fabric.Connection | None,
    hops: tuple[Endpoint, ...],
    keys: HostKeys,
    timeout_s: float,
    config_file: str | None = None,
) -> fabric.Connection:
    """A logged-in connection to `target`; TCP, greeting and login each take at most `timeout_s`.

    `via` is the open connection to the last of `hops`. NodeUnreachable and HostKeyChanged speak of `node`.
    `config_file` is the one that ssh needs to find the same hosts.
    """
    _quiet_paramiko()
    describe = Description(node, target, hops, timeout_s, config_file)
    attempts = 3
    while True:
        attempts -= 1
        begun = time.monotonic()
        try:
            with waiting(f"no connection to {describe.at} was made yet", f"try `{describe.try_command}`"):
                return _open(describe, via, keys)
        except RingmasterError:
            raise
        except (EOFError, OSError, SSHException, KeysRefused) as error:
            # A busy sshd (MaxStartups) closes connections at once, before its greeting.
            early = isinstance(error, (EOFError, ConnectionResetError)) or "banner" in str(error)
            if not early or time.monotonic() - begun > timeout_s / 4 or attempts == 0:
                raise describe.error(error, time.monotonic() - begun) from error
            time.sleep(0.5 * (3 - attempts))


def _open(describe: Description, via: fabric.Connection | None, keys: HostKeys) -> fabric.Connection:
    target, timeout_s = describe.target, describe.timeout_s
    name = target.key_name
    sock = _tcp(target, timeout_s) if via is None else _through(via, target, timeout_s)
    known = keys.known(name, target.rules.files)

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
    connection.client.set_missing_host_key_policy(PinningPolicy(keys, describe.node, name, target.rules))
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
        raise NoAddressInTime from None
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
