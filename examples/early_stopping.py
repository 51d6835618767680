"""Train in a loop of your own: with your own log, and an end when the held-out images show no more progress.

    fab train --script examples/early_stopping.py --np 2
    fab train --script examples/early_stopping.py --np 2 -- --patience 2 --validate-steps 25
    mpirun -np 2 python examples/early_stopping.py

The network and the images are those of mnist.py. Every rank runs this loop, and all must leave it at the same step.
That needs no message between them: they all get the same validation metrics and so decide alike. What differs from rank
to rank (the time, the rank's own loss, its disk) must not decide.
"""

import argparse
import os
import sys

# So that `import trainer` works in a checkout, wherever the script is started.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import mnist
import tensorflow.compat.v1 as tf

import trainer


def make_trainer(arguments, training, held_out):
    samples = trainer.data.from_arrays(training.images, training.labels)
    return trainer.Trainer(
        training_dataset=samples.shuffle(len(training), seed=arguments.seed).repeat(arguments.epochs),
        build_training_func=mnist.build_training,
        optimizer=tf.train.AdamOptimizer,
        optimizer_args={"learning_rate": arguments.learning_rate},
        batch_size=arguments.batch_size,
        log_step_size=10**9,  # this script has a log of its own
        validation_dataset=trainer.data.from_arrays(held_out.images, held_out.labels),
        build_validation_func=mnist.build_validation,
        seed=arguments.seed,
    )


def train(job, validate_steps, patience):
    """Train until `patience` validations in a row brought no better loss; returns (best step, its accuracy, reason)."""
    best_loss, best_step, best_accuracy, since_best = float("inf"), 0, 0.0, 0
    while not job.session.should_stop():
        try:
            for _ in range(validate_steps):
                job.train_on_batch()
        except tf.errors.OutOfRangeError:
            pass  # the data ended, on all ranks at this step: validate once more, and the loop ends
        (_, accuracy), (_, loss) = job.validation_metrics  # the same numbers on every rank
        if loss < best_loss:
            best_loss, best_step, best_accuracy, since_best = loss, job.global_step, accuracy, 0
        else:
            since_best += 1
        if job.is_master:
            print(
                f"step {job.global_step}: held-out loss {loss:.4f}, accuracy {accuracy:.4f}, "
                f"{since_best} since the best",
                flush=True,
            )
        if since_best >= patience:
            return best_step, best_accuracy, f"no progress in {patience} validations"
    return best_step, best_accuracy, "the data ended"


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data-dir", help="folder with the full MNIST set (default: the part in examples/data)")
    add("--validate-steps", type=int, default=50, help="steps between validations (default: %(default)s)")
    add("--patience", type=int, default=3, help="validations without progress (default: %(default)s)")
    add("--epochs", type=int, default=20, help="at most (default: %(default)s)")
    add("--batch-size", type=int, default=32, help="images per rank and step (default: %(default)s)")
    add("--learning-rate", type=float, default=0.002, help="of one rank (default: %(default)s)")
    add("--seed", type=int, default=1, help="same seed, same result (default: %(default)s)")
    arguments = parser.parse_args(argv)
    for name in ("validate_steps", "patience"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected 1 or more")
    return arguments


def main():
    arguments = parse_arguments()
    try:
        training, held_out = mnist.load(arguments.data_dir)
    except mnist.datasets.DatasetError as error:
        mnist.give_up(error)
    tf.disable_eager_execution()  # the Trainer builds graphs; TensorFlow 1 does so anyway
    job = make_trainer(arguments, training, held_out)
    best_step, accuracy, reason = train(job, arguments.validate_steps, arguments.patience)
    if job.is_master:
        print(
            f"ended at step {job.global_step} ({reason}); best at step {best_step}: test accuracy "
            f"{accuracy:.4f} on {len(held_out)} held-out images",
            flush=True,
        )


if __name__ == "__main__":
    main()
