"""Scripts with TensorLayer's layers train as they are, and go on from checkpoints of TensorLayer's own Trainer."""

import os

import numpy as np
import pytest

from tests.trainer.forks import run_worker
from tests.trainer.launch import ROOT
from tests.trainer.workers.samples import numbered

STEPS, BATCH, VALIDATION_ROWS, COLUMNS = 3, 4, 5, 16
DECAY, EPSILON = 0.7, 0.00001  # of the script's and of TensorLayer's BatchNormLayer
WAYS = ("loop", "to_end", "should_stop", "validating")
WEIGHTS = [
    "model/bn/beta",
    "model/bn/gamma",
    "model/conv/bias",
    "model/conv/kernel",
    "model/output/W",
    "model/output/b",
    "model/relu/W",
    "model/relu/b",
]


@pytest.fixture(scope="module")
def layers():
    folder = os.environ.get("RINGMASTER_TENSORLAYER")
    if folder:
        return folder
    reason = "RINGMASTER_TENSORLAYER names no folder with TensorLayer 1.11.1"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module", params=[1, 2, 3])
def reports(request, layers, tmp_path_factory):
    directory = tmp_path_factory.mktemp("tensorlayer")
    return run_worker(
        "tensorlayer_script.py",
        request.param,
        directory,
        report_dir=directory,
        timeout_s=240,
        is_fresh=True,
        env={"PYTHONPATH": f"{ROOT}{os.pathsep}{layers}"},
    ).reports


@pytest.mark.parametrize("way", WAYS)
def test_every_weight_is_trained(reports, way):
    for report in reports:
        result = report[way]
        assert result["steps"] == STEPS
        assert result["moved"] == WEIGHTS
        assert result["weights"] == reports[0][way]["weights"]


@pytest.mark.parametrize("way", WAYS)
def test_network_is_the_layer_that_the_script_returned(reports, way):
    for report in reports:
        assert report[way]["is_layer"]
        moving = ["model/bn/moving_mean", "model/bn/moving_variance"]
        assert sorted(report[way]["params"]) == sorted(WEIGHTS + moving)


@pytest.mark.parametrize("way", WAYS)
def test_metrics_of_validation(reports, way):
    for report in reports:
        (cost, cost_average), (accuracy, accuracy_average) = report[way]["validated"]
        assert "validate" in cost
        assert "validate_accuracy" in accuracy
        assert 0 < cost_average < 20
        # Of so many samples a whole number is right.
        right = accuracy_average * VALIDATION_ROWS
        assert right == pytest.approx(round(right), abs=1e-5)
        assert report[way]["validated"] == reports[0][way]["validated"]


# way, what every line on a step says
LOGGED = [
    ("loop", (", cost ", ", accuracy ")),
    ("to_end", (", train", ", train_accuracy ")),
    ("should_stop", (", train",)),
    ("validating", (", cost ", ", accuracy ")),
]


@pytest.mark.parametrize(("way", "words"), LOGGED, ids=[row[0] for row in LOGGED])
def test_log(reports, way, words):
    lines = [line for line in reports[0][way]["messages"] if f"/{STEPS}, " in line]
    assert len(lines) == STEPS
    assert all(word in line for word in words for line in lines)
    for other in reports[1:]:
        assert other[way]["messages"] == []


def test_validation_on_the_way_is_logged(reports):
    lines = [line for line in reports[0]["validating"]["messages"] if "validation: " in line]
    assert len(lines) == 1
    assert lines[0].startswith("step 2, ")


def _expected_statistics(rank, size):
    mine = numbered(STEPS * BATCH * size, COLUMNS)[0].astype(np.float64)[rank::size]
    mean, variance = np.zeros(COLUMNS), np.ones(COLUMNS)
    for batch in mine.reshape(STEPS, BATCH, COLUMNS):
        mean = DECAY * mean + (1 - DECAY) * batch.mean(axis=0)
        variance = DECAY * variance + (1 - DECAY) * batch.var(axis=0)
    return {"model/bn/moving_mean": mean, "model/bn/moving_variance": variance}


def test_statistics_are_updated_once_a_step(reports):
    for rank, report in enumerate(reports):
        for name, expected in _expected_statistics(rank, len(reports)).items():
            np.testing.assert_allclose(report["normalised"]["statistics"][name], expected, atol=1e-5)


def test_validation_uses_the_statistics_and_leaves_them(reports):
    rows = numbered(VALIDATION_ROWS, COLUMNS)[0].astype(np.float64)
    total = np.zeros(COLUMNS)
    for rank, report in enumerate(reports):
        got = report["normalised"]
        assert got["after_validation"] == got["statistics"]
        mean, variance = _expected_statistics(rank, len(reports)).values()
        total += ((rows[rank :: len(reports)] - mean) / np.sqrt(variance + EPSILON)).sum(axis=0)
    for report in reports:
        np.testing.assert_allclose(report["normalised"]["averages"], total / VALIDATION_ROWS, atol=1e-4)


def test_statistics_of_rank_0_are_saved(reports):
    assert reports[0]["normalised"]["saved"] == reports[0]["normalised"]["statistics"]
    for other in reports[1:]:
        assert other["normalised"]["statistics"] != reports[0]["normalised"]["saved"]


def test_checkpoint_of_their_trainer_goes_on(reports):
    saved = reports[0]["restored"]["saved"]
    assert saved["global_step"] == STEPS
    for report in reports:
        result = report["restored"]
        assert (result["started_at"], result["ended_at"]) == (STEPS, STEPS + 2)
        # Weights, statistics, and Adam's moments. Theirs makes gamma and beta in the validation, and never trains them.
        assert {name: result["values"][name] for name in saved} == saved
        assert {"model/conv/kernel/Adam_1", "model/bn/moving_variance"} < set(saved)
        anew = set(result["values"]) - set(saved)
        assert anew == {
            f"model/bn/{weight}/{kind}" for weight in ("beta", "gamma") for kind in ("Adam", "Adam_1")
        }
        assert all(set(result["values"][name]) == {0.0} for name in anew)
    said = [
        line for report in reports for line in report["restored"]["messages"] if "another program" in line
    ]
    assert len(said) == 1
    assert said[0].endswith("not trained so far: model/bn/beta, model/bn/gamma")
