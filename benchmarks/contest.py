"""What all speed measurements have in common: the contenders, the launch line, the warm-up."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONTENDERS = ROOT / "benchmarks" / "contenders"

# Steps that still fill caches and pools; they count for the time to the first step only.
WARM_UP_STEPS = 20


class BenchmarkError(Exception):
    """A run failed; the message holds the end of its output."""


def mpirun_argv(ranks: int, *, realtime: bool, yields: bool = True) -> list[str]:
    """Return the launch command that `fab train` uses on one host without GPUs; more ranks than cores are refused.

    Args:
        yields: ranks that wait leave their core to others; without it, the command that Horovod documents.
    """
    argv = ["chrt", "--rr", "5"] if realtime else []
    argv += [os.environ.get("RINGMASTER_MPIRUN", "mpirun"), "-bind-to", "none", "-map-by", "slot"]
    argv += ["-mca", "pml", "ob1", "-mca", "btl", "^openib"]
    if yields:
        argv += ["-mca", "mpi_yield_when_idle", "1"]
    if os.geteuid() == 0:
        argv.append("--allow-run-as-root")
    return [*argv, "-np", str(ranks)]
