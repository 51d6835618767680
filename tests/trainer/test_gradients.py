"""What several ranks compute is what one would, and the learning rate is scaled once."""

import numpy as np
import pytest

from tests.trainer.launch import run_worker

# 12 samples a step on each number of ranks.
BATCHES = {1: 12, 2: 6, 3: 4}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Number of ranks -> the ranks' reports."""
    return {
        size: run_worker("gradients.py", size, batch, report_dir=tmp_path_factory.mktemp("gradients")).reports
        for size, batch in BATCHES.items()
    }


@pytest.mark.parametrize("case", ["whole", "uneven"])
@pytest.mark.parametrize("size", [2, 3])
def test_weights_equal_those_of_one_rank_on_the_union_batch(reports, size, case):
    alone = reports[1][0][case]
    for report in reports[size]:
        assert report[case]["steps"] == alone["steps"] == 2
        for got, expected in zip(report[case]["weights"], alone["weights"]):
            assert np.abs(expected).max() > 0.01
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_hold_the_same_weights(reports, size):
    for case in ("whole", "uneven", "fp16", "limited"):
        assert all(
            report[case]["weights"] == reports[size][0][case]["weights"] for report in reports[size]
        ), case


def test_fp16_compression_rounds_gradients(reports):
    exact, rounded = (np.concatenate(reports[2][0][case]["weights"]) for case in ("whole", "fp16"))
    assert 0 < np.abs(exact - rounded).max() < 1e-3


@pytest.mark.parametrize(("size", "steps"), [(1, 4), (2, 3), (3, 2)])
def test_max_iteration_counts_minibatches_of_all_ranks(reports, size, steps):
    # 7 mini-batches are 7, 3 and 2 steps; the data is enough for 4.
    assert [report["limited"]["steps"] for report in reports[size]] == [steps] * size


@pytest.mark.parametrize("size", [1, 2, 3])
def test_learning_rate_is_scaled_once_and_the_dict_untouched(reports, size):
    for report in reports[size]:
        assert report["scaled"]["rates"] == pytest.approx([0.1 * size] * 2)
        assert report["scaled"]["arguments"] == {"learning_rate": 0.1}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_batch_normalisation_is_updated_each_step(reports, size):
    # The mean of ones, with momentum 0.5 from 0: 0.5 after one step, 0.75 after two.
    for report in reports[size]:
        assert report["moving_means"] == {"tf": [0.75] * 3, "keras": [0.75] * 3}
