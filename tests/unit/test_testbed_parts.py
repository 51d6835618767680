"""The testbed's pure parts: what it reads from apt, which range it takes, what it misses, what it writes."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest

from provision.errors import PreconditionError
from tests.cluster.conftest import require_hosts
from tests.testbed import bare, files, net, preconditions
from tests.testbed.spec import Bind, Interface, NodeSpec, node_specs

ONE_LINE = """\
# a comment
deb http://mirror.example/debian bookworm main contrib # the archive
deb-src http://mirror.example/debian bookworm main
deb [arch=amd64 signed-by=/usr/share/keyrings/k.gpg] http://other.example/debian bookworm-updates main
"""
DEB822 = """\
# a comment
Types: deb deb-src
URIs: http://mirror.example/debian http://second.example/debian
Suites: bookworm
 bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/k.gpg

Types: deb-src
URIs: http://source.example/debian
Suites: bookworm
Components: main

Enabled: no
Types: deb
URIs: http://disabled.example/debian
Suites: bookworm
Components: main
"""
KEY = "/usr/share/keyrings/k.gpg"


def test_one_line_sources() -> None:
    assert list(bare.parse_one_line(ONE_LINE)) == [
        bare.Source("http://mirror.example/debian", "bookworm", ("main", "contrib"), None),
        bare.Source("http://other.example/debian", "bookworm-updates", ("main",), KEY),
    ]


def test_deb822_sources() -> None:
    assert list(bare.parse_deb822(DEB822)) == [
        bare.Source(f"http://{host}.example/debian", suite, ("main",), KEY)
        for host in ("mirror", "second")
        for suite in ("bookworm", "bookworm-updates")
    ]


def test_the_release_itself_is_chosen(tmp_path: Path) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text("deb http://updates.example/debian bookworm-updates main\n")
    (tmp_path / "sources.list.d" / "a.list").write_text("deb http://tool.example/apt bookworm stable\n")
    (tmp_path / "sources.list.d" / "b.sources").write_text(DEB822)
    sources = bare.read_sources(tmp_path)
    assert bare.choose_source(sources, "bookworm").uri == "http://mirror.example/debian"
    with pytest.raises(PreconditionError, match="no source of trixie with component main"):
        bare.choose_source(sources, "trixie")


def test_a_mirror_list_is_followed(tmp_path: Path) -> None:
    (tmp_path / "mirrors").write_text("http://first.example/debian\nhttp://second.example/debian\n")
    source = bare.Source(f"mirror+file:{tmp_path}/mirrors", "bookworm", ("main",), KEY)
    assert bare.choose_source([source], "bookworm").uri == "http://first.example/debian"


def networks(*texts: str) -> list[ipaddress.IPv4Network]:
    return [ipaddress.IPv4Network(text) for text in texts]


def test_a_free_range_overlaps_nothing() -> None:
    taken = networks("192.168.0.0/16", "10.64.0.0/11")
    first = net.free_range("seed", taken)
    assert first.prefixlen == 24
    assert first.subnet_of(ipaddress.IPv4Network("10.96.0.0/11"))
    assert net.free_range("seed", taken) == first
    second = net.free_range("seed", [*taken, first])
    assert not second.overlaps(first)
    with pytest.raises(net.TestbedError, match=r"no free 10\.x\.y\.0/24"):
        net.free_range("seed", networks("10.0.0.0/8"))


@pytest.mark.parametrize(
    ("uid", "path", "filesystems", "expected"),
    [
        (1000, "/usr/bin", "nodev overlay\n", ["it is run by uid 1000"]),
        (0, "/usr/bin", "ext4\n", ["modprobe overlay"]),
        (0, "/usr/bin", "overlay ext4\n", []),
    ],
)
def test_missing_preconditions_are_named(uid: int, path: str, filesystems: str, expected: list[str]) -> None:
    found = preconditions.problems(frozenset({"clone"}), uid=uid, path=path, filesystems=filesystems)
    about_tools = [text for text in found if "not found; install: apt-get install" in text]
    others = [text for text in found if text not in about_tools]
    assert len(others) == len(expected)
    assert all(part in text for part, text in zip(expected, others))


def test_missing_tools_are_named_with_their_packages() -> None:
    found = preconditions.problems(frozenset({"bare"}), uid=0, path="/nonexistent", filesystems="overlay")
    assert len(found) == 1
    for word in ("sshd", "openssh-server", "nsenter", "util-linux", "nft", "nftables", "debootstrap"):
        assert word in found[0]


def test_specs_survive_json() -> None:
    spec = NodeSpec(
        "h1",
        users=("alice",),
        binds=(Bind("/a", "/b"),),
        interfaces=(Interface("docker0", "172.17.0.1/16"),),
    )
    assert NodeSpec.from_json(spec.to_json()) == spec
    assert [spec.name for spec in node_specs(3)] == ["h1", "h2", "h3"]


def test_ssh_files_name_ports() -> None:
    nodes = {
        "h1": ("10.64.0.11", 22, "ssh-ed25519 AAA root@h1"),
        "h2": ("10.64.0.12", 2222, "ssh-ed25519 BBB"),
    }
    assert files.known_hosts_text(nodes) == (
        "h1,10.64.0.11 ssh-ed25519 AAA\n[h2]:2222,[10.64.0.12]:2222 ssh-ed25519 BBB\n"
    )


@pytest.mark.parametrize(
    ("port", "peers", "expected"),
    [
        (None, [], ["iifname lo accept; drop;", "oifname lo accept; drop;"]),
        (22, [], ["iifname lo accept; tcp dport 22 drop;"]),
        (22, ["10.0.0.1"], ["ip saddr { 10.0.0.1 } tcp dport 22 drop;"]),
        (
            None,
            ["10.0.0.1", "10.0.0.2"],
            ["ip saddr { 10.0.0.1, 10.0.0.2 } drop;", "ip daddr { 10.0.0.1, 10.0.0.2 }"],
        ),
    ],
)
def test_cut_rules(port: int | None, peers: list[str], expected: list[str]) -> None:
    text = net.cut_rules(port, peers)
    assert text.count("chain ") == len(expected)
    assert all(part in text for part in expected)


def test_ci_fails_where_others_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="need root"):
        require_hosts(frozenset({"clone"}))
    monkeypatch.setenv("CI", "1")
    with pytest.raises(pytest.fail.Exception, match="need root"):
        require_hosts(frozenset({"clone"}))
