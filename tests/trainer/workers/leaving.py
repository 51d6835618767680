"""Ranks that do not do alike: one of them stops, leaves, fails inside a step, or loses its session."""

import os
import sys
import time

import tensorflow.compat.v1 as tf
from samples import numbered
from tools import RANK, Recorder, report

import trainer

tf.disable_eager_execution()

WAY, AT_STEP = sys.argv[1], 3


class Uneven(tf.train.SessionRunHook):
    """Rank 1 alone asks to stop, or meets an error after which TensorFlow makes the session anew."""

    def after_run(self, run_context, run_values):
        if RANK == 1 and len(recorder.batches) == AT_STEP:
            note()
            if WAY == "hook":
                run_context.request_stop()
            if WAY == "aborted":
                raise tf.errors.AbortedError(None, None, "as if a device had gone away")


def note():
    with open(os.path.join(os.environ["TRAINER_TEST_REPORTS"], "failed_at.txt"), "w") as file:
        file.write(str(time.time()))


def fail_inside(batches):
    if WAY == "inside" and RANK == 1 and len(batches) == AT_STEP:
        note()
        raise KeyError("the cause of it all")


recorder = Recorder(fail_inside)
job = trainer.Trainer(
    trainer.data.from_arrays(*numbered(64)).repeat(),
    recorder.build,
    tf.train.GradientDescentOptimizer,
    {"learning_rate": 0.01},
    batch_size=2,
    log_step_size=100,
    validation_dataset=trainer.data.from_arrays(*numbered(1)),
    build_validation_func=recorder.build_validation,
    hooks=[Uneven()] if WAY in ("hook", "aborted") else None,
)
while not job.session.should_stop():
    job.train_on_batch()
    if WAY in ("break", "validating") and RANK == 1 and job.global_step == AT_STEP:
        note()
        break
    if WAY == "validating" and job.global_step == AT_STEP:
        job.validation_metrics  # noqa: B018
if WAY not in ("break", "validating"):
    report(steps=job.global_step, batches=len(recorder.batches))
