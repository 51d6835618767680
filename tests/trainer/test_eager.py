"""Beside eager execution: nothing of TensorFlow's is switched, what is eager is refused, and graphs are trained."""

import json

import pytest

from tests.trainer.forks import run_worker

REMEDIES = ("with tf.Graph().as_default():", "tf.compat.v1.disable_eager_execution()")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    directory = tmp_path_factory.mktemp("eager")
    done = run_worker("eager.py", 1, directory, report_dir=directory, is_fresh=True)
    return directory, done.reports[0]


def test_importing_and_training_switch_nothing(job):
    _, report = job
    assert report["before"][0] is True
    assert report["after"] == report["before"]
    assert report["still"]


@pytest.mark.parametrize(
    ("what", "kind", "texts"),
    [
        ("arrays", "ValueError", ("from_arrays: called while TensorFlow", "executes eagerly", *REMEDIES)),
        ("trainer", "ValueError", ("Trainer: called while TensorFlow", "executes eagerly", *REMEDIES)),
        ("dataset", "ValueError", ("training_dataset: it was made while TensorFlow", *REMEDIES)),
        ("keras_optimizer", "TypeError", ("optimizer: got SGD", "tf.train.Optimizer")),
    ],
)
def test_refused_before_mpi_starts(job, what, kind, texts):
    name, text, horovod_is_imported = job[1]["refused"][what]
    assert name == kind
    assert all(part in text for part in texts), text
    assert not horovod_is_imported


def test_model_or_variable_made_eagerly_is_refused(job):
    for name, text, _ in job[1]["made_eagerly"]:
        assert name == "ValueError"
        assert text.startswith(
            "build_training_func: it uses a tensor, variable or model that was made outside"
        )


def test_training_driven_from_outside_its_graph(job):
    directory, report = job
    assert report["from_outside"] == {"steps": 6, "samples": list(range(12)), "validated": pytest.approx(5.5)}
    names = {path.name for path in (directory / "checkpoints").iterdir()}
    assert {f"model.ckpt-{step}.index" for step in (2, 4, 6)} <= names
    lines = [json.loads(line) for line in (directory / "metrics" / "metrics.jsonl").read_text().splitlines()]
    assert [line["learning_rate"] for line in lines] == pytest.approx([0.01] * 6)


def test_order_is_kept_where_the_user_allows_any(job):
    assert job[1]["unordered"] == list(range(12))
