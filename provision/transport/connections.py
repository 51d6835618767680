"""One transport per node, made when it is first needed, all closed together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from provision.cluster import Node
from provision.sshconfig import SSHSettings, load_ssh_config
from provision.transport.base import Transport
from provision.transport.endpoints import Endpoint, endpoint_of, hops_of
from provision.transport.hostkeys import HostKeys
from provision.transport.local import LocalTransport
from provision.transport.opening import open_connection, soon
from provision.transport.ssh import SSHTransport

if TYPE_CHECKING:
    import fabric

CONNECT_TIMEOUT_S = 10.0


class Connections:
    """Transports by node, safe for several threads; closes them all on leaving its `with` block.

    Nodes behind the same jump hosts share the connections to those. `pinned` lists the host keys met for the
    first time; `on_pin` hears of each at once. `ssh_config` (default: the user's) describes the jump hosts and
    says which known_hosts files are obeyed, and whether an unknown host key is pinned or refused.
    """

    def __init__(
        self,
        known_hosts: Path,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        on_pin: Callable[[str], None] | None = None,
        ssh_config: SSHSettings | None = None,
    ) -> None:
        self._keys = HostKeys(known_hosts, on_pin=on_pin)
        self._connect_timeout_s = connect_timeout_s
        self._ssh_config = ssh_config
        self._lock = threading.Lock()
        self._locks: dict[object, threading.Lock] = {}
        self._transports: dict[Node, Transport] = {}
        self._hops: dict[tuple[Endpoint, ...], fabric.Connection] = {}

    @property
    def pinned(self) -> tuple[str, ...]:
        return tuple(self._keys.pinned)

    def to(self, node: Node) -> Transport:
        """The node's transport, connected: NodeUnreachable, HostKeyChanged. A later call tries again."""
        with self._lock_of(node):
            found = self._transports.get(node)
            if found is None:
                found = LocalTransport(node) if node.local else SSHTransport(node, lambda: self._open(node))
                self._transports[node] = found
            return found

    def close(self) -> None:
        """Ends the commands that still run and closes every connection, within seconds."""
        with self._lock:
            transports, self._transports = list(self._transports.values()), {}
            hops, self._hops = list(self._hops.values()), {}
        closing = [threading.Thread(target=each.close, daemon=True) for each in transports]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(5.0)
        for hop in hops:
            soon(hop.client.close)

    def __enter__(self) -> Connections:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, node: Node) -> fabric.Connection:
        settings = self._settings()
        hops = hops_of(node, settings)
        return self._open_along(node.name, endpoint_of(node, settings), hops)

    def _open_along(self, node: str, target: Endpoint, hops: tuple[Endpoint, ...]) -> fabric.Connection:
        via = self._hop(node, hops) if hops else None
        return open_connection(
            node,
            target,
            via=via,
            hops=hops,
            keys=self._keys,
            timeout_s=self._connect_timeout_s,
            config_file=self._settings().file,
        )

    def _hop(self, node: str, hops: tuple[Endpoint, ...]) -> fabric.Connection:
        """The shared connection to the last of `hops`."""
        with self._lock_of(hops):
            found = self._hops.get(hops)
            if found is None or not found.transport.is_active():
                found = self._open_along(node, hops[-1], hops[:-1])
                self._hops[hops] = found
            return found

    def _settings(self) -> SSHSettings:
        with self._lock:
            if self._ssh_config is None:
                self._ssh_config = load_ssh_config()
            return self._ssh_config

    def _lock_of(self, key: object) -> threading.Lock:
        with self._lock:
            return self._locks.setdefault(key, threading.Lock())


class _Single(SSHTransport):
    """One node's transport that owns the connections to its jump hosts."""

    def __init__(self, node: Node, connections: Connections) -> None:
        self._connections = connections
        super().__init__(node, lambda: connections._open(node))

    def close(self) -> None:
        super().close()
        self._connections.close()


def connect(node: Node, *, known_hosts: Path, connect_timeout_s: float = CONNECT_TIMEOUT_S) -> Transport:
    """A connected transport for one node: NodeUnreachable, HostKeyChanged."""
    if node.local:
        return LocalTransport(node)
    return _Single(node, Connections(known_hosts, connect_timeout_s=connect_timeout_s))
