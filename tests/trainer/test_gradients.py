"""What several ranks compute is what one would, and the learning rate is scaled once."""

import numpy as np
import pytest

from tests.trainer.forks import run_worker

# 12 samples a step on each number of ranks.
BATCHES = {1: 12, 2: 6, 3: 4, 4: 3}
SEVERAL = (2, 3, 4)
OPTIMIZERS = ("sgd", "momentum", "adam")


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Number of ranks -> the ranks' reports."""

    def of(size, batch):
        folder = tmp_path_factory.mktemp("gradients")
        # Eight Trainers each; where there are more ranks than cores, those that wait give way.
        yields = {"OMPI_MCA_mpi_yield_when_idle": "1"}
        return run_worker("gradients.py", size, batch, report_dir=folder, timeout_s=400, env=yields).reports

    return {size: of(size, batch) for size, batch in BATCHES.items()}


def flat(gradients):
    """Steps of gradients of variables -> [steps, weights]."""
    return np.array([np.concatenate(step) for step in gradients])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("size", SEVERAL)
def test_an_optimizer_is_given_the_gradients_of_the_union_batch(reports, size, optimizer):
    # Dense ones and an embedding's, of a loss of three terms. Every number of ranks deals the 11 samples of the last
    # step unevenly.
    alone = reports[1][0][optimizer]
    for report in reports[size]:
        assert report[optimizer]["sparse"] == alone["sparse"] == ["table"]
        assert report[optimizer]["steps"] == alone["steps"] == 4
        got, expected = (flat(each["gradients"]) for each in (report[optimizer], alone))
        assert all(np.abs(step).max() > 0.1 for step in expected)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("size", SEVERAL)
def test_an_optimizer_makes_the_weights_of_one_rank(reports, size, optimizer):
    alone = np.concatenate(reports[1][0][optimizer]["weights"])
    for report in reports[size]:
        np.testing.assert_allclose(np.concatenate(report[optimizer]["weights"]), alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", SEVERAL)
def test_ranks_hold_the_same_weights(reports, size):
    for case in (*OPTIMIZERS, "fp16"):
        assert all(
            report[case]["weights"] == reports[size][0][case]["weights"] for report in reports[size]
        ), case


@pytest.mark.parametrize("size", SEVERAL)
def test_fp16_compression_rounds_gradients(reports, size):
    # 11 bits each: for the share of every rank and for every sum of two.
    exact, rounded = (flat(reports[size][0][case]["gradients"])[0] for case in ("sgd", "fp16"))
    assert 0 < np.abs(exact - rounded).max() < 2 * size * 2**-11 * np.abs(exact).max()


def test_one_rank_sends_nothing_and_rounds_nothing(reports):
    np.testing.assert_array_equal(*(flat(reports[1][0][case]["gradients"]) for case in ("sgd", "fp16")))


@pytest.mark.parametrize(("size", "steps"), [(1, 4), (2, 3), (3, 2), (4, 1)])
def test_max_iteration_counts_minibatches_of_all_ranks(reports, size, steps):
    # 7 mini-batches are 7, 3, 2 and 1 steps; the data is enough for 4.
    assert [report["fp16"]["steps"] for report in reports[size]] == [steps] * size


@pytest.mark.parametrize("size", BATCHES)
def test_learning_rate_is_scaled_once_and_the_dict_untouched(reports, size):
    for report in reports[size]:
        assert report["scaled"]["rates"] == pytest.approx([0.1 * size] * 2)
        assert report["scaled"]["arguments"] == {"learning_rate": 0.1}


@pytest.mark.parametrize("size", BATCHES)
def test_batch_normalisation_is_updated_each_step(reports, size):
    # The mean of ones, with momentum 0.5 from 0: 0.5 after one step, 0.75 after two.
    for report in reports[size]:
        assert report["moving_means"] == {"tf": [0.75] * 3, "keras": [0.75] * 3}
