"""Old scripts: either order of explicit reuse, exact batch normalisation, checkpoints of another program."""

import numpy as np
import pytest

from tests.trainer.forks import run_worker
from tests.trainer.workers.samples import numbered

ORDERS = ("training_first", "validation_first", "auto")
# The momentum of the batch normalisation in each network; TensorFlow's epsilon in all.
MOMENTUM = dict.fromkeys(ORDERS, 0.9)
MOMENTUM["keras"] = 0.8
EPSILON = 0.001
STEPS, BATCH, COLUMNS, VALIDATION_ROWS = 3, 3, 4, 5


@pytest.fixture(scope="module", params=[1, 2])
def job(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("old")
    return run_worker("old_orders.py", request.param, directory, report_dir=directory, timeout_s=240)


def expected_statistics(momentum, rank, size):
    """Mean and variance as `STEPS` training steps leave them: all columns see the sum of a row."""
    mine = numbered(STEPS * BATCH * size)[0].astype(np.float64).sum(axis=1)[rank::size]
    mean, variance = 0.0, 1.0
    for batch in mine.reshape(STEPS, BATCH):
        mean = momentum * mean + (1 - momentum) * batch.mean()
        variance = momentum * variance + (1 - momentum) * batch.var()
    return {"mean": mean, "variance": variance}


@pytest.mark.parametrize("order", ORDERS)
def test_networks_share_variables_in_either_order(job, order):
    for report in job.reports:
        assert report[order]["steps"] == STEPS
        assert report[order]["trained"] == [
            "mlp/normal/beta",
            "mlp/normal/gamma",
            "mlp/out/bias",
            "mlp/out/kernel",
            "mlp/w",
        ]
        assert report[order]["averages"] == job.reports[0][order]["averages"]


def test_reuse_of_what_nothing_makes_is_refused(job):
    for report in job.reports:
        assert report["refused"] is not None
        assert "mlp/" in report["refused"]


@pytest.mark.parametrize("network", list(MOMENTUM))
def test_statistics_are_updated_once_a_step_from_the_batches_of_the_rank(job, network):
    size = len(job.reports)
    for rank, report in enumerate(job.reports):
        expected = expected_statistics(MOMENTUM[network], rank, size)
        for name, value in expected.items():
            np.testing.assert_allclose(report[network]["statistics"][name], [value] * COLUMNS, atol=1e-5)


@pytest.mark.parametrize("network", list(MOMENTUM))
def test_validation_uses_the_statistics_and_leaves_them(job, network):
    size = len(job.reports)
    rows = numbered(VALIDATION_ROWS)[0].astype(np.float64).sum(axis=1)
    total = 0.0
    for rank, report in enumerate(job.reports):
        got = report[network]
        assert got["after_validation"] == got["statistics"]
        expected = expected_statistics(MOMENTUM[network], rank, size)
        total += ((rows[rank::size] - expected["mean"]) / np.sqrt(expected["variance"] + EPSILON)).sum()
    for report in job.reports:
        assert report[network]["averages"] == pytest.approx([COLUMNS * total / VALIDATION_ROWS], abs=1e-4)


@pytest.mark.parametrize("network", list(MOMENTUM))
def test_statistics_of_rank_0_are_saved(job, network):
    got = job.reports[0][network]
    assert got["saved"] == got["statistics"]
    for other in job.reports[1:]:
        assert other[network]["statistics"] != got["saved"]


def test_checkpoint_of_another_program_goes_on(job):
    for report in job.reports:
        result = report["restored"]
        assert (result["started_at"], result["ended_at"], result["bias"]) == (5, 6, [7.0])
    said = [line for line in job.reports[0]["restored"]["messages"] if "written by another program" in line]
    assert len(said) == 1
