"""Train a small convolutional network on MNIST, on every rank that mpirun started.

    mpirun -np 2 python examples/mnist.py

Out of the box it uses the 10,000 images in examples/data: 8,000 to train, 2,000 held out to test. With `--data-dir`
it trains on the 60,000 training images found there and tests on the 10,000 test images.
"""

import argparse
import math
import os
import sys
import time

# So that `import trainer` works in a checkout, wherever the script is started.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import tensorflow.compat.v1 as tf

import trainer
from trainer import datasets

HERE = os.path.dirname(os.path.abspath(__file__))


def network(images, reuse):
    """Map images [n, 28, 28] of bytes to logits [n, 10]."""
    with tf.variable_scope("mnist", reuse=reuse):
        x = tf.cast(images, tf.float32)[..., tf.newaxis] / 255
        x = tf.layers.conv2d(x, 16, 5, strides=2, padding="same", activation=tf.nn.relu)
        x = tf.layers.conv2d(x, 32, 3, strides=2, padding="same", activation=tf.nn.relu)
        x = tf.layers.dense(tf.layers.flatten(x), 128, activation=tf.nn.relu)
        return tf.layers.dense(x, 10)


def accuracy(logits, labels):
    return tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), labels), tf.float32), name="accuracy")


def build_training(images, labels):
    """Return what the Trainer trains: the network, its loss, and what to log."""
    logits = network(images, reuse=False)
    loss = tf.losses.sparse_softmax_cross_entropy(labels, logits)
    return logits, loss, {"loss": loss, "accuracy": accuracy(logits, labels)}


def build_validation(images, labels):
    """Return the same network with the same weights, and the metrics to average over the held-out images."""
    logits = network(images, reuse=True)
    return logits, [accuracy(logits, labels), tf.losses.sparse_softmax_cross_entropy(labels, logits)]


def load(data_dir):
    """Return (training images, held-out images)."""
    if data_dir is None:
        return datasets.split(datasets.load_test(os.path.join(HERE, "data")))
    return datasets.load_training(data_dir), datasets.load_test(data_dir)


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--drive", choices=("end", "validate", "loop"), default="end", help="how to drive the Trainer")
    add("--data-dir", help="folder with the full MNIST set")
    add(
        "--download",
        action="store_true",
        help="fetch what --data-dir lacks (each host needs it; run once per host)",
    )
    add("--mirror", action="append", help="where to fetch it from: an address that ends with a slash")
    add("--epochs", type=int, help="default: 10, or 3 with the full set")
    add("--batch-size", type=int, default=32, help="images per rank and step (default: %(default)s)")
    add("--learning-rate", type=float, default=0.001, help="of one rank (default: %(default)s)")
    add("--max-steps", type=int, help="stop after so many steps of every rank")
    add("--log-steps", type=int, default=50, help="log every so many steps (default: %(default)s)")
    add("--checkpoint-dir", help="where rank 0 keeps checkpoints; training goes on from the last one")
    add("--checkpoint-steps", type=int, help="steps between checkpoints (default: one every 10 minutes)")
    add("--metrics-dir", help="where rank 0 writes metrics.jsonl and TensorBoard events")
    add("--seed", type=int, default=1, help="same seed, same result (default: %(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.download and arguments.data_dir is None:
        parser.error("--download needs --data-dir, the folder to put the files in")
    if arguments.epochs is None:
        arguments.epochs = 10 if arguments.data_dir is None else 3
    return arguments


def give_up(problem):
    """End the job with one line: the first rank of a host speaks, the others give it the time to."""
    if int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", 0)) > 0:
        time.sleep(5)
        sys.exit(1)
    sys.exit(f"{os.path.basename(sys.argv[0])}: {problem}")


def main():
    arguments = parse_arguments()
    try:
        if arguments.download:
            datasets.download(arguments.data_dir, arguments.mirror or datasets.MIRRORS)
        training, held_out = load(arguments.data_dir)
    except datasets.DatasetError as error:
        give_up(error)

    tf.disable_eager_execution()  # the Trainer builds graphs; TensorFlow 1 does so anyway
    ranks = int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1))
    dataset = trainer.data.from_arrays(training.images, training.labels)
    job = trainer.Trainer(
        training_dataset=dataset.shuffle(len(training), seed=arguments.seed).repeat(arguments.epochs),
        build_training_func=build_training,
        optimizer=tf.train.AdamOptimizer,
        optimizer_args={"learning_rate": arguments.learning_rate},
        batch_size=arguments.batch_size,
        checkpoint_dir=arguments.checkpoint_dir,
        log_step_size=arguments.log_steps,
        validation_dataset=trainer.data.from_arrays(held_out.images, held_out.labels),
        build_validation_func=build_validation,
        max_iteration=math.inf if arguments.max_steps is None else arguments.max_steps * ranks,
        metrics_dir=arguments.metrics_dir,
        seed=arguments.seed,
        save_checkpoint_steps=arguments.checkpoint_steps,
    )

    # The three ways to drive a Trainer.
    if arguments.drive == "end":
        job.train_to_end()
    elif arguments.drive == "validate":
        job.train_and_validate_to_end(validate_step_size=100)
    else:
        while not job.session.should_stop():
            job.train_on_batch()

    (_, test_accuracy), _ = job.validation_metrics
    if job.is_master:
        print(
            f"test accuracy {test_accuracy:.4f} on {len(held_out)} held-out images ({len(training)} "
            f"training images, {ranks} ranks)",
            flush=True,
        )


if __name__ == "__main__":
    main()
