"""Old scripts: either order of explicit reuse, exact batch normalisation, checkpoints of another program."""

import numpy as np
import pytest

from tests.trainer.launch import run_worker

ORDERS = ("training_first", "validation_first", "auto")
STEPS, BATCH = 2, 3


@pytest.fixture(scope="module", params=[1, 2])
def job(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("old")
    return run_worker("old_orders.py", request.param, directory, report_dir=directory)


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


@pytest.mark.parametrize("order", ORDERS)
def test_moving_mean_moves_once_a_step_and_not_in_validation(job, order):
    size = len(job.reports)
    for rank, report in enumerate(job.reports):
        got = report[order]
        assert got["after_validation"] == got["moving_mean"]
        # The first step's mean is exact: w is all ones. Its size bounds the second's, after one small change of w.
        mine = np.array(report["rows"])[rank::size]
        means = [mine[i * BATCH : (i + 1) * BATCH].sum(axis=1).mean() for i in range(STEPS)]
        expected = 0.9 * (0.1 * means[0]) + 0.1 * means[1]
        assert abs(expected) > 1e-3
        np.testing.assert_allclose(got["moving_mean"], [expected] * 4, rtol=0.05)


def test_checkpoint_of_another_program_goes_on(job):
    for report in job.reports:
        result = report["restored"]
        assert (result["started_at"], result["ended_at"], result["bias"]) == (5, 6, [7.0])
    said = [line for line in job.reports[0]["restored"]["messages"] if "written by another program" in line]
    assert len(said) == 1
