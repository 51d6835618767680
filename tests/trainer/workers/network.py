"""What a user's network brings along: summaries, averages over the ranks, Keras layers; with checkpoints."""

import os
import sys

import horovod.tensorflow as hvd
import numpy as np
import tensorflow.compat.v1 as tf
from samples import numbered
from tools import RANK, Messages, report

import trainer

tf.disable_eager_execution()

DIRECTORY, BATCH, STEPS = sys.argv[1], 2, 4
keras_batches = []


def loss_of(x):
    with tf.variable_scope("linear", reuse=tf.AUTO_REUSE):
        w = tf.get_variable("w", [3, 1], initializer=tf.ones_initializer())
    loss = tf.reduce_mean(tf.square(tf.matmul(x, w)))
    tf.summary.scalar("the_loss", loss)
    return loss, w


def note(labels):
    keras_batches.append(labels.tolist())
    return np.float32(0)


def build(x, y):
    # Nothing but the summary needs the batch's labels: whoever writes it takes a batch.
    tf.summary.scalar("labels", tf.py_func(note, [y], tf.float32))
    loss, w = loss_of(x)
    return (
        w,
        loss,
        {"loss": hvd.allreduce(loss, op=hvd.Average), "mine": loss, "word": tf.constant("a"), "step": loss},
    )


def build_validation(x, y):
    loss, w = loss_of(x)
    return w, [loss]


def summarised():
    """The lines logged, the batches taken by summaries, and the tags of the events."""
    messages = Messages()
    job = trainer.Trainer(
        trainer.data.from_arrays(*numbered(64)).repeat(),
        build,
        tf.train.GradientDescentOptimizer,
        {"learning_rate": 0.01},
        batch_size=BATCH,
        checkpoint_dir=os.path.join(DIRECTORY, "checkpoints"),
        metrics_dir=os.path.join(DIRECTORY, "metrics"),
        max_iteration=STEPS * hvd_size(),
        validation_dataset=trainer.data.from_arrays(*numbered(5)),
        build_validation_func=build_validation,
    )
    step = tf.train.get_global_step()
    for _ in range(3):
        # The first step is one whose summaries are written; this is none.
        job.session.run(step)
    before = len(keras_batches)
    job.train_to_end()
    validated = [value for _, value in job.validation_metrics]
    job.close()
    return {
        "lines": list(messages.lines),
        "before": before,
        "after": len(keras_batches),
        "validated": validated,
    }


def hvd_size():
    return int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1))


def normalised_mean(kind):
    """The moving mean of a Keras layer; the network is a plain tensor, or the output of a model made before."""
    with tf.Graph().as_default():
        rows = np.ones((2 * BATCH * hvd_size(), 3), np.float32)

        layer = tf.keras.layers.BatchNormalization(momentum=0.5)
        # A model is made with a placeholder, which nothing feeds.
        model = tf.keras.Sequential([tf.keras.Input((3,)), layer]) if kind == "model" else layer

        def build_plain(x, y):
            out = model(x, training=True)
            loss = tf.reduce_mean(tf.square(out))
            return out, loss, [loss]

        job = trainer.Trainer(
            trainer.data.from_arrays(rows, np.zeros(len(rows), np.int64)),
            build_plain,
            tf.train.GradientDescentOptimizer,
            {"learning_rate": 0.0},
            batch_size=BATCH,
        )
        job.train_to_end()
        mean = next(variable for variable in tf.global_variables() if "moving_mean" in variable.name)
        return job.session.run_step_fn(lambda step_context: step_context.session.run(mean)).tolist()


def tags():
    directory = os.path.join(DIRECTORY, "checkpoints")
    names = [name for name in os.listdir(directory) if "tfevents" in name]
    events = [event for name in names for event in tf.train.summary_iterator(os.path.join(directory, name))]
    return sorted({value.tag for event in events for value in event.summary.value})


report(
    summarised=summarised(),
    means=[normalised_mean("tensor"), normalised_mean("model")],
    tags=tags() if RANK == 0 else None,
)
