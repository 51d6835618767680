"""Chooses the network that carries the ranks' data, and each node's address on it, from facts alone.

Open MPI offers every interface that is up to its peers. A bridge that has the same address on every machine,
or that no other machine can reach, then swallows the connections and the job hangs. So only chosen subnets
are used.
"""

from __future__ import annotations

import fnmatch
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Protocol

from provision.cluster import Node
from provision.errors import PreconditionError

# Bridges of container and virtual machine hosts: taken only where nothing else is common.
_VIRTUAL = (
    "docker*",
    "virbr*",
    "veth*",
    "br-*",
    "cni*",
    "flannel*",
    "cali*",
    "podman*",
    "lxc*",
    "lxdbr*",
    "vmnet*",
)
_PAIRS_SHOWN = 10
_REMEDY = "give all hosts an address in one network, or leave some out"


class Interface(Protocol):
    """A network interface as the node told of it."""

    @property
    def name(self) -> str: ...
    @property
    def up(self) -> bool: ...
    @property
    def loopback(self) -> bool: ...
    @property
    def mtu(self) -> int | None: ...
    @property
    def cidrs(self) -> Sequence[str]: ...


class SshServer(Protocol):
    """The node's own end of the controller's SSH connection."""

    @property
    def address(self) -> str | None: ...


class Facts(Protocol):
    """What is needed of a node's facts; None where the node could not tell."""

    @property
    def interfaces(self) -> Sequence[Interface] | None: ...
    @property
    def ssh_server(self) -> SshServer | None: ...


@dataclass(frozen=True)
class Networks:
    """`cidrs` carry MPI's traffic (none for a single node); `addresses`: where others reach each node."""

    cidrs: tuple[str, ...]
    addresses: Mapping[str, str]
    routed: bool = False  # the nodes are in different subnets


@dataclass(frozen=True)
class _Address:
    address: ipaddress.IPv4Address
    subnet: ipaddress.IPv4Network
    mtu: int
    is_virtual: bool


def choose(nodes: Sequence[Node], facts: Mapping[str, Facts]) -> Networks:
    """The data network of `nodes`; PreconditionError, naming the pairs, when some share none."""
    if len(nodes) == 1:
        return Networks((), {nodes[0].name: _ssh_address(facts[nodes[0].name]) or "127.0.0.1"})
    known = {node.name: _addresses(node, facts[node.name]) for node in nodes}
    common = _common(known)
    if common:
        used = {name: _ssh_address(facts[name]) for name in known}
        best = max(common, key=lambda subnet: _rank(subnet, known, used))
        return Networks((str(best),), {name: str(_on(best, held).address) for name, held in known.items()})
    routed = _routed(nodes, known, facts)
    if routed is not None:
        return routed
    raise PreconditionError(_no_common(known), remedy=_REMEDY)


def _addresses(node: Node, facts: Facts) -> tuple[_Address, ...]:
    """The node's IPv4 addresses that another machine might reach."""
    if facts.interfaces is None:
        raise PreconditionError(
            f"{node.name}: its network interfaces could not be read", remedy="install iproute2"
        )
    found = []
    has_ipv6 = False
    for interface in facts.interfaces:
        if not interface.up or interface.loopback:
            continue
        for cidr in interface.cidrs:
            held = ipaddress.ip_interface(cidr)
            if held.is_link_local or held.is_loopback:
                continue
            if isinstance(held, ipaddress.IPv6Interface):
                has_ipv6 = True
                continue
            virtual = any(fnmatch.fnmatchcase(interface.name, each) for each in _VIRTUAL)
            found.append(_Address(held.ip, held.network, interface.mtu or 0, virtual))
    if not found:
        got = (
            "only IPv6 addresses, which this Open MPI is built without"
            if has_ipv6
            else "no address but loopback"
        )
        raise PreconditionError(f"{node.name}: {got}", remedy="give it an IPv4 address that the others reach")
    return tuple(found)


def _common(known: Mapping[str, Sequence[_Address]]) -> list[ipaddress.IPv4Network]:
    """Subnets on which every node has an address of its own, in the order of the first node."""
    shared = []
    for subnet in dict.fromkeys(each.subnet for held in known.values() for each in held):
        here = [[each.address for each in held if each.subnet == subnet] for held in known.values()]
        flat = [address for addresses in here for address in addresses]
        if subnet.prefixlen < 32 and all(here) and len(set(flat)) == len(flat):
            shared.append(subnet)
    return shared


def _on(subnet: ipaddress.IPv4Network, held: Sequence[_Address]) -> _Address:
    return next(each for each in held if each.subnet == subnet)


def _rank(
    subnet: ipaddress.IPv4Network,
    known: Mapping[str, Sequence[_Address]],
    used: Mapping[str, str | None],
) -> tuple[int, bool, int]:
    """Greater is better: SSH came this way, no bridge for containers, the largest packets."""
    here = [_on(subnet, held) for held in known.values()]
    came = sum(1 for address in used.values() if address and ipaddress.ip_address(address) in subnet)
    return came, not any(each.is_virtual for each in here), min(each.mtu for each in here)


def _ssh_address(facts: Facts) -> str | None:
    """The node's own end of the controller's SSH connection, if it is an IPv4 address others could use."""
    server = facts.ssh_server
    if server is None or not server.address:
        return None
    try:
        address = ipaddress.ip_address(server.address)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return None
        address = address.ipv4_mapped
    return None if address.is_loopback or address.is_link_local else str(address)


def _routed(
    nodes: Sequence[Node], known: Mapping[str, Sequence[_Address]], facts: Mapping[str, Facts]
) -> Networks | None:
    """Nodes in different subnets, each at the address the controller's SSH reached; None if that fails."""
    chosen: dict[str, _Address] = {}
    for node in nodes:
        held = known[node.name]
        ssh = _ssh_address(facts[node.name])
        named = [each for each in held if str(each.address) in (ssh, node.host)]
        real = [each for each in held if not each.is_virtual]
        if named:
            chosen[node.name] = named[0]
        elif len(real) == 1:
            chosen[node.name] = real[0]
        else:
            return None
    if len({each.address for each in chosen.values()}) != len(chosen):
        return None
    cidrs = tuple(str(subnet) for subnet in dict.fromkeys(each.subnet for each in chosen.values()))
    return Networks(cidrs, {name: str(each.address) for name, each in chosen.items()}, routed=True)


def _no_common(known: Mapping[str, Sequence[_Address]]) -> str:
    """Which pairs of nodes share no subnet with addresses of their own, and what each has."""
    lines = []
    for one, other in combinations(known, 2):
        pair = {one: known[one], other: known[other]}
        if _common(pair):
            continue
        same = {each.address for each in known[one]} & {each.address for each in known[other]}
        why = f"both have {', '.join(map(str, sorted(same)))}" if same else "no subnet in common"
        lines.append(f"  {one} - {other}: {why} ({_shown(known[one])} / {_shown(known[other])})")
    if not lines:
        lines = [f"  {name}: {_shown(held)}" for name, held in known.items()]
    more = len(lines) - _PAIRS_SHOWN
    shown = lines[:_PAIRS_SHOWN] + ([f"  and {more} more pairs"] if more > 0 else [])
    return "there is no network on which every node has an address of its own\n" + "\n".join(shown)


def _shown(held: Sequence[_Address]) -> str:
    return ", ".join(f"{each.address}/{each.subnet.prefixlen}" for each in held)
