"""Brings a training project to every node, with the `trainer` package and the node-side helpers."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from provision import paths
from provision.cluster import Node
from provision.errors import LaunchError, UsageError
from provision.transport import Transport, tree

LIMIT_BYTES = 1_000_000_000
SHIP_TIMEOUT_S = 900.0
_REMEDY = "put the script into a directory of its own, or name one with --project DIR"


@dataclass(frozen=True)
class Project:
    """What is shipped. `script` is relative to `root`; `sums` is text for `sha256sum -c`."""

    id: str
    root: Path
    script: str
    sums: str
    size_bytes: int

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.sums.encode()).hexdigest()


def read_project(script: Path, project: Path | None = None) -> Project:
    """The project of `script`: its directory, or `project`. UsageError; LaunchError if too large."""
    script = Path(os.path.abspath(script))
    if not script.is_file():
        raise UsageError(f"--script {str(script)!r}: no such file", remedy="give the path of a Python script")
    root = script.parent if project is None else Path(os.path.abspath(project))
    if not root.is_dir():
        raise UsageError(f"--project {str(root)!r}: no such directory")
    if root not in script.parents:
        raise UsageError(
            f"--script {str(script)!r} lies outside the project directory {str(root)!r}",
            remedy="name a directory that holds the script with --project",
        )
    if root in _too_wide():
        raise LaunchError(f"{root} would be sent to every node as the script's project", remedy=_REMEDY)
    size_bytes = _size(root)
    entries = tree.scan(root, tree.DEFAULT_EXCLUDE)
    sums = "".join(f"{entry.value}  {path}\n" for path, entry in entries.items() if entry.kind in "fx")
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", root.name).strip("-") or "project"
    mark = hashlib.sha256(os.fsencode(root)).hexdigest()[:8]
    relative_script = script.relative_to(root).as_posix()
    return Project(f"{name}-{mark}", root, relative_script, sums, size_bytes)


def ship(transport: Transport, prefix: str, project: Project) -> None:
    """Brings one node up to date: sends changed files, removes those an earlier version had."""
    send_helpers(transport, prefix)
    where = f"{prefix}/projects/{project.id}"
    transport.put_tree(project.root, where, exclude=tree.DEFAULT_EXCLUDE, timeout_s=SHIP_TIMEOUT_S)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="ringmaster-sums-") as sums:
        sums.write(project.sums)
        sums.flush()
        transport.put(Path(sums.name), f"{where}.sha256.new", timeout_s=SHIP_TIMEOUT_S)
    commit = ["bash", f"{prefix}/libexec/project_commit.sh", project.id]
    transport.run(commit, timeout_s=SHIP_TIMEOUT_S)


def send_helpers(transport: Transport, prefix: str) -> None:
    """Brings `libexec/` (scripts/node) and the `trainer` package on one node up to date."""
    transport.put_tree(
        paths.scripts_dir() / "node",
        f"{prefix}/libexec",
        exclude=tree.DEFAULT_EXCLUDE,
        timeout_s=SHIP_TIMEOUT_S,
    )
    transport.put_tree(
        paths.trainer_dir(),
        f"{prefix}/lib/trainer",
        exclude=tree.DEFAULT_EXCLUDE,
        delete=True,
        timeout_s=SHIP_TIMEOUT_S,
    )


def prefix_of(node: Node) -> str:
    """The node's absolute prefix; LaunchError when the node was never provisioned."""
    if node.prefix_path is None:
        raise LaunchError(f"{node.name} was never provisioned", remedy="run `fab provision` first")
    return node.prefix_path


def _too_wide() -> frozenset[Path]:
    """Directories that hold far more than one project."""
    home = Path(os.path.expanduser("~")).absolute()
    return frozenset({home, *home.parents, Path("/tmp"), Path("/var/tmp"), Path("/home"), Path("/root")})


def _size(root: Path) -> int:
    """Bytes that would be shipped; LaunchError as soon as they are too many."""
    total = 0
    for folder, folders, files in os.walk(root):
        inside = os.path.relpath(folder, root)
        base = "" if inside == "." else inside + "/"
        folders[:] = [name for name in folders if not tree.is_excluded(base + name, tree.DEFAULT_EXCLUDE)]
        for name in files:
            if not tree.is_excluded(base + name, tree.DEFAULT_EXCLUDE):
                total += os.lstat(os.path.join(folder, name)).st_size
        if total > LIMIT_BYTES:
            raise LaunchError(
                f"the project directory {root} holds more than {LIMIT_BYTES / 1e9:g} GB, seen up to {folder}",
                remedy=_REMEDY + "; data belongs on the nodes, named by an argument of the script",
            )
    return total
