"""The judges of what only all nodes together show: network, MPI hello, affinity, allreduce, known defects; pure."""

from __future__ import annotations

from provision import network
from provision.cluster import fold
from provision.errors import PreconditionError
from provision.healthcheck.evidence import Evidence, MpiRun
from provision.healthcheck.model import FAILED, INFO, OK, WARNING, Finding

VADER_VERSIONS = ("3.1.0", "3.1.1")
TRACE = "fab healthcheck --json"


def data_network(evidence: Evidence) -> Finding:
    nodes = [node for node in evidence.cluster.nodes if node.name in evidence.facts]
    if len(nodes) == 1:
        return Finding(OK, "one host: nothing leaves it")
    try:
        chosen = network.choose(nodes, evidence.facts)
    except PreconditionError as error:
        return Finding(FAILED, error.message, error.remedy)
    planned = evidence.cluster.networks
    if planned and len(nodes) == len(evidence.cluster.nodes) and set(planned) != set(chosen.cidrs):
        return Finding(
            FAILED,
            f"the hosts now share {', '.join(chosen.cidrs)}, provisioned for {', '.join(planned)}",
            "fab provision",
        )
    how = "routed over" if chosen.routed else "every host has its own address in"
    return Finding(OK, f"{how} {', '.join(chosen.cidrs)}")


def hello(evidence: Evidence) -> Finding:
    run = evidence.hello
    if run is None:
        return Finding(FAILED, evidence.failed.get("mpi-hello", "was not run"), TRACE)
    bad = unfinished(run, "mpi-hello")
    if bad is not None:
        return bad
    size = len(run.hosts)
    for rank in range(size):
        said = run.said[rank]
        if said.get("rank") != rank or said.get("size") != size:
            text = f"rank {rank} on {run.hosts[rank]} says it is {said.get('rank')} of {said.get('size')}"
            return Finding(FAILED, f"{text}, expected {rank} of {size}", "fab provision")
    libraries = {str(said.get("library")) for said in run.said.values()}
    if len(libraries) > 1:
        return Finding(FAILED, f"different MPI libraries: {', '.join(sorted(libraries))}", "fab provision")
    return Finding(OK, f"{size} ranks{_where(run)}, {libraries.pop()}")


def affinity(evidence: Evidence) -> Finding:
    """Ranks must not be bound: one that shares a core with another is slow."""
    run = evidence.hello
    if run is None or not run.said:
        return Finding(INFO, "unknown")
    shown = [
        f"{rank}: {spans(said.get('cpus', []))} of {said.get('cpu_count')}" for rank, said in run.said.items()
    ]
    text = "rank: CPUs  " + "; ".join(shown[:8]) + (f"; and {len(shown) - 8} more" if len(shown) > 8 else "")
    bound = [
        rank for rank, said in run.said.items() if len(said.get("cpus", [])) == 1 < said.get("cpu_count", 1)
    ]
    if bound:
        return Finding(
            WARNING,
            f"ranks {fold(map(str, bound))} may use one CPU only; {text}",
            "env | grep OMPI_MCA_.*bind",
        )
    return Finding(INFO, text)


def spans(cpus: list[int]) -> str:
    """`0-3,8` for [0, 1, 2, 3, 8]."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def allreduce(evidence: Evidence) -> Finding:
    run = evidence.allreduce
    if run is None:
        return Finding(FAILED, evidence.failed.get("allreduce", "was not run"), TRACE)
    bad = unfinished(run, "allreduce")
    if bad is not None:
        return bad
    size = len(run.hosts)
    for rank in range(size):
        said = run.said[rank]
        if said.get("size") != size:
            text = f"Horovod on {run.hosts[rank]} is rank {said.get('rank')} of {said.get('size')}, expected of {size}"
            return Finding(FAILED, f"{text}: it may be built without MPI", "fab provision")
        if not said.get("max_error", 1.0) <= 1e-9 * size:
            text = f"rank {rank} on {run.hosts[rank]} got a sum that is off by {said.get('max_error')}"
            return Finding(FAILED, text, "fab provision")
    slowest = max(float(said["seconds"]) for said in run.said.values())
    return Finding(OK, f"{size} ranks{_where(run)}, sums right, {slowest:.1f} s")


def known_defects(evidence: Evidence) -> Finding:
    if evidence.expected_mpi in VADER_VERSIONS:
        return Finding(
            INFO,
            f"Open MPI {evidence.expected_mpi} has a rare race in shared memory (vader) that can crash or drop "
            "messages between ranks of one host, fixed in 3.1.3: fab provision --openmpi-version 3.1.6",
        )
    return Finding(OK, "none known")


def unfinished(run: MpiRun, what: str) -> Finding | None:
    """The fault when not every rank came to its end, or None."""
    size = len(run.hosts)
    remedy = "fab provision"
    if run.deadline_s is not None:
        quiet = [run.hosts[rank] for rank in range(size) if rank not in run.said]
        who = fold(dict.fromkeys(quiet)) or "nobody"
        text = f"did not end within {run.deadline_s:g} s; nothing came from {who}{_words(run)}"
        return Finding(FAILED, text, remedy)
    silent = [rank for rank in range(size) if rank not in run.said]
    if run.status == 0 and not silent:
        return None
    if silent:
        rank = next((rank for rank in silent if run.errors.get(rank)), silent[0])
        last = run.errors.get(rank, "").strip().splitlines()[-1:]
        text = f"rank {rank} of {size} on {run.hosts[rank]} failed: {last[0] if last else 'no words'}"
        return Finding(FAILED, text + (_words(run) if not last else ""), remedy)
    return Finding(FAILED, f"mpirun ended with status {run.status}{_words(run)}", remedy)


def _words(run: MpiRun) -> str:
    lines = [line for line in run.mpirun.splitlines() if line.strip(" -*")]
    return "; mpirun says: " + " | ".join(lines[:3]) if lines else ""


def _where(run: MpiRun) -> str:
    """` over 2 hosts (without h3)`."""
    hosts = len(dict.fromkeys(run.hosts))
    left_out = f" (without {fold(run.left_out)})" if run.left_out else ""
    return f" over {hosts} host{'s' if hosts != 1 else ''}{left_out}"
