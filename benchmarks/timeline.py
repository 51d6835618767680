"""Where the time of a training step goes: traced steps of the Trainer on 2 ranks, drawn one row a kind of work."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.contest import CONTENDERS, BenchmarkError, mpirun_argv

if TYPE_CHECKING:
    import argparse

RANKS = 2
# Tracing itself warms up; this is the step of the traced ones that is drawn.
_DRAWN_STEP = 2
KINDS = ("input", "network", "allreduce", "optimizer", "bookkeeping")
_COLOURS = ("#4477aa", "#228833", "#ee6677", "#ccbb44", "#888888")


def kind_of(name: str, operation: str) -> str | None:
    """Return what an operation is there for; None for what only holds or passes values on."""
    if "Iterator" in operation or "Dataset" in operation:
        return "input"
    if operation == "HorovodAllreduce":
        return "allreduce"
    if "Apply" in operation:
        return "optimizer"
    if operation.startswith("_") or operation in ("NoOp", "Const", "VariableV2", "VarHandleOp", "Identity"):
        return None
    return "bookkeeping" if name.startswith("trainer") else "network"


def spans(rows: list[list]) -> dict[str, list[tuple[float, float]]]:
    """Turn one traced step into kind -> merged (start, end) in milliseconds since the epoch."""
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for name, operation, start_us, end_us in sorted(rows, key=lambda row: row[2]):
        kind = kind_of(name, operation)
        if kind is None:
            continue
        start, end = start_us / 1e3, end_us / 1e3
        merged = found[kind]
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return found


def trace(options: argparse.Namespace, model: str) -> list[dict[str, list[tuple[float, float]]]]:
    """Run the Trainer with tracing and return one step's spans of every rank.

    Raises:
        BenchmarkError: the run failed.
    """
    with tempfile.TemporaryDirectory(prefix="ringmaster-bench-") as folder:
        argv = mpirun_argv(RANKS, realtime=options.realtime)
        argv += [options.python, str(CONTENDERS / "with_trainer.py"), "--trace", "--model", model]
        argv += ["--batch-size", str(options.batch_size), "--steps", "120"]
        argv += ["--data-dir", str(options.data_dir), "--report-dir", folder]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=options.timeout, check=False)
        if done.returncode:
            raise BenchmarkError(f"{model}: mpirun exited with {done.returncode}\n{done.stderr[-2000:]}")
        traced = [json.loads((Path(folder) / f"trace{rank}.json").read_text()) for rank in range(RANKS)]
    return [spans(steps[_DRAWN_STEP]) for steps in traced]


def draw(options: argparse.Namespace, target: Path) -> None:
    """Trace every model, print the milliseconds of each kind of work, and draw them all into one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = options.models
    figure, axes = pyplot.subplots(len(models), 1, figsize=(10, 2.4 * len(models)), squeeze=False)
    for axis, model in zip(axes[:, 0], models):
        ranks = trace(options, model)
        began = min(start for kinds in ranks for merged in kinds.values() for start, _ in merged)
        for rank, kinds in enumerate(ranks):
            busy = {kind: sum(end - start for start, end in merged) for kind, merged in kinds.items()}
            sys.stdout.write(
                f"{model}, rank {rank}: "
                + ", ".join(f"{kind} {ms:.2f} ms" for kind, ms in busy.items())
                + "\n"
            )
            for row, (kind, colour) in enumerate(zip(KINDS, _COLOURS)):
                bars = [(start - began, end - start) for start, end in kinds[kind]]
                place = row + 0.45 * rank
                axis.broken_barh(bars, (place, 0.4), facecolors=colour, alpha=1.0 if rank == 0 else 0.6)
        axis.set_yticks([row + 0.4 for row in range(len(KINDS))])
        axis.set_yticklabels(KINDS)
        axis.invert_yaxis()
        axis.set_title(
            f"{model}: one traced step on {RANKS} ranks (upper bar: rank 0, lower: rank 1)", fontsize=9
        )
        axis.set_xlabel("milliseconds (tracing slows a step)", fontsize=8)
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    sys.stdout.write(f"drawn: {target}\n")
