"""Networks of Keras layers: statistics, frozen layers, seeds, penalties, and the same layers for validation."""

import numpy as np
import pytest

from tests.trainer.forks import run_worker


@pytest.fixture(scope="module", params=[1, 2])
def reports(request, tmp_path_factory):
    return run_worker(
        "keras_networks.py", request.param, report_dir=tmp_path_factory.mktemp("keras"), timeout_s=200
    ).reports


def test_statistics_of_every_kind_of_model(reports):
    assert len(reports[0]["models"]) == 8
    for report in reports:
        for kind, result in report["models"].items():
            assert result["means"] == [[0.75] * 3], kind
            assert result["warned"] == [], kind
            assert result["weights"] == reports[0]["models"][kind]["weights"], kind


def test_validation_uses_the_same_weights_and_their_statistics(reports):
    # After two steps on ones: mean 0.75 and variance 0.25, as their start is 0 and 1.
    normalised = (1 - 0.75) / np.sqrt(0.25 + 0.001)
    for report in reports:
        for kind, result in report["models"].items():
            kernel = next(weights for weights in result["weights"] if set(weights) not in ({0.0}, {1.0}))
            assert result["validated"] == pytest.approx([normalised * sum(kernel)], rel=1e-4), kind


def test_layer_called_twice_is_updated_twice(reports):
    for report in reports:
        (mean,) = report["called_twice"]["means"]
        # One after the other 0.75, side by side 1; once it would be 0.5.
        assert all(0.7 < value < 1.05 for value in mean), mean


def test_learning_phase(reports):
    for rank, report in enumerate(reports):
        assert report["phase_set"]["means"] == [[0.75] * 3]
        assert report["phase_set"]["warned"] == []
        assert report["phase_unset"]["means"] == [[0.0] * 3]
        # Rank 0 alone says so.
        assert len(report["phase_unset"]["warned"]) == (1 if rank == 0 else 0)


def test_frozen_layer_stays_as_it_is(reports):
    for report in reports:
        assert report["frozen"]["means"] == [[0.0] * 3]
        assert {name.split("/")[-1] for name in report["frozen"]["moved"]} == {"kernel:0", "bias:0"}


def test_seed_reaches_the_initial_weights(reports):
    for report in reports:
        first, again, other = report["seeded"]
        assert first["initial"] == again["initial"]
        assert first["weights"] == again["weights"]
        assert first["initial"] != other["initial"]
        assert first["initial"] == reports[0]["seeded"][0]["initial"]


def test_penalty_of_a_layer(reports):
    # The gradient of 0.5 * w * w is w: two steps of rate 0.1 leave 0.9 * 0.9 of it.
    for report in reports:
        assert report["regularised"] == pytest.approx([0.81] * 3)
