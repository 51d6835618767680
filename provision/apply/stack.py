"""The stack: an interpreter where there is none, and the environment with Horovod and mpi4py built once."""

from __future__ import annotations

import os
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from provision import artifacts, paths, staging
from provision.apply.openmpi import mpi_artifact
from provision.apply.run import BUILT, Run, controller_builder, place_files
from provision.cluster import Node
from provision.errors import ArtifactError, RingmasterError
from provision.plan import CONTROLLER, Group
from provision.steps import CHANGED, UNCHANGED


def series(run: Run) -> str:
    """The stack's Python as major.minor."""
    return run.lock.stack(run.options.stack).python


def step_python(run: Run, group: Group) -> None:
    """An interpreter of the stack's version where the node has none."""
    version = series(run)
    basic = [f"--version={version}"]
    todo = run.outdated(group, "python", lambda node: basic)
    if not todo:
        return
    try:
        archive, digest = python_archive(run, group.platform)
    except RingmasterError as error:
        run.blame(todo, "python", error)
        return
    placed = place_files(run, [archive], todo, "python")
    run.each(
        [node for node in todo if node.name in placed],
        "python",
        lambda node: [*basic, f"--archive={placed[node.name]}/{archive.name}", f"--sha256={digest}"],
    )


def python_archive(run: Run, platform: str) -> tuple[Path, str]:
    """(archive, sha256) of an interpreter for that platform: this machine's own when it is of the same platform."""
    version = series(run)
    own = None
    if run.controller is not None and run.controller.platform == platform:
        # One of the operating system's own has no folder that could be packed.
        usable = [
            p for p in run.controller.usable_pythons(version) if Path(p.path).parent != Path("/usr/bin")
        ]
        own = Path(usable[0].path) if usable else None
    return artifacts.python_archive(
        version, run.lock, own=own, mirror=run.given.mirror, file=run.given.python_archive
    )


def wants_nccl(run: Run, nodes: Sequence[Node]) -> bool:
    """Whether Horovod is to be built with NCCL: asked for, or by itself where a node has a GPU and a CUDA toolkit."""
    if not run.lock.stack(run.options.stack).gpu:
        return False
    if run.options.gpu != "auto":
        return run.options.gpu == "nccl"
    return any(run.facts[node.name].gpus and run.facts[node.name].cuda for node in nodes)


def step_runtime(run: Run, group: Group) -> None:
    """The stack's environment: wheels from the controller, Horovod and mpi4py built on one node for all."""
    stack = run.options.stack
    basic = [f"--stack={stack}", f"--gpu={run.options.gpu}"]
    todo = run.outdated(group, "runtime", lambda node: basic)
    if not todo:
        return
    try:
        house = artifacts.wheelhouse(stack, run.lock, nccl=wants_nccl(run, todo), given=run.given.wheelhouse)
        built = paths.cache_dir() / BUILT / group.platform / "wheels"
        built.mkdir(parents=True, exist_ok=True)
        first = next((node for node in todo if node.name == group.builder), todo[0])
        if group.builder == CONTROLLER:
            build_wheels_here(run, group, house, built)
        placed_house = run.place(house, todo, f"wheelhouse-{stack}")
        install_runtime(run, [first], placed_house, built, basic)
        if first.name in run.errors:
            raise run.errors[first.name]
        install_runtime(run, [node for node in todo if node.name != first.name], placed_house, built, basic)
    except RingmasterError as error:
        run.blame(todo, "runtime", error)


def install_runtime(
    run: Run, nodes: Sequence[Node], house: Mapping[str, str], built: Path, basic: Sequence[str]
) -> None:
    """Install the stack on nodes that have the wheelhouse, and bring back what was built there."""
    nodes = [node for node in nodes if node.name in house]
    if not nodes:
        return
    before = {path.name for path in built.iterdir()}
    placed = run.place(built, nodes, BUILT)
    ready = [node for node in nodes if node.name in placed]
    run.each(
        ready,
        "runtime",
        lambda node: [*basic, f"--wheelhouse={house[node.name]}", f"--built-wheels={placed[node.name]}"],
    )
    for node in ready:
        if not node.local and node.name not in run.errors:
            bring_back(run, node, placed[node.name], built, before)
            before = {path.name for path in built.iterdir()}


def bring_back(run: Run, node: Node, remote: str, built: Path, known: set[str]) -> None:
    """Fetch the built wheels that the cache does not have yet; each key is a folder of its own."""
    transport = run.connections.to(node)
    listing = transport.run(["ls", "-1", "--", remote], timeout_s=60, check=False).stdout.split()
    for key in listing:
        if key in known or key.startswith(".") or key == staging.SUMS:
            continue
        packed = f"{run.places()[node.name].staging}/built-wheels.tar"
        transport.run(["tar", "-C", remote, "-cf", packed, "--", key], timeout_s=staging.TRANSFER_TIMEOUT_S)
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:
            local = Path(folder) / "built.tar"
            transport.get(packed, local, timeout_s=staging.TRANSFER_TIMEOUT_S)
            keep_built(local, key, built)
        transport.run(["rm", "-f", "--", packed], timeout_s=60, check=False)


def keep_built(packed: Path, key: str, built: Path) -> None:
    """Put the folder `key` from a tar archive into the cache of built wheels, unless it is there."""
    with artifacts.locked(built.parent), tempfile.TemporaryDirectory(dir=built.parent) as stage:
        with tarfile.open(packed) as archive:
            archive.extractall(stage, filter="data")
        if not (built / key).exists():
            os.replace(Path(stage) / key, built / key)


def build_wheels_here(run: Run, group: Group, house: Path, built: Path) -> None:
    """Fill the cache of built wheels on this machine, for nodes of its platform that cannot compile."""
    version = series(run)
    with controller_builder(run, group.platform) as me:
        if run.installer.run(me, "python", [f"--version={version}"], check=True) != UNCHANGED:
            archive, digest = python_archive(run, group.platform)
            run.installer.run(
                me, "python", [f"--version={version}", f"--archive={archive}", f"--sha256={digest}"]
            )
        mpi = run.options.mpi
        file, digest = mpi_artifact(run)
        source = paths.cache_dir() / BUILT / group.platform / f"openmpi-{mpi.version}-{digest[:16]}.tar.gz"
        if mpi.kind == "source" and source.is_file():
            words = ["--from=archive", f"--file={source}", f"--sha256={artifacts.sha256_of(source)}"]
        else:
            words = [f"--from={mpi.kind}", f"--file={file}", f"--sha256={digest}"]
        run.installer.run(me, "openmpi", [f"--version={mpi.version}", *words])
        word = run.installer.run(
            me,
            "runtime",
            [
                f"--stack={run.options.stack}",
                f"--gpu={run.options.gpu}",
                f"--wheelhouse={house}",
                f"--built-wheels={built}",
            ],
        )
        if word != CHANGED:
            raise ArtifactError(f"the build on this machine printed {word!r}, expected {CHANGED!r}")
