"""Validates, reads the step and logs between training steps; reports what that did to the training."""

import tensorflow.compat.v1 as tf
from samples import numbered
from tools import RANK, Messages, Recorder, report

import trainer

BATCH = 4


class Calls(tf.train.SessionRunHook):
    """Counts the session runs that hooks see."""

    def __init__(self):
        self.count = 0

    def after_run(self, run_context, run_values):
        self.count += 1


def make(validation, recorder, hooks=()):
    return trainer.Trainer(
        trainer.data.from_arrays(*numbered(48)),
        recorder.build,
        tf.train.GradientDescentOptimizer,
        {"learning_rate": 0.01},
        batch_size=BATCH,
        validation_dataset=validation,
        build_validation_func=None if validation is None else recorder.build_validation,
        hooks=hooks,
        seed=1,
    )


def mixed():
    """Train, validating, reading and running other things after every step."""
    with tf.Graph().as_default():
        recorder, calls = Recorder(), Calls()
        job = make(trainer.data.from_arrays(*numbered(11)), recorder, [calls])
        steps, averages = [job.global_step], []
        while not job.session.should_stop():
            job.train_on_batch()
            steps += [job.global_step, job.global_step]
            averages.append([value for _, value in job.validation_metrics])
        after_end = [value for _, value in job.validation_metrics]
        metrics = [metric.name for metric, _ in job.validation_metrics]
        weights = job.session.run_step_fn(
            lambda step_context: step_context.session.run(tf.trainable_variables()[0])
        )
        return {
            "samples": recorder.samples,
            "steps": steps,
            "averages": averages,
            "after_end": after_end,
            "metrics": metrics,
            "hook_calls": calls.count,
            "weights": weights.ravel().tolist(),
            "is_master": job.is_master,
            "network": job.training_network.name,
        }


def own_run():
    """A run of the user's own through the monitored session takes no batch."""
    with tf.Graph().as_default():
        recorder = Recorder()
        step = tf.train.get_or_create_global_step()
        job = make(None, recorder)
        job.train_on_batch()
        seen = [int(job.session.run(step)) for _ in range(3)]
        return {"seen": seen, "batches": len(recorder.batches), "step": job.global_step}


def validate_to_end():
    with tf.Graph().as_default():
        messages = Messages()
        job = make(trainer.data.from_arrays(*numbered(11)), Recorder())
        job.train_and_validate_to_end(validate_step_size=2)
        return {"steps": job.global_step, "messages": messages.lines}


def problem_of(action):
    try:
        action()
    except Exception as error:
        return [type(error).__name__, str(error), isinstance(error, ValueError)]
    return None


def without_validation():
    with tf.Graph().as_default():
        job = make(None, Recorder())
        return [problem_of(lambda: job.validation_metrics), problem_of(job.train_and_validate_to_end)]


def empty_validation():
    with tf.Graph().as_default():
        empty = trainer.data.from_arrays(*numbered(5)).filter(lambda x, y: y < 0)
        job = make(empty, Recorder())
        return problem_of(lambda: job.validation_metrics)


report(
    rank=RANK,
    mixed=mixed(),
    own_run=own_run(),
    validate_to_end=validate_to_end(),
    without_validation=without_validation(),
    empty_validation=empty_validation(),
)
