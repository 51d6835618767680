"""The table of checks, and how it is carried through: a check that needs a failed one is not counted as passed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from provision.healthcheck import judges, mpi_judges
from provision.healthcheck.evidence import Evidence
from provision.healthcheck.model import FAILED, NOT_CHECKED, Finding, Row


@dataclass(frozen=True)
class Check:
    """`scope` node: judged for each node; pair: from the launching node to each other one; cluster: once.

    `judge(evidence, node name)`, for a cluster check `judge(evidence)`.

    `needs`: checks that must not have failed for the same node; for a cluster check, for at least one node.
    """

    id: str
    scope: str
    judge: Callable[..., Finding]
    needs: tuple[str, ...] = ()


CHECKS: tuple[Check, ...] = (
    Check("reach", "node", judges.reach),
    Check("login-noise", "node", judges.login_noise, ("reach",)),
    Check("clock", "node", judges.clock, ("reach",)),
    Check("disk", "node", judges.disk, ("reach",)),
    Check("cpu", "node", judges.cpu, ("reach",)),
    Check("openmpi", "node", judges.openmpi, ("reach",)),
    Check("stack", "node", judges.stack, ("reach",)),
    Check("packages", "node", judges.packages, ("reach", "stack")),
    Check("gpus", "node", judges.gpus, ("reach",)),
    Check("network", "cluster", mpi_judges.data_network, ("reach",)),
    Check("ssh-mesh", "pair", judges.ssh_mesh, ("reach", "openmpi")),
    Check("mpi-hello", "cluster", mpi_judges.hello, ("openmpi", "stack", "ssh-mesh", "network")),
    Check("affinity", "cluster", mpi_judges.affinity, ("mpi-hello",)),
    Check("allreduce", "cluster", mpi_judges.allreduce, ("mpi-hello",)),
    Check("known-defects", "cluster", mpi_judges.known_defects, ("reach",)),
)


def judge_all(evidence: Evidence) -> tuple[Row, ...]:
    """Every check of the table on the evidence."""
    rows: list[Row] = []
    for check in CHECKS:
        if check.scope == "cluster":
            rows.append(_cluster_row(check, evidence, rows))
        else:
            rows += _node_rows(check, evidence, rows)
    return tuple(rows)


def _node_rows(check: Check, evidence: Evidence, earlier: list[Row]) -> list[Row]:
    rows = []
    launcher = evidence.launcher.name if evidence.launcher is not None else None
    for name in evidence.cluster.names:
        subject = f"{launcher} -> {name}" if check.scope == "pair" and launcher else name
        if check.scope == "pair" and name == launcher:
            continue
        blocker = _blocker(check, earlier, name)
        if blocker is None and check.scope == "pair" and launcher is None:
            blocker = "no host can start MPI programs"
        if blocker is not None:
            finding = Finding(NOT_CHECKED, f"because {blocker}")
        else:
            finding = check.judge(evidence, name)
        rows.append(Row(check.id, check.scope, subject, finding, name))
    return rows


def _blocker(check: Check, earlier: list[Row], name: str) -> str | None:
    """Why this check cannot be made on that node, or None."""
    for row in earlier:
        if row.check in check.needs and row.node == name and row.state in (FAILED, NOT_CHECKED):
            return f"{row.check} failed" if row.state == FAILED else row.finding.text.removeprefix("because ")
    return None


def _cluster_row(check: Check, evidence: Evidence, earlier: list[Row]) -> Row:
    finding: Finding | None = None
    for need in check.needs:
        mine = [row for row in earlier if row.check == need]
        # A lone host has no pairs: nothing can have failed there.
        if mine and all(row.state in (FAILED, NOT_CHECKED) for row in mine):
            failed = next((row for row in mine if row.state == FAILED), None)
            where = "" if mine[0].scope == "cluster" else " on every host" if len(mine) > 1 else ""
            why = f"{need} failed{where}" if failed else mine[0].finding.text.removeprefix("because ")
            finding = Finding(NOT_CHECKED, f"because {why}")
            break
    return Row(check.id, check.scope, "cluster", finding or check.judge(evidence))
