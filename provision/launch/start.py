"""What every mpirun of Ringmaster has in common: its options, its hostfile on the head, the sweep afterwards."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from provision.cluster import Cluster, Node
from provision.errors import NodeError
from provision.fanout import Outcome, fan_out
from provision.launch.command import MpirunOptions, exported
from provision.launch.preflight import Answer
from provision.launch.ship import prefix_of
from provision.launch.slots import Seat, hostfile_text
from provision.transport import Connections, Transport

SWEEP_TIMEOUT_S = 30.0


def nodes_in(cluster: Cluster, placed: Sequence[Seat]) -> list[Node]:
    """The nodes that take part: the head, where mpirun runs, and those with ranks."""
    return [seat.node for seat in placed if seat.ranks or seat.node.name == cluster.head.name]


# A user who sets it decides; on mpirun's command line it would win over the user's value.
YIELD = "OMPI_MCA_mpi_yield_when_idle"


def mpirun_options(
    cluster: Cluster, placed: Sequence[Seat], answers: Mapping[str, Answer], job: str, env: Mapping[str, str]
) -> MpirunOptions:
    """The options for these seats; `answers` are those of the preflight."""
    prefix = prefix_of(cluster.head)
    alone = len(nodes_in(cluster, placed)) == 1
    total = sum(seat.ranks for seat in placed)
    return MpirunOptions(
        prefix=prefix,
        np=total,
        hostfile=f"{prefix}/.ringmaster/jobs/{job}.hostfile",
        alone=alone,
        networks=() if alone else cluster.networks,
        env_names=exported(env),
        as_root=answers[cluster.head.name].facts.get("uid") == "0",
        single_copy=all(answer.single_copy for answer in answers.values()),
        yields=YIELD not in env and not any(answer.gpus for answer in answers.values()),
    )


def job_marks(job: str, np: int, stack: str | None) -> dict[str, str]:
    """The variables by which rank.sh and the sweep know a job."""
    return {"RINGMASTER_JOB": job, "RINGMASTER_NP": str(np), "RINGMASTER_STACK": stack or "tf1"}


def put_hostfile(head: Transport, cluster: Cluster, placed: Sequence[Seat], dest: str) -> None:
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="ringmaster-hostfile-") as stream:
        stream.write(hostfile_text(placed, cluster.head.name))
        stream.flush()
        head.put(Path(stream.name), dest, timeout_s=60.0)


def with_env(prefix: str, argv: Sequence[str]) -> list[str]:
    """`argv` in the head's own environment (its env.sh)."""
    return [f"{prefix}/libexec/with_env.sh", *argv]


def sweep(
    cluster: Cluster, connections: Connections, placed: Sequence[Seat], job: str, hostfile: str
) -> dict[str, Outcome[str]]:
    """Ends what the job has left on its nodes, the head first; node name -> `pid command` lines."""
    head = cluster.head.name
    nodes = sorted(nodes_in(cluster, placed), key=lambda node: node.name != head)

    def one(node: Node) -> str:
        transport = connections.to(node)
        if node.name == head:
            transport.run(["rm", "-f", "--", hostfile], timeout_s=SWEEP_TIMEOUT_S, check=False)
        argv = [f"{prefix_of(node)}/libexec/job_sweep.sh", job, "--wait=3", "--end"]
        found = transport.run(argv, timeout_s=SWEEP_TIMEOUT_S, check=False)
        if found.status != 0:
            raise NodeError(
                node.name, f"processes of job {job} could not be ended:\n{found.stdout}{found.stderr}"
            )
        return found.stdout

    return fan_out(nodes, one, deadline_s=SWEEP_TIMEOUT_S * 2, what="look for leftovers")
