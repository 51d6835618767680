"""One provisioning under way: which nodes are still in it, and what every step has in common."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from provision import artifacts, paths, staging
from provision.artifacts import Lock
from provision.cluster import Cluster, Node
from provision.errors import RingmasterError, StepFailed
from provision.facts import NodeFacts
from provision.fanout import fan_out
from provision.plan import CONTROLLER, Group, Options, Plan
from provision.staging import Place
from provision.steps import STEP_TIMEOUT_S, UNCHANGED, Installer
from provision.transport import Connections

BUILT = "built"


@dataclass(frozen=True)
class StepRow:
    """What one step did on one node: `word` is changed or unchanged."""

    node: str
    step: str
    word: str
    duration_s: float


@dataclass(frozen=True)
class Given:
    """Local files that stand in for downloads (air-gapped sites)."""

    wheelhouse: Path | None = None
    python_archive: Path | None = None
    mirror: str | None = None


@dataclass
class Run:
    """One provisioning under way: what is known of each node and which nodes are still in it."""

    cluster: Cluster
    options: Options
    given: Given
    connections: Connections
    installer: Installer
    facts: dict[str, NodeFacts]
    plan: Plan
    on_row: Callable[[StepRow], None]
    controller: NodeFacts | None = None
    lock: Lock = field(default_factory=artifacts.read_lock)
    errors: dict[str, RingmasterError] = field(default_factory=dict)
    rows: list[StepRow] = field(default_factory=list)

    def places(self) -> dict[str, Place]:
        """Where each node's files lie."""
        return {
            name: Place(prefix, self.cluster.id or "") for name, prefix in self.installer.prefixes.items()
        }

    def active(self, names: Iterable[str]) -> list[Node]:
        """Those of `names` that have not failed and that write their own installation."""
        writers = self.plan.writers()
        wanted = set(names)
        return [
            node
            for node in self.cluster.nodes
            if node.name in wanted and node.name not in self.errors and writers.get(node.name) == node.name
        ]

    def each(
        self, nodes: Sequence[Node], step: str, args: Callable[[Node], Sequence[str]], *, check: bool = False
    ) -> dict[str, str]:
        """Run a step on the nodes in parallel; node name -> word. Failures go to `errors`."""
        started = time.monotonic()
        outcomes = fan_out(
            nodes,
            lambda node: self.installer.run(node, step, args(node), check=check),
            deadline_s=STEP_TIMEOUT_S + 60,
            what=f"step {step}",
        )
        words: dict[str, str] = {}
        for name, outcome in outcomes.items():
            if outcome.error is not None:
                self.errors[name] = outcome.error
            elif outcome.value is not None:
                words[name] = outcome.value
                if not check:
                    self.record(name, step, outcome.value, time.monotonic() - started)
        return words

    def record(self, name: str, step: str, word: str, duration_s: float) -> None:
        row = StepRow(name, step, word, duration_s)
        self.rows.append(row)
        self.on_row(row)

    def place(self, folder: Path, nodes: Sequence[Node], name: str) -> dict[str, str]:
        """Bring a folder to the nodes; node name -> its path there. Failures go to `errors`."""
        placed = {}
        for node_name, where in staging.distribute(
            self.connections, folder, nodes, self.places(), name
        ).items():
            if isinstance(where, RingmasterError):
                self.errors[node_name] = where
            else:
                placed[node_name] = where
        return placed

    def outdated(self, group: Group, step: str, args: Callable[[Node], Sequence[str]]) -> list[Node]:
        """The nodes of the group where the step has something to do; the others are recorded as unchanged."""
        nodes = self.active(group.nodes)
        started = time.monotonic()
        words = self.each(nodes, step, args, check=True)
        for name, word in words.items():
            if word == UNCHANGED:
                self.record(name, step, UNCHANGED, time.monotonic() - started)
        return [node for node in nodes if words.get(node.name) not in (UNCHANGED, None)]

    def blame(self, nodes: Iterable[Node], step: str, error: RingmasterError) -> None:
        """What these nodes were waiting for failed; each of them carries the reason."""
        for node in nodes:
            self.errors.setdefault(
                node.name, StepFailed(node.name, step, f"was not started: {error}", status=error.exit_status)
            )


def place_files(run: Run, files: Sequence[Path], nodes: Sequence[Node], name: str) -> dict[str, str]:
    """Bring single files to the nodes, as a folder of that name."""
    bundle = paths.cache_dir() / "outbox" / f"{name}-{os.getpid()}"
    shutil.rmtree(bundle, ignore_errors=True)
    bundle.mkdir(parents=True)
    for file in files:
        try:
            os.link(file, bundle / file.name)
        except OSError:
            shutil.copyfile(file, bundle / file.name)
    try:
        placed = run.place(bundle, [node for node in nodes if not node.local], name)
    finally:
        shutil.rmtree(bundle, ignore_errors=True)
    # On this machine the installer reads the cache itself; every file of one call lies in one folder there.
    placed.update({node.name: str(files[0].parent) for node in nodes if node.local})
    return placed


@contextlib.contextmanager
def controller_builder(run: Run, platform: str) -> Iterator[Node]:
    """This machine as a builder for nodes of its own platform that have no compiler; its prefix is thrown away."""
    me = Node(name=CONTROLLER, host="localhost", local=True)
    folder = paths.cache_dir() / "builder" / platform
    with artifacts.locked(folder.parent):
        run.installer.prefixes[CONTROLLER] = str(folder)
        try:
            yield me
        finally:
            shutil.rmtree(folder, ignore_errors=True)
