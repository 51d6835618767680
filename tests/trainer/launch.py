"""Runs a worker script under mpirun and collects what every rank reported."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import List

ROOT = Path(__file__).resolve().parents[2]
WORKERS = Path(__file__).resolve().parent / "workers"
_TERM_GRACE_S = 10


@dataclass(frozen=True)
class Job:
    """A finished job: exit status, the JSON each rank reported, and all output with the rank in each line."""

    status: int
    reports: List[dict]
    output: str
    duration_s: float

    def lines_of(self, rank):
        """Return the lines of output that `rank` wrote, in the order of their ends."""
        # mpirun tags what it reads, which may be half a line, the other half after something of another stream's.
        written = {"out": "", "err": ""}
        lines = []
        pieces = re.split(r"\[1,(\d+)\]<std(out|err)>:", self.output)[1:]
        for wrote, stream, piece in zip(pieces[::3], pieces[1::3], pieces[2::3]):
            if int(wrote) != rank:
                continue
            *ended, written[stream] = (written[stream] + piece).split("\n")
            lines += ended
        return lines + [rest for rest in written.values() if rest]


def mpirun():
    """Return the mpirun to use as the first words of a command."""
    command = [os.environ.get("RINGMASTER_MPIRUN", "mpirun")]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    return command


def rank_environment(more):
    """Return the environment of a rank, with the variables `more`."""
    values = dict(os.environ, PYTHONPATH=str(ROOT))
    # A test that made a Trainer in this very process has set its share of the cores here.
    values.pop("OMP_NUM_THREADS", None)
    # Where it is set, a line is written in pieces, and mpirun puts its tag before each of them.
    values.pop("PYTHONUNBUFFERED", None)
    values.update(more)
    return values


def run(script, size, *arguments, report_dir=None, timeout_s=120, env=None, words=None):
    """Run a Python script on `size` ranks; its process group is ended when it takes longer than `timeout_s`.

    Args:
        words: what starts the script (default: this interpreter).

    Raises:
        AssertionError: it did not end in time.
    """
    command = [*mpirun(), "--oversubscribe", "--bind-to", "none", "--tag-output", "-np", str(size)]
    command += [*(words or [sys.executable]), str(script), *map(str, arguments)]
    environment = rank_environment(env or {})
    if report_dir is not None:
        environment["TRAINER_TEST_REPORTS"] = str(report_dir)
        for old in Path(report_dir).glob("rank*.json"):
            old.unlink()
    started_s = time.monotonic()
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=str(ROOT),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        # mpirun ends its ranks when it is asked to end.
        os.killpg(process.pid, signal.SIGTERM)
        try:
            output, _ = process.communicate(timeout=_TERM_GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        raise AssertionError(f"{script} on {size} ranks did not end within {timeout_s} s:\n{output}")
    reports = []
    if report_dir is not None:
        paths = [Path(report_dir) / f"rank{rank}.json" for rank in range(size)]
        reports = [json.loads(path.read_text()) for path in paths if path.exists()]
    return Job(process.returncode, reports, output, time.monotonic() - started_s)
