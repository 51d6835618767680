"""A node's facts: a recorded answer, damaged ones, and this machine's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from provision.cluster import Node
from provision.errors import CommandFailed, NodeError, UsageError
from provision.facts import Interface, NodeFacts, SshServer, gather, parse_facts
from provision.paths import scripts_dir
from provision.transport import connect

# What probe.sh printed on a Debian 12 host with a CUDA toolkit, no GPU, nothing installed by Ringmaster.
RECORDED = Path(__file__).with_name("data") / "probe_debian12.json"

DONE = {
    "openmpi": {"version": "3.1.0", "from": "source", "digest": "ab12", "path": "/p/openmpi"},
    "stacks": {
        "tf1": {
            "python": "3.7.16",
            "digest": "cd34",
            "packages": {"tensorflow": "1.15.0"},
            "horovod_build": {"mpi": True},
        }
    },
    "gpus": [{"index": 0, "name": "Tesla T4", "memory_mib": 15360, "driver": "535.54"}],
    "manifest": {"schema": 1},
}
UNKNOWN = {
    "gpus": None,
    "cuda": None,
    "cpu": {"count": 4, "model": None, "flags": None},
    "unknown": {"gpus": "nvidia-smi did not answer within 10 s", "cpu.flags": "/proc/cpuinfo has none"},
}


def answer(changes: dict[str, Any] | None = None, *, without: str = "") -> str:
    value = json.loads(RECORDED.read_text())
    value.update(changes or {})
    value.pop(without, None)
    return json.dumps(value)


def facts(changes: dict[str, Any] | None = None) -> NodeFacts:
    return parse_facts(answer(changes), "h1")


def test_a_recorded_answer() -> None:
    got = facts()
    assert (got.hostname, got.user, got.uid, got.home, got.prefix) == (
        "h1",
        "root",
        0,
        "/root",
        "/root/local",
    )
    assert got.platform == "debian12-x86_64-glibc2.36-nocuda", "a toolkit without a GPU does not count"
    assert got.cpu.count == 2
    assert got.has_avx is True
    assert got.gpus == ()
    assert got.gpu_count == 0
    assert got.ssh_server is not None
    assert got.ssh_server.port == 22
    assert got.interfaces is not None
    assert Interface("lo", True, True, 65536, ("127.0.0.1/8", "::1/128")) in got.interfaces
    assert [key.split()[0] for key in got.host_keys or ()] == ["ssh-ed25519"]
    assert got.tools["cc"] == "cc (Debian 12.2.0-14+deb12u1) 12.2.0"
    assert got.pythons is not None
    assert got.pythons[0].problem == "version 3.12.1, expected 3.7 or 3.11"
    assert [python.path for python in got.usable_pythons("3.11")] == [
        "/usr/bin/python3",
        "/usr/bin/python3.11",
    ]
    assert got.usable_pythons("3.7") == got.usable_pythons("3.1") == ()
    assert (got.openmpi, dict(got.stacks), got.manifest, dict(got.unknown)) == (None, {}, None, {})
    assert hash(got.ssh_server) == hash(SshServer(got.ssh_server.address, 22))


def test_a_provisioned_node() -> None:
    got = facts(DONE)
    assert got.openmpi is not None
    assert (got.openmpi.version, got.openmpi.origin, got.openmpi.path) == ("3.1.0", "source", "/p/openmpi")
    assert got.stacks["tf1"].packages == {"tensorflow": "1.15.0"}
    assert got.stacks["tf1"].horovod_build == {"mpi": True}
    assert got.gpus is not None
    assert (got.gpus[0].name, got.gpus[0].memory_mib, got.gpu_count) == ("Tesla T4", 15360, 1)
    assert got.manifest == {"schema": 1}


def test_unknown_is_not_absent() -> None:
    absent, unknown = facts({"gpus": [], "cuda": False}), facts(UNKNOWN)
    assert (absent.gpus, absent.gpu_count, absent.is_unknown("gpus")) == ((), 0, False)
    assert (unknown.gpus, unknown.gpu_count, unknown.is_unknown("gpus")) == (None, None, True)
    assert unknown.unknown["gpus"] == "nvidia-smi did not answer within 10 s"
    assert unknown.has_avx is None
    assert facts({"cpu": {"count": 4, "model": "old", "flags": ["sse2"]}}).has_avx is False


@pytest.mark.parametrize(
    ("changes", "platform"),
    [
        ({"cuda": False}, "debian12-x86_64-glibc2.36-nocuda"),
        ({"cuda": {"home": "/c", "version": "11.8"}}, "debian12-x86_64-glibc2.36-nocuda"),
        (
            {"gpus": DONE["gpus"], "cuda": {"home": "/c", "version": "11.8"}},
            "debian12-x86_64-glibc2.36-cuda11",
        ),
        (
            {"gpus": DONE["gpus"], "cuda": None, "unknown": {"cuda": "why"}},
            "debian12-x86_64-glibc2.36-cudaunknown",
        ),
        (
            {"cuda": False, "os": {"id": "opensuse-leap", "version": "15.5", "pretty": None}},
            "opensuse_leap15.5-x86_64-glibc2.36-nocuda",
        ),
        ({"cuda": False, "os": None, "arch": "aarch64", "glibc": None}, "linux-aarch64-glibcunknown-nocuda"),
    ],
)
def test_platforms(changes: dict[str, Any], platform: str) -> None:
    assert facts(changes).platform == platform


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"h1: probe.sh printed '', expected one JSON object"),
        ("motd\n{}", r"printed 'motd\\n{}', expected one JSON object"),
        ("[]", r"`the answer` is \[\], expected an object"),
        ("{}", r"has no `schema`"),
        (answer({"schema": 2}), r"schema 2, expected 1; use the probe.sh of this installation"),
        (answer(without="glibc"), r"has no `glibc`"),
        (answer({"uid": None, "unknown": {"uid": "id failed"}}), r"could not find out `uid`: id failed"),
        (answer({"home": False}), r"could not find out `home`"),
        (answer({"uid": "0"}), r"`uid` is \"0\", expected an integer"),
        (answer({"uid": True}), r"`uid` is true, expected an integer"),
        (answer({"prefix": "local"}), r"`prefix` is 'local', expected an absolute path"),
        (
            answer({"cpu": {"count": 1, "model": "x", "flags": "avx"}}),
            r"`cpu.flags` is \"avx\", expected a list",
        ),
        (answer({"cpu": {"count": 1, "model": "x"}}), r"has no `cpu.flags`"),
        (answer({"host_keys": [1]}), r"`host_keys` is 1, expected a list of texts"),
        (answer({"tools": {"cc": True}}), r"`tools.cc` is true, expected a version text or false"),
        (answer({"gpus": [{"index": None}]}), r"could not find out `gpus\[0\].index`"),
        (
            answer({"interfaces": [{"name": "a", "up": 1}]}),
            r"`interfaces\[0\].up` is 1, expected true or false",
        ),
        (answer({"stacks": {"tf1": []}}), r"`stacks.tf1` is \[\], expected an object"),
    ],
)
def test_answers_that_are_no_facts(text: str, message: str) -> None:
    with pytest.raises(NodeError, match=message) as caught:
        parse_facts(text, "h1")
    assert caught.value.node == "h1"


# -- for real ----------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HOME", str(tmp_path))
    return connect(Node("here", "localhost", local=True), known_hosts=tmp_path / "known_hosts")


def test_this_machine_tells_its_facts(here: Any, tmp_path: Path) -> None:
    got = gather(here, scripts_dir(), "$HOME/lo cal")
    assert got.prefix == f"{tmp_path}/lo cal"
    assert got.home == str(tmp_path)
    assert got.ssh_server is None
    assert got.cpu.count is not None
    assert gather(here, scripts_dir(), "/opt/x").prefix == "/opt/x"


def test_a_probe_that_fails(here: Any, tmp_path: Path) -> None:
    (tmp_path / "probe.sh").write_text("echo 'out of luck' >&2; exit 4\n")
    with pytest.raises(CommandFailed, match=r"`probe.sh --prefix=/p` exited 4, expected 0\nout of luck"):
        gather(here, tmp_path, "/p")
    with pytest.raises(UsageError, match=r"probe.sh cannot be read"):
        gather(here, tmp_path / "nowhere", "/p")
