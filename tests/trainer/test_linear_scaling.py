"""The linear scaling experiment, on few images: it chooses a rate, compares, keeps every run and makes none twice."""

import json
import sys

import pytest

from benchmarks import linear_scaling
from tests.trainer.launch import ROOT

# 500 images a set: 10 steps of one rank and 5 of two.
SIZE = ["--ranks", "2", "--batch-size", "50", "--epochs", "1", "--limit", "500"]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """The images the repository carries, under the names of both sets."""
    folder = tmp_path_factory.mktemp("mnist")
    for kind in ("images-idx3", "labels-idx1"):
        for name in ("t10k", "train"):
            (folder / f"{name}-{kind}-ubyte.gz").symlink_to(ROOT / "examples/data" / f"t10k-{kind}-ubyte.gz")
    return folder


def experiment(data_dir, results, *more):
    """Make the missing runs; return what is in the results file and what was noted."""
    arguments = ["--data-dir", str(data_dir), "--results", str(results), "--python", sys.executable]
    options, settings = linear_scaling.parse_arguments([*arguments, *SIZE, *more])
    notes = []
    kept = linear_scaling.load(results, settings)
    rate = linear_scaling.tune(kept, settings, options, notes.append)
    linear_scaling.compare(kept, settings, options, rate, notes.append)
    return json.loads(results.read_text()), notes


def test_runs_are_made_once_and_kept(data_dir, tmp_path):
    path = tmp_path / "results.json"
    more = ["--rates", "0.05", "--tuning-seeds", "1", "--seeds", "1", "--arms", "rule-warmup"]
    results, notes = experiment(data_dir, path, *more)
    (tuning,), (run,) = results["tuning"], results["runs"]
    assert (tuning["learning_rate"], tuning["ranks"], tuning["steps"]) == (0.05, 1, 10)
    assert (run["arm"], run["learning_rate"], run["ranks"], run["steps"]) == ("rule-warmup", 0.05, 2, 5)
    for each in (tuning, run):
        (epoch,) = each["curve"]
        # Better than guessing, after so few steps.
        assert 0.15 < epoch["accuracy"] < 1
        assert 0 < epoch["loss"] < 2.3
    assert [note.split(",")[0] for note in notes] == ["tuning", "rule-warmup"]
    assert experiment(data_dir, path, *more) == (results, [])
    with pytest.raises(linear_scaling.ExperimentError, match=r"made with the settings .* give another file"):
        experiment(data_dir, path, *more, "--momentum", "0.5")


def test_a_run_that_fails_says_what_it_said(data_dir, tmp_path):
    with pytest.raises(linear_scaling.ExperimentError) as failure:
        experiment(data_dir / "none", tmp_path / "results.json", "--rates", "0.05")
    assert "exited 1; expected exit 0 and a report" in str(failure.value)
    assert "none/train-images-idx3-ubyte.gz: no such file" in str(failure.value)
