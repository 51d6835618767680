"""What a testbed is made of, as data: hosts, their kinds, users and binds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Union

from provision.errors import RingmasterError, UsageError

KINDS = ("clone", "bare")
NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?", re.ASCII)
USER = re.compile(r"[a-z_][a-z0-9_-]{0,30}", re.ASCII)
MAX_NODES = 200


class TestbedError(RingmasterError):
    """The testbed could not do what was asked; nothing of a failed `up` is left behind."""

    __test__ = False  # pytest: not a test class


@dataclass(frozen=True)
class Bind:
    """A file or directory of this machine, shown to a host at `target` (read-only unless said otherwise)."""

    source: str
    target: str
    readonly: bool = True


@dataclass(frozen=True)
class Interface:
    """An extra network card. `bridge`: private to the host, as docker0. `veth`: on the switch `network`."""

    name: str
    cidr: str | None = None
    kind: str = "bridge"
    network: str | None = None


@dataclass(frozen=True)
class NodeSpec:
    name: str
    kind: str = "clone"
    port: int = 22
    login: str = "root"  # the user in ssh_config
    users: tuple[str, ...] = ()  # made besides root, each with a home and the test key
    binds: tuple[Bind, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    base: str | None = None  # a layer made by Testbed.freeze; the host starts with everything in it

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> NodeSpec:
        return cls(
            **{
                **data,
                "users": tuple(data["users"]),
                "binds": tuple(Bind(**bind) for bind in data["binds"]),
                "interfaces": tuple(Interface(**interface) for interface in data["interfaces"]),
            }
        )


Nodes = Union[int, Sequence[Union[str, NodeSpec]]]


def node_specs(nodes: Nodes, **defaults: Any) -> tuple[NodeSpec, ...]:
    """`3` -> h1, h2, h3; names become specs with `defaults`; specs stay as they are.

    Raises: UsageError for a bad or repeated name, an unknown kind, too many hosts.
    """
    named = [f"h{number}" for number in range(1, nodes + 1)] if isinstance(nodes, int) else list(nodes)
    specs = tuple(node if isinstance(node, NodeSpec) else NodeSpec(name=node, **defaults) for node in named)
    if not 1 <= len(specs) <= MAX_NODES:
        raise UsageError(f"{len(specs)} hosts asked for, expected 1 to {MAX_NODES}")
    for spec in specs:
        check_spec(spec)
    names = [spec.name for spec in specs]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise UsageError(f"host names {repeated} are given twice", remedy="give every host its own name")
    return specs


def check_spec(spec: NodeSpec) -> None:
    if not NAME.fullmatch(spec.name) or spec.name == "localhost":
        raise UsageError(f"host name {spec.name!r} cannot be used, expected a lower-case host name")
    if spec.kind not in KINDS:
        raise UsageError(f"{spec.name}: kind {spec.kind!r} is unknown, expected one of {', '.join(KINDS)}")
    for user in (*spec.users, spec.login):
        if not USER.fullmatch(user):
            raise UsageError(f"{spec.name}: user name {user!r} cannot be used")
    if spec.login not in ("root", *spec.users):
        raise UsageError(f"{spec.name}: login {spec.login!r} is neither root nor one of users {spec.users}")
    if not 1 <= spec.port <= 65535:
        raise UsageError(f"{spec.name}: port {spec.port} is out of range, expected 1 to 65535")
    for bind in spec.binds:
        if not bind.target.startswith("/") or ".." in bind.target.split("/"):
            raise UsageError(f"{spec.name}: bind target {bind.target!r} must be an absolute path")


def with_interface(spec: NodeSpec, interface: Interface) -> NodeSpec:
    kept = tuple(known for known in spec.interfaces if known.name != interface.name)
    return replace(spec, interfaces=(*kept, interface))
