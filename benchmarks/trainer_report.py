"""Tables of the speed benchmark: medians, ratios, and the goals they are held to."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from benchmarks.trainer import Run

NAMES = {
    "with_trainer": "Ringmaster's Trainer",
    "by_hand": "Horovod loop by hand",
    "with_tensorlayer": "TensorLayer 1.11.1",
    "with_tensorlayer_as_documented": "TensorLayer, Horovod's launch line",
}
_COLUMNS = (
    ("first_step_s", "first step, s", "{:.2f}"),
    ("step_ms", "step, ms", "{:.2f}"),
    ("samples_per_s", "samples/s", "{:.0f}"),
    ("peak_mb", "peak MB", "{:.0f}"),
    ("cpu_s", "CPU s", "{:.1f}"),
)


def median(runs: list[Run], figure: str, **which) -> float:
    """Return the median of one figure over the runs of one contender, model and number of ranks.

    Raises:
        ValueError: there is no such run.
    """
    values = [
        getattr(run, figure)
        for run in runs
        if all(getattr(run, key) == value for key, value in which.items())
    ]
    if not values:
        raise ValueError(f"no run with {which}")
    return statistics.median(values)


def goals(runs: list[Run], model: str) -> list[tuple[str, float, str, bool]]:
    """Return (what, measured ratio, goal, met) for every goal that the runs can tell of."""
    contenders = {run.contender for run in runs}

    def of(figure, contender, ranks):
        return median(runs, figure, contender=contender, model=model, ranks=ranks)

    found = []
    for ranks in (1, 2) if "by_hand" in contenders else ():
        ratio = of("step_ms", "with_trainer", ranks) / of("step_ms", "by_hand", ranks)
        found.append((f"step time / by hand, {ranks} rank(s)", ratio, "<= 1.02", ratio <= 1.02))
    if "with_tensorlayer" in contenders:
        for ranks, goal in ((1, 1.3), (2, 2.5)):
            ratio = of("samples_per_s", "with_trainer", ranks) / of(
                "samples_per_s", "with_tensorlayer", ranks
            )
            found.append((f"samples/s / TensorLayer, {ranks} rank(s)", ratio, f">= {goal}", ratio >= goal))
        if "with_tensorlayer_as_documented" in contenders:
            own = of("samples_per_s", "with_tensorlayer_as_documented", 2)
            ratio = of("samples_per_s", "with_trainer", 2) / own
            found.append(
                ("samples/s / TensorLayer by Horovod's launch line, 2 ranks", ratio, ">= 2.5", ratio >= 2.5)
            )
        ratio = of("first_step_s", "with_trainer", 2) / of("first_step_s", "with_tensorlayer", 2)
        found.append(("time to first step / TensorLayer, 2 ranks", ratio, "<= 0.5", ratio <= 0.5))
    ratio = of("samples_per_s", "with_trainer", 2) / of("samples_per_s", "with_trainer", 1)
    found.append(("samples/s, 2 ranks / 1 rank on both cores", ratio, ">= 0.95", ratio >= 0.95))
    return found


def print_run(turn: int, run: Run) -> None:
    """Print one run as it ends."""
    print(
        f"round {turn + 1}: {run.model} on {run.ranks}: {NAMES[run.contender]}: first step {run.first_step_s:.2f} s, "
        f"step {run.step_ms:.2f} ms, {run.samples_per_s:.0f} samples/s, {run.peak_mb:.0f} MB",
        flush=True,
    )


def print_tables(facts: dict, runs: list[Run]) -> None:
    """Print the medians and the ratios."""
    console = Console(width=120)
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()))
    table = Table("model", "ranks", "contender", *(title for _, title, _ in _COLUMNS), title="medians")
    kinds = sorted({(run.model, run.ranks, run.contender) for run in runs})
    for model, ranks, contender in kinds:
        which = {"model": model, "ranks": ranks, "contender": contender}
        figures = [form.format(median(runs, name, **which)) for name, _, form in _COLUMNS]
        table.add_row(model, str(ranks), NAMES[contender], *figures)
    console.print(table)
    ratios = Table("model", "ratio", "measured", "goal", "met", title="ratios of the medians")
    for model in sorted({run.model for run in runs}):
        for what, ratio, goal, is_met in goals(runs, model):
            ratios.add_row(model, what, f"{ratio:.2f}", goal, "yes" if is_met else "NO")
    console.print(ratios)


def save(path: Path, facts: dict, runs: list[Run]) -> None:
    """Keep every run, so that the medians can be taken again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"about": facts, "runs": [asdict(run) for run in runs]}, indent=1) + "\n")
