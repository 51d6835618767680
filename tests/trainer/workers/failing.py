"""Fails on one rank in the middle of the training, in the way named by the argument."""

import os
import sys
import time

import tensorflow.compat.v1 as tf
from samples import numbered
from tools import RANK, SIZE, Recorder, report

import trainer

tf.disable_eager_execution()

WAY, AT_STEP = sys.argv[1], 3
# Another rank than the one that logs, where there is one.
FAILS = min(1, SIZE - 1) == RANK


def note():
    with open(os.path.join(os.environ["TRAINER_TEST_REPORTS"], "failed_at.txt"), "w") as file:
        file.write(str(time.time()))


def fail(*values):
    note()
    raise KeyError("the cause of it all")


class Failing(tf.train.SessionRunHook):
    def after_run(self, run_context, run_values):
        if len(recorder.batches) == AT_STEP:
            fail()


def build(x, y):
    w, loss, log = recorder.build(x, y)
    return w, tf.identity(loss, "the_loss"), log


def build_validation(x, y):
    if WAY == "validation" and FAILS:
        return w_and_metrics(tf.py_func(fail, [x], tf.float32))
    return w_and_metrics(tf.reduce_sum(x))


def w_and_metrics(value):
    return tf.constant(0.0), [tf.reshape(value, [])]


def mapped(x, y):
    # Every rank maps every sample, some steps before it is trained on.
    is_bad = tf.logical_and(tf.equal(y, 40 * SIZE), FAILS)
    fine = tf.cond(is_bad, lambda: tf.py_func(fail, [y], tf.float32), lambda: tf.constant(1.0))
    return x * tf.reshape(fine, []), y


features, labels = numbered(400)
if WAY == "nan":
    # A sample that step 3 deals to rank 1.
    features[2 * 2 * SIZE + 1] = float("nan")
recorder = Recorder()
dataset = trainer.data.from_arrays(features, labels)
hooks = {"hook": [Failing()], "nan": [tf.train.NanTensorHook("the_loss:0")]}.get(WAY) if FAILS else None
job = trainer.Trainer(
    (dataset.map(mapped) if WAY == "input" else dataset).repeat(),
    build,
    tf.train.GradientDescentOptimizer,
    {"learning_rate": 0.001},
    batch_size=2,
    log_step_size=100,
    hooks=hooks,
    validation_dataset=trainer.data.from_arrays(*numbered(5)),
    build_validation_func=build_validation,
)
for _ in range(AT_STEP):
    if FAILS and WAY == "nan":
        note()
    job.train_on_batch()
if WAY == "validation":
    job.validation_metrics  # noqa: B018
if FAILS and WAY in ("raise", "exit", "os_exit"):
    if WAY == "raise":
        fail()
    note()
    if WAY == "exit":
        sys.exit(3)
    os._exit(3)
job.train_to_end()
report(steps=job.global_step)
