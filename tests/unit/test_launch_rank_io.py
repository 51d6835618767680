"""rank_io.py as mpirun runs it, with a pipe in mpirun's place."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.test_launch_demux import RANK_IO

TIMEOUT_S = 30


def run(code: str, *, env: dict[str, str] | None = None) -> tuple[bytes, bytes, dict[str, object], int]:
    """Runs Python text under rank_io.py; its two streams, the end frame, and the wrapper's own status."""
    done = subprocess.run(
        [sys.executable, str(RANK_IO), sys.executable, "-c", code],
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, **(env or {})},
    )
    assert done.stderr == b""
    streams = {"o": b"", "e": b"", "x": b""}
    for line in done.stdout.decode("ascii").splitlines():
        assert line[0] == "~"
        assert 64 <= len(line) < 4096
        streams[line[1]] += base64.b64decode(line[2:].rstrip("."))
    end = json.loads(streams["x"])
    assert end["out"] == len(streams["o"])
    assert end["err"] == len(streams["e"])
    return streams["o"], streams["e"], end, done.returncode


def test_every_byte_of_both_streams_arrives() -> None:
    code = "import os\nfor i in range(200): os.write(1, bytes(range(256)) * 31); os.write(2, b'e%d\\n' % i)"
    out, err, end, status = run(code)
    assert out == bytes(range(256)) * 31 * 200
    assert err == b"".join(b"e%d\n" % i for i in range(200))
    assert (end["status"], status) == (0, 0)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("raise SystemExit(3)", 3),
        ("import os; os.kill(os.getpid(), 9)", 137),
        ("import os; os.kill(os.getpid(), 15)", 143),
        ("import os; os.abort()", 134),
    ],
)
def test_a_failure_is_told_and_then_dies_by_signal(code: str, status: int) -> None:
    _, _, end, own = run(code)
    assert end["status"] == status
    assert own == -signal.SIGKILL


def test_a_program_that_cannot_start_is_127() -> None:
    done = subprocess.run(
        [sys.executable, str(RANK_IO), "/no/such/program"],
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    frames = {line[1]: base64.b64decode(line[2:].rstrip(".")) for line in done.stdout.decode().splitlines()}
    assert frames["e"] == b"/no/such/program: No such file or directory\n"
    assert json.loads(frames["x"])["status"] == 127


def test_a_stopped_program_is_ended_and_said_so() -> None:
    code = "import os; print('x', flush=True); os.kill(os.getpid(), 19)"
    started = time.monotonic()
    out, _, end, _ = run(code, env={"RINGMASTER_STOPPED_LIMIT_S": "1"})
    assert out == b"x\n"
    assert end["status"] == 137
    assert end["stopped_s"] in (1, 2)
    assert time.monotonic() - started < 10


def test_what_the_program_left_running_does_not_hold_the_end() -> None:
    code = "import subprocess; subprocess.Popen(['sleep', '20']); print('done')"
    started = time.monotonic()
    out, _, end, status = run(code)
    assert (out, end["status"], status) == (b"done\n", 0, 0)
    assert time.monotonic() - started < 10


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


@pytest.mark.parametrize("how", ["mpirun gone", "killed -9", "group TERM"])
def test_the_program_never_outlives_its_job(how: str) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, str(RANK_IO), sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    pid = int(base64.b64decode(line[2:].strip().rstrip(b".")))
    assert is_alive(pid)
    if how == "mpirun gone":
        process.stdout.close()
    elif how == "killed -9":
        process.kill()
    else:
        os.killpg(process.pid, signal.SIGTERM)
    process.wait(timeout=TIMEOUT_S)
    deadline = time.monotonic() + 5
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(pid)
    process.stdout.close()
