"""Prefetching, failures, and the options of a run."""

import json
import re
import time

import pytest

from tests.trainer.launch import WORKERS, run, run_worker


@pytest.mark.parametrize("size", [1, 2])
def test_input_and_computation_overlap(size, tmp_path):
    for report in run_worker("overlap.py", size, report_dir=tmp_path).reports:
        wait_s = report["wait_s"]
        # Input and computation wait equally long: one after the other they take two waits, side by side one.
        assert report["generated_unprefetched_s"] > 1.8 * wait_s, report
        assert report["generated_s"] < 1.6 * wait_s, report
        assert report["mapped_s"] < 1.6 * wait_s, report


@pytest.mark.parametrize(("way", "last"), [("raise", "KeyError: 'the cause of it all'"), ("exit", None)])
def test_failure_of_one_rank_ends_the_job(way, last, tmp_path):
    job = run(WORKERS / "failing.py", 3, way, report_dir=tmp_path, timeout_s=180)
    assert job.status != 0
    assert job.reports == []
    assert time.time() - float((tmp_path / "failed_at.txt").read_text()) < 10
    if last is not None:
        said = [line for line in job.output.splitlines() if re.match(r"\[1,\d\]<std...>:.", line)]
        assert said[-1] == f"[1,1]<stderr>:{last}", job.output


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
