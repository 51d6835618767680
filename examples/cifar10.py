"""Train a convolutional network with batch normalisation on CIFAR-10, on every rank that mpirun started.

    fab train --script examples/cifar10.py --np 2                                       # on drawn pictures
    fab train --script examples/cifar10.py --np 2 -- --data-dir /data/cifar10           # on CIFAR-10
    fab train --script examples/cifar10.py --np 2 -- --data-dir /data/cifar10 --download
    mpirun -np 2 python examples/cifar10.py                                             # without a cluster

Without `--data-dir` it draws a small set of its own: SYNTHETIC pictures of ten figures, which are not CIFAR-10; their
accuracy says that the training works, and nothing else. CIFAR-10's binary version is taken from a folder that holds
cifar-10-binary.tar.gz or what is in it; each host needs it.
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
from trainer.datasets import DatasetError, LabelledImages, cifar10, synthetic

SIDE, CROP = 32, 24  # pixels of an image, and of the part of it that the network sees
SHUFFLE = 10000  # images to choose the next one from
MAP_THREADS = 4
SYNTHETIC_SEED = 20091


def augment(place, image, seed):
    """Cut, mirror and recolour an image [32, 32, 3] of bytes at random; returns standardised floats [24, 24, 3].

    The random numbers depend on the seed and on the image's place in the stream of samples, and on nothing else. So
    every rank and every epoch has its own, and a restart has those that it would have had.
    """
    chance = tf.random.stateless_uniform([5], tf.stack([tf.constant(seed, tf.int64), place]))
    corner = tf.cast(chance[:2] * (SIDE - CROP + 1), tf.int32)
    image = tf.slice(image, [corner[0], corner[1], 0], [CROP, CROP, 3])
    image = tf.cond(chance[2] < 0.5, lambda: image, lambda: tf.image.flip_left_right(image))
    image = tf.cast(image, tf.float32) / 255
    # Cut off at black and white: the standardisation would undo what is linear.
    image = tf.clip_by_value(tf.image.adjust_brightness(image, 0.5 * chance[3] - 0.25), 0, 1)
    image = tf.clip_by_value(tf.image.adjust_contrast(image, 0.5 + chance[4]), 0, 1)
    return tf.image.per_image_standardization(image)


def plain(image):
    """Cut the middle out of an image [32, 32, 3] of bytes; returns standardised floats [24, 24, 3]."""
    edge = (SIDE - CROP) // 2
    image = tf.slice(image, [edge, edge, 0], [CROP, CROP, 3])
    return tf.image.per_image_standardization(tf.cast(image, tf.float32) / 255)


def training_stream(training, epochs, seed):
    """Return the dataset to train on: shuffled, repeated, and augmented on several threads.

    The Trainer deals it to the ranks, batches and prefetches it; a rank augments only the images it is dealt.
    """
    samples = trainer.data.from_arrays(training.images, training.labels)
    samples = samples.shuffle(min(SHUFFLE, len(training)), seed=seed).repeat(epochs)

    def prepare(place, sample):
        image, label = sample
        return augment(place, image, seed), label

    return samples.enumerate().map(prepare, num_parallel_calls=MAP_THREADS)


def validation_stream(held_out):
    samples = trainer.data.from_arrays(held_out.images, held_out.labels)

    def prepare(image, label):
        return plain(image), label

    return samples.map(prepare, num_parallel_calls=MAP_THREADS)


def network(images, is_training):
    """Map images [n, 24, 24, 3] to logits [n, 10]; training and validation share the weights."""
    with tf.variable_scope("cifar10", reuse=tf.AUTO_REUSE):
        x = images
        for number, channels in enumerate((32, 64, 96), 1):
            x = tf.layers.conv2d(x, channels, 3, padding="same", use_bias=False, name=f"conv{number}")
            # The Trainer runs the updates of its averages with every step.
            x = tf.layers.batch_normalization(x, training=is_training, momentum=0.9, name=f"norm{number}")
            x = tf.layers.max_pooling2d(tf.nn.relu(x), 2, 2)
        x = tf.layers.dense(tf.layers.flatten(x), 128, activation=tf.nn.relu, name="hidden")
        return tf.layers.dense(x, 10, name="logits")


def l2_of_chosen_weights():
    """Return the L2 term: of the dense layers' matrices, not of biases, convolutions or batch normalisation."""
    chosen = tf.trainable_variables("cifar10/(hidden|logits)/kernel")
    return tf.add_n([tf.nn.l2_loss(weights) for weights in chosen])


def measures(logits, labels):
    """Return (cross-entropy, accuracy) of a batch."""
    cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    is_right = tf.equal(tf.argmax(logits, 1), labels)
    return tf.reduce_mean(cross_entropy), tf.reduce_mean(tf.cast(is_right, tf.float32))


def build_training_func(l2):
    def build_training(images, labels):
        logits = network(images, is_training=True)
        cross_entropy, accuracy = measures(logits, labels)
        loss = cross_entropy + l2 * l2_of_chosen_weights()
        return logits, loss, {"loss": loss, "cross_entropy": cross_entropy, "accuracy": accuracy}

    return build_training


def build_validation(images, labels):
    logits = network(images, is_training=False)
    cross_entropy, accuracy = measures(logits, labels)
    return logits, [tf.identity(accuracy, "test_accuracy"), tf.identity(cross_entropy, "test_cross_entropy")]


def load(arguments):
    """Return (training images, held-out images, what they are)."""
    if arguments.data_dir is None:
        count = arguments.synthetic_images
        drawn = synthetic.pictures(count + max(10, count // 4), SYNTHETIC_SEED)
        parts = (slice(count), slice(count, None))
        training, held_out = (LabelledImages(drawn.images[part], drawn.labels[part]) for part in parts)
        return training, held_out, "SYNTHETIC pictures, not CIFAR-10"
    if arguments.download:
        cifar10.download(arguments.data_dir, arguments.mirror or cifar10.MIRRORS)
    training, held_out = cifar10.load(arguments.data_dir, is_verified=not arguments.unverified)
    return training, held_out, "unverified images" if arguments.unverified else "CIFAR-10"


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data-dir", help="folder with CIFAR-10's binary version, or its tar.gz file")
    add("--download", action="store_true", help="fetch it into --data-dir where it is missing")
    add("--mirror", action="append", help="where to fetch it from: an address that ends with a slash")
    add("--unverified", action="store_true", help="take other images in the same format, too")
    add("--synthetic-images", type=int, default=4000, help="training images drawn (default: %(default)s)")
    add("--epochs", type=int, help="default: 6, or 30 with --data-dir")
    add("--batch-size", type=int, default=32, help="images per rank and step (default: %(default)s)")
    add("--learning-rate", type=float, default=0.02, help="of one rank (default: %(default)s)")
    add("--warmup-epochs", type=float, default=0.5, help="to rise to all ranks' rate (default: %(default)s)")
    add("--l2", type=float, default=0.001, help="factor of the L2 term (default: %(default)s)")
    add("--max-steps", type=int, help="stop after so many steps of every rank")
    add("--log-steps", type=int, default=20, help="log every so many steps (default: %(default)s)")
    add("--validate-steps", type=int, help="validate every so many steps (default: once an epoch)")
    add("--checkpoint-dir", help="where rank 0 keeps checkpoints; training goes on from the last one")
    add("--checkpoint-steps", type=int, help="steps between checkpoints (default: one every 10 minutes)")
    add("--metrics-dir", help="where rank 0 writes metrics.jsonl and TensorBoard events")
    add("--seed", type=int, default=1, help="same seed, same result (default: %(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.download and (arguments.data_dir is None or os.path.isfile(arguments.data_dir)):
        parser.error("--download needs --data-dir, the folder to put the file in")
    if arguments.synthetic_images < 10:
        parser.error("--synthetic-images: expected 10 or more, one of each kind")
    if arguments.epochs is None:
        arguments.epochs = 6 if arguments.data_dir is None else 30
    return arguments


def give_up(problem):
    """End the job with one line: the first rank of a host speaks, the others give it the time to."""
    if int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", 0)) > 0:
        time.sleep(5)
        sys.exit(1)
    sys.exit(f"cifar10.py: {problem}")


def main():
    arguments = parse_arguments()
    try:
        training, held_out, source = load(arguments)
    except DatasetError as error:
        give_up(error)

    tf.disable_eager_execution()  # the Trainer builds graphs; TensorFlow 1 does so anyway
    ranks = int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1))
    steps_per_epoch = math.ceil(len(training) / (ranks * arguments.batch_size))
    steps = arguments.max_steps or math.ceil(
        arguments.epochs * len(training) / (ranks * arguments.batch_size)
    )
    # A tensor will do as a learning rate: here it falls along half a cosine. The Trainer scales it by the ranks.
    learning_rate = tf.train.cosine_decay(
        arguments.learning_rate, tf.train.get_or_create_global_step(), decay_steps=steps
    )
    job = trainer.Trainer(
        training_dataset=training_stream(training, arguments.epochs, arguments.seed),
        build_training_func=build_training_func(arguments.l2),
        optimizer=tf.train.MomentumOptimizer,
        optimizer_args={"learning_rate": learning_rate, "momentum": 0.9},
        batch_size=arguments.batch_size,
        checkpoint_dir=arguments.checkpoint_dir,
        log_step_size=arguments.log_steps,
        validation_dataset=validation_stream(held_out),
        build_validation_func=build_validation,
        max_iteration=math.inf if arguments.max_steps is None else arguments.max_steps * ranks,
        warmup_epochs=arguments.warmup_epochs,
        metrics_dir=arguments.metrics_dir,
        seed=arguments.seed,
        save_checkpoint_steps=arguments.checkpoint_steps,
    )
    if job.is_master:
        print(f"training on {len(training)} {source}", flush=True)
    started_s = time.time()
    job.train_and_validate_to_end(arguments.validate_steps or steps_per_epoch)

    (_, test_accuracy), _ = job.validation_metrics
    if job.is_master:
        print(
            f"test accuracy {test_accuracy:.4f} on {len(held_out)} held-out images, {source} ({len(training)} "
            f"training images, {ranks} ranks, {time.time() - started_s:.0f} s)",
            flush=True,
        )


if __name__ == "__main__":
    main()
