"""After kill -9 training goes on from the last checkpoint: same step, same loss, the samples that come next."""

import collections
import json

import pytest

from tests.trainer.forks import run_forked, run_worker

# Two epochs of 60 samples, batch 2; the checkpoint before the kill holds step 8, in the middle of an epoch.
COUNT, EPOCHS, KILL_AT, SAVED = 60, 2, 11, 8


def _steps(directory, size, kill_at):
    """Step -> per rank (loss, samples)."""
    steps = collections.defaultdict(list)
    for rank in range(size):
        path = directory / f"steps-{size}-{kill_at}-{rank}.txt"
        for line in path.read_text().splitlines() if path.exists() else []:
            step, loss, *samples = line.split()
            steps[int(step)].append((float(loss), [int(sample) for sample in samples]))
    return steps


def _samples(steps, first, last):
    return [s for step in range(first, last + 1) for _, samples in steps[step] for s in samples]


@pytest.mark.parametrize(("size", "new_size", "kind"), [(2, 2, "known"), (1, 2, "unknown"), (3, 2, "known")])
def test_kill_and_restart(size, new_size, kind, tmp_path):
    arguments = [tmp_path, COUNT, EPOCHS, kind]
    killed = run_forked("resume.py", size, *arguments, KILL_AT, report_dir=tmp_path)
    assert killed.status != 0
    assert killed.reports == []
    first = _steps(tmp_path, size, KILL_AT)
    assert max(first) == KILL_AT - 1

    job = run_worker("resume.py", new_size, *arguments, "never", report_dir=tmp_path)
    left = COUNT * EPOCHS - SAVED * 2 * size
    last = SAVED + -(-left // (2 * new_size))
    for report in job.reports:
        assert (report["started_at"], report["ended_at"]) == (SAVED, last)
        assert report["rate"] == pytest.approx(0.01 * new_size)
    second = _steps(tmp_path, new_size, "never")
    assert sorted(second) == list(range(SAVED + 1, last + 1))
    # What the checkpoint counts and what came after it are every sample of every epoch, once each.
    seen = _samples(first, 1, SAVED) + _samples(second, SAVED + 1, last)
    assert sorted(seen[:COUNT]) == list(range(COUNT))
    assert sorted(seen[COUNT:]) == list(range(COUNT))
    assert seen[:COUNT] != sorted(seen[:COUNT])
    if new_size == size:
        # The steps lost with the killed job are made again: same samples, same losses.
        for step in range(SAVED + 1, KILL_AT):
            for (loss, samples), (loss_before, samples_before) in zip(second[step], first[step]):
                assert samples == samples_before
                assert loss == pytest.approx(loss_before, rel=1e-5)

    names = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert f"model.ckpt-{last}.index" in names
    # One event file of each run: only rank 0 writes.
    assert len([name for name in names if name.startswith("events.")]) == 2


@pytest.mark.parametrize("kind", ["known", "unknown"])
def test_finished_job_ends_at_once(kind, tmp_path):
    # 13 samples: one is left out, and must not make a further step after the restart either.
    arguments = [tmp_path, 13, 1, kind, "never"]
    steps = []
    for expected in ((0, 3, False), (3, 3, True)):
        job = run_worker("resume.py", 2, *arguments, report_dir=tmp_path)
        for report in job.reports:
            assert (report["started_at"], report["ended_at"], report["finished_at_once"]) == expected
        steps.append(_samples(_steps(tmp_path, 2, "never"), 1, 3))
    assert len(steps[0]) == 12
    assert steps[1] == steps[0]


def test_limit_and_warmup_go_on_with_another_number_of_ranks(tmp_path):
    """1,003 mini-batches: 80 steps of 3 ranks, 381 of 2, nothing left to do for 3; the warm-up ends on the way."""
    runs = (
        # ranks, mini-batches, first step, last step, rate at the end
        (3, 242, 0, 80, 0.01 * 3 * (1 / 3 + (1 - 1 / 3) * 80 / 100)),
        (2, 1003, 80, 80 + (1003 - 240) // 2, 0.01 * 2),
        (3, 1003, 461, 461, 0.01 * 3),
    )
    for size, limit, first, last, rate in runs:
        more = json.dumps({"max_iteration": limit, "warmup_steps": 100, "save_checkpoint_steps": 1000})
        arguments = [tmp_path, 60, 100, "known", "never", more]
        job = run_worker("resume.py", size, *arguments, report_dir=tmp_path)
        for report in job.reports:
            assert (report["started_at"], report["ended_at"]) == (first, last)
            assert report["finished_at_once"] == (first == last)
            assert report["rate"] == pytest.approx(rate, rel=1e-5)
