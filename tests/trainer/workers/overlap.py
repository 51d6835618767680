"""Times steps whose input and computation both wait; reports the time of a step in either way of working."""

import time

import numpy as np
import tensorflow.compat.v1 as tf
from samples import numbered
from tools import SIZE, Recorder, report

import trainer

BATCH, STEPS, WAIT_S = 4, 30, 0.04


def wait(value, seconds):
    time.sleep(seconds)
    return value


def waiting(tensor, seconds):
    waited = tf.py_func(lambda value: wait(value, seconds), [tensor], tensor.dtype)
    waited.set_shape(tensor.shape)
    return waited


def mapped():
    """A map that waits so long that one batch of a rank takes WAIT_S; other ranks' samples must not pass it."""
    return trainer.data.from_arrays(*numbered(4096)).map(lambda x, y: (waiting(x, WAIT_S / BATCH), y))


def generated():
    """Samples that come one after the other, a batch for every rank in WAIT_S."""

    def generate():
        for x, y in zip(*numbered(4096)):
            time.sleep(WAIT_S / BATCH / SIZE)
            yield x, y

    return tf.data.Dataset.from_generator(generate, (tf.float32, tf.int64), ((3,), ()))


def step_s(make, prefetch_size):
    """Seconds of one step, start-up left out."""
    with tf.Graph().as_default():
        dataset = make()

        def build(x, y):
            return Recorder().build(waiting(x, WAIT_S), y)

        job = trainer.Trainer(
            dataset,
            build,
            tf.train.GradientDescentOptimizer,
            {"learning_rate": 0.01},
            batch_size=BATCH,
            prefetch_size=prefetch_size,
            log_step_size=1000,
        )
        times = []
        for _ in range(STEPS):
            started_s = time.monotonic()
            job.train_on_batch()
            times.append(time.monotonic() - started_s)
        job.close()
        return float(np.median(times[5:]))


report(
    mapped_s=step_s(mapped, 2),
    generated_s=step_s(generated, 2),
    generated_unprefetched_s=step_s(generated, 0),
    wait_s=WAIT_S,
)
