"""kill -9 at random moments: training goes on from the last complete checkpoint, and none is ever unreadable.

RINGMASTER_KILLS=n kills n times; RINGMASTER_KILLS_UNFORKED=1 starts every rank as a process of its own.
"""

import contextlib
import json
import os
import random
import re
import signal
import sys
import time

import pytest
import tensorflow.compat.v1 as tf

from tests.trainer.forks import fork_server, start, wait
from tests.trainer.launch import WORKERS

COUNT, BATCH = 60, 2
KILLS = int(os.environ.get("RINGMASTER_KILLS", "20"))
IS_UNFORKED = os.environ.get("RINGMASTER_KILLS_UNFORKED") == "1"
SAVINGS = ({"save_checkpoint_steps": 1}, {"save_checkpoint_steps": 2}, {"save_checkpoint_secs": 0.03})
# For what takes seconds: a busy machine may need many times that.
END_S, STEP_S = 120, 180


def _notes(path):
    """The complete lines of a rank's notes as one dict each."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(True) if line.endswith("\n")]


def _has(path, key):
    return any(key in note for note in _notes(path))


def _until(condition, process, timeout_s):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "nothing happened"
        assert process.poll() is None, "the job ended by itself"
        time.sleep(0.003)


def _is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _kill(process, pids, victim, chance):
    if victim == "mpirun":
        os.killpg(process.pid, signal.SIGKILL)
    for pid in {"rank": [chance.choice(pids)] if pids else [], "all": pids, "mpirun": []}[victim]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _end(process, pids):
    """Wait for the rest of a killed job."""
    wait(process, END_S)
    deadline_s = time.monotonic() + END_S
    while any(_is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline_s, "ranks outlived their killed job"
        time.sleep(0.01)


def _checkpoints(directory):
    """Step and stream position of every listed checkpoint, oldest first; each is read whole."""
    state = tf.train.get_checkpoint_state(str(directory)) if directory.exists() else None
    found = []
    for path in state.all_model_checkpoint_paths if state else ():
        reader = tf.train.load_checkpoint(path)
        values = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
        assert values["ballast"].shape == (2**18,)
        found.append((int(values["global_step"]), int(values["trainer/state"][0])))
        assert path.endswith(f"-{found[-1][0]}")
    return found


class Chain:
    """The runs of one training, each killed but the last, and what they say of the stream of samples."""

    def __init__(self, directory):
        self.directory = directory
        self.checkpoints = directory / "checkpoints"
        self.stream = {}  # position -> sample
        self.losses = {}  # step, position, ranks -> loss of rank 0
        self.repeated = 0
        self.start = (0, 0)

    def check(self, run, size):
        """Compare a run's notes with its checkpoint and with the runs before it; returns how many steps it made."""
        notes = [_notes(self.directory / f"{run}.{rank}") for rank in range(size)]
        starts = {note["started_at"] for lines in notes for note in lines if "started_at" in note}
        assert starts <= {self.start[0]}, (run, starts, self.start)
        steps = [[note for note in lines if "step" in note] for lines in notes]
        for number in range(min(map(len, steps))):
            step, position = self.start[0] + 1 + number, self.start[1] + number * size * BATCH
            for rank in range(size):
                note = steps[rank][number]
                assert note["step"] == step
                for index, sample in enumerate(note["samples"]):
                    place = position + index * size + rank
                    assert self.stream.setdefault(place, sample) == sample, (run, step)
            loss = steps[0][number]["loss"]
            key = (step, position, size)
            self.repeated += key in self.losses
            assert self.losses.setdefault(key, loss) == pytest.approx(loss, rel=1e-3), (run, step)
        return max(map(len, steps))


def _run_and_kill(chain, run, size, words, chance):
    """One run that is killed; returns a word on the moment."""
    victim = chance.choice(("rank", "rank", "all", "mpirun"))
    moment = chance.choice(("starting", "step", "time", "time"))
    arguments = [chain.directory, run, COUNT, "inf", json.dumps(chance.choice(SAVINGS))]
    paths = [chain.directory / f"{run}.{rank}" for rank in range(size)]
    with open(chain.directory / f"{run}.log", "w") as log:
        process = start([*words, str(WORKERS / "killed.py"), *map(str, arguments)], size, log)
    try:
        _until(lambda: all(_has(path, "pid") for path in paths), process, STEP_S)
        if moment == "starting":
            time.sleep(chance.uniform(0, 0.6))
        else:
            wanted = chance.randint(1, 12) if moment == "step" else 1
            _until(lambda: sum("step" in note for note in _notes(paths[0])) >= wanted, process, STEP_S)
        if moment == "time":
            time.sleep(chance.uniform(0, 0.3))
    finally:
        pids = [note["pid"] for path in paths for note in _notes(path) if "pid" in note]
        _kill(process, pids, victim, chance)
        _end(process, pids)
    assert process.returncode != 0, (chain.directory / f"{run}.log").read_text()
    return f"{victim} killed while {moment}"


def test_killed_again_and_again(tmp_path):
    seed = random.SystemRandom().randrange(2**32)
    chance, chain, report = random.Random(seed), Chain(tmp_path), []
    print("seed", seed)
    server = contextlib.nullcontext([sys.executable]) if IS_UNFORKED else fork_server(tmp_path)
    with server as words:
        for number in range(KILLS):
            size, run = chance.choice((1, 2, 2, 3)), f"run{number}"
            begun_s = time.monotonic()
            moment = _run_and_kill(chain, run, size, words, chance)
            made = chain.check(run, size)
            saved = _checkpoints(chain.checkpoints)
            names = (
                sorted(path.name for path in chain.checkpoints.iterdir())
                if chain.checkpoints.exists()
                else []
            )
            rests = [name for name in names if "temp" in name or ".tmp" in name or name.endswith(".new")]
            listed = {f"model.ckpt-{step}.index" for step, _ in saved}
            torn = [name for name in names if name.endswith(".index") and name not in listed]
            report.append(
                f"{run}: {size} ranks, {moment}, from {chain.start[0]}, {made} steps, {len(rests + torn)} rests, "
                f"{time.monotonic() - begun_s:.1f} s"
            )
            print(report[-1])
            assert (saved or [(0, 0)])[-1] >= chain.start, report
            chain.start = saved[-1] if saved else (0, 0)
        # The last run ends by itself: a few steps on.
        step, position = chain.start
        limit = position // BATCH + 2 * 10
        with open(tmp_path / "last.log", "w") as log:
            arguments = [tmp_path, "last", COUNT, limit, json.dumps(SAVINGS[0])]
            status = wait(start([*words, str(WORKERS / "killed.py"), *map(str, arguments)], 2, log), STEP_S)
        assert status == 0, (tmp_path / "last.log").read_text()
    assert chain.check("last", 2) == 10
    assert [_notes(tmp_path / f"last.{rank}")[-1] for rank in range(2)] == [{"ended_at": step + 10}] * 2
    # Every sample once in every epoch that the whole chain went through, in another order each time.
    stream = [chain.stream[place] for place in range(position + 40)]
    epochs = [stream[first : first + COUNT] for first in range(0, len(stream), COUNT)]
    for epoch in epochs[:-1]:
        assert sorted(epoch) == list(range(COUNT))
    assert len(set(epochs[-1])) == len(epochs[-1])
    print(
        f"{len(stream)} samples, {step + 10} steps, {chain.repeated} of them made again after a kill, all alike"
    )
    # What the kills left is gone, but for checkpoints that were finished a moment before and are not listed.
    names = {path.name for path in chain.checkpoints.iterdir() if "tfevents" not in path.name} - {
        "checkpoint",
        "trainer.lock",
    }
    for name in names:
        part = re.fullmatch(r"(model\.ckpt-\d+)\.(data-\d+-of-\d+|index|meta)", name)
        assert part, name
        assert part.group(1) + ".index" in names, name
