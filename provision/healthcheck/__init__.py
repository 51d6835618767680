"""Is this cluster healthy? A table of checks, one verdict, one remedy per fault."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Mapping

from provision import report
from provision.cluster import Cluster, Node
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
    if cluster.id is None:
        rows = tuple(with_hosts(row, cluster) for row in rows)
    return Report(cluster.names, rows, time.monotonic() - started)


def with_hosts(row: Row, cluster: Cluster) -> Row:
    """The row with a remedy that can be typed as it stands where no provision has saved the hosts yet."""
    remedy = row.finding.remedy
    if remedy is None or not remedy.startswith("fab provision") or "--hosts" in remedy:
        return row
    words = (
        ["--local"]
        if cluster.head.local
        else ["--hosts", ",".join(node.name if cluster.ssh_config else spelt(node) for node in cluster.nodes)]
    )
    if cluster.ssh_config is not None:
        words += ["--ssh-config", cluster.ssh_config]
    full = shlex.join([*remedy.split(), *words])
    return dataclasses.replace(row, finding=dataclasses.replace(row.finding, remedy=full))


def spelt(node: Node) -> str:
    """A node as host text: its name where the SSH configuration knows it, else with user and port."""
    if node.user is None and node.port is None:
        return node.name
    return (f"{node.user}@" if node.user else "") + node.host + (f":{node.port}" if node.port else "")


def show(found: Report, *, as_json: bool) -> None:
    """Prints the rows with equal hosts folded, the verdict and the remedies; or one JSON object."""
    if as_json:
        report.print_json(found.as_dict())
        return
    report.table("", ["check", "hosts", "state", "what"], report_rows(found))
    report.verdict(found.healthy, found.verdict, remedies=found.remedies)
