"""Trains with checkpoints every 4 steps; with a kill step, rank 0 dies by SIGKILL in that step.

A last argument holds other arguments of the Trainer instead, as JSON.
"""

import json
import os
import signal
import sys
import time

import tensorflow.compat.v1 as tf
from samples import numbered
from tools import RANK, SIZE, Recorder, report

import trainer

tf.disable_eager_execution()

DIRECTORY, COUNT, EPOCHS, KIND, KILL_AT = (
    sys.argv[1],
    int(sys.argv[2]),
    int(sys.argv[3]),
    sys.argv[4],
    sys.argv[5],
)
LOG = os.path.join(DIRECTORY, f"steps-{SIZE}-{KILL_AT}-{RANK}.txt")


class Losses(tf.train.SessionRunHook):
    """Writes a line for every finished step: step, loss, sample numbers."""

    def before_run(self, run_context):
        return tf.train.SessionRunArgs(tf.get_collection("test_loss")[0])

    def after_run(self, run_context, run_values):
        with open(LOG, "a") as log:
            line = [recorder.start + len(recorder.batches), float(run_values.results), *recorder.batches[-1]]
            print(*line, file=log)


def die(batches):
    if RANK == 0 and KILL_AT != "never" and len(batches) == int(KILL_AT):
        os.kill(os.getpid(), signal.SIGKILL)


recorder = Recorder(die)


def build(x, y):
    w, loss, log = recorder.build(x, y)
    tf.add_to_collection("test_loss", loss)
    return w, loss, log


dataset = trainer.data.from_arrays(*numbered(COUNT))
if KIND == "unknown":
    dataset = dataset.filter(lambda x, y: y >= 0)
given = []


class Optimizer(tf.train.MomentumOptimizer):
    def __init__(self, learning_rate, momentum):
        given.append(learning_rate)
        super().__init__(learning_rate, momentum)


job = trainer.Trainer(
    dataset.shuffle(COUNT).repeat(EPOCHS),
    build,
    Optimizer,
    {"learning_rate": 0.01, "momentum": 0.9},
    batch_size=2,
    checkpoint_dir=os.path.join(DIRECTORY, "checkpoints"),
    hooks=[Losses()],
    **(json.loads(sys.argv[6]) if len(sys.argv) > 6 else {"save_checkpoint_steps": 4}),
)
recorder.start = started_at = job.global_step
finished_at_once = job.session.should_stop()
started_s = time.monotonic()
job.train_to_end()
rate = float(job.session.run_step_fn(lambda step_context: step_context.session.run(given[0])))
report(started_at=started_at, ended_at=job.global_step, finished_at_once=finished_at_once, rate=rate)
