"""What a healthcheck is made of: findings, rows, the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from provision.cluster import fold
from provision.report import fold_rows

OK, INFO, WARNING, FAILED, NOT_CHECKED = "ok", "info", "warning", "failed", "not checked"
SCHEMA = 1
MAX_STATUS = 100


@dataclass(frozen=True)
class Finding:
    """What a judge says. A `failed` or `warning` one names exactly one command to type as its remedy."""

    state: str
    text: str
    remedy: str | None = None


@dataclass(frozen=True)
class Row:
    """One finding about one subject: a node, a pair (`h1 -> h2`) or the cluster. `node` is whose fault it is."""

    check: str
    scope: str
    subject: str
    finding: Finding
    node: str | None = None

    @property
    def state(self) -> str:
        return self.finding.state

    def as_dict(self) -> dict[str, Any]:
        return {
            "check": self.check,
            "scope": self.scope,
            "subject": self.subject,
            "state": self.finding.state,
            "text": self.finding.text,
            "remedy": self.finding.remedy,
        }


@dataclass(frozen=True)
class Report:
    """All rows in the order of the checks. `exit_status` is 0 when healthy, else how many faults (at most 100)."""

    nodes: tuple[str, ...]
    rows: tuple[Row, ...]
    duration_s: float = 0.0
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def faults(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.state == FAILED)

    @property
    def faulty_nodes(self) -> tuple[str, ...]:
        named = {row.node for row in self.faults if row.node}
        return tuple(name for name in self.nodes if name in named)

    @property
    def healthy(self) -> bool:
        return not self.faults

    @property
    def exit_status(self) -> int:
        return min(len(self.faults), MAX_STATUS)

    @property
    def verdict(self) -> str:
        total = len(self.nodes)
        if self.healthy:
            warned = sum(row.state == WARNING for row in self.rows)
            note = f", {warned} warnings" if warned else ""
            return f"healthy: {total} of {total} hosts ({fold(self.nodes)}){note}"
        faults = f"{len(self.faults)} fault{'s' if len(self.faults) != 1 else ''}"
        where = f", on {len(self.faulty_nodes)} of {total} hosts ({fold(self.faulty_nodes)})"
        return f"not healthy: {faults}{where if self.faulty_nodes else ''}"

    @property
    def remedies(self) -> tuple[str, ...]:
        """One line per fault: who, what, the command to type; equal remedies once."""
        given = [(row.node or row.subject, row) for row in self.faults if row.finding.remedy]
        folded = fold_rows(given, key=lambda row: (row.check, row.finding.remedy))
        return tuple(f"{names}: {row.check}: {row.finding.remedy}" for names, row in folded)

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "healthy": self.healthy,
            "verdict": self.verdict,
            "hosts": list(self.nodes),
            "faulty_hosts": list(self.faulty_nodes),
            "faults": len(self.faults),
            "duration_s": round(self.duration_s, 2),
            "checks": [row.as_dict() for row in self.rows],
            **self.details,
        }


def report_rows(report: Report) -> list[tuple[str, str, str, str]]:
    """(check, hosts, state, text): hosts of equal findings are folded, and what was not checked comes last."""
    rows = []
    skipped: dict[str, list[Row]] = {}
    for check in dict.fromkeys(row.check for row in report.rows):
        mine = [row for row in report.rows if row.check == check]
        for subjects, finding in _folded([row for row in mine if row.state != NOT_CHECKED]):
            rows.append((check, subjects, finding.state, finding.text))
        for row in mine:
            if row.state == NOT_CHECKED:
                skipped.setdefault(row.finding.text, []).append(row)
    for text, without in skipped.items():
        checks = list(dict.fromkeys(row.check for row in without))
        hosts = fold(dict.fromkeys(row.node or row.subject for row in without))
        if len(checks) == 1:
            rows.append((checks[0], hosts, NOT_CHECKED, text))
        else:
            rows.append((f"{len(checks)} checks", hosts, NOT_CHECKED, f"{text}: {', '.join(checks)}"))
    return rows


def _folded(rows: Sequence[Row]) -> list[tuple[str, Finding]]:
    """Subjects of equal findings joined; pairs are folded by their second host."""
    groups: dict[tuple[str, Finding], list[str]] = {}
    for row in rows:
        first, arrow, second = row.subject.partition(" -> ")
        key = (first + arrow if arrow else "", row.finding)
        groups.setdefault(key, []).append(second if arrow else first)
    return [(lead + fold(names), finding) for (lead, finding), names in groups.items()]
