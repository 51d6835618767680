"""What the results of the linear scaling experiment say: summary, table and plot."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

CLAIMED_POINTS = 0.3  # of percent: what the rule is held to


@dataclass(frozen=True)
class Arm:
    """One way to train: on one rank or on all, with or without the rule."""

    id: str
    label: str
    is_alone: bool
    is_scaled: bool
    has_warmup: bool
    colour: str


ARMS = (
    Arm("one", "1 rank", True, True, False, "#333333"),
    Arm("rule-warmup", "{ranks} ranks, rule and warm-up", False, True, True, "#1f77b4"),
    Arm("rule", "{ranks} ranks, rule without warm-up", False, True, False, "#2ca02c"),
    Arm("unscaled", "{ranks} ranks, rate not scaled", False, False, False, "#d62728"),
)


@dataclass(frozen=True)
class Summary:
    """The final accuracies of an arm, in percent, and the difference to one rank with the same seed, in points."""

    arm: Arm
    accuracies: tuple[float, ...]
    differences: tuple[float, ...]

    @property
    def difference(self) -> float:
        """The mean difference."""
        return statistics.mean(self.differences)

    @property
    def is_within(self) -> bool:
        """Whether the mean difference is as small as claimed for the rule."""
        return abs(self.difference) <= CLAIMED_POINTS


def percent(run: dict) -> float:
    """Return the final accuracy of a run; one that diverged to NaN has none and counts as 0."""
    return 100 * (run["curve"][-1]["accuracy"] or 0.0)


def summarise(results: dict) -> list[Summary]:
    """Compare every arm with one rank, seed by seed, as far as the runs are there."""
    final = {(run["arm"], run["seed"]): percent(run) for run in results["runs"]}
    summaries = []
    for arm in ARMS:
        seeds = sorted(seed for arm_id, seed in final if arm_id == arm.id and ("one", seed) in final)
        if seeds:
            accuracies = tuple(final[arm.id, seed] for seed in seeds)
            differences = tuple(final[arm.id, seed] - final["one", seed] for seed in seeds)
            summaries.append(Summary(arm, accuracies, differences))
    return summaries


def spread(values: tuple[float, ...]) -> float:
    """Return the standard deviation of a sample; 0 for a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def verdicts(summaries: list[Summary]) -> list[str]:
    """Say for every arm on several ranks whether it is within what the rule is held to."""
    return [
        f"{summary.arm.id}: {summary.difference:+.2f} points from 1 rank, "
        f"{'within' if summary.is_within else 'not within'} {CLAIMED_POINTS}"
        for summary in summaries
        if not summary.arm.is_alone
    ]


def rows(results: dict) -> list[tuple[str, str, str, str, str]]:
    """Return the comparison, for every arm: name, test accuracies, mean, standard deviation, points from one rank."""
    return [
        (
            summary.arm.label.format(ranks=results["settings"]["ranks"]),
            " ".join(f"{value:.2f}" for value in summary.accuracies),
            f"{statistics.mean(summary.accuracies):.2f}",
            f"{spread(summary.accuracies):.2f}",
            "-" if summary.arm.is_alone else f"{summary.difference:+.2f} ({spread(summary.differences):.2f})",
        )
        for summary in summarise(results)
    ]


def print_report(results: dict) -> None:
    """Print the tuning, the comparison and the verdicts."""
    # Only who runs the experiment needs it.
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if results["tuning"]:
        tuning = Table("rate of 1 rank", "held-out training images, %", title="choice of the rate")
        for rate in sorted({run["learning_rate"] for run in results["tuning"]}):
            runs = [percent(run) for run in results["tuning"] if run["learning_rate"] == rate]
            tuning.add_row(f"{rate:g}", " ".join(f"{value:.2f}" for value in runs))
        console.print(tuning)
    table = Table("arm", "test accuracy of each seed, %", "mean", "sd", "points from 1 rank (sd)")
    for row in rows(results):
        table.add_row(*row)
    console.print(table)
    for verdict in verdicts(summarise(results)):
        console.print(verdict, highlight=False)


def curves(results: dict, arm: Arm) -> list[list[float]]:
    """Return the test error in percent after each epoch, for every seed; 100 where training had diverged."""
    return [
        [100 * (1 - (epoch["accuracy"] or 0.0)) for epoch in run["curve"]]
        for run in sorted(results["runs"], key=lambda run: run["seed"])
        if run["arm"] == arm.id
    ]


def draw(results: dict, path: Path) -> None:
    """Draw the test error after each epoch: the mean over the seeds, and a band from the best to the worst."""
    import matplotlib

    matplotlib.use("Agg")
    # The same results make the same file.
    matplotlib.rcParams["svg.hashsalt"] = "linear scaling"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    settings = results["settings"]
    for arm in ARMS:
        by_epoch = list(zip(*curves(results, arm)))
        if not by_epoch:
            continue
        epochs = range(1, len(by_epoch) + 1)
        label = arm.label.format(ranks=settings["ranks"])
        axes.plot(epochs, [statistics.mean(e) for e in by_epoch], marker="o", color=arm.colour, label=label)
        axes.fill_between(
            epochs, [min(e) for e in by_epoch], [max(e) for e in by_epoch], color=arm.colour, alpha=0.15, lw=0
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xticks(range(1, settings["epochs"] + 1))
    axes.set_xlabel("epoch")
    axes.set_ylabel("test error, %")
    seeds = len({run["seed"] for run in results["runs"]})
    axes.set_title(
        f"MNIST, batch {settings['batch_size']} a rank, momentum {settings['momentum']:g}, "
        f"{seeds} seed{'' if seeds == 1 else 's'}"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, bbox_inches="tight")
    pyplot.close(figure)
