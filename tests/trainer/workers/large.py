"""Trains on large arrays given in the way named by the first argument; reports what that cost in memory and on disk."""

import os
import resource
import sys

import numpy as np
import tensorflow.compat.v1 as tf
from tools import RANK, report

import trainer

WAY, DIRECTORY = sys.argv[1], sys.argv[2]
MB = 1 << 20
STEPS, BATCH = 2, 2


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def build(x, y):
    w = tf.get_variable("w", [1], initializer=tf.ones_initializer())
    rows = tf.cast(x[:, :4], tf.float32)
    loss = tf.reduce_mean(tf.square(rows * w - tf.cast(y, tf.float32)[:, tf.newaxis]))
    return w, loss, {"loss": loss, "first": rows[0, 0], "label": y[0]}


def dataset():
    rows = {"slices": 200, "shared": 200, "arrays": 200, "over_2_gb": 2200}[WAY]
    if WAY == "over_2_gb":
        # Pages that nobody writes take no memory, and TensorFlow takes over as it is what begins at a multiple of 64.
        pages = np.zeros(rows * MB + 64, np.uint8)
        start = -pages.ctypes.data % 64
        features = pages[start : start + rows * MB].reshape(rows, MB)
    else:
        features = np.full([rows, MB], 7, np.uint8)
    labels = np.arange(rows)
    if WAY in ("slices", "shared"):
        made = tf.data.Dataset.from_tensor_slices((features, labels))
        if WAY == "shared":
            tf.data.make_initializable_iterator(made.take(1))
        return features.nbytes, features, made
    return features.nbytes, features, trainer.data.from_arrays(features, labels)


class Logged(tf.train.SessionRunHook):
    def __init__(self):
        self.values = []

    def begin(self):
        self._wanted = tf.get_collection("logged")

    def before_run(self, run_context):
        return tf.train.SessionRunArgs(self._wanted)

    def after_run(self, run_context, run_values):
        self.values.append([float(value) for value in run_values.results])


def noting_build(x, y):
    network, loss, logged = build(x, y)
    tf.add_to_collection("logged", tf.identity(logged["first"]))
    tf.add_to_collection("logged", tf.identity(logged["label"]))
    return network, loss, logged


tf.disable_eager_execution()
size, features, made = dataset()
at_start, logged = peak_bytes(), Logged()
job = trainer.Trainer(
    made,
    noting_build,
    tf.train.GradientDescentOptimizer,
    {"learning_rate": 0.0},
    batch_size=BATCH,
    max_iteration=STEPS * int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")),
    checkpoint_dir=DIRECTORY,
    save_checkpoint_steps=1,
    hooks=[logged],
    log_step_size=100,
)
job.train_to_end()
job.close()
files = {}
if RANK == 0:
    files = {name: os.path.getsize(os.path.join(DIRECTORY, name)) for name in os.listdir(DIRECTORY)}
report(
    size=size,
    multiple=(peak_bytes() - at_start) / size,
    peak=peak_bytes(),
    values=logged.values,
    steps=job.global_step,
    files=files,
    unchanged=bool(features[0, 0] == (0 if WAY == "over_2_gb" else 7)),
)
