"""Prefetching, failures, and the options of a run."""

import json
import re
import time

import pytest

from tests.trainer.forks import fork_server, run_forked, run_worker, start, wait
from tests.trainer.launch import WORKERS, run


@pytest.mark.parametrize("size", [1, 2, 3])
def test_input_and_computation_overlap(size, tmp_path):
    for report in run_worker("overlap.py", size, report_dir=tmp_path).reports:
        wait_s = report["wait_s"]
        # Input and computation wait equally long: one after the other they take two waits, side by side one.
        assert report["generated_unprefetched_s"] > 1.8 * wait_s, report
        assert report["generated_s"] < 1.6 * wait_s, report
        assert report["mapped_s"] < 1.6 * wait_s, report


def _check_end(status, output, directory, last, size=3):
    rank = min(1, size - 1)
    assert status != 0
    assert not list(directory.glob("rank*.json"))
    assert time.time() - float((directory / "failed_at.txt").read_text()) < 15
    if last is not None:
        said = [line for line in output.splitlines() if re.match(r"\[1,\d\]<std...>:.", line)]
        assert said[-1] == f"[1,{rank}]<stderr>:{last}", output
        # Python's own traceback where there is no other rank.
        assert (f"[1,{rank}]<stderr>:trainer: rank {rank} of {size} failed:" in said) == (size > 1), output


CAUSE = "KeyError: 'the cause of it all'"


@pytest.mark.parametrize(("way", "last"), [("raise", CAUSE), ("exit", None)])
def test_failure_of_one_rank_ends_the_job(way, last, tmp_path):
    job = run(WORKERS / "failing.py", 3, way, report_dir=tmp_path, timeout_s=180)
    _check_end(job.status, job.output, tmp_path, last)


@pytest.mark.parametrize("way", ["raise", "hook"])
@pytest.mark.parametrize("size", [1, 2])
def test_failure_ends_a_small_job(size, way, tmp_path):
    job = run_forked("failing.py", size, way, report_dir=tmp_path)
    _check_end(job.status, job.output, tmp_path, CAUSE, size)


def test_other_failures_of_one_rank_end_the_job_too(tmp_path):
    ways = {
        "hook": CAUSE,
        "nan": "tensorflow.python.training.basic_session_run_hooks.NanLossDuringTrainingError: "
        "NaN loss during training.",
        # These come out of the graph, which adds lines of its own behind the reason.
        "input": None,
        "validation": None,
        "os_exit": None,
    }
    with fork_server(tmp_path) as words:
        for way, last in ways.items():
            directory = tmp_path / way
            directory.mkdir()
            with open(directory / "log", "w") as log:
                command = [*words, str(WORKERS / "failing.py"), way]
                status = wait(start(command, 3, log, TRAINER_TEST_REPORTS=str(directory)), 180)
            output = (directory / "log").read_text()
            _check_end(status, output, directory, last)
            if way in ("input", "validation"):
                assert f"[1,1]<stderr>:{CAUSE}" in output, output
                assert "[1,1]<stderr>:trainer: rank 1 of 3 failed:" in output, output
                assert "rank 0 of 3 failed" not in output, output


@pytest.mark.parametrize("size", [1, 2, 3])
def test_options(size, tmp_path):
    metrics = tmp_path / "metrics"
    job = run_worker("options.py", size, metrics, report_dir=tmp_path)
    rates = [0.3 * size * (1 / size + (1 - 1 / size) * min(1, step / 4)) for step in range(6)]
    for report in job.reports:
        # Every step uses the rate of its warm-up, and the same samples in a second run with the same seed.
        assert report["rates"] == pytest.approx(rates)
        assert report["epoch_rates"] == pytest.approx(rates)
        assert report["samples"] == report["samples_again"]
        assert report["weights"] == report["weights_again"]
        assert report["samples_unseeded"] != report["samples"]
        assert report["threads"] == [report["share"], report["share"]]
        assert report["own_threads"] == 7
    lines = [json.loads(line) for line in (metrics / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert [line["learning_rate"] for line in lines] == pytest.approx([rates[1], rates[3], rates[5]])
    assert all({"loss", "time_s", "learning_rate"} <= set(line) for line in lines)
    assert all(line["samples_per_s"] > 0 for line in lines[1:])
    events = [path for path in metrics.iterdir() if "tfevents" in path.name]
    assert len(events) == 1
    assert job.reports[0]["tags"] == ["learning_rate", "loss", "samples_per_s"]
