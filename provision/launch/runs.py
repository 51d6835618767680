"""One folder per job under `.ringmaster/runs/`: meta.json and what every rank wrote."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from provision.cluster import write_atomically
from provision.errors import UsageError

SCHEMA = 1


@dataclass(frozen=True)
class Run:
    """A job's id and folder. Files: meta.json, hostfile, mpirun.log, rank-N.out, rank-N.err."""

    job: str
    folder: Path

    def append(self, name: str, data: bytes) -> None:
        # Opened anew each time: a job may have more ranks than a process may have open files.
        with open(self.folder / name, "ab", buffering=0) as stream:
            stream.write(data)

    def write_meta(self, meta: Mapping[str, object]) -> None:
        text = json.dumps({"schema": SCHEMA, "job": self.job, **meta}, indent=2)
        write_atomically(self.folder / "meta.json", text + "\n")


def new_run(state_dir: Path) -> Run:
    """Makes the folder of a new job; its name sorts by time, and two made at once differ."""
    runs = state_dir / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    while True:
        job = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        folder = runs / job
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return Run(job, folder)


def runs_of(state_dir: Path) -> Sequence[Run]:
    """All jobs started from here, oldest first."""
    folders = sorted((state_dir / "runs").glob("*/meta.json"))
    return tuple(Run(path.parent.name, path.parent) for path in folders)


def read_meta(run: Run) -> dict[str, object]:
    """meta.json of a job; UsageError when it is missing or damaged."""
    try:
        value = json.loads((run.folder / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"job {run.job}: meta.json cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"job {run.job}: meta.json holds no object")
    return value


def utc_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
