"""Warm-up, seed, metrics and thread shares."""

import os
import sys

import tensorflow.compat.v1 as tf
from samples import numbered
from tools import RANK, SIZE, Recorder, report

import trainer
from trainer.ranks import cpu_threads

STEPS, BATCH = 6, 2
METRICS = sys.argv[1]


class Rates(tf.train.SessionRunHook):
    """Notes the learning rate of every step."""

    def __init__(self):
        self.values = []

    def before_run(self, run_context):
        return tf.train.SessionRunArgs(tf.get_collection("test_rate")[0])

    def after_run(self, run_context, run_values):
        self.values.append(float(run_values.results))


class Optimizer(tf.train.GradientDescentOptimizer):
    def __init__(self, learning_rate):
        # A copy, taken before the step: the tensor itself may be computed after the global step has changed.
        tf.add_to_collection("test_rate", learning_rate)
        super().__init__(learning_rate)


def train(**options):
    recorder, rates = Recorder(), Rates()
    count = STEPS * SIZE * BATCH
    with tf.Graph().as_default():
        job = trainer.Trainer(
            trainer.data.from_arrays(*numbered(count)).shuffle(count),
            recorder.build,
            Optimizer,
            {"learning_rate": 0.3},
            batch_size=BATCH,
            hooks=[rates],
            **options,
        )
        job.train_to_end()
        weights = job.session.run_step_fn(
            lambda step_context: step_context.session.run(tf.trainable_variables()[0])
        )
        job.close()
    return recorder.samples, weights.ravel().tolist(), rates.values


def tags_of(directory):
    path = next(os.path.join(directory, name) for name in os.listdir(directory) if "tfevents" in name)
    return sorted({value.tag for event in tf.train.summary_iterator(path) for value in event.summary.value})


samples, weights, rates = train(seed=5, warmup_steps=4, metrics_dir=METRICS, log_step_size=2)
samples_again, weights_again, epoch_rates = train(seed=5, warmup_epochs=4 / STEPS)
threads = [int(os.environ["OMP_NUM_THREADS"]), cpu_threads(SIZE)]
os.environ["OMP_NUM_THREADS"] = "7"
report(
    rates=rates,
    epoch_rates=epoch_rates,
    samples=samples,
    samples_again=samples_again,
    samples_unseeded=train()[0],
    weights=weights,
    weights_again=weights_again,
    threads=threads,
    share=max(1, len(os.sched_getaffinity(0)) // SIZE),
    own_threads=cpu_threads(SIZE),
    tags=tags_of(METRICS) if RANK == 0 else None,
)
