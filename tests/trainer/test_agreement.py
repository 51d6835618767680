"""All ranks make the same steps on different samples, whatever the dataset holds."""

import collections

import pytest

from tests.trainer.forks import run_forked, run_worker

BATCH = 2


@pytest.fixture(scope="module", params=[1, 2, 3])
def results(request, tmp_path_factory):
    """Every case of the worker on one number of ranks: (ranks, list of each rank's results)."""
    job = run_worker("agree.py", request.param, 5, report_dir=tmp_path_factory.mktemp("agree"), timeout_s=200)
    return request.param, job.reports


def _expected(samples, size):
    full, rest = divmod(samples, size * BATCH)
    return (full + 1, 0) if rest >= size else (full, rest)


def test_same_steps_and_few_left_out(results):
    size, reports = results
    for case in reports[0]:
        count = int(case.split("-")[1]) * (2 if "epochs" in case else 1)
        steps, left_out = _expected(count, size)
        assert [report[case]["steps"] for report in reports] == [steps] * size, case
        seen = [sample for report in reports for batch in report[case]["batches"] for sample in batch]
        assert len(seen) == count - left_out, case
        assert [len(report[case]["batches"]) for report in reports] == [steps] * size, case


def test_no_sample_twice_in_an_epoch(results):
    _, reports = results
    for case in reports[0]:
        repeats = 2 if "epochs" in case else 1
        seen = collections.Counter(
            s for report in reports for batch in report[case]["batches"] for s in batch
        )
        assert max(seen.values()) <= repeats, (case, seen)


def test_epochs_end_one_after_the_other(results):
    size, reports = results
    # 12 samples are whole steps on every tested number of ranks, so the first epoch ends with a step.
    steps = 12 // (size * BATCH)
    for case in ("epochs-12", "epochs_of_unknown_size-12"):
        for part in (slice(0, steps), slice(steps, 2 * steps)):
            seen = [s for report in reports for batch in report[case]["batches"][part] for s in batch]
            assert sorted(seen) == list(range(12)), case


def test_number_left_out_is_logged_once_by_rank_0(results):
    size, reports = results
    for case in reports[0]:
        count = int(case.split("-")[1]) * (2 if "epochs" in case else 1)
        left_out = _expected(count, size)[1]
        said = [[line for line in report[case]["messages"] if "left out" in line] for report in reports]
        assert [len(lines) for lines in said] == [1 if left_out else 0] + [0] * (size - 1), case
        if left_out:
            assert said[0][0].startswith(f"{left_out} sample"), said


def test_shuffled_order_is_not_the_plain_one(results):
    _, reports = results
    for case in ("epochs-12", "badly_seeded-12"):
        first = [s for batch in reports[0][case]["batches"] for s in batch]
        assert first != sorted(first), case


@pytest.mark.parametrize("kind", ["arrays", "filtered"])
def test_fewer_samples_than_ranks_is_one_clear_error(kind, tmp_path):
    job = run_forked("too_few.py", 3, kind, report_dir=tmp_path, timeout_s=180)
    assert job.status != 0
    assert job.reports == []
    assert job.output.count("training_dataset: it has 2 samples for 3 ranks") == 1, job.output
    assert "fewer ranks" in job.output
    assert "Traceback" not in job.output
