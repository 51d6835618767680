#!/usr/bin/env python3
"""How fast is the Trainer? Side by side with a Horovod loop written by hand and with TensorLayer 1.11.1's Trainer.

    source ~/local/env.sh
    .venv/bin/python benchmarks/trainer.py --data-dir FOLDER_WITH_MNIST --tensorlayer FOLDER

Every round runs every contender once, on 1 and on 2 ranks, in an order that turns from round to round; the table shows
medians over the rounds, and ratios of the medians. `--tensorlayer` names a folder with TensorLayer 1.11.1 and what it
needs (`uv pip install --target`, see scripts/requirements-tensorlayer.lock); without it that contender is left out.
TensorLayer runs twice: launched as `fab train` launches, so that only the packages differ, and on 2 ranks also as it is
launched without Ringmaster, with the mpirun command of Horovod's documentation and Horovod's own settings.
`--weak` measures weak scaling instead: 1 and 2 hosts made on this machine (root needed), one core each.
`--timeline` traces steps of the Trainer instead, and draws where their time goes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import timeline, weak_scaling
from benchmarks import trainer_report as report
from benchmarks.contest import CONTENDERS, ROOT, WARM_UP_STEPS, BenchmarkError, mpirun_argv

RESULTS = ROOT / "benchmarks" / "results"
TRAINER, BY_HAND, TENSORLAYER = "with_trainer", "by_hand", "with_tensorlayer"
AS_DOCUMENTED = "with_tensorlayer_as_documented"
_HOROVOD_CYCLE_MS = "1"  # Horovod's own default


@dataclass(frozen=True)
class Run:
    """What one run of one contender gave."""

    contender: str
    model: str
    ranks: int
    first_step_s: float  # from the launch of mpirun to the end of the first step
    import_s: float  # from the start of the process until TensorFlow is imported
    step_ms: float  # median step of rank 0 after the warm-up
    samples_per_s: float  # over all ranks and all steps after the warm-up
    peak_mb: float  # resident memory of the largest rank
    cpu_s: float  # processor time of all ranks


def run_once(contender: str, model: str, ranks: int, options: argparse.Namespace) -> Run:
    """Run one contender once.

    Raises:
        BenchmarkError: it failed or took longer than `options.timeout`.
    """
    environment = dict(os.environ, PYTHONDONTWRITEBYTECODE="1")
    # The launch line alone says whether ranks yield.
    environment.pop("OMPI_MCA_mpi_yield_when_idle", None)
    script = contender
    if contender in (TENSORLAYER, AS_DOCUMENTED):
        script = TENSORLAYER
        environment["PYTHONPATH"] = str(options.tensorlayer)
    if contender == AS_DOCUMENTED:
        environment["HOROVOD_CYCLE_TIME"] = _HOROVOD_CYCLE_MS
    with tempfile.TemporaryDirectory(prefix="ringmaster-bench-") as folder:
        argv = mpirun_argv(ranks, realtime=options.realtime, yields=contender != AS_DOCUMENTED)
        argv += [options.python, str(CONTENDERS / f"{script}.py"), "--model", model]
        argv += [
            "--batch-size",
            str(options.batch_size),
            "--steps",
            str(options.steps),
            "--drive",
            options.drive,
        ]
        argv += ["--data-dir", str(options.data_dir), "--report-dir", folder]
        launched_s = time.time()
        try:
            done = subprocess.run(
                argv, env=environment, capture_output=True, text=True, timeout=options.timeout, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise BenchmarkError(f"{contender} on {ranks} ranks: no end after {options.timeout} s") from error
        if done.returncode:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
            raise BenchmarkError(
                f"{contender} on {ranks} ranks: mpirun exited with {done.returncode}\n{tail}"
            )
        records = [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    return evaluated(contender, model, options.batch_size, launched_s, records)


def evaluated(contender: str, model: str, batch_size: int, launched_s: float, records: list[dict]) -> Run:
    """Turn what the ranks noted into the figures of one run."""
    ended_s = records[0]["ended_s"]
    steady = ended_s[WARM_UP_STEPS:]
    steps_s = [after - before for before, after in zip(steady, steady[1:])]
    return Run(
        contender=contender,
        model=model,
        ranks=len(records),
        first_step_s=max(record["ended_s"][0] for record in records) - launched_s,
        import_s=records[0]["imported_s"] - records[0]["began_s"],
        step_ms=1e3 * statistics.median(steps_s),
        samples_per_s=len(records) * batch_size * len(steps_s) / (steady[-1] - steady[0]),
        peak_mb=max(record["peak_bytes"] for record in records) / 1e6,
        cpu_s=sum(record["cpu_s"] for record in records),
    )


def measure(options: argparse.Namespace) -> list[Run]:
    """Make all runs, contender after contender within a round, so that what disturbs the machine disturbs all."""
    contenders = [TRAINER] + ([BY_HAND] if options.drive == "loop" else [])
    contenders += [TENSORLAYER, AS_DOCUMENTED] if options.tensorlayer else []
    runs = []
    for turn in range(options.rounds):
        order = contenders[turn % len(contenders) :] + contenders[: turn % len(contenders)]
        for model in options.models:
            for ranks in (1, 2):
                for contender in order:
                    # One rank waits for no other: the launch makes no difference.
                    if contender == AS_DOCUMENTED and ranks == 1:
                        continue
                    runs.append(run_once(contender, model, ranks, options))
                    report.print_run(turn, runs[-1])
    return runs


def about(options: argparse.Namespace) -> dict:
    """Say when, where and with what the figures were measured."""
    versions = subprocess.run(
        [
            options.python,
            "-c",
            "import tensorflow, horovod, platform; "
            "print(platform.python_version(), tensorflow.__version__, horovod.__version__)",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return {
        "date": datetime.date.today().isoformat(),
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "load_before": os.getloadavg()[0],
        "python": versions[-3],
        "tensorflow": versions[-2],
        "horovod": versions[-1],
        "batch_size": options.batch_size,
        "steps": options.steps,
        "drive": options.drive,
        "rounds": options.rounds,
        "realtime": options.realtime,
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data-dir", type=Path, required=True, help="folder with the MNIST files")
    add("--python", default="", help="interpreter of the stack (default: python of ~/local/stacks/tf1)")
    add("--tensorlayer", type=Path, help="folder with TensorLayer 1.11.1")
    add(
        "--models",
        nargs="+",
        default=["augmented", "cnn", "mlp"],
        choices=("augmented", "cnn", "linear", "mlp"),
    )
    add("--batch-size", type=int, default=32, help="samples per rank and step (default: %(default)s)")
    add("--steps", type=int, default=600, help="steps of a run (default: %(default)s)")
    add(
        "--drive",
        choices=("loop", "helper"),
        default="loop",
        help="loop: a loop of the user's that logs every 100 steps; helper: train_and_validate_to_end() with its "
        "defaults, which log every step and validate every 50 (no loop by hand then)",
    )
    add("--rounds", type=int, default=5, help="runs of each kind (default: %(default)s)")
    add("--timeout", type=float, default=300, help="seconds after which a run has failed")
    add("--realtime", action="store_true", help="real-time priority, for a machine with other work (root)")
    add("--timeline", action="store_true", help="trace steps of the Trainer and draw them")
    add("--weak", action="store_true", help="weak scaling over hosts made on this machine (root)")
    add(
        "--results",
        type=Path,
        help="where the figures go (default: trainer-STACK.json in benchmarks/results)",
    )
    options = parser.parse_args()
    if options.steps < 2 * WARM_UP_STEPS:
        parser.error(f"--steps: got {options.steps}, expected at least {2 * WARM_UP_STEPS}")
    options.python = options.python or str(Path.home() / "local/stacks/tf1/bin/python")
    if not Path(options.python).exists():
        parser.error(
            f"--python: {options.python} does not exist; type fab provision --local, or name another one"
        )
    return options


def main() -> None:
    options = parse_arguments()
    facts = about(options)
    stack = "tf" + facts["tensorflow"].split(".")[0]
    try:
        if options.weak:
            weak_scaling.measure(options, facts, RESULTS / "weak_scaling.json")
        elif options.timeline:
            timeline.draw(options, RESULTS / f"timeline-{stack}.png")
        else:
            runs = measure(options)
            name = (
                f"trainer-{stack}.json"
                if options.drive == "loop"
                else f"trainer-{stack}-{options.drive}.json"
            )
            target = options.results or RESULTS / name
            report.save(target, facts, runs)
            report.print_tables(facts, runs)
    except BenchmarkError as error:
        sys.exit(f"benchmarks/trainer.py: {error}")


if __name__ == "__main__":
    main()
