"""Which network carries the ranks' data, for the layouts that are known to hang jobs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from provision.cluster import Node
from provision.errors import PreconditionError
from provision.network import choose


@dataclass(frozen=True)
class Interface:
    name: str
    cidrs: tuple[str, ...]
    up: bool = True
    loopback: bool = False
    mtu: int | None = 1500


@dataclass(frozen=True)
class SshServer:
    address: str | None
    port: int = 22


@dataclass(frozen=True)
class Facts:
    interfaces: tuple[Interface, ...] | None
    ssh_server: SshServer | None = None


LO = Interface("lo", ("127.0.0.1/8", "::1/128"), loopback=True, mtu=65536)
DOCKER = Interface("docker0", ("172.17.0.1/16",))


def eth(cidr: str, name: str = "eth0", mtu: int = 1500, up: bool = True) -> Interface:
    return Interface(name, (cidr, "fe80::1/64"), mtu=mtu, up=up)


def nodes(count: int) -> list[Node]:
    return [Node(f"h{i}", f"h{i}.example") for i in range(1, count + 1)]


def facts(*hosts: list[Interface], ssh: tuple[str | None, ...] = ()) -> dict[str, Facts]:
    addresses = ssh + (None,) * len(hosts)
    return {
        f"h{i}": Facts((LO, *interfaces), SshServer(addresses[i - 1]) if addresses[i - 1] else None)
        for i, interfaces in enumerate(hosts, start=1)
    }


@pytest.mark.parametrize(
    ("given", "cidrs", "addresses"),
    [
        (
            facts([eth("10.0.0.1/24"), DOCKER], [eth("10.0.0.2/24"), DOCKER], [eth("10.0.0.3/24"), DOCKER]),
            ("10.0.0.0/24",),
            ["10.0.0.1", "10.0.0.2", "10.0.0.3"],
        ),
        (
            facts([eth("10.0.0.1/24"), Interface("virbr0", ("192.168.121.1/24",))],
                  [eth("10.0.0.2/24"), Interface("virbr0", ("192.168.122.1/24",))]),
            ("10.0.0.0/24",),
            ["10.0.0.1", "10.0.0.2"],
        ),
        (
            facts([eth("10.0.0.1/24"), eth("10.9.0.1/24", "ib0", 9000)],
                  [eth("10.0.0.2/24"), eth("10.9.0.2/24", "ib0", 9000)]),
            ("10.9.0.0/24",),
            ["10.9.0.1", "10.9.0.2"],
        ),
        (
            facts([eth("10.0.0.1/24"), eth("10.9.0.1/24", "ib0", 9000)],
                  [eth("10.0.0.2/24"), eth("10.9.0.2/24", "ib0", 9000)], ssh=("10.0.0.1", "10.0.0.2")),
            ("10.0.0.0/24",),
            ["10.0.0.1", "10.0.0.2"],
        ),
        (
            facts([eth("10.0.0.1/24"), eth("10.9.0.1/24", "eth1", up=False)],
                  [eth("10.0.0.2/24"), eth("10.9.0.2/24", "eth1")]),
            ("10.0.0.0/24",),
            ["10.0.0.1", "10.0.0.2"],
        ),
        (
            facts([Interface("docker0", ("10.200.0.1/16",), mtu=9000), eth("10.0.0.1/24")],
                  [Interface("docker0", ("10.200.0.2/16",), mtu=9000), eth("10.0.0.2/24")]),
            ("10.0.0.0/24",),
            ["10.0.0.1", "10.0.0.2"],
        ),
    ],
    ids=["docker0 everywhere", "virbr0 each its own", "larger packets", "ssh first", "one end down", "bridge last"],
)  # fmt: skip
def test_a_common_subnet_is_chosen(
    given: dict[str, Facts], cidrs: tuple[str, ...], addresses: list[str]
) -> None:
    chosen = choose(nodes(len(given)), given)
    assert chosen.cidrs == cidrs
    assert list(chosen.addresses.values()) == addresses
    assert not chosen.routed


def test_one_host_alone_needs_no_network() -> None:
    chosen = choose(nodes(1), facts([]))
    assert chosen.cidrs == ()
    assert chosen.addresses == {"h1": "127.0.0.1"}


@pytest.mark.parametrize(
    ("given", "cidrs"),
    [
        (
            facts([eth("10.1.0.1/24"), DOCKER], [eth("10.2.0.1/24"), DOCKER], ssh=("10.1.0.1", "10.2.0.1")),
            ("10.1.0.0/24", "10.2.0.0/24"),
        ),
        (facts([eth("10.1.0.1/24"), DOCKER], [eth("10.2.0.1/24"), DOCKER]), ("10.1.0.0/24", "10.2.0.0/24")),
        (
            facts([eth("10.1.0.1/32")], [eth("10.1.0.2/32")], ssh=("10.1.0.1", "::ffff:10.1.0.2")),
            ("10.1.0.1/32", "10.1.0.2/32"),
        ),
    ],
    ids=["ssh addresses", "one real address each", "cloud /32"],
)
def test_hosts_in_different_subnets_use_all_of_them(given: dict[str, Facts], cidrs: tuple[str, ...]) -> None:
    chosen = choose(nodes(2), given)
    assert chosen.cidrs == cidrs
    assert chosen.routed


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (facts([DOCKER], [DOCKER]), ["h1 - h2", "both have 172.17.0.1"]),
        (
            facts([eth("10.1.0.1/24"), eth("10.3.0.1/24", "b")], [eth("10.2.0.1/24"), eth("10.4.0.1/24", "b")]),
            ["h1 - h2", "no subnet in common", "10.4.0.1/24"],
        ),
        (
            facts([eth("10.0.0.1/24")], [eth("10.0.0.2/24")], [eth("10.0.0.1/24")]),
            ["h1 - h3", "both have 10.0.0.1"],
        ),
        (facts([eth("10.0.0.1/24")], [Interface("eth0", ("2001:db8::2/64",))]), ["h2", "only IPv6"]),
        (facts([eth("10.0.0.1/24")], [Interface("eth0", ("169.254.3.4/16",))]), ["h2", "no address but loopback"]),
        ({**facts([eth("10.0.0.1/24")]), "h2": Facts(None)}, ["h2", "could not be read"]),
    ],
    ids=["bridges only", "disjoint", "same address twice", "ipv6", "link-local", "unknown"],
)  # fmt: skip
def test_no_common_network_names_the_pairs(given: dict[str, Facts], words: list[str]) -> None:
    with pytest.raises(PreconditionError) as caught:
        choose(nodes(len(given)), given)
    for word in words:
        assert word in str(caught.value)


def test_many_bad_pairs_are_not_all_listed() -> None:
    given = facts(*[[eth(f"10.{i}.0.1/24"), eth(f"10.{i}.9.1/24", "b")] for i in range(20)])
    with pytest.raises(PreconditionError, match="and 180 more pairs"):
        choose(nodes(20), given)
