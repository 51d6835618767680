"""Trains networks of Keras layers, made in many ways, for two steps; reports what became of their statistics."""

import logging

import numpy as np
import tensorflow.compat.v1 as tf
from samples import numbered
from tools import SIZE, Messages, report

import trainer

BATCH = 2
keras = tf.keras


def normalise():
    return keras.layers.BatchNormalization(momentum=0.5)


def functional():
    inputs = keras.Input((3,))
    return keras.Model(inputs, keras.layers.Dense(1)(normalise()(inputs)))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.normalise, self.dense = normalise(), keras.layers.Dense(1)

    def call(self, inputs, training=None):
        return self.dense(self.normalise(inputs, training=training))


class Calls:
    """A model as a function that makes it anew, or takes one made before, at its first call."""

    def __init__(self, model=None):
        self.model = model

    def __call__(self, make, x, training):
        self.model = make() if self.model is None else self.model
        return self.model(x, training=training)


def sequential():
    return keras.Sequential([normalise(), keras.layers.Dense(1)])


def sequential_with_input():
    return keras.Sequential([keras.Input((3,)), normalise(), keras.layers.Dense(1)])


def value_of(job, tensors):
    return job.session.run_step_fn(lambda step_context: step_context.session.run(tensors))


def train(apply, rows=None, learning_rate=0.0, steps=2, seed=None):
    """Train `apply(x, training) -> tensor` and validate it.

    Returns:
        Moving means, weights before and after, trainable variables, validation metric, and the lines logged.
    """
    messages = Messages()
    # All ones: the moving mean is 0.5 after one step and 0.75 after two.
    rows = np.ones((steps * BATCH * SIZE, 3), np.float32) if rows is None else rows
    count = len(rows)

    def build(x, y):
        out = apply(x, True)
        loss = tf.reduce_mean(tf.square(out - 1.0))
        return out, loss, {"loss": loss}

    def build_validation(x, y):
        return None, [tf.reduce_mean(apply(x, False))]

    job = trainer.Trainer(
        trainer.data.from_arrays(rows, np.zeros(count, np.int64)),
        build,
        tf.train.GradientDescentOptimizer,
        {"learning_rate": learning_rate},
        batch_size=BATCH,
        validation_dataset=trainer.data.from_arrays(rows, np.zeros(count, np.int64)),
        build_validation_func=build_validation,
        seed=seed,
    )
    weights = [value.ravel().tolist() for value in value_of(job, tf.trainable_variables())]
    job.train_to_end()
    means = [variable for variable in tf.global_variables() if "moving_mean" in variable.name]
    result = {
        "means": [value.tolist() for value in value_of(job, means)],
        "initial": weights,
        "weights": [value.ravel().tolist() for value in value_of(job, tf.trainable_variables())],
        "validated": [value for _, value in job.validation_metrics],
        "warned": [line for line in messages.lines if "training=True" in line],
    }
    job.close()
    logging.getLogger("trainer").removeHandler(messages)
    return result


def model_in(make, made_before):
    """The results of a model that is made before the Trainer, or by the build function."""
    with tf.Graph().as_default():
        call = Calls(make() if made_before else None)
        result = train(lambda x, training: call(make, x, training))
        result["updates"] = len(call.model.updates) if hasattr(call.model, "updates") else None
        return result


def called_twice():
    """One layer on two inputs, both of which count."""
    with tf.Graph().as_default():
        layer = normalise()
        return train(lambda x, training: layer(x, training=training) + layer(x, training=training), steps=1)


def phase(is_set):
    """Without `training=`: what Keras's learning phase says."""
    with tf.Graph().as_default():
        layer = normalise()
        if is_set:
            keras.backend.set_learning_phase(1)
        w = tf.get_variable("w", [])
        return train(lambda x, training: layer(x) * w)


def frozen():
    """A layer that is not to be trained keeps its weights and statistics; the one after it is trained."""
    with tf.Graph().as_default():
        layer, dense = normalise(), keras.layers.Dense(1, kernel_initializer="ones")
        layer.trainable = False
        rows, _ = numbered(2 * BATCH * SIZE)
        result = train(lambda x, training: dense(layer(x, training=training)), rows, learning_rate=0.1)
        names = [variable.name for variable in tf.trainable_variables()]
        moved = [name for name, a, b in zip(names, result["initial"], result["weights"]) if a != b]
        return dict(result, moved=moved)


def seeded(seed):
    with tf.Graph().as_default():
        rows, _ = numbered(2 * BATCH * SIZE)
        call = Calls()
        return train(lambda x, training: call(sequential, x, training), rows, learning_rate=0.1, seed=seed)


def regularised():
    """The penalty that a layer asks for, added by the user as `layer.losses`: shrinks the weights alone."""
    with tf.Graph().as_default():
        dense = keras.layers.Dense(
            1, use_bias=False, kernel_initializer="ones", kernel_regularizer=keras.regularizers.l2(0.5)
        )

        def build(x, y):
            out = dense(x)
            loss = 0.0 * tf.reduce_mean(out) + tf.add_n(dense.losses)
            return out, loss, {"loss": loss}

        job = trainer.Trainer(
            trainer.data.from_arrays(*numbered(2 * BATCH * SIZE)),
            build,
            tf.train.GradientDescentOptimizer,
            {"learning_rate": 0.1},
            batch_size=BATCH,
            scaling_learning_rate=False,
        )
        job.train_to_end()
        return value_of(job, tf.trainable_variables()[0]).ravel().tolist()


MODELS = (functional, sequential, sequential_with_input, Subclassed)
report(
    models={
        f"{make.__name__} {'before' if before else 'within'}": model_in(make, before)
        for make in MODELS
        for before in (True, False)
    },
    called_twice=called_twice(),
    frozen=frozen(),
    phase_set=phase(True),
    phase_unset=phase(False),
    seeded=[seeded(5), seeded(5), seeded(6)],
    regularised=regularised(),
)
