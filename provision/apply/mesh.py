"""Node-to-node SSH: a key of the cluster's own, known host keys, and the helpers that mpirun calls."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from provision.apply.run import Run
from provision.cluster import Cluster, Node
from provision.errors import PreconditionError
from provision.facts import NodeFacts
from provision.fanout import fan_out


def step_ssh_mesh(run: Run, state_dir: Path) -> None:
    """A cluster key of its own, known host keys, and the helpers that mpirun calls, on every node."""
    nodes = run.active(run.plan.node_names)
    if not nodes:
        return
    single = len(run.plan.node_names) == 1
    private, public = cluster_key(state_dir)
    with tempfile.TemporaryDirectory() as folder:
        stage = Path(folder)
        (stage / "peers.tsv").write_text(peers_text(run.cluster, run.facts), encoding="utf-8")
        where: dict[str, str] = {}

        def push(node: Node) -> None:
            transport = run.connections.to(node)
            base = f"{run.places()[node.name].staging}/mesh"
            transport.run(["mkdir", "-p", "-m", "700", "--", base], timeout_s=30)
            transport.put(private, f"{base}/id_ed25519", mode=0o600, timeout_s=60)
            transport.put(public, f"{base}/id_ed25519.pub", timeout_s=60)
            transport.put(stage / "peers.tsv", f"{base}/peers.tsv", timeout_s=60)
            where[node.name] = base

        pushed = fan_out(nodes, push, deadline_s=180, what="copying the cluster key")
        run.errors.update({name: o.error for name, o in pushed.items() if o.error is not None})
    nodes = [node for node in nodes if node.name not in run.errors]

    def args(node: Node) -> list[str]:
        base = where[node.name]
        words = [f"--private-key={base}/id_ed25519", f"--public-key={base}/id_ed25519.pub"]
        words += [f"--peers={base}/peers.tsv", f"--cluster-id={run.cluster.id}"]
        return [*words, "--no-authorize"] if single else words

    run.each(nodes, "ssh_mesh", args)
    fan_out(
        nodes,
        lambda node: run.connections.to(node).run(
            ["rm", "-rf", "--", where[node.name]], timeout_s=30, check=False
        ),
        deadline_s=60,
        what="tidying up",
    )


def cluster_id(state_dir: Path) -> str:
    """Eight characters that mark what belongs to this cluster on the nodes; they come from its key."""
    _, public = cluster_key(state_dir)
    return hashlib.sha256(public.read_bytes().split()[1]).hexdigest()[:8]


def cluster_key(state_dir: Path) -> tuple[Path, Path]:
    """The key pair for node-to-node SSH, made once per cluster; the user's own keys never leave this machine."""
    private = state_dir / "id_ed25519"
    public = state_dir / "id_ed25519.pub"
    if not (private.is_file() and public.is_file()):
        state_dir.mkdir(parents=True, exist_ok=True)
        if shutil.which("ssh-keygen") is None:
            raise PreconditionError(
                "ssh-keygen is missing on this machine", remedy="type as root: apt-get install openssh-client"
            )
        with tempfile.TemporaryDirectory(dir=state_dir) as stage:
            argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "ringmaster"]
            subprocess.run([*argv, "-f", f"{stage}/key"], check=True, timeout=60, stdin=subprocess.DEVNULL)
            os.replace(f"{stage}/key.pub", public)
            os.replace(f"{stage}/key", private)
    return private, public


def peers_text(cluster: Cluster, facts: Mapping[str, NodeFacts]) -> str:
    """The peers table of setup_ssh_mesh.sh: name, address, port, user, prefix, host keys joined by `|`."""
    rows = []
    for node in cluster.nodes:
        own = facts[node.name]
        keys = "|".join(own.host_keys or ())
        rows.append(f"{node.name}\t{node.address}\t{node.ssh_port}\t{own.user}\t{own.prefix}\t{keys}\n")
    return "".join(rows)
