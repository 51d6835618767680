"""A working directory, a testbed and the program: what a user of a cluster has."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.testbed import Testbed

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(sys.executable).with_name("ringmaster")


@dataclass(frozen=True)
class Lab:
    """`cwd` holds the state (`.ringmaster`, `hostfile`); the download cache is the user's own, shared by all labs."""

    bed: Testbed
    cwd: Path

    def run(
        self, *words: str, timeout_s: float = 600.0, expect: int | None = 0
    ) -> subprocess.CompletedProcess[str]:
        """Run a task and check its exit status (None: any)."""
        done = subprocess.run(
            [str(PROGRAM), *words],
            cwd=self.cwd,
            env=dict(os.environ, NO_COLOR="1"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        text = f"$ ringmaster {' '.join(words)}\n{done.stdout}\n{done.stderr}"
        assert expect is None or done.returncode == expect, f"exit status {done.returncode}\n{text}"
        assert "Traceback (most recent call last)" not in done.stderr, text
        return done

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start a task and do not wait; its two streams come as one."""
        return subprocess.Popen(
            [str(PROGRAM), *words],
            cwd=self.cwd,
            env=dict(os.environ, NO_COLOR="1", PYTHONUNBUFFERED="1"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def provision(self, hosts: str, *words: str, timeout_s: float = 900.0, expect: int | None = 0) -> str:
        """Provision with the prebuilt Open MPI over the testbed's SSH configuration; returns standard output."""
        given = ["--hosts", hosts, "--ssh-config", str(self.bed.ssh_config)]
        return self.run("provision", *given, *words, timeout_s=timeout_s, expect=expect).stdout
