"""One run of the linear scaling experiment, on every rank that mpirun started; `linear_scaling.py` starts it.

    mpirun -np 4 python benchmarks/linear_scaling_rank.py '{"data_dir": ..., "report": ...}'

It trains with momentum SGD and the schedule of arXiv 1706.02677 through the Trainer, looks at the held-out images after
each epoch, and rank 0 leaves the curve in the file `report`.
"""

import json
import math
import os
import sys
import time

# So that `import trainer` works in a checkout, wherever the script is started.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import tensorflow.compat.v1 as tf

import trainer
from trainer import datasets

SIZE = int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1))


def network(images):
    """Map images [n, 28, 28] of bytes to logits [n, 10]; 109,000 weights, no batch normalisation."""
    with tf.variable_scope("mnist", reuse=tf.AUTO_REUSE):
        x = tf.layers.flatten(tf.cast(images, tf.float32) / 255)
        x = tf.layers.dense(x, 128, activation=tf.nn.relu, name="hidden1")
        x = tf.layers.dense(x, 64, activation=tf.nn.relu, name="hidden2")
        return tf.layers.dense(x, 10, name="logits")


def build_training(images, labels):
    """Return the network, its loss, and what to log."""
    logits = network(images)
    loss = tf.losses.sparse_softmax_cross_entropy(labels, logits)
    return logits, loss, {"loss": loss}


def build_validation(images, labels):
    """Return the same network and its metrics on the held-out images."""
    logits = network(images)
    right = tf.cast(tf.equal(tf.argmax(logits, 1), labels), tf.float32)
    return logits, [right, tf.losses.sparse_softmax_cross_entropy(labels, logits)]


def load(task):
    """Return (training images, held-out images).

    With `held_out` the last so many training images are looked at instead of the test images, which then have no part
    in the choice of the learning rate. `limit` cuts both down, for a quick try.
    """
    training = datasets.load_training(task["data_dir"])
    if task["held_out"]:
        cut = len(training) - task["held_out"]
        held_out = datasets.Digits(training.images[cut:], training.labels[cut:])
        training = datasets.Digits(training.images[:cut], training.labels[:cut])
    else:
        held_out = datasets.load_test(task["data_dir"])
    limit = task["limit"] or len(training)
    return tuple(datasets.Digits(part.images[:limit], part.labels[:limit]) for part in (training, held_out))


def schedule(rate, epochs, steps_per_epoch):
    """Return the rate divided by 10 after 30, 60 and 80 of the paper's 90 epochs, or those parts of `epochs`."""
    boundaries = [round(epochs * part / 90 * steps_per_epoch) for part in (30, 60, 80)]
    step = tf.cast(tf.train.get_or_create_global_step(), tf.int32)
    return tf.train.piecewise_constant(step, boundaries, [rate, rate / 10, rate / 100, rate / 1000])


def finite(value):
    """Return the number, or None for NaN and infinity, which JSON lacks."""
    return float(value) if math.isfinite(value) else None


def main():
    tf.disable_eager_execution()  # no effect under TensorFlow 1.15, needed under 2
    task = json.loads(sys.argv[1])
    training, held_out = load(task)
    steps_per_epoch = len(training) // (SIZE * task["batch_size"])
    rate = schedule(task["learning_rate"], task["epochs"], steps_per_epoch)
    job = trainer.Trainer(
        trainer.data.from_arrays(training.images, training.labels)
        .shuffle(len(training))
        .repeat(task["epochs"]),
        build_training,
        tf.train.MomentumOptimizer,
        {"learning_rate": rate, "momentum": task["momentum"]},
        batch_size=task["batch_size"],
        scaling_learning_rate=task["is_scaled"],
        log_step_size=steps_per_epoch,
        validation_dataset=trainer.data.from_arrays(held_out.images, held_out.labels),
        build_validation_func=build_validation,
        warmup_epochs=task["warmup_epochs"] or None,
        seed=task["seed"],
    )
    curve, started_s = [], time.monotonic()
    while not job.session.should_stop():
        job.train_on_batch()
        if job.global_step % steps_per_epoch == 0:
            (_, accuracy), (_, loss) = job.validation_metrics
            curve.append({"accuracy": finite(accuracy), "loss": finite(loss)})
    if job.is_master:
        outcome = {"curve": curve, "steps": job.global_step, "ranks": SIZE, "tensorflow": tf.__version__}
        outcome["training_s"] = round(time.monotonic() - started_s, 1)
        with open(task["report"] + ".part", "w") as report:
            json.dump(outcome, report)
        os.rename(task["report"] + ".part", task["report"])


if __name__ == "__main__":
    main()
