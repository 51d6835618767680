"""What the judges look at: everything that was asked and measured, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from provision.cluster import Cluster, Node
from provision.errors import RingmasterError
from provision.facts import NodeFacts
from provision.launch.preflight import Answer


@dataclass(frozen=True)
class Look:
    """One short command on a node: what its login files printed, and its clock against the controller's."""

    noise: str
    clock_offset_s: float  # node minus controller
    clock_error_s: float  # half of the round trip


@dataclass(frozen=True)
class MpiRun:
    """One mpirun of the healthcheck. `said` maps a rank to the JSON object it printed."""

    hosts: tuple[str, ...]  # node name by rank
    left_out: tuple[str, ...]  # nodes that an earlier fault kept out
    status: int
    said: Mapping[int, Mapping[str, Any]]
    errors: Mapping[int, str]  # rank -> the end of its standard error
    mpirun: str  # mpirun's own words
    deadline_s: float | None = None  # set when it did not end in time
    leftovers: int = 0


@dataclass(frozen=True)
class Evidence:
    cluster: Cluster
    facts: Mapping[str, NodeFacts]
    unreachable: Mapping[str, RingmasterError]
    looks: Mapping[str, Look] = field(default_factory=dict)
    launcher: Node | None = None  # the node that acts as head: the first one that can
    answers: Mapping[str, Answer] = field(default_factory=dict)
    hello: MpiRun | None = None
    allreduce: MpiRun | None = None
    lock: Mapping[str, str] = field(default_factory=dict)  # package -> version
    unasked: Mapping[str, str] = field(default_factory=dict)  # node -> why the launcher could not ask it
    failed: Mapping[str, str] = field(default_factory=dict)  # id of an MPI check -> why it was not run

    @property
    def expected_mpi(self) -> str | None:
        """The cluster's Open MPI version; for a cluster never provisioned, that of its first node."""
        if self.cluster.mpi and "version" in self.cluster.mpi:
            return self.cluster.mpi["version"]
        found = (facts.openmpi.version for facts in self.facts.values() if facts.openmpi is not None)
        return next((version for version in found if version), None)
