"""Two jobs with one checkpoint directory: the second is refused and changes nothing; a dead job's claim is gone."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from tests.trainer.forks import run_forked, run_worker
from tests.trainer.launch import ROOT
from trainer import claim
from trainer.ranks import SharedError

HOLD = "import sys; from trainer import claim; claim.claim(sys.argv[1]); print('held', flush=True); sys.stdin.read()"


@pytest.fixture
def holder(tmp_path):
    """Another process that has claimed `checkpoints`."""
    (tmp_path / "checkpoints").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "checkpoints")],
        cwd=str(ROOT),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_second_job_is_refused_and_changes_nothing(size, holder, tmp_path):
    arguments = [tmp_path, 24, 1, "known", "never"]
    # What the first job is in the middle of saving.
    (tmp_path / "checkpoints" / "model.ckpt-4.data-00000-of-00001").write_bytes(b"half")
    before = {path.name: path.read_bytes() for path in (tmp_path / "checkpoints").iterdir()}
    job = run_forked("resume.py", size, *arguments, report_dir=tmp_path)
    assert job.status != 0
    told = f"another job writes there (process {holder.pid} on {socket.gethostname()}); expected one job at a time"
    assert job.output.count(told) == 1, job.output
    assert {path.name: path.read_bytes() for path in (tmp_path / "checkpoints").iterdir()} == before
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert run_worker("resume.py", size, *arguments, report_dir=tmp_path).reports[0]["started_at"] == 0


def test_a_job_that_is_just_ending_is_waited_for(holder, tmp_path, monkeypatch):
    monkeypatch.setattr(claim.time, "sleep", lambda _: holder.communicate())
    claim.claim(str(tmp_path / "checkpoints"))
    claim.release(str(tmp_path / "checkpoints"))


def test_a_claim_from_another_host_only_warns(holder, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(claim, "_PATIENCE_S", 0.0)
    with pytest.raises(SharedError):
        claim.claim(str(tmp_path / "checkpoints"))
    monkeypatch.setattr(claim.socket, "gethostname", lambda: "elsewhere")
    claim.claim(str(tmp_path / "checkpoints"))
    assert f"process {holder.pid} on {os.uname().nodename} has claimed it" in caplog.text


def test_it_is_claimed_once_and_given_up(tmp_path):
    for _ in range(2):
        claim.claim(str(tmp_path))
        claim.claim(str(tmp_path))
        claim.release(str(tmp_path))
    claim.release(str(tmp_path))
    # Nobody else is kept out any more.
    other = [sys.executable, "-c", HOLD, str(tmp_path)]
    done = subprocess.run(other, cwd=str(ROOT), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=60)
    assert done.stdout == b"held\n"
