"""Talks to launch.py, the process that forks the hosts."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from tests.testbed import processes
from tests.testbed.spec import TestbedError

LAUNCH = Path(__file__).with_name("launch.py")
TIMEOUT_S = 120.0


class Launcher:
    """One run of launch.py: `pids()`, then the network cards are put in, then `go()`."""

    __test__ = False

    def __init__(self, plan: Mapping[str, Any], tag: str, log: BinaryIO) -> None:
        self._log = Path(log.name)
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(LAUNCH)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd="/",
            env={**os.environ, processes.TAG: tag},
            start_new_session=True,  # an interrupt typed here is for this process, which then clears up
        )
        self._send(json.dumps(plan))

    def __enter__(self) -> Launcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._process.kill()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def pids(self) -> dict[str, Any]:
        """{"switch": pid or null, "nodes": {name: pid, 0 where it failed already}}"""
        return self._read()

    def go(self) -> dict[str, str]:
        """Lets the hosts become what they are; the errors by name."""
        self._send("go")
        return self._read()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            ready = selector.select(TIMEOUT_S)
        # launch.py writes each line in one piece, so a readable pipe holds a whole one (or its end).
        line = self._process.stdout.readline() if ready else b""
        if not line:
            tail = self._log.read_text().strip().splitlines()[-5:]
            raise TestbedError("the hosts' launcher " + ("ended: " if ready else "hangs: ") + "\n".join(tail))
        answer: dict[str, Any] = json.loads(line)
        return answer
