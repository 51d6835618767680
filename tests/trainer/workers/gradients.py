"""Trains small models for a few SGD steps; reports weights, batch statistics and learning rates."""

import sys

import numpy as np
import tensorflow as tf
from samples import numbered
from tools import SIZE, Recorder, report

import trainer

BATCH = int(sys.argv[1])


def value_of(job, tensors):
    return job.session.run_step_fn(lambda step_context: step_context.session.run(tensors))


def weights_of(job):
    values = value_of(job, tf.trainable_variables())
    return [np.asarray(value, np.float64).ravel().tolist() for value in values]


def two_layers(x, y):
    # Random initial weights: they differ between ranks until rank 0's are broadcast.
    hidden = tf.layers.dense(x, 5, activation=tf.nn.tanh)
    loss = tf.reduce_mean(
        tf.squared_difference(tf.layers.dense(hidden, 1)[:, 0], tf.cast(y, tf.float32) / 10)
    )
    return hidden, loss, {"loss": loss}


def train(count, steps=None, **options):
    with tf.Graph().as_default():
        job = trainer.Trainer(
            trainer.data.from_arrays(*numbered(count)),
            two_layers,
            tf.train.GradientDescentOptimizer,
            {"learning_rate": 0.1},
            batch_size=BATCH,
            scaling_learning_rate=False,
            seed=3,
            **options,
        )
        job.train_to_end()
        return {"steps": job.global_step, "weights": weights_of(job)}


class SteppingOptimizer(tf.train.GradientDescentOptimizer):
    """Keeps the learning rates it is made with."""

    given = []  # noqa: RUF012

    def __init__(self, learning_rate):
        self.given.append(learning_rate)
        super().__init__(learning_rate)


def scaled_rates():
    """The learning rate that training uses, for two Trainers made from one dict."""
    arguments, rates = {"learning_rate": 0.1}, []
    for _ in range(2):
        with tf.Graph().as_default():
            dataset = trainer.data.from_arrays(*numbered(SIZE))
            job = trainer.Trainer(dataset, Recorder().build, SteppingOptimizer, arguments, batch_size=1)
            rate = SteppingOptimizer.given[-1]
            rates.append(float(value_of(job, rate)))
    return {"rates": rates, "arguments": arguments}


def batch_normalised(layer):
    """The moving mean after two steps, with TensorFlow's or Keras's layer."""
    with tf.Graph().as_default():

        def build(x, y):
            if layer == "keras":
                inputs = tf.keras.Input(tensor=x)
                normalised = tf.keras.layers.BatchNormalization(momentum=0.5)(inputs, training=True)
                network = tf.keras.Model(inputs, normalised)
            else:
                network = normalised = tf.layers.batch_normalization(x, momentum=0.5, training=True)
            loss = tf.reduce_mean(tf.square(normalised))
            return network, loss, {"loss": loss}

        rows = np.ones((2 * BATCH * SIZE, 3), np.float32)
        job = trainer.Trainer(
            trainer.data.from_arrays(rows, np.zeros(len(rows), np.int64)),
            build,
            tf.train.GradientDescentOptimizer,
            {"learning_rate": 0.0},
            batch_size=BATCH,
        )
        job.train_to_end()
        mean = next(variable for variable in tf.global_variables() if "moving_mean" in variable.name)
        return value_of(job, mean).tolist()


report(
    whole=train(24),
    uneven=train(22),
    fp16=train(24, gradient_compression="fp16"),
    limited=train(48, max_iteration=7),
    scaled=scaled_rates(),
    moving_means={layer: batch_normalised(layer) for layer in ("tf", "keras")},
)
