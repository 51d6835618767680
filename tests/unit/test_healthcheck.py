"""The judges and the table of checks: every fault is found, named, and has one remedy; none hides another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from provision.cluster import Cluster, Node
from provision.errors import NodeUnreachable
from provision.facts import Cpu, Disk, Gpu, Interface, NodeFacts, OpenMPI, OperatingSystem, SshServer, Stack
from provision.healthcheck import with_hosts
from provision.healthcheck.checks import CHECKS, judge_all
from provision.healthcheck.evidence import Evidence, Look, MpiRun
from provision.healthcheck.measure import parse_lock, parsed
from provision.healthcheck.model import (
    FAILED,
    INFO,
    NOT_CHECKED,
    OK,
    WARNING,
    Finding,
    Report,
    Row,
    report_rows,
)
from provision.healthcheck.mpi_judges import spans
from provision.launch.preflight import Answer

NAMES = ("h1", "h2", "h3")
LOCK = {"protobuf": "3.20.3", "typing-extensions": "4.7.1"}
CLUSTER = Cluster(
    tuple(Node(name, name, slots=1, address=f"10.0.0.{i}") for i, name in enumerate(NAMES, start=1)),
    stack="tf1",
    mpi={"from": "source", "version": "4.1.4"},
    networks=("10.0.0.0/24",),
)


def facts(name: str) -> NodeFacts:
    number = name[1:]
    return NodeFacts(
        hostname=name, fqdn=name, user="root", uid=0, home="/root", shell=None, kernel=None, arch="x86_64",
        glibc="2.36", clock_epoch_s=None, os=OperatingSystem("debian", "12", None),
        cpu=Cpu(2, "a CPU", ("avx", "sse2")), memory_bytes=None, disk=Disk(10**11, 10**10, False), gpus=(), cuda=None,
        interfaces=(Interface("eth0", True, False, 1500, (f"10.0.0.{number}/24",)),),
        ssh_server=SshServer(f"10.0.0.{number}", 22), host_keys=(), tools={}, pythons=(), sudo="root", ptrace_scope=0,
        prefix="/root/local", home_token=name, openmpi=OpenMPI("4.1.4", "source", "d", "/root/local/openmpi"),
        stacks={"tf1": Stack("3.7.16", "d", {"protobuf": "3.20.3", "typing_extensions": "4.7.1"}, {})},
        manifest=None, unknown={},
    )  # fmt: skip


def answer(name: str, **changed: str) -> Answer:
    return Answer(name, 0, {"openmpi": "4.1.4", "python": "3.7.16", "uid": "0", **changed})


def hello(hosts: tuple[str, ...] = NAMES, **changed: Any) -> MpiRun:
    said = {
        rank: {"rank": rank, "size": len(hosts), "library": "Open MPI v4.1.4", "cpus": [0, 1], "cpu_count": 2}
        for rank in range(len(hosts))
    }
    left_out = tuple(name for name in NAMES if name not in hosts)
    return replace(MpiRun(hosts, left_out, 0, said, {}, ""), **changed)


def allreduce(hosts: tuple[str, ...] = NAMES, **changed: Any) -> MpiRun:
    said = {
        rank: {"rank": rank, "size": len(hosts), "max_error": 0.0, "seconds": 0.5}
        for rank in range(len(hosts))
    }
    return replace(MpiRun(hosts, (), 0, said, {}, ""), **changed)


def healthy(**changed: Any) -> Evidence:
    base = Evidence(
        cluster=CLUSTER,
        facts={name: facts(name) for name in NAMES},
        unreachable={},
        looks={name: Look("", 0.01, 0.02) for name in NAMES},
        launcher=CLUSTER.head,
        answers={name: answer(name) for name in NAMES},
        hello=hello(),
        allreduce=allreduce(),
        lock=LOCK,
    )
    return replace(base, **changed)


def with_facts(name: str, **changed: Any) -> Evidence:
    base = healthy()
    return replace(base, facts={**base.facts, name: replace(base.facts[name], **changed)})


def states(evidence: Evidence) -> dict[tuple[str, str], str]:
    """(check, subject) -> state for all that is neither ok nor info."""
    return {(row.check, row.subject): row.state for row in judge_all(evidence) if row.state not in (OK, INFO)}


def test_a_healthy_cluster_has_no_fault_and_every_check_was_made() -> None:
    rows = judge_all(healthy())
    assert [row for row in rows if row.state not in (OK, INFO)] == []
    assert {row.check for row in rows} == {check.id for check in CHECKS}
    report = Report(NAMES, rows)
    assert (report.exit_status, report.verdict) == (0, "healthy: 3 of 3 hosts (h[1-3])")


def drifted(**packages: str) -> Mapping[str, Stack]:
    return {"tf1": Stack("3.7.16", "d", {"protobuf": "3.20.3", "typing-extensions": "4.7.1", **packages}, {})}


V100 = Gpu(0, "Tesla V100", 16384, "535")

FAULTS = [
    (
        "noise",
        healthy(looks={**healthy().looks, "h2": Look("Welcome!\n", 0, 0)}),
        "login-noise",
        "h2",
        WARNING,
        "Welcome!",
    ),
    (
        "clock",
        healthy(looks={**healthy().looks, "h2": Look("", -90.0, 0.1)}),
        "clock",
        "h2",
        FAILED,
        "90 s behind",
    ),
    (
        "slow clock",
        healthy(looks={**healthy().looks, "h2": Look("", 8.0, 4.0)}),
        "clock",
        "h2",
        OK,
        "within 5 s",
    ),
    (
        "disk",
        with_facts("h2", disk=Disk(10**8, None, None)),
        "disk",
        "h2",
        FAILED,
        "0.10 GB free at /root/local",
    ),
    ("no avx", with_facts("h2", cpu=Cpu(2, "old CPU", ("sse2",))), "cpu", "h2", FAILED, "old CPU"),
    ("unknown cpu", with_facts("h2", cpu=Cpu(2, None, None)), "cpu", "h2", WARNING, "could not be read"),
    ("no mpi", with_facts("h2", openmpi=None), "openmpi", "h2", FAILED, "missing, expected 4.1.4"),
    (
        "other mpi",
        with_facts("h2", openmpi=OpenMPI("3.1.0", None, None, None)),
        "openmpi",
        "h2",
        FAILED,
        "3.1.0, expected",
    ),
    (
        "shim orted",
        healthy(answers={**healthy().answers, "h2": answer("h2", openmpi="2.1.1")}),
        "openmpi",
        "h2",
        FAILED,
        "orted says 2.1.1, expected Open MPI 4.1.4",
    ),
    ("no stack", with_facts("h2", stacks={}), "stack", "h2", FAILED, "tf1 stack is missing"),
    (
        "drift",
        with_facts("h2", stacks=drifted(protobuf="4.24.4")),
        "packages",
        "h2",
        FAILED,
        "protobuf 4.24.4, expected 3.20.3",
    ),
    (
        "gone",
        with_facts("h2", stacks={"tf1": Stack("3.7", "d", {"protobuf": "3.20.3"}, {})}),
        "packages",
        "h2",
        FAILED,
        "typing-extensions is missing, expected 4.7.1",
    ),
    ("gpus unknown", with_facts("h2", gpus=None), "gpus", "h2", WARNING, "could not be listed"),
    (
        "gpu on one",
        with_facts("h2", gpus=(V100,)),
        "gpus",
        "h2",
        WARNING,
        "1 x Tesla V100, while most hosts have no GPU",
    ),
    (
        "few gpus",
        replace(
            with_facts("h2", gpus=(V100,)),
            cluster=replace(
                CLUSTER, nodes=(CLUSTER.nodes[0], replace(CLUSTER.nodes[1], slots=4), CLUSTER.nodes[2])
            ),
        ),
        "gpus",
        "h2",
        FAILED,
        "4 slots on 1 GPUs",
    ),
    (
        "mesh",
        healthy(answers={**healthy().answers, "h2": Answer("h2", 255, {}, "Permission denied")}),
        "ssh-mesh",
        "h1 -> h2",
        FAILED,
        "status 255: Permission denied",
    ),
    (
        "mesh slow",
        healthy(answers={**healthy().answers, "h2": Answer("h2", 124, {}, "")}),
        "ssh-mesh",
        "h1 -> h2",
        FAILED,
        "no answer within 20 s",
    ),
    (
        "network",
        with_facts("h2", interfaces=(Interface("eth0", True, False, 1500, ("10.0.0.1/24",)),)),
        "network",
        "cluster",
        FAILED,
        "h1 - h2: both have 10.0.0.1",
    ),
    (
        "rank 0 of 1",
        healthy(hello=hello(said={r: {"rank": 0, "size": 1} for r in range(3)})),
        "mpi-hello",
        "cluster",
        FAILED,
        "says it is 0 of 1",
    ),
    (
        "hello dead",
        healthy(hello=hello(said={}, status=1, errors={1: "Traceback\nImportError: no"})),
        "mpi-hello",
        "cluster",
        FAILED,
        "rank 1 of 3 on h2 failed: ImportError: no",
    ),
    (
        "hello hangs",
        healthy(hello=hello(said={0: {}}, status=1, deadline_s=60.0)),
        "mpi-hello",
        "cluster",
        FAILED,
        "did not end within 60 s; nothing came from h[2-3]",
    ),
    (
        "no daemon",
        healthy(hello=hello(said={}, status=1, mpirun="-----\nORTE was unable to start on h3")),
        "mpi-hello",
        "cluster",
        FAILED,
        "ORTE was unable to start on h3",
    ),
    (
        "two libraries",
        healthy(hello=hello(said={**hello().said, 2: {**hello().said[2], "library": "Open MPI v3.1.0"}})),
        "mpi-hello",
        "cluster",
        FAILED,
        "Open MPI v3.1.0, Open MPI v4.1.4",
    ),
    (
        "bound",
        healthy(hello=hello(said={r: {**hello().said[r], "cpus": [r % 2]} for r in range(3)})),
        "affinity",
        "cluster",
        WARNING,
        "may use one CPU only",
    ),
    (
        "wrong sum",
        healthy(allreduce=allreduce(said={**allreduce().said, 1: {**allreduce().said[1], "max_error": 2.5}})),
        "allreduce",
        "cluster",
        FAILED,
        "rank 1 on h2 got a sum that is off by 2.5",
    ),
    (
        "not a number",
        healthy(
            allreduce=allreduce(
                said={**allreduce().said, 1: {**allreduce().said[1], "max_error": float("nan")}}
            )
        ),
        "allreduce",
        "cluster",
        FAILED,
        "off by nan",
    ),
    (
        "alone",
        healthy(allreduce=allreduce(said={r: {**allreduce().said[r], "size": 1} for r in range(3)})),
        "allreduce",
        "cluster",
        FAILED,
        "may be built without MPI",
    ),
]


@pytest.mark.parametrize(
    ("evidence", "check", "subject", "state", "words"),
    [row[1:] for row in FAULTS],
    ids=[row[0] for row in FAULTS],
)
def test_each_fault_is_named_and_others_stay_ok(
    evidence: Evidence, check: str, subject: str, state: str, words: str
) -> None:
    rows = judge_all(evidence)
    row = next(row for row in rows if (row.check, row.subject) == (check, subject))
    assert row.state == state
    assert words in row.finding.text
    if state in (FAILED, WARNING):
        assert row.finding.remedy
        assert "\n" not in row.finding.remedy
    unlike = {(r.check, r.subject) for r in rows if r.state == FAILED} - {(check, subject)}
    assert unlike == set()


def test_a_node_that_is_down_hides_no_other_and_is_not_counted_as_passed() -> None:
    base = healthy()
    error = NodeUnreachable("h3", "connection refused", remedy="start sshd")
    evidence = replace(
        base,
        facts={name: base.facts[name] for name in ("h1", "h2")},
        looks={name: base.looks[name] for name in ("h1", "h2")},
        answers={name: base.answers[name] for name in ("h1", "h2")},
        unreachable={"h3": error},
        hello=hello(("h1", "h2")),
        allreduce=allreduce(("h1", "h2")),
    )
    got = states(evidence)
    assert got[("reach", "h3")] == FAILED
    assert {state for (check, _), state in got.items() if check != "reach"} == {NOT_CHECKED}
    rows = judge_all(evidence)
    said = next(row.finding.text for row in rows if row.check == "mpi-hello")
    assert said == "2 ranks over 2 hosts (without h3), Open MPI v4.1.4"
    report = Report(NAMES, rows)
    assert report.exit_status == 1
    assert report.faulty_nodes == ("h3",)
    assert report.remedies == ("h3: reach: start sshd",)
    shown = report_rows(report)
    assert ("reach", "h[1-2]", OK, "answers") in shown
    assert ("reach", "h3", FAILED, "connection refused") in shown
    assert [row[:3] for row in shown if row[2] == NOT_CHECKED] == [("9 checks", "h3", NOT_CHECKED)]


def test_what_needs_a_failed_check_says_so() -> None:
    got = {row.check: row for row in judge_all(healthy(hello=None, failed={"mpi-hello": "h1: broken"}))}
    assert got["mpi-hello"].finding.text == "h1: broken"
    for check in ("affinity", "allreduce"):
        assert (got[check].state, got[check].finding.text) == (NOT_CHECKED, "because mpi-hello failed")


def test_all_nodes_down_leaves_nothing_passed() -> None:
    down = {name: NodeUnreachable(name, "no route") for name in NAMES}
    rows = judge_all(Evidence(CLUSTER, {}, down, lock=LOCK))
    assert {row.state for row in rows} == {FAILED, NOT_CHECKED}
    assert {row.check for row in rows if row.state == FAILED} == {"reach"}
    assert Report(NAMES, rows).exit_status == 3


def test_missing_open_mpi_everywhere_is_one_remedy() -> None:
    evidence = healthy(hello=None, allreduce=None, answers={}, launcher=None)
    evidence = replace(evidence, facts={n: replace(f, openmpi=None) for n, f in evidence.facts.items()})
    report = Report(NAMES, judge_all(evidence))
    assert report.remedies == ("h[1-3]: openmpi: fab provision",)
    assert {row.check for row in report.faults} == {"openmpi"}


def test_the_known_defect_is_information_with_its_remedy() -> None:
    evidence = healthy(cluster=replace(CLUSTER, mpi={"from": "source", "version": "3.1.0"}))
    row: Row = next(row for row in judge_all(evidence) if row.check == "known-defects")
    assert row.state == INFO
    assert "fab provision --openmpi-version 3.1.6" in row.finding.text


def test_json_has_stable_keys() -> None:
    value = json.loads(json.dumps(Report(NAMES, judge_all(healthy()), 1.5).as_dict()))
    assert list(value) == [
        "schema", "healthy", "verdict", "hosts", "faulty_hosts", "faults", "duration_s", "checks",
    ]  # fmt: skip
    for row in value["checks"]:
        assert list(row) == ["check", "scope", "subject", "state", "text", "remedy"]


@pytest.mark.parametrize(
    ("cpus", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 3, 8], "0-3,8"), ([5, 1, 0], "0-1,5")]
)
def test_cpu_lists_are_short(cpus: list[int], text: str) -> None:
    assert spans(cpus) == text


def test_the_lock_is_read() -> None:
    text = (
        "# made by a tool\nabsl-py==2.1.0 \\\n    --hash=sha256:00\nnumpy==1.18.5 ; python_version<'3.8' \\\n"
    )
    assert parse_lock(text) == {"absl-py": "2.1.0", "numpy": "1.18.5"}


def test_a_ranks_object_is_found_among_other_lines() -> None:
    assert parsed(b'warning\n{"rank": 1}\nbye\n') == {"rank": 1}
    assert parsed(b"{broken\n") is None


@pytest.mark.parametrize(
    ("cluster", "remedy", "typed"),
    [
        (Cluster((Node("h1", "h1"), Node("h2", "h2", user="a", port=2222))), "fab provision",
         "fab provision --hosts h1,a@h2:2222"),
        (Cluster((Node("h1", "10.0.0.1", user="a", port=22),), ssh_config="/c"), "fab provision",
         "fab provision --hosts h1 --ssh-config /c"),
        (Cluster((Node("localhost", "localhost", local=True),)), "fab provision --slots 2",
         "fab provision --slots 2 --local"),
        (Cluster((Node("h1", "h1"),)), "df -h /", "df -h /"),
        (Cluster((Node("h1", "h1"),)), "fab provision --hosts h2", "fab provision --hosts h2"),
    ],
)  # fmt: skip
def test_a_remedy_names_the_hosts_that_no_provision_has_saved(
    cluster: Cluster, remedy: str, typed: str
) -> None:
    row = Row("openmpi", "node", "h1", Finding(FAILED, "none", remedy), "h1")
    assert with_hosts(row, cluster).finding.remedy == typed
