"""One job from its script to its exit status."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provision.cluster import Cluster, fold
from provision.errors import LaunchError, NodeError, RingmasterError
from provision.fanout import Outcome
from provision.launch import preflight, slots
from provision.launch.command import MpirunOptions, job_environment, mpirun_argv, parse_env, rank_argv
from provision.launch.output import JobOutput, Screen, TerminalScreen
from provision.launch.runs import Run, new_run, utc_now
from provision.launch.ship import Project, read_project, ship_to_all
from provision.launch.start import job_marks, mpirun_options, nodes_in, put_hostfile, sweep, with_env
from provision.transport import Connections

INTERRUPTED = 130
_SIGNALLED = re.compile(r"process rank (\d+) .*exited on signal (\d+)")


@dataclass(frozen=True)
class JobResult:
    """How a job ended. `status` is the first failing rank's, 130 after Ctrl-C, 0 when all ranks succeeded."""

    job: str
    folder: Path
    status: int
    failed_rank: int | None = None
    failed_host: str | None = None
    leftovers: tuple[str, ...] = ()


def run_job(cluster: Cluster, connections: Connections, script: str | Path, **settings: Any) -> int:
    """The exit status of `start_job` with the same arguments."""
    return start_job(cluster, connections, script, **settings).status


def start_job(
    cluster: Cluster,
    connections: Connections,
    script: str | Path,
    *,
    np: int = 0,
    args: Sequence[str] = (),
    env: Sequence[str] = (),
    project: str | Path | None = None,
    state_dir: Path,
    timeout_s: float | None = None,
    screen: Screen | None = None,
) -> JobResult:
    """Ships the script's project, starts it on `np` ranks (0: one per slot) and waits for its end.

    `env`: `NAME=VALUE`, or `NAME` for the controller's own value. UsageError and LaunchError come before
    anything runs. NodeError when the head is lost while the job runs.
    """
    screen = screen or TerminalScreen()
    job_env = job_environment(os.environ, parse_env(env, os.environ))
    placed = slots.seats(cluster, np, {})
    shipped = read_project(Path(script), None if project is None else Path(project))
    nodes = nodes_in(cluster, placed)
    ship_to_all(connections, nodes, shipped, lambda text: screen.line(None, "err", text))
    head = connections.to(cluster.head)
    answers = preflight.ask(cluster, head, nodes, shipped.id)
    found = preflight.problems(cluster, answers, project_digest=shipped.digest)
    preflight.refuse(cluster, found, len(nodes))
    placed = slots.seats(cluster, np, {name: answer.gpus for name, answer in answers.items()})

    run = new_run(state_dir)
    total = sum(seat.ranks for seat in placed)
    job_env.update(job_marks(run.job, total, cluster.stack))
    if sys.stderr.isatty():
        job_env["RINGMASTER_TTY"] = "1"
    options = mpirun_options(cluster, placed, answers, run.job, job_env)
    if options.as_root:
        screen.line(None, "err", f"note: mpirun runs as root on {cluster.head.name} (--allow-run-as-root)")
    argv = mpirun_argv(options, rank_argv(shipped.id, shipped.script, args))
    job = _Job(cluster, connections, run, placed, shipped, screen)
    return job.carry_out(options, argv, job_env, timeout_s)


@dataclass
class _Job:
    cluster: Cluster
    connections: Connections
    run: Run
    placed: tuple[slots.Seat, ...]
    project: Project
    screen: Screen

    def carry_out(
        self, options: MpirunOptions, argv: list[str], env: Mapping[str, str], timeout_s: float | None
    ) -> JobResult:
        hosts = slots.hosts_of_ranks(self.placed)
        meta: dict[str, object] = {
            "script": self.project.script,
            "project": str(self.project.root),
            "project_id": self.project.id,
            "project_digest": self.project.digest,
            "argv": argv,
            "env": sorted(env),
            "hosts": hosts,
            "np": len(hosts),
            "controller_pid": os.getpid(),
            "started": utc_now(),
            "ended": None,
            "state": "running",
            "status": None,
        }
        self.run.write_meta(meta)
        output = JobOutput(self.run, self.screen, len(hosts))
        head = self.connections.to(self.cluster.head)
        state, status = "lost", 1
        leftovers: tuple[str, ...] = ()
        try:
            put_hostfile(head, self.cluster, self.placed, options.hostfile)
            result = head.run(
                with_env(options.prefix, argv),
                env=env,
                timeout_s=math.inf if timeout_s is None else timeout_s,
                check=False,
                on_line=output.on_line,
            )
            output.close()
            status = self._status(output, result.status, hosts)
            state = "lost" if output.lost_hosts else "done" if status == 0 else "failed"
        except KeyboardInterrupt:
            output.close()
            state, status = "interrupted", INTERRUPTED
        except RingmasterError:
            output.close()
            raise
        finally:
            leftovers = self._sweep(options.hostfile, interrupted=state == "interrupted")
            meta.update(ended=utc_now(), state=state, status=status, leftovers=leftovers)
            self.run.write_meta(meta)
        failed = self._failed_rank(output) if state == "failed" else None
        host = None if failed is None else hosts[failed]
        if state == "lost" and output.lost_hosts:
            host = output.lost_hosts[0]
        return JobResult(self.run.job, self.run.folder, status, failed, host, leftovers)

    def _failed_rank(self, output: JobOutput) -> int | None:
        if output.first_failure is not None:
            return output.first_failure.rank
        match = next(filter(None, map(_SIGNALLED.search, output.mpirun_lines)), None)
        return int(match[1]) if match and int(match[1]) < len(slots.hosts_of_ranks(self.placed)) else None

    def _status(self, output: JobOutput, mpirun_status: int, hosts: Sequence[str]) -> int:
        """The job's status; says which rank failed first, where, and with which words."""
        self._report_lost(output, hosts)
        if output.lost_hosts:
            # The ranks that mpirun then ends are no failures of their own.
            self._say(lost_text(output.lost_hosts, hosts, self.cluster.head.name))
            return NodeError.exit_status
        rank = self._failed_rank(output)
        failure = output.first_failure
        if rank is not None:
            how = "was killed" if failure is None else how_ended(failure.status)
            if failure is not None and failure.stopped_s is not None:
                how = f"was stopped for {failure.stopped_s} s and then ended, since the others wait for it"
            self._say(f"error: rank {rank} on {hosts[rank]} {how}; {output.log_words(rank)}")
            for line in output.error_lines(rank):
                self._say(f"  [{rank}] {line}")
        if failure is not None:
            return failure.status
        if mpirun_status == 0 and len(output.ends) != len(hosts):
            self._say(f"error: {len(output.ends)} of {len(hosts)} ranks told how they ended")
            return LaunchError.exit_status
        return mpirun_status

    def _report_lost(self, output: JobOutput, hosts: Sequence[str]) -> None:
        for rank, host in enumerate(hosts):
            lost = output.lost_bytes(rank)
            if lost:
                self._say(
                    f"warning: {slots.counted(lost, 'byte')} of the output of rank {rank} on {host}"
                    f" {'was' if lost == 1 else 'were'} lost on the way"
                )

    def _say(self, text: str) -> None:
        self.screen.line(None, "err", text)

    def _sweep(self, hostfile: str, *, interrupted: bool) -> tuple[str, ...]:
        """Ends what the job has left on any node; what was found, as `node: pid command`."""
        found: list[str] = []
        outcomes = sweep(self.cluster, self.connections, self.placed, self.run.job, hostfile)
        for name, outcome in outcomes.items():
            if outcome.error is not None:
                self._say(
                    f"warning: {name} could not be searched for what the job left running: {outcome.error}"
                )
                continue
            found += [f"{name}: {line}" for line in (outcome.value or "").splitlines()]
        if found:
            noun = "process" if len(found) == 1 else "processes"
            self._say(f"note: ended {len(found)} {noun} that the job had left running")
        if interrupted:
            self._say(interrupted_text(outcomes))
        return tuple(found)


def lost_text(lost: Sequence[str], hosts: Sequence[str], head: str) -> str:
    """What to say of hosts that mpirun lost; `hosts` is the node of each rank."""
    ranks = [str(rank) for rank, host in enumerate(hosts) if host in lost]
    held = f" (rank{'' if len(ranks) == 1 else 's'} {', '.join(ranks)})" if ranks else ""
    return (
        f"error: {fold(lost)}{held} was lost: it answers {head} no more, or mpirun's daemon there died; the job"
        " was ended; run `fab healthcheck`"
    )


def interrupted_text(outcomes: Mapping[str, Outcome[str]]) -> str:
    """What to say after Ctrl-C, by what the search for leftovers found on each node."""
    ended = [name for name, outcome in outcomes.items() if outcome.ok]
    unknown = [name for name, outcome in outcomes.items() if not outcome.ok]
    parts = [f"the job's ranks on {fold(ended)} were ended"] if ended else []
    parts += [f"not known of {fold(unknown)}"] if unknown else []
    return f"interrupted: {'; '.join(parts)}"


def how_ended(status: int) -> str:
    """A status in words: `exited 3`, `was killed by signal 9`."""
    return f"was killed by signal {status - 128}" if status > 128 else f"exited {status}"
