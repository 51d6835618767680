"""What every contender shares: arguments, data, model, and the clock; so that only the training loop differs."""

import argparse
import json
import os
import resource
import sys
import time

_BEGAN_S = time.time()

# The checkout, so that `import trainer` and `import trainer.datasets` find it.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import numpy as np  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

if tf.executing_eagerly():
    tf.disable_eager_execution()

_IMPORTED_S = time.time()

from trainer.ranks import choose_cycle_time  # noqa: E402

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))
SIZE = int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1))
SEED = 1
LOG_STEPS = 100
VALIDATE_STEPS = 50  # the default of train_and_validate_to_end, there and here
HELD_OUT = 1000


def arguments():
    """Parse what the benchmark passes: the model, batch size, number of steps and where to report to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=sorted(MODELS), required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--report-dir", required=True)
    parser.add_argument("--drive", choices=("loop", "helper"), default="loop")
    parser.add_argument("--one-core", action="store_true", help="rank r keeps to core r")
    parser.add_argument("--trace", action="store_true", help="trace steps after the warm-up")
    options = parser.parse_args()
    if options.one_core:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[RANK]})
    os.makedirs(options.report_dir, exist_ok=True)
    # What the Trainer chooses, so that only the loops differ; it leaves it to the user's HOROVOD_CYCLE_TIME.
    choose_cycle_time()
    return options


def arrays(options):
    """Return MNIST's training set, or random pictures for the augmented model: uint8 [n, h, w(, 3)] and int64 [n]."""
    from trainer import datasets

    if options.model == "augmented":
        source = np.random.RandomState(SEED)
        return source.randint(0, 256, (10000, 32, 32, 3)).astype(np.uint8), source.randint(0, 10, 10000)
    digits = datasets.load_training(options.data_dir)
    return digits.images, digits.labels


def mapped(model, dataset):
    """Apply the input map of a model: for the augmented one what examples/cifar10.py does to a picture."""
    return dataset.map(_augment, num_parallel_calls=4) if model == "augmented" else dataset


def _augment(image, label):
    x = tf.random_crop(
        tf.image.resize_image_with_crop_or_pad(tf.cast(image, tf.float32), 40, 40), [32, 32, 3]
    )
    x = tf.image.random_flip_left_right(x)
    x = tf.image.random_contrast(tf.image.random_brightness(x, 25), 0.8, 1.2)
    return tf.image.per_image_standardization(x), label


def _mlp(images):
    """Two hidden layers of 800 with dropout: TensorLayer's own distributed MNIST example has this shape."""
    x = tf.reshape(tf.cast(images, tf.float32) / 255, [-1, 784])
    for _ in range(2):
        x = tf.layers.dropout(tf.layers.dense(x, 800, activation=tf.nn.relu), 0.5, training=True)
    return tf.layers.dense(x, 10)


def _cnn(images):
    """The network of examples/mnist.py."""
    x = tf.cast(images, tf.float32)[..., tf.newaxis] / 255
    x = tf.layers.conv2d(x, 16, 5, strides=2, padding="same", activation=tf.nn.relu)
    x = tf.layers.conv2d(x, 32, 3, strides=2, padding="same", activation=tf.nn.relu)
    x = tf.layers.dense(tf.layers.flatten(x), 128, activation=tf.nn.relu)
    return tf.layers.dense(x, 10)


def _augmented(images):
    """Two convolutions: the input costs about as much as the network."""
    x = tf.layers.conv2d(images, 16, 5, strides=2, padding="same", activation=tf.nn.relu)
    x = tf.layers.conv2d(x, 32, 3, strides=2, padding="same", activation=tf.nn.relu)
    return tf.layers.dense(tf.layers.flatten(x), 10)


def _linear(images):
    """Almost nothing to compute: a step of it is what the loop itself costs."""
    return tf.layers.dense(tf.reshape(tf.cast(images, tf.float32) / 255, [-1, 784]), 10)


MODELS = {"augmented": _augmented, "cnn": _cnn, "linear": _linear, "mlp": _mlp}


def build(model):
    """Return the function that builds network, loss and log tensors for a batch."""

    def build_training(images, labels):
        logits, loss = _logits_and_loss(model, images, labels)
        return logits, loss, {"loss": loss}

    return build_training


def build_validation(model):
    """Return the function that builds network and metrics of the held-out images, on the same variables."""

    def build(images, labels):
        logits, loss = _logits_and_loss(model, images, labels)
        return logits, [loss]

    return build


def _logits_and_loss(model, images, labels):
    with tf.variable_scope("net", reuse=tf.AUTO_REUSE):
        logits = MODELS[model](images)
    return logits, tf.losses.sparse_softmax_cross_entropy(labels, logits)


class Clock:
    """Notes when each step ended, and reports at the end."""

    def __init__(self, options):
        self._directory = options.report_dir
        self._ended_s = []

    def step_done(self):
        """Call it after every step."""
        self._ended_s.append(time.time())

    def watch(self, job):
        """Take the time of every step that `job` makes by itself."""
        make_step = job.train_on_batch

        def timed():
            make_step()
            self.step_done()

        job.train_on_batch = timed

    def report(self):
        """Write this rank's times (seconds since the epoch) and its peak memory (bytes)."""
        record = {
            "began_s": _BEGAN_S,
            "imported_s": _IMPORTED_S,
            "ended_s": self._ended_s,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "cpu_s": time.process_time(),
        }
        with open(os.path.join(self._directory, f"rank{RANK}.json"), "w") as target:
            json.dump(record, target)


def trace(session, name, options, steps=5):
    """Run the operation `name` traced, and leave what each step did: [name, kind, start, end] in microseconds."""
    train_op = session.graph.get_operation_by_name(name)
    kinds = {op.name: op.type for op in session.graph.get_operations()}
    traced = []
    for _ in range(steps):
        metadata = tf.RunMetadata()
        session.run(train_op, None, tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), metadata)
        rows = []
        for device in metadata.step_stats.dev_stats:
            for node in device.node_stats:
                name = node.node_name.split(":")[0]
                start = node.all_start_micros
                rows.append([name, kinds.get(name, name), start, start + node.all_end_rel_micros])
        traced.append(rows)
    with open(os.path.join(options.report_dir, f"trace{RANK}.json"), "w") as target:
        json.dump(traced, target)
