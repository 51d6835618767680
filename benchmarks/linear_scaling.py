#!/usr/bin/env python3
"""Does the linear scaling rule keep the accuracy? Trains MNIST on 1 rank and on several, with the rule and without.

    source ~/local/env.sh
    .venv/bin/python benchmarks/linear_scaling.py --data-dir FOLDER_WITH_MNIST

First the learning rate of one rank is chosen among `--rates`, on training images that are held out for it. Then every
arm trains the same number of epochs with that rate, once for each seed, and is tested on the 10,000 test images. Each
finished run is kept in the results file at once; started again, the script makes only the runs that are missing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.linear_scaling_report import ARMS, Arm, draw, percent, print_report

ROOT = Path(__file__).resolve().parents[1]
RANK_SCRIPT = ROOT / "benchmarks" / "linear_scaling_rank.py"
_TERM_GRACE_S = 10


class ExperimentError(Exception):
    """A run failed, or the results file belongs to another experiment; the message says what to do."""


@dataclass(frozen=True)
class Settings:
    """What all runs of a results file have in common."""

    ranks: int = 4
    batch_size: int = 125  # per rank
    epochs: int = 9  # a tenth of the paper's, and so is the warm-up
    momentum: float = 0.9
    warmup_epochs: float = 0.5
    tuning_images: int = 5000  # the last of the training images, held out while the rate is chosen
    limit: int = 0  # use only so many images of each set; 0: all


def best_rate(tuning: list[dict]) -> float:
    """Return the rate with the best mean accuracy on the held-out training images; of equals the smaller one."""
    rates = sorted({run["learning_rate"] for run in tuning})
    return max(
        rates, key=lambda rate: statistics.mean(percent(r) for r in tuning if r["learning_rate"] == rate)
    )


# ---- running ---------------------------------------------------------------------------------------------------


def mpirun_argv(ranks: int, python: str, task: dict) -> list[str]:
    """Return the command of one run; more ranks than cores give way while they wait."""
    argv = [os.environ.get("RINGMASTER_MPIRUN", "mpirun"), "--oversubscribe", "--bind-to", "none"]
    if os.geteuid() == 0:
        argv.append("--allow-run-as-root")
    argv += ["-mca", "mpi_yield_when_idle", "1", "-np", str(ranks)]
    return [*argv, python, str(RANK_SCRIPT), json.dumps(task)]


def run(ranks: int, python: str, task: dict, *, timeout_s: float) -> dict:
    """Make one run and return rank 0's report.

    Raises:
        ExperimentError: it failed or did not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="linear-scaling-") as folder:
        report = Path(folder) / "report.json"
        argv = mpirun_argv(ranks, python, dict(task, report=str(report)))
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                argv,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            problem = None
            try:
                status = process.wait(timeout_s)
                problem = f"exited {status}" if status else None
            except subprocess.TimeoutExpired:
                problem = f"did not end within {timeout_s:.0f} s"
            finally:
                # Also on Ctrl-C: mpirun has a session of its own and would go on.
                _end(process)
        if problem is None and report.exists():
            return json.loads(report.read_text())
        last = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise ExperimentError(
            f"mpirun -np {ranks} {RANK_SCRIPT.name}: it {problem or 'left no report'}; expected exit 0 and a report: "
            f"mend what its last lines say and start this script again, finished runs are kept\n{last}"
        )


def _end(process: subprocess.Popen) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, sign)
        try:
            process.wait(_TERM_GRACE_S)
        except subprocess.TimeoutExpired:
            continue


def task_of(settings: Settings, data_dir: Path, seed: int, rate: float, arm: Arm, held_out: int = 0) -> dict:
    """Return what the rank script is told."""
    return {
        "data_dir": str(data_dir.resolve()),
        "held_out": held_out,
        "limit": settings.limit,
        "batch_size": settings.batch_size,
        "epochs": settings.epochs,
        "momentum": settings.momentum,
        "learning_rate": rate,
        "is_scaled": arm.is_scaled,
        "warmup_epochs": settings.warmup_epochs if arm.has_warmup else 0,
        "seed": seed,
    }


def load(path: Path, settings: Settings) -> dict:
    """Read the results so far, or begin with none.

    Raises:
        ExperimentError: they were made with other settings.
    """
    if not path.exists():
        return {"settings": asdict(settings), "machine": machine(), "tuning": [], "runs": []}
    results = json.loads(path.read_text())
    if results["settings"] != asdict(settings):
        raise ExperimentError(
            f"{path}: it was made with the settings {results['settings']}, expected {asdict(settings)}: "
            "give another file with --results"
        )
    return results


def save(path: Path, results: dict) -> None:
    """Write the results so that a kill at any moment leaves the old file or the new one."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(results, indent=1) + "\n")
    part.replace(path)


def machine() -> dict:
    """Return what ran the experiment, and when."""
    models = [
        line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")
    ]
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def tune(results, settings, options, note) -> float:
    """Make the tuning runs that are missing, on one rank; return the best rate."""
    one = ARMS[0]
    done = {(run["learning_rate"], run["seed"]) for run in results["tuning"]}
    for rate in options.rates:
        for seed in range(1, options.tuning_seeds + 1):
            if (rate, seed) in done:
                continue
            task = task_of(settings, options.data_dir, seed, rate, one, settings.tuning_images)
            report = run(1, options.python, task, timeout_s=options.timeout_s)
            results["tuning"].append({"learning_rate": rate, "seed": seed, **report})
            save(options.results, results)
            note(
                f"tuning, rate {rate:g}, seed {seed}: {percent(report):.2f} % of the held-out training images"
            )
    return best_rate([run for run in results["tuning"] if run["learning_rate"] in options.rates])


def compare(results, settings, options, rate, note) -> None:
    """Make the runs of the comparison that are missing, seed by seed."""
    others = {run["learning_rate"] for run in results["runs"]} - {rate}
    if others:
        raise ExperimentError(
            f"{options.results}: got runs with the learning rate {others.pop():g}, expected {rate:g}: give another "
            "file with --results"
        )
    done = {(run["arm"], run["seed"]) for run in results["runs"]}
    for seed in range(1, options.seeds + 1):
        for arm in ARMS:
            if arm.id not in options.arms or (arm.id, seed) in done:
                continue
            task = task_of(settings, options.data_dir, seed, rate, arm)
            ranks = 1 if arm.is_alone else settings.ranks
            report = run(ranks, options.python, task, timeout_s=options.timeout_s)
            results["runs"].append({"arm": arm.id, "seed": seed, "learning_rate": rate, **report})
            save(options.results, results)
            note(f"{arm.id}, seed {seed}: {percent(report):.2f} % of the test images")


def parse_arguments(argv=None) -> tuple[argparse.Namespace, Settings]:
    """Return the options and the settings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shared_data = os.environ.get("RINGMASTER_TEST_DATA")
    defaults = Settings()
    results = ROOT / "benchmarks" / "results" / "linear_scaling.json"
    add = parser.add_argument
    add("--data-dir", type=Path, default=Path(shared_data) / "data" / "mnist" if shared_data else None)
    add(
        "--python", default=os.path.expanduser("~/local/stacks/tf1/bin/python"), help="the ranks' interpreter"
    )
    add("--results", type=Path, default=results, help="kept and added to (default: %(default)s)")
    add("--plot", type=Path, help="default: the results file with .svg")
    add("--show", action="store_true", help="run nothing: table and plot of the results so far")
    add("--seeds", type=int, default=3, help="runs of each arm (default: %(default)s)")
    add("--arms", nargs="+", choices=[arm.id for arm in ARMS], default=[arm.id for arm in ARMS])
    add(
        "--rates",
        nargs="+",
        type=float,
        default=[0.025, 0.05, 0.1, 0.2, 0.4],
        help="rates of 1 rank to try",
    )
    add("--tuning-seeds", type=int, default=2, help="runs of each rate (default: %(default)s)")
    add("--timeout-s", type=float, default=600, help="of each run (default: %(default)s)")
    for name, value in asdict(defaults).items():
        add("--" + name.replace("_", "-"), type=type(value), default=value, help="default: %(default)s")
    options = parser.parse_args(argv)
    if options.data_dir is None and not options.show:
        parser.error("--data-dir: expected the folder with the MNIST files (or RINGMASTER_TEST_DATA set)")
    options.plot = options.plot or options.results.with_suffix(".svg")
    return options, Settings(**{name: getattr(options, name) for name in asdict(defaults)})


def main(argv=None) -> int:
    """Run, print, draw; return the exit status."""
    options, settings = parse_arguments(argv)
    try:
        if options.show:
            results = json.loads(options.results.read_text())
        else:
            options.results.parent.mkdir(parents=True, exist_ok=True)
            results = load(options.results, settings)

            def note(text):
                print(f"{datetime.datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)

            rate = tune(results, settings, options, note)
            note(f"the best rate of one rank is {rate:g}")
            compare(results, settings, options, rate, note)
    except (ExperimentError, OSError) as error:
        print(f"linear_scaling.py: {error}", file=sys.stderr)
        return 1
    print_report(results)
    draw(results, options.plot)
    print(options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
