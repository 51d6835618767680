"""Is this cluster healthy? A table of checks, one verdict, one remedy per fault."""

from __future__ import annotations

import time
from collections.abc import Mapping

from provision import report
from provision.cluster import Cluster
from provision.errors import RingmasterError
from provision.facts import NodeFacts
from provision.healthcheck.checks import CHECKS, judge_all
from provision.healthcheck.measure import measure
from provision.healthcheck.model import Finding, Report, Row, report_rows
from provision.transport import Connections

__all__ = ["CHECKS", "Finding", "Report", "Row", "report_rows", "run", "show"]


def run(
    cluster: Cluster,
    connections: Connections,
    facts: Mapping[str, NodeFacts],
    errors: Mapping[str, RingmasterError],
) -> Report:
    """Checks every node, then all together; `errors` holds the nodes that gave no facts."""
    started = time.monotonic()
    rows = judge_all(measure(cluster, connections, facts, errors))
    return Report(cluster.names, rows, time.monotonic() - started)


def show(found: Report, *, as_json: bool) -> None:
    """Prints the rows with equal hosts folded, the verdict and the remedies; or one JSON object."""
    if as_json:
        report.print_json(found.as_dict())
        return
    report.table("", ["check", "hosts", "state", "what"], report_rows(found))
    report.verdict(found.healthy, found.verdict, remedies=found.remedies)
