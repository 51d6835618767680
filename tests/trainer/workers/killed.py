"""Trains with a checkpoint at every step or nearly so, until it is killed; notes every step before the next begins."""

import json
import os
import sys

import tensorflow.compat.v1 as tf
from samples import numbered
from tools import RANK, Recorder

import trainer

DIRECTORY, RUN, COUNT, LIMIT = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
SAVING = json.loads(sys.argv[5])

tf.disable_eager_execution()
# Small writes to one descriptor: a kill cuts nothing but the line under way.
log = os.open(os.path.join(DIRECTORY, f"{RUN}.{RANK}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def note(**values):
    os.write(log, (json.dumps(values) + "\n").encode())


class Steps(tf.train.SessionRunHook):
    """Notes step, loss and samples of every finished step."""

    def before_run(self, run_context):
        return tf.train.SessionRunArgs(tf.get_collection("test_loss")[0])

    def after_run(self, run_context, run_values):
        step = started_at + len(recorder.batches)
        note(step=step, loss=float(run_values.results), samples=recorder.batches[-1])


def build(x, y):
    w, loss, logged = recorder.build(x, y)
    tf.add_to_collection("test_loss", loss)
    # Something to write: a kill shall find checkpoints half written.
    tf.get_variable("ballast", [2**18], initializer=tf.random_uniform_initializer(), trainable=False)
    return w, loss, logged


note(pid=os.getpid())
recorder = Recorder()
job = trainer.Trainer(
    trainer.data.from_arrays(*numbered(COUNT)).shuffle(COUNT).repeat(),
    build,
    tf.train.MomentumOptimizer,
    {"learning_rate": 0.001, "momentum": 0.9},
    batch_size=2,
    checkpoint_dir=os.path.join(DIRECTORY, "checkpoints"),
    max_iteration=LIMIT,
    hooks=[Steps()],
    log_step_size=1000,
    **SAVING,
)
started_at = job.global_step
note(started_at=started_at)
job.train_to_end()
job.close()
note(ended_at=job.global_step)
