"""Getting files to nodes: scripts by changed file, large folders in a tree, so that the controller sends each once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from provision import paths
from provision.artifacts import sha256_of
from provision.cluster import Node
from provision.errors import RingmasterError
from provision.fanout import fan_out
from provision.transport import Connections

SCRIPT_TIMEOUT_S = 60.0
TRANSFER_TIMEOUT_S = 1800.0
SUMS = "SHA256SUMS"
# Only the installers go to the nodes; quickstart, test and the controller's own locks stay.
NOT_FOR_NODES = (
    "quickstart",
    "test",
    "relock",
    "requirements-controller.*",
    "requirements-dev.*",
    "lib/controller.sh",
    "__pycache__",
)


def scripts_path(node: Node, prefix: str) -> str:
    """Where the installers lie on a node: the checkout itself when the node is this machine."""
    return str(paths.scripts_dir()) if node.local else f"{prefix}/.ringmaster/scripts"


def push_scripts(connections: Connections, node: Node, prefix: str) -> None:
    """Bring the installers on a node up to date (changed files only)."""
    if node.local:
        return
    connections.to(node).put_tree(
        paths.scripts_dir(), scripts_path(node, prefix), exclude=NOT_FOR_NODES, timeout_s=SCRIPT_TIMEOUT_S
    )


def write_sums(folder: Path) -> str:
    """Write the folder's SHA256SUMS (as `sha256sum -c` reads it) and return that file's own digest."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in (SUMS, ".lock"))
    text = "".join(f"{sha256_of(path)}  {path.relative_to(folder)}\n" for path in files)
    sums = folder / SUMS
    if not sums.is_file() or sums.read_text() != text:
        sums.write_text(text)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Place:
    """A node's prefix, and where files for this cluster wait there: two controllers do not meet in one folder."""

    prefix: str
    cluster_id: str

    @property
    def staging(self) -> str:
        return f"{self.prefix}/.ringmaster/staging/{self.cluster_id}"


def distribute(
    connections: Connections, source: Path, nodes: Sequence[Node], places: Mapping[str, Place], name: str
) -> dict[str, str | RingmasterError]:
    """Bring the folder `source` to every node as `<its staging path>/<name>`; node name -> path or error.

    The controller sends to one node. Every node that has the folder then sends it to one that has not, over
    the cluster's own SSH, so the number of nodes that have it doubles each round; where a node cannot be
    reached from its sender, the controller sends to it after all.
    """
    where: dict[str, str | RingmasterError] = {node.name: str(source) for node in nodes if node.local}
    remote = [node for node in nodes if not node.local]
    if not remote:
        return where
    digest = write_sums(source)
    target = {node.name: f"{places[node.name].staging}/{name}" for node in remote}

    def complete(node: Node) -> bool:
        check = (
            f'cd "$1" && [ "$(sha256sum <{SUMS} | cut -d " " -f 1)" = "$2" ] && sha256sum --status -c {SUMS}'
        )
        result = connections.to(node).run(
            ["sh", "-c", check, "check", target[node.name], digest], timeout_s=TRANSFER_TIMEOUT_S, check=False
        )
        return result.status == 0

    def from_controller(node: Node) -> None:
        connections.to(node).put_tree(source, target[node.name], timeout_s=TRANSFER_TIMEOUT_S)

    def from_node(sender: Node, receiver: Node) -> None:
        argv = [
            "bash",
            f"{places[sender.name].prefix}/libexec/push_tree.sh",
            target[sender.name],
            receiver.name,
        ]
        result = connections.to(sender).run(
            [*argv, target[receiver.name]], timeout_s=TRANSFER_TIMEOUT_S, check=False
        )
        if result.status != 0 or not complete(receiver):
            from_controller(receiver)

    have: list[Node] = []
    todo: list[Node] = []
    for node_name, outcome in fan_out(
        remote, complete, deadline_s=TRANSFER_TIMEOUT_S, what="looking for files"
    ).items():
        node = next(n for n in remote if n.name == node_name)
        if outcome.error is not None:
            where[node_name] = outcome.error
        elif outcome.value:
            have.append(node)
        else:
            todo.append(node)
    while todo:
        pairs: list[tuple[Node | None, Node]] = list(zip(have, todo)) if have else [(None, todo[0])]
        with ThreadPoolExecutor(max_workers=min(32, len(pairs))) as pool:
            futures = {
                receiver.name: pool.submit(from_controller, receiver)
                if sender is None
                else pool.submit(from_node, sender, receiver)
                for sender, receiver in pairs
            }
        for key, future in futures.items():
            node = next(n for n in todo if n.name == key)
            todo.remove(node)
            error = future.exception()
            if error is None:
                have.append(node)
            elif isinstance(error, RingmasterError):
                where[key] = error
            else:
                raise error
    where.update({node.name: target[node.name] for node in have})
    return where


def drop_staging(connections: Connections, node: Node, place: Place) -> None:
    """Remove what `distribute` brought; half a gigabyte of wheels is of no use once it is installed."""
    if not node.local:
        connections.to(node).run(["rm", "-rf", "--", place.staging], timeout_s=SCRIPT_TIMEOUT_S, check=False)
