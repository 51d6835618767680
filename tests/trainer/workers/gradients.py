"""Trains small models for a few steps; reports weights, gradients, batch statistics and learning rates."""

import sys

import numpy as np
import tensorflow.compat.v1 as tf
from samples import numbered
from tools import SIZE, Recorder, report

import trainer

BATCH = int(sys.argv[1])


def value_of(job, tensors):
    return job.session.run_step_fn(lambda step_context: step_context.session.run(tensors))


def weights_of(job):
    values = value_of(job, tf.trainable_variables())
    return [np.asarray(value, np.float64).ravel().tolist() for value in values]


def several_terms(x, y):
    """A network with an embedding, and a loss of three terms."""
    # Random initial weights: they differ between ranks until rank 0's are broadcast.
    # Some rows come several times, in one rank and across ranks, and some never.
    row = tf.nn.embedding_lookup(tf.get_variable("table", [11, 4]), y * y % 11)
    hidden = tf.layers.dense(tf.concat([x, row], axis=1), 5, activation=tf.nn.tanh)
    value = tf.layers.dense(hidden, 1)[:, 0]
    kernels = [variable for variable in tf.trainable_variables() if "kernel" in variable.name]
    terms = [
        tf.reduce_mean(tf.squared_difference(value, tf.cast(y, tf.float32) / 10)),
        tf.losses.sparse_softmax_cross_entropy(y % 3, tf.layers.dense(hidden, 3)),
        0.01 * tf.add_n([tf.nn.l2_loss(kernel) for kernel in kernels]),
    ]
    return hidden, tf.add_n(terms), {"loss": terms[0]}


def recording(optimizer):
    """A class of optimizer that keeps the gradients it applies in a graph collection."""

    class Recording(optimizer):
        def apply_gradients(self, grads_and_vars, global_step=None, name=None):
            grads_and_vars = list(grads_and_vars)
            for gradient, variable in grads_and_vars:
                if isinstance(gradient, tf.IndexedSlices):
                    tf.add_to_collection("sparse", variable.op.name)
                tf.add_to_collection("gradients", tf.reshape(tf.convert_to_tensor(gradient), [-1]))
            return super().apply_gradients(grads_and_vars, global_step=global_step, name=name)

    return Recording


class Applied(tf.train.SessionRunHook):
    """Fetches the gradients of every step."""

    def __init__(self):
        self.gradients = []

    def before_run(self, run_context):
        return tf.train.SessionRunArgs(tf.get_collection("gradients"))

    def after_run(self, run_context, run_values):
        self.gradients.append([np.asarray(gradient, np.float64).tolist() for gradient in run_values.results])


def train(optimizer, arguments, **options):
    """Four steps, the last of which is not full; with the gradients that were applied."""
    with tf.Graph().as_default():
        applied = Applied()
        job = trainer.Trainer(
            trainer.data.from_arrays(*numbered(47)),
            several_terms,
            recording(optimizer),
            arguments,
            batch_size=BATCH,
            hooks=[applied],
            seed=3,
            scaling_learning_rate=False,
            **options,
        )
        job.train_to_end()
        return {
            "steps": job.global_step,
            "weights": weights_of(job),
            "gradients": applied.gradients,
            "sparse": tf.get_collection("sparse"),
        }


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


SGD = tf.train.GradientDescentOptimizer, {"learning_rate": 0.1}
report(
    sgd=train(*SGD),
    momentum=train(tf.train.MomentumOptimizer, {"learning_rate": 0.05, "momentum": 0.9}),
    adam=train(tf.train.AdamOptimizer, {"learning_rate": 0.01}),
    fp16=train(*SGD, gradient_compression="fp16", max_iteration=7),
    scaled=scaled_rates(),
    moving_means={layer: batch_normalised(layer) for layer in ("tf", "keras")},
)
