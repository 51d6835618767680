"""Weak scaling over real SSH hosts on this machine: each rank has one core and a host of its own."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.contest import ROOT, WARM_UP_STEPS, BenchmarkError

if TYPE_CHECKING:
    import argparse

_GOAL = 0.9
_ON_HOST = "/tmp/ringmaster-weak"
_DATA_ON_HOST = "/mnt/mnist"


class Cluster:
    """Hosts of the testbed, provisioned by Ringmaster itself."""

    def __init__(self, hosts: int, data_dir: Path, folder: str):
        from tests.testbed import Bind, Testbed

        self._folder = Path(folder)
        self._bed = Testbed(
            hosts, name=f"weak{os.getpid()}", binds=(Bind(str(data_dir.resolve()), _DATA_ON_HOST),)
        )

    def __enter__(self) -> Cluster:
        self._bed.__enter__()
        try:
            names = ",".join(node.name for node in self._bed.nodes())
            hosts = ("--hosts", names, "--ssh-config", str(self._bed.ssh_config))
            self.ringmaster("provision", *hosts, "--mpi", "wheel")
        except BaseException:
            self._bed.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(self, *error) -> None:
        self._bed.__exit__(*error)

    def ringmaster(self, *words: str) -> None:
        """Run a task of this checkout.

        Raises:
            BenchmarkError: it failed.
        """
        argv = [str(Path(sys.executable).with_name("ringmaster")), *words]
        done = subprocess.run(
            argv, cwd=self._folder, capture_output=True, text=True, timeout=1200, check=False
        )
        if done.returncode:
            tail = (done.stdout + done.stderr)[-3000:]
            raise BenchmarkError(f"{' '.join(words)}: exit status {done.returncode}\n{tail}")

    def congestion_control(self) -> str:
        """What TCP uses on the hosts: it is part of what is measured."""
        return self._bed.node("h1").read("/proc/sys/net/ipv4/tcp_congestion_control").strip()

    def train(self, ranks: int, model: str, batch_size: int, steps: int) -> float:
        """Train on one rank of each of the first `ranks` hosts; return samples/s over all of them."""
        script = str(ROOT / "benchmarks" / "contenders" / "with_trainer.py")
        self.ringmaster(
            *("train", "--script", script, "--np", str(ranks), "--env", "OMP_NUM_THREADS=1", "--"),
            *("--model", model, "--batch-size", str(batch_size), "--steps", str(steps), "--one-core"),
            *("--data-dir", _DATA_ON_HOST, "--report-dir", _ON_HOST),
        )
        ended_s = json.loads(self._bed.node("h1").read(f"{_ON_HOST}/rank0.json"))["ended_s"][WARM_UP_STEPS:]
        return ranks * batch_size * (len(ended_s) - 1) / (ended_s[-1] - ended_s[0])


def measure(options: argparse.Namespace, facts: dict, target: Path) -> None:
    """Print samples/s on 1 and 2 hosts and the efficiency (1: no loss), and keep every run."""
    runs = []
    with tempfile.TemporaryDirectory(prefix="ringmaster-bench-") as folder, Cluster(
        2, options.data_dir, folder
    ) as hosts:
        facts = {**facts, "congestion_control": hosts.congestion_control()}
        for turn in range(options.rounds):
            for model in options.models:
                for ranks in (1, 2):
                    rate = hosts.train(ranks, model, options.batch_size, options.steps)
                    runs.append({"model": model, "hosts": ranks, "samples_per_s": rate})
                    print(f"round {turn + 1}: {model} on {ranks}: {rate:.0f} samples/s", flush=True)
    for model in options.models:
        one, two = (
            statistics.median(
                run["samples_per_s"] for run in runs if run["model"] == model and run["hosts"] == hosts
            )
            for hosts in (1, 2)
        )
        efficiency = two / (2 * one)
        verdict = "met" if efficiency >= _GOAL else "NOT met"
        print(
            f"{model}: 1 host {one:.0f}, 2 hosts {two:.0f} samples/s: efficiency {efficiency:.2f} "
            f"(goal {_GOAL}: {verdict})"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"about": facts, "runs": runs}, indent=1) + "\n")
