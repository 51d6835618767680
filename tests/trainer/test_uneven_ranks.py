"""Ranks that do not do alike end together: in good order where they can, else in seconds with a reason."""

import json
import re
import subprocess
import sys
import time

import pytest

from tests.trainer.forks import run_forked, run_worker
from tests.trainer.launch import ROOT, WORKERS, run


@pytest.mark.parametrize(
    ("way", "rank", "text"),
    [
        ("inside", 1, "the cause of it all"),
        (
            "break",
            0,
            "another rank left the training before step 4; expected every rank to make the same steps",
        ),
        ("validating", 0, "another rank left the training before step 4"),
        ("aborted", 1, "rank 1 lost its session"),
    ],
)
def test_job_ends_in_seconds_with_the_reason(way, rank, text, tmp_path):
    job = run(WORKERS / "leaving.py", 2, way, report_dir=tmp_path, timeout_s=180)
    assert job.status != 0
    assert job.reports == []
    assert time.time() - float((tmp_path / "failed_at.txt").read_text()) < 15
    assert text in "\n".join(job.lines_of(rank)), job.output
    assert f"trainer: rank {rank} of 2 failed:" in job.output


def test_rank_count_that_differs_from_the_launched_one(tmp_path):
    job = run(WORKERS / "leaving.py", 1, "hook", report_dir=tmp_path, env={"RINGMASTER_NP": "2"})
    assert job.status != 0
    assert "2 ranks were started (RINGMASTER_NP), but Horovod sees 1" in job.output


@pytest.mark.parametrize("wish", ["", "all"])
def test_users_network(wish, tmp_path):
    env = {"TRAINER_LOG_RANKS": wish, "RINGMASTER_TTY": "1", "OMP_NUM_THREADS": "1"}
    job = run_worker("network.py", 2, tmp_path, report_dir=tmp_path, env=env)
    for rank, rank_report in enumerate(job.reports):
        result = rank_report["summarised"]
        # Summaries took the batch of the first step alone, on rank 0 alone, and no run of the user's own did.
        assert (result["before"], result["after"]) == (0, 1 if rank == 0 else 0)
        assert len(result["validated"]) == 1
        # The network is a plain tensor that came out of a Keras layer or model: 0.5 after one step, 0.75 after two.
        assert rank_report["means"] == [[0.75] * 3] * 2
        lines = [line for line in result["lines"] if "step " in line]
        assert len(lines) == (4 if rank == 0 or wish else 0)
        prefix = f"rank {rank}: " if rank else ""
        for number, line in enumerate(lines, 1):
            assert re.match(
                rf"{prefix}step {number}/4, loss \S+, mine \S+, word a, step \S+, \d+ samples/s$", line
            ), line
    # Of the network that is made twice, the summaries of training steps alone.
    assert [tag for tag in job.reports[0]["tags"] if "the_loss" in tag] == ["the_loss"]
    assert "labels" in job.reports[0]["tags"]
    averages = [
        line.split("loss ")[1].split(",")[0]
        for line in job.reports[0]["summarised"]["lines"]
        if "loss" in line
    ]
    records = [json.loads(line) for line in (tmp_path / "metrics" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert [f"{record['loss']:.6g}" for record in records] == averages
    assert all(record["word"] == "a" and record["samples_per_s"] > 0 for record in records)
    # The terminal is at the other end of a pipe.
    assert "100%  step 4/4" in job.output


_LAST_WORDS = """
import sys
from trainer.ranks import HostError, Ranks, _EndJob
sys.excepthook = _EndJob(Ranks(rank=3, size=4, local_rank=0, local_size=2), sys.excepthook)
if sys.argv[1] == "closed":
    sys.stdout.close()
raise {"host": HostError, "closed": KeyError}[sys.argv[1]]("the cause of it all")
"""


@pytest.mark.parametrize(
    ("case", "first", "last"),
    [
        # Rank 0 is on another host, which has no such error and would not tell.
        ("host", "trainer: the cause of it all", "trainer: the cause of it all"),
        ("closed", "trainer: rank 3 of 4 failed:", "KeyError: 'the cause of it all'"),
    ],
)
def test_last_words(case, first, last):
    done = subprocess.run(
        [sys.executable, "-c", _LAST_WORDS, case],
        cwd=str(ROOT),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert (lines[0], lines[-1]) == (first, last)


def test_limit_below_one_step_is_said(tmp_path):
    job = run_forked("too_few.py", 1, "limit", report_dir=tmp_path)
    assert job.status == 0, job.output
    assert job.reports == [{"steps": 0}]
    assert "no step to make: max_iteration 0.5 is less than one mini-batch for each of 1 rank" in job.output
