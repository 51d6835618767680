"""Training ends before its data does: all ranks stop at the same step, and the checkpoint of that step is there."""

import pytest
import tensorflow.compat.v1 as tf

from tests.trainer.forks import run_worker

STEPS = {
    "asked": 3,
    "asked_in_first_step": 1,
    "asked_in_last_step": 3,
    "one_rank_has_hooks": 4,
    "asked_between": 2,
    "asked_at_once": 0,
    "at_step": 5,
    "nan": 3,
}


@pytest.fixture(scope="module", params=[2, 3])
def job(request, tmp_path_factory):
    """Every case of the worker on one number of ranks: (directory, list of each rank's results)."""
    directory = tmp_path_factory.mktemp("early_stop")
    return directory, run_worker(
        "early_stop.py", request.param, directory, report_dir=directory, timeout_s=300
    ).reports


def _saved_step(path):
    return int(tf.train.load_checkpoint(tf.train.latest_checkpoint(str(path))).get_tensor("global_step"))


@pytest.mark.parametrize("case", [*STEPS, "time", "validated"])
def test_all_ranks_stop_at_the_same_step_and_save_it(case, job):
    directory, reports = job
    results = [report[case] for report in reports]
    assert results == results[:1] * len(results)
    steps = results[0]["steps"]
    if case in STEPS:
        assert steps == STEPS[case]
    assert results[0]["batches"] == steps
    name = "at_step" if case == "more_steps" else case
    assert _saved_step(directory / name) == (8 if case == "at_step" else steps)


def test_loop_left_after_validation_had_to_go_on_for_a_while(job):
    assert job[1][0]["validated"]["steps"] % 3 == 0


def test_stop_after_more_steps_counts_from_the_restart(job):
    assert [report["more_steps"] for report in job[1]] == [{"steps": 8, "batches": 3}] * len(job[1])


def test_variables_of_hooks_are_those_of_rank_0(job):
    assert [report["variable"]["value"] for report in job[1]] == [5.0] * len(job[1])


def test_variables_that_one_rank_has_alone_are_left_alone(job):
    values = [report["variable_of_one_rank"]["value"] for report in job[1]]
    assert values == [None] * (len(values) - 1) + [len(values) + 4.0]
    assert [report["variable_of_one_rank"]["steps"] for report in job[1]] == [2] * len(values)
