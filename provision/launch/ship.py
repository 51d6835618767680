"""Brings a training project to every node, with the `trainer` package and the node-side helpers."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from provision import paths
from provision.cluster import Node, fold
from provision.errors import (
    Busy,
    CommandFailed,
    DeadlineExceeded,
    LaunchError,
    NodeError,
    NodeUnreachable,
    UsageError,
)
from provision.fanout import fan_out, values_or_raise
from provision.transport import Connections, Transport, tree

LIMIT_BYTES = 1_000_000_000
SHIP_TIMEOUT_S = 900.0
ATTEMPTS = 5
_SILENT_S = 2.0  # a wait longer than this is explained
_EXIT_OTHER_CONTENT = 65  # of project_commit.sh
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
    if script.is_dir():
        raise UsageError(
            f"--script {str(script)!r}: is a folder",
            remedy="give the path of a Python script, --project for its folder",
        )
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


def ship_to_all(
    connections: Connections, nodes: Sequence[Node], project: Project, say: Callable[[str], None]
) -> None:
    """Brings `nodes` up to date; NodesFailed with every error. Other shipments of the project are waited for."""
    prefixes = prefixes_of(nodes)
    with _alone(paths.cache_dir() / "locks" / f"{project.id}.lock", SHIP_TIMEOUT_S, say):
        outcomes = fan_out(
            nodes,
            lambda node: ship(connections.to(node), prefixes[node.name], project),
            deadline_s=SHIP_TIMEOUT_S,
            what="ship the project",
        )
    values_or_raise(outcomes, "ship the project")


def ship(transport: Transport, prefix: str, project: Project) -> None:
    """Brings one node up to date: sends changed files, removes those an earlier version had.

    Another controller may be sending the same: what failed on that account has changed less at every try, until
    it succeeds. NodeError when the node then still holds something else.
    """
    for left in reversed(range(ATTEMPTS)):
        try:
            _ship_once(transport, prefix, project)
            return
        except (NodeUnreachable, DeadlineExceeded):
            raise
        except NodeError as error:
            if left == 0:
                if isinstance(error, CommandFailed) and error.status == _EXIT_OTHER_CONTENT:
                    raise _other_content(transport.node.name, prefix, project) from error
                raise
        # Two that failed on each other must not meet again.
        time.sleep(0.1 + secrets.randbelow(1000) / 1000)


def _ship_once(transport: Transport, prefix: str, project: Project) -> None:
    send_helpers(transport, prefix)
    where = f"{prefix}/projects/{project.id}"
    transport.put_tree(project.root, where, exclude=tree.DEFAULT_EXCLUDE, timeout_s=SHIP_TIMEOUT_S)
    token = secrets.token_hex(8)  # of this shipment alone, on whichever controller
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="ringmaster-sums-") as sums:
        sums.write(project.sums)
        sums.flush()
        transport.put(Path(sums.name), f"{where}.sha256.{token}", timeout_s=SHIP_TIMEOUT_S)
    commit = ["bash", f"{prefix}/libexec/project_commit.sh", project.id, token]
    transport.run(commit, timeout_s=SHIP_TIMEOUT_S)


def _other_content(node: str, prefix: str, project: Project) -> NodeError:
    return NodeError(
        node,
        f"{prefix}/projects/{project.id} does not hold what was sent: {project.root} was changed, or another"
        " version of it sent, at the same time",
        remedy="run the same `fab train` again, or give one version a folder of another name",
    )


@contextmanager
def _alone(lock: Path, timeout_s: float, say: Callable[[str], None]) -> Iterator[None]:
    """Holds `lock` among the processes of this user; Busy after `timeout_s`. It goes with the process."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    said = False
    with lock.open("a") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited_s = time.monotonic() - begun
                if waited_s > _SILENT_S and not said:
                    say("note: another `fab train` is sending the same project; waiting for it")
                    said = True
                if waited_s > timeout_s:
                    raise Busy(
                        f"another `fab train` has been sending its project for more than {timeout_s:g} s",
                        remedy="wait for it, or end it",
                    ) from None
                time.sleep(0.1)
        yield


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


def prefixes_of(nodes: Sequence[Node]) -> dict[str, str]:
    """The nodes' absolute prefixes by name; LaunchError names all nodes that were never provisioned."""
    missing = [node.name for node in nodes if node.prefix_path is None]
    if missing:
        were = "was" if len(missing) == 1 else "were"
        raise LaunchError(f"{fold(missing)} {were} never provisioned", remedy="run `fab provision` first")
    return {node.name: node.prefix_path for node in nodes if node.prefix_path is not None}


def prefix_of(node: Node) -> str:
    """The node's absolute prefix; LaunchError when the node was never provisioned."""
    return prefixes_of([node])[node.name]


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
