"""Validation averages over all samples of all ranks and leaves the training alone."""

import numpy as np
import pytest

from tests.trainer.forks import run_worker
from tests.trainer.workers.samples import numbered

COUNT, VALIDATION_COUNT, BATCH = 48, 11, 4


@pytest.fixture(scope="module", params=[1, 2, 3])
def job(request, tmp_path_factory):
    return run_worker("validate.py", request.param, report_dir=tmp_path_factory.mktemp("validate"))


def test_averages_are_exact_and_equal_on_all_ranks(job):
    features, labels = numbered(VALIDATION_COUNT)
    last = job.reports[0]["mixed"]
    errors = (features @ np.array(last["weights"]) - labels / 10) ** 2
    for report in job.reports:
        assert report["mixed"]["averages"] == last["averages"]
        assert report["mixed"]["after_end"] == pytest.approx([errors.mean(), labels.mean()], rel=1e-5)
        assert len(report["mixed"]["metrics"]) == 2


def test_training_is_not_touched(job):
    size = len(job.reports)
    steps = COUNT // (BATCH * size)
    seen = []
    for report in job.reports:
        mixed = report["mixed"]
        assert mixed["steps"] == [0] + [step for step in range(1, steps + 1) for _ in range(2)]
        # Hooks saw the training steps and nothing else.
        assert mixed["hook_calls"] == steps
        seen += mixed["samples"]
    assert sorted(seen) == list(range(COUNT))


def test_own_session_run_takes_no_batch(job):
    for report in job.reports:
        assert report["own_run"] == {"seen": [1, 1, 1], "batches": 1, "step": 1}


def test_train_and_validate_to_end_logs_on_rank_0(job):
    steps = COUNT // (BATCH * len(job.reports))
    for report in job.reports:
        result = report["validate_to_end"]
        lines = [line for line in result["messages"] if "validation" in line]
        assert result["steps"] == steps
        assert len(lines) == (steps // 2 if report["rank"] == 0 else 0)
        assert all(line.startswith(f"step {2 * i + 2}, validation: ") for i, line in enumerate(lines))


def test_without_a_validation_set(job):
    for report in job.reports:
        assert report["without_validation"] == [["AttributeError", "Validation is not setup.", False]] * 2


def test_empty_validation_set(job):
    for report in job.reports:
        _, text, is_value_error = report["empty_validation"]
        assert is_value_error
        assert text.startswith("validation_dataset: it is empty")


def test_members(job):
    assert [report["mixed"]["is_master"] for report in job.reports] == [True] + [False] * (
        len(job.reports) - 1
    )
    assert {report["mixed"]["network"] for report in job.reports} == {"linear/w:0"}


def test_only_rank_0_logs_and_its_lines_are_complete(job):
    for rank in range(len(job.reports)):
        lines = [line for line in job.lines_of(rank) if "step " in line]
        assert bool(lines) == (rank == 0), lines
    assert any("loss" in line and line.endswith("samples/s") for line in job.lines_of(0)), job.output
