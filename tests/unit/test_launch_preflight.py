"""The nodes' answers over mpirun's own path, and which of them forbid a launch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from provision.cluster import Cluster, Node
from provision.errors import LaunchError
from provision.launch.preflight import Answer, parse, problems, refuse
from provision.paths import scripts_dir

CLUSTER = Cluster(
    tuple(Node(name, name, prefix_path="/root/local") for name in ("h1", "h2", "h3")),
    stack="tf1",
    mpi={"from": "wheel", "version": "4.1.8"},
)
NAMES = {"localhost": "h1", "h2": "h2", "h3": "h3"}

# What preflight.sh printed on three hosts, one of them without Open MPI.
RECORDED = """\
localhost\t0\t
localhost\t0\thostname=h1
localhost\t0\tuid=0
localhost\t0\tprefix=/root/local
localhost\t0\topenmpi=4.1.8
localhost\t0\tpython=3.7.16
localhost\t0\tstack=0a1b
localhost\t0\tgpus=0
localhost\t0\tptrace_scope=1
localhost\t0\tproject=ok abc
h2\t69\t
h2\t69\t/root/local/openmpi/bin/orted is missing
h3\t255\t
h3\t255\tssh: connect to host 10.1.1.13 port 22: Connection refused
"""


def answer(node: str, **facts: str) -> Answer:
    usual = {"openmpi": "4.1.8", "python": "3.7.16", "stack": "0a1b", "gpus": "0", "project": "ok abc"}
    return Answer(node, 0, {**usual, **facts})


def test_recorded_answers_are_read() -> None:
    answers = parse(RECORDED, NAMES)
    assert list(answers) == ["h1", "h2", "h3"]
    assert answers["h1"].facts["openmpi"] == "4.1.8"
    assert (answers["h1"].gpus, answers["h1"].single_copy) == (0, False)
    assert (answers["h2"].status, answers["h2"].text) == (69, "/root/local/openmpi/bin/orted is missing")
    assert (answers["h3"].status, answers["h3"].gpus) == (255, None)


def test_a_host_that_is_not_in_the_output_has_no_answer() -> None:
    assert parse("", NAMES)["h3"].status == 125


@pytest.mark.parametrize(
    ("answers", "node", "words"),
    [
        ([answer("h1"), Answer("h2", 69, {}, "/x/orted is missing")], "h2", "orted is missing"),
        ([answer("h1"), Answer("h2", 124, {}, "")], "h2", "did not answer the head within 20 s"),
        (
            [answer("h1"), Answer("h2", 255, {}, "Permission denied")],
            "h2",
            "cannot be reached from h1 over SSH",
        ),
        ([answer("h1"), answer("h2", openmpi="2.1.1")], "h2", "Open MPI 2.1.1, expected 4.1.8"),
        ([answer("h1", openmpi="")], "h1", "Open MPI of unknown version"),
        ([answer("h1"), answer("h2", python="bash: no such file")], "h2", "python does not run"),
        ([answer("h1"), answer("h2", python="missing", stack="")], "h2", "stack tf1 is not installed"),
        ([answer("h1"), answer("h2", stack="ffff")], "h2", "stack ffff, expected 0a1b"),
        ([answer("h1"), answer("h2", built_with="other")], "h2", "built with another Open MPI than 4.1.8"),
        (
            [answer("h1"), answer("h2", project="differs train.py: FAILED")],
            "h2",
            "no longer as it was sent: train.py: FAILED",
        ),
        ([answer("h1"), answer("h2", project="missing")], "h2", "the shipped project: missing"),
        ([answer("h1"), answer("h2", project="ok fff")], "h2", "another version of the project"),
    ],
    ids=[
        "orted",
        "silent",
        "ssh",
        "mixed MPI",
        "no version",
        "python",
        "no stack",
        "stack",
        "built with another MPI",
        "older copy",
        "no project",
        "other version",
    ],
)
def test_each_fault_is_found_and_named(answers: list[Answer], node: str, words: str) -> None:
    found = problems(CLUSTER, {each.node: each for each in answers}, project_digest="abc")
    assert [name for name, _, _ in found] == [node]
    assert words in found[0][1]
    with pytest.raises(LaunchError) as caught:
        refuse(CLUSTER, found, len(answers))
    assert f"{node}: {found[0][1]}; {found[0][2]}" in str(caught.value)


@pytest.mark.parametrize("remedy", ["run fab provision", "run `fab provision`"])
def test_what_a_node_says_itself_is_said_once(remedy: str) -> None:
    """rsh_agent.sh's and with_env.sh's words name the host and the remedy already."""
    missing = Answer("h3", 69, {}, f"h3: /root/local/env.sh is missing; {remedy}")
    with pytest.raises(LaunchError) as caught:
        refuse(CLUSTER, problems(CLUSTER, {"h1": answer("h1"), "h3": missing}), 2)
    assert str(caught.value).splitlines()[1:] == ["  h3: /root/local/env.sh is missing; run `fab provision`"]


def test_a_missing_stack_is_named_with_what_installs_it(tmp_path: Path) -> None:
    """The real node_check.sh in a prefix that has the stack tf1 only; asked for tf2."""
    libexec = tmp_path / "libexec"
    libexec.mkdir()
    script = shutil.copy(scripts_dir() / "node" / "node_check.sh", libexec)
    python = tmp_path / "stacks/tf1/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (tmp_path / "openmpi/bin").mkdir(parents=True)
    (tmp_path / "openmpi/bin/orted").write_text("#!/bin/sh\necho 'orted (OpenRTE) 4.1.8'\n")
    (tmp_path / "openmpi/bin/orted").chmod(0o755)
    found = {}
    for stack in ("tf1", "tf2"):
        env = {**os.environ, "RINGMASTER_STACK": stack}
        done = subprocess.run(
            ["bash", script], env=env, capture_output=True, text=True, timeout=30, check=False
        )
        said = "".join(f"h1\t{done.returncode}\t{line}\n" for line in done.stdout.splitlines())
        of_stack = replace(CLUSTER, stack=stack, nodes=CLUSTER.nodes[:1])
        found[stack] = problems(of_stack, parse(said, {"h1": "h1"}))
    assert found == {
        "tf1": [],
        "tf2": [("h1", "the stack tf2 is not installed", "run `fab provision --stack tf2`")],
    }


@pytest.mark.parametrize(("in_place", "said"), [("aa", "here"), ("bb", "other"), (None, "")])
def test_open_mpi_that_the_stack_was_built_with(in_place: str | None, said: str, tmp_path: Path) -> None:
    """The real node_check.sh beside the lines that the installers write down."""
    (tmp_path / "libexec").mkdir()
    script = shutil.copy(scripts_dir() / "node" / "node_check.sh", tmp_path / "libexec")
    (tmp_path / "stacks/tf1").mkdir(parents=True)
    (tmp_path / "stacks/tf1/.ringmaster.json").write_text('{\n "openmpi_digest": "aa",\n "digest": "cc"\n}\n')
    (tmp_path / "openmpi").mkdir()
    if in_place:
        (tmp_path / "openmpi/.ringmaster.json").write_text(f'{{\n "digest": "{in_place}"\n}}\n')
    done = subprocess.run(["bash", script], capture_output=True, text=True, timeout=30, check=True)
    assert f"built_with={said}" in done.stdout.splitlines()


def test_a_missing_orted_is_a_fault_of_open_mpi_not_of_the_way_there(tmp_path: Path) -> None:
    """The real node_check.sh in a prefix without Open MPI."""
    (tmp_path / "libexec").mkdir()
    script = shutil.copy(scripts_dir() / "node" / "node_check.sh", tmp_path / "libexec")
    done = subprocess.run(["bash", script], capture_output=True, text=True, timeout=30, check=False)
    said = "".join(f"h2\t{done.returncode}\t{line}\n" for line in done.stdout.splitlines())
    found = problems(CLUSTER, {"h1": answer("h1"), **parse(said, {"h2": "h2"})})
    assert found[0][:2] == ("h2", f"its Open MPI is broken: {tmp_path}/openmpi/bin/orted is missing")


def test_equal_nodes_may_start() -> None:
    found = problems(CLUSTER, {name: answer(name) for name in CLUSTER.names}, project_digest="abc")
    assert found == []
    refuse(CLUSTER, found, 3)


def test_every_faulty_node_is_in_the_refusal() -> None:
    found = problems(CLUSTER, parse(RECORDED, NAMES), project_digest="abc")
    with pytest.raises(LaunchError, match=r"2 of 3 nodes") as caught:
        refuse(CLUSTER, found, 3)
    assert "h2: " in str(caught.value)
    assert "h3: " in str(caught.value)
