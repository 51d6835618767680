"""Train, stop in the middle, and go on: type the same command again after any kind of end.

    fab train --script examples/resume.py --np 2 -- --checkpoint-dir /tmp/run --stop-after 40
    fab train --script examples/resume.py --np 2 -- --checkpoint-dir /tmp/run      # goes on at step 40; press Ctrl-C
    fab train --script examples/resume.py --np 1 -- --checkpoint-dir /tmp/run      # goes on at the last checkpoint
    fab train --script examples/resume.py --np 2 -- --checkpoint-dir /tmp/run      # at the end already: exits at once

Rank 0 writes the checkpoints and alone reads them, on the first host. Training goes on with the images that come next:
those before are not trained on again, even where the middle of a shuffled epoch was interrupted. To show it, each image
carries its place in the stream of samples, and the log has that of the first image of each step. After a kill the
steps since the last checkpoint are made again, with the same images.

The network and the images are those of mnist.py.
"""

import argparse
import os
import sys

# So that `import trainer` works in a checkout, wherever the script is started.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import mnist
import tensorflow.compat.v1 as tf

import trainer


def numbered_stream(training, epochs, seed):
    """Return a dataset of ((image, place in the stream), label)."""
    samples = trainer.data.from_arrays(training.images, training.labels)
    # With its own seed or the Trainer's, or none: the order of a restart is that of the first start.
    samples = samples.shuffle(len(training), seed=seed).repeat(epochs)

    def number(place, sample):
        image, label = sample
        return (image, place), label

    return samples.enumerate().map(number)


def build_training(sample, labels):
    images, places = sample
    network, loss, _ = mnist.build_training(images, labels)
    return network, loss, {"loss": loss, "first image": tf.reduce_min(places)}


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--checkpoint-dir",
        required=True,
        help="where rank 0 keeps checkpoints; training goes on from the last one",
    )
    add("--checkpoint-steps", type=int, default=20, help="steps between checkpoints (default: %(default)s)")
    add("--stop-after", type=int, help="stop after so many steps of this start")
    add("--data-dir", help="folder with the full MNIST set (default: the part in examples/data)")
    add("--epochs", type=int, default=2, help="of all starts together (default: %(default)s)")
    add("--batch-size", type=int, default=32, help="images per rank and step (default: %(default)s)")
    add("--learning-rate", type=float, default=0.001, help="of one rank (default: %(default)s)")
    add("--log-steps", type=int, default=10, help="log every so many steps (default: %(default)s)")
    add("--seed", type=int, default=1, help="same seed, same result (default: %(default)s)")
    return parser.parse_args(argv)


def main():
    arguments = parse_arguments()
    try:
        training, _ = mnist.load(arguments.data_dir)
    except mnist.datasets.DatasetError as error:
        mnist.give_up(error)
    tf.disable_eager_execution()  # the Trainer builds graphs; TensorFlow 1 does so anyway
    job = trainer.Trainer(
        training_dataset=numbered_stream(training, arguments.epochs, arguments.seed),
        build_training_func=build_training,
        optimizer=tf.train.AdamOptimizer,
        optimizer_args={"learning_rate": arguments.learning_rate},
        batch_size=arguments.batch_size,
        checkpoint_dir=arguments.checkpoint_dir,
        log_step_size=arguments.log_steps,
        seed=arguments.seed,
        save_checkpoint_steps=arguments.checkpoint_steps,
    )

    started_at = job.global_step  # the same on every rank
    if job.is_master:
        print(f"went on from step {started_at}" if started_at else "started at step 0", flush=True)
    while not job.session.should_stop():
        job.train_on_batch()
        if arguments.stop_after and job.global_step - started_at >= arguments.stop_after:
            break
    is_finished = job.session.should_stop()
    job.close()  # writes the last checkpoint
    if job.is_master:
        how = "finished" if is_finished else "stopped; start it again to go on"
        print(f"step {job.global_step}: {how}", flush=True)


if __name__ == "__main__":
    main()
