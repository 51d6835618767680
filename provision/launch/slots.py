"""Which node runs how many ranks, and the refusals before anything starts; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from provision.cluster import Cluster, Node
from provision.errors import LaunchError, UsageError


@dataclass(frozen=True)
class Seat:
    """One node's part of a job. `gpus` is None where nobody asked the node."""

    node: Node
    slots: int
    gpus: int | None
    ranks: int


def seats(cluster: Cluster, np: int, gpus: Mapping[str, int | None]) -> tuple[Seat, ...]:
    """Place `np` ranks on the nodes' slots, in cluster order; 0: one on every slot.

    Without GPUs the ranks are spread evenly, so that every host's cores work; with GPUs one host after the
    other is filled, so that ranks talk over the fast links inside a host. `gpus` maps node name to its number of
    GPUs. UsageError for an impossible `np`; LaunchError, with a table, when slots or GPUs do not suffice.
    """
    if np < 0:
        raise UsageError(f"--np {np}: expected a whole number of 1 or more, or 0 for all slots")
    slots = [1 if node.slots is None else node.slots for node in cluster.nodes]
    wanted = np or sum(slots)
    ranks = _packed(slots, wanted) if any(gpus.values()) else _spread(slots, wanted)
    left = wanted - sum(ranks)
    placed = [
        Seat(node, count, gpus.get(node.name), given)
        for node, count, given in zip(cluster.nodes, slots, ranks)
    ]
    if wanted == 0:
        raise LaunchError(
            f"no node has a slot\n{table(placed)}", remedy="give at least one host slots=1 or more"
        )
    if left:
        raise LaunchError(
            f"{counted(wanted, 'rank')} wanted, {counted(sum(slots), 'slot')} in the cluster\n{table(placed)}",
            remedy=f"use --np {sum(slots)} or less, add hosts, or give each more slots (fab provision --slots N)",
        )
    crowded = [seat for seat in placed if seat.gpus and seat.ranks > seat.gpus]
    if crowded:
        names = ", ".join(
            f"{s.node.name} would run {s.ranks} ranks on {counted(s.gpus or 0, 'GPU')}" for s in crowded
        )
        fit = sum(min(s.slots, s.gpus) if s.gpus else s.slots for s in placed)
        raise LaunchError(
            f"each rank needs a GPU of its own: {names}\n{table(placed)}",
            remedy=f"provision with slots equal to the GPUs of each host; {counted(fit, 'rank')} fit in all",
        )
    return tuple(placed)


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _packed(slots: Sequence[int], wanted: int) -> list[int]:
    ranks = []
    for count in slots:
        ranks.append(min(count, wanted))
        wanted -= ranks[-1]
    return ranks


def _spread(slots: Sequence[int], wanted: int) -> list[int]:
    """As even as the slots allow; the earlier nodes take what does not divide."""
    ranks = [0] * len(slots)
    wanted = min(wanted, sum(slots))
    while wanted:
        for index, count in enumerate(slots):
            if wanted and ranks[index] < count:
                ranks[index] += 1
                wanted -= 1
    return ranks


def table(placed: Sequence[Seat]) -> str:
    """`host slots GPUs ranks`, one node a line."""
    rows = [("host", "slots", "GPUs", "ranks")]
    for seat in placed:
        gpus = "?" if seat.gpus is None else str(seat.gpus)
        rows.append((seat.node.name, str(seat.slots), gpus, str(seat.ranks)))
    width = max(len(row[0]) for row in rows)
    return "\n".join(f"  {a:<{width}}  {b:>5}  {c:>4}  {d:>5}" for a, b, c, d in rows)


def hostfile_text(placed: Sequence[Seat], head: str) -> str:
    """The hostfile of one job: the nodes that run ranks, each with exactly as many slots as it has ranks.

    The head is written as `localhost`: it may be known to the user by an alias or an address that means
    nothing on that machine. A node without ranks is left out: mpirun may use a host with 0 slots anyway.
    """
    lines = []
    for seat in placed:
        if seat.ranks:
            name = "localhost" if seat.node.name == head else seat.node.name
            lines.append(f"{name} slots={seat.ranks}\n")
    return "".join(lines)


def hosts_of_ranks(placed: Sequence[Seat]) -> tuple[str, ...]:
    """Node name by rank."""
    return tuple(seat.node.name for seat in placed for _ in range(seat.ranks))
