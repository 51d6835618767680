"""Asks and measures what the judges look at; every wait has a deadline."""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from provision import network, paths
from provision.cluster import Cluster, Node
from provision.errors import DeadlineExceeded, PreconditionError, RingmasterError
from provision.facts import NodeFacts
from provision.fanout import fan_out
from provision.healthcheck.evidence import Evidence, Look, MpiRun
from provision.launch import preflight, slots
from provision.launch.command import mpirun_argv, rank_argv
from provision.launch.demux import Demux, MpirunText, RankData
from provision.launch.ship import send_helpers
from provision.launch.start import job_marks, mpirun_options, put_hostfile, sweep, with_env
from provision.transport import Connections

LOOK_TIMEOUT_S = 15.0
HELPERS_TIMEOUT_S = 60.0
HELLO_TIMEOUT_S = 60.0
# Importing TensorFlow takes 5 s on an idle machine, a minute from a slow disk.
ALLREDUCE_TIMEOUT_S = 150.0
_PINNED = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)")


def measure(
    cluster: Cluster,
    connections: Connections,
    facts: Mapping[str, NodeFacts],
    unreachable: Mapping[str, RingmasterError],
) -> Evidence:
    """All evidence that can be had; a node that fails in one thing is still asked for the others."""
    reached = [node for node in cluster.nodes if node.name in facts]
    lost = dict(unreachable)
    for node in cluster.nodes:
        if node.name not in facts and node.name not in lost:
            lost[node.name] = RingmasterError("gave no facts", remedy="fab healthcheck")
    evidence = Evidence(cluster, facts, lost, lock=read_lock(cluster.stack or "tf1"))
    outcomes = fan_out(
        reached,
        lambda node: look(connections, node),
        deadline_s=LOOK_TIMEOUT_S + 5,
        what="look at the clock",
    )
    # It answered once and does not now: that is all that can be said of such a node.
    lost.update({name: outcome.error for name, outcome in outcomes.items() if outcome.error is not None})
    facts = {name: own for name, own in facts.items() if name not in lost}
    looks = {name: outcome.value for name, outcome in outcomes.items() if outcome.value is not None}
    evidence = dataclasses.replace(evidence, facts=facts, unreachable=lost, looks=looks)
    reached = [node for node in reached if node.name in facts]
    ready = [resolved(node, facts[node.name]) for node in reached if facts[node.name].openmpi is not None]
    if not ready:
        return evidence
    helped = fan_out(
        ready,
        lambda node: send_helpers(connections.to(node), node.prefix_path or ""),
        deadline_s=HELPERS_TIMEOUT_S,
        what="copy the helpers",
    )
    unhelped = {name: str(outcome.error) for name, outcome in helped.items() if outcome.error is not None}
    evidence = dataclasses.replace(evidence, unasked=unhelped)
    ready = [node for node in ready if node.name not in unhelped]
    if not ready:
        why = next(iter(unhelped.values()))
        return dataclasses.replace(evidence, failed={"mpi-hello": why})
    sub = dataclasses.replace(cluster, nodes=tuple(ready))
    evidence = dataclasses.replace(evidence, launcher=sub.head)
    try:
        answers = preflight.ask(sub, connections.to(sub.head), ready)
    except RingmasterError as error:
        unasked = {**unhelped, **dict.fromkeys(sub.names, str(error))}
        return dataclasses.replace(evidence, unasked=unasked, failed={"mpi-hello": str(error)})
    evidence = dataclasses.replace(evidence, answers=answers)
    return run_mpi(evidence, sub, connections)


def run_mpi(evidence: Evidence, sub: Cluster, connections: Connections) -> Evidence:
    """The MPI checks over those nodes that can take part."""
    faulty = {name for name, _, _ in preflight.problems(sub, evidence.answers)}
    fit = tuple(node for node in sub.nodes if node.name not in faulty)
    if not fit or fit[0].name != sub.head.name:
        first = next((text for name, text, _ in preflight.problems(sub, evidence.answers)), "no host is fit")
        return dataclasses.replace(evidence, failed={"mpi-hello": f"{sub.head.name}: {first}"})
    try:
        networks = network.choose(fit, evidence.facts).cidrs
    except PreconditionError as error:
        return dataclasses.replace(evidence, failed={"mpi-hello": error.message})
    sub = dataclasses.replace(sub, nodes=fit, networks=networks)
    left_out = tuple(name for name in evidence.cluster.names if name not in sub.names)
    try:
        hello = run_check(sub, connections, evidence.answers, "hello", left_out, HELLO_TIMEOUT_S)
    except RingmasterError as error:
        return dataclasses.replace(evidence, failed={"mpi-hello": str(error)})
    evidence = dataclasses.replace(evidence, hello=hello)
    if hello.status != 0 or hello.deadline_s is not None:
        return evidence
    try:
        allreduce = run_check(sub, connections, evidence.answers, "allreduce", left_out, ALLREDUCE_TIMEOUT_S)
    except RingmasterError as error:
        return dataclasses.replace(evidence, failed={"allreduce": str(error)})
    return dataclasses.replace(evidence, allreduce=allreduce)


def look(connections: Connections, node: Node) -> Look:
    """One short command, timed from both sides."""
    before = time.time()
    result = connections.to(node).run(["date", "+%s.%N"], timeout_s=LOOK_TIMEOUT_S)
    after = time.time()
    return Look(result.noise, float(result.stdout) - (before + after) / 2, (after - before) / 2)


def resolved(node: Node, facts: NodeFacts) -> Node:
    """The node as the facts show it now, whatever cluster.json says."""
    return dataclasses.replace(node, prefix_path=facts.prefix, uid=facts.uid, remote_user=facts.user)


def check_seats(nodes: Sequence[Node]) -> tuple[slots.Seat, ...]:
    """One rank on every host; two on a lone host, so that messages are really exchanged."""
    ranks = 2 if len(nodes) == 1 else 1
    return tuple(slots.Seat(node, ranks, None, ranks) for node in nodes)


def run_check(
    cluster: Cluster,
    connections: Connections,
    answers: Mapping[str, preflight.Answer],
    what: str,
    left_out: tuple[str, ...],
    deadline_s: float,
) -> MpiRun:
    """`mpi_check.py <what>` on every node of `cluster`, as a job is run; nothing is left running."""
    placed = check_seats(cluster.nodes)
    job = f"check-{what}-{secrets.token_hex(4)}"
    env = job_marks(job, sum(seat.ranks for seat in placed), cluster.stack)
    mine = {node.name: answers[node.name] for node in cluster.nodes}
    options = mpirun_options(cluster, placed, mine, job, env)
    argv = mpirun_argv(options, rank_argv("-", "mpi_check.py", [what]))
    head = connections.to(cluster.head)
    demux = Demux()
    out: dict[int, bytes] = {}
    errors: dict[int, bytes] = {}
    own: list[str] = []

    def take(stream: str, line: str) -> None:
        for event in demux.feed(line + "\n") if stream == "stdout" else [MpirunText(line)]:
            if isinstance(event, RankData):
                held = out if event.stream == "out" else errors
                held[event.rank] = (held.get(event.rank, b"") + event.data)[-20_000:]
            elif isinstance(event, MpirunText):
                own.append(event.text)

    status, missed = 1, None
    leftovers = 0
    try:
        put_hostfile(head, cluster, placed, options.hostfile)
        command = with_env(options.prefix, argv)
        status = head.run(command, env=env, timeout_s=deadline_s, check=False, on_line=take).status
    except DeadlineExceeded:
        missed = deadline_s
    finally:
        swept = sweep(cluster, connections, placed, job, options.hostfile)
        leftovers = sum(len((outcome.value or "").splitlines()) for outcome in swept.values())
    return MpiRun(
        hosts=slots.hosts_of_ranks(placed),
        left_out=left_out,
        status=status,
        said={rank: said for rank, text in sorted(out.items()) if (said := parsed(text)) is not None},
        errors={rank: text.decode("utf-8", "replace") for rank, text in errors.items()},
        mpirun="\n".join(own),
        deadline_s=missed,
        leftovers=leftovers,
    )


def parsed(text: bytes) -> dict[str, Any] | None:
    """The JSON object among the lines of a rank, or None."""
    for line in reversed(text.decode("utf-8", "replace").splitlines()):
        if line.startswith("{"):
            try:
                value = json.loads(line)
            except ValueError:
                continue
            return value if isinstance(value, dict) else None
    return None


def read_lock(stack: str) -> dict[str, str]:
    """Package name -> version of `scripts/requirements-<stack>.lock`."""
    return parse_lock((paths.scripts_dir() / f"requirements-{stack}.lock").read_text(encoding="utf-8"))


def parse_lock(text: str) -> dict[str, str]:
    """The pins of a requirements file with hashes."""
    return {match[1]: match[2] for line in text.splitlines() if (match := _PINNED.match(line))}
