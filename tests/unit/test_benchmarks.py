"""What the speed benchmark makes of the times it is given."""

from dataclasses import replace

import pytest

from benchmarks import timeline, trainer_report
from benchmarks.contest import WARM_UP_STEPS
from benchmarks.trainer import Run, evaluated

RUN = Run("with_trainer", "cnn", 1, 4.0, 3.0, 10.0, 100.0, 300.0, 8.0)


def runs(**steps_ms):
    """One run on 1 and on 2 ranks of each contender with that step time; a smaller step means more samples/s."""
    return [
        replace(RUN, contender=name, ranks=ranks, step_ms=ms, samples_per_s=ranks * 1000 / ms)
        for name, ms in steps_ms.items()
        for ranks in (1, 2)
    ]


def verdicts(measured):
    return {what: is_met for what, _, _, is_met in trainer_report.goals(measured, "cnn")}


def test_the_warm_up_counts_for_the_first_step_only():
    # Slow while it warms up, then 4 steps of 10 ms; rank 1 makes its first step later.
    ended_s = [100.0 + step for step in range(WARM_UP_STEPS)]
    ended_s += [ended_s[-1] + 1 + 0.01 * step for step in range(5)]
    record = {"began_s": 98.0, "imported_s": 99.0, "ended_s": ended_s, "peak_bytes": 2e6, "cpu_s": 1.5}
    late = dict(record, ended_s=[100.5, *ended_s[1:]], peak_bytes=3e6)
    run = evaluated("by_hand", "cnn", 32, 97.0, [record, late])
    assert run.first_step_s == pytest.approx(3.5)
    assert run.import_s == pytest.approx(1.0)
    assert run.step_ms == pytest.approx(10.0, rel=1e-3)
    assert run.samples_per_s == pytest.approx(2 * 32 / 0.01, rel=1e-3)
    assert run.peak_mb == pytest.approx(3.0)
    assert run.cpu_s == pytest.approx(3.0)


def test_medians_are_taken_over_the_runs_of_one_kind():
    measured = [replace(RUN, step_ms=ms) for ms in (9.0, 30.0, 10.0)] + [replace(RUN, ranks=2, step_ms=1.0)]
    assert trainer_report.median(measured, "step_ms", ranks=1) == 10.0
    with pytest.raises(ValueError, match="no run with"):
        trainer_report.median(measured, "step_ms", ranks=3)


def test_goals_are_met_and_missed():
    fast = verdicts(runs(with_trainer=10.0, by_hand=10.0, with_tensorlayer=30.0))
    assert fast["step time / by hand, 2 rank(s)"]
    assert fast["samples/s / TensorLayer, 2 rank(s)"]
    assert not fast["time to first step / TensorLayer, 2 ranks"]
    slow = verdicts(runs(with_trainer=10.3, by_hand=10.0, with_tensorlayer=13.0))
    assert not slow["step time / by hand, 2 rank(s)"]
    assert not slow["samples/s / TensorLayer, 1 rank(s)"]


def test_tensorlayer_by_its_users_launch_line_has_a_goal_of_its_own():
    measured = runs(with_trainer=10.0, with_tensorlayer=20.0, with_tensorlayer_as_documented=26.0)
    found = verdicts(measured)
    assert not found["samples/s / TensorLayer, 2 rank(s)"]
    assert found["samples/s / TensorLayer by Horovod's launch line, 2 ranks"]


def test_a_missing_contender_has_no_goal():
    assert list(verdicts(runs(with_trainer=10.0))) == ["samples/s, 2 ranks / 1 rank on both cores"]


def test_spans_of_one_kind_are_merged_and_value_holders_left_out():
    rows = [
        ["matmul", "MatMul", 1000, 3000],
        ["matmul_1", "MatMul", 2000, 4000],
        ["relu", "Relu", 6000, 7000],
        ["hvd", "HorovodAllreduce", 4000, 9000],
        ["adam", "ApplyAdam", 9000, 9500],
        ["next", "IteratorGetNext", 500, 900],
        ["trainer/AssignAdd", "AssignAddVariableOp", 9600, 9700],
        ["w", "VariableV2", 0, 100],
    ]
    assert timeline.spans(rows) == {
        "input": [(0.5, 0.9)],
        "network": [(1.0, 4.0), (6.0, 7.0)],
        "allreduce": [(4.0, 9.0)],
        "optimizer": [(9.0, 9.5)],
        "bookkeeping": [(9.6, 9.7)],
    }
