"""Trainings that end early, each in another way, one after the other; reports the steps of each."""

import os
import sys
import warnings

import tensorflow.compat.v1 as tf
from samples import numbered
from tools import RANK, SIZE, Recorder, report

import trainer

DIRECTORY = sys.argv[1]
ONE_RANK = RANK == SIZE - 1


class Asking(tf.train.SessionRunHook):
    """Asks to stop after so many training steps."""

    def __init__(self, recorder, at_step):
        self.recorder, self.at_step = recorder, at_step

    def after_run(self, run_context, run_values):
        if len(self.recorder.batches) >= self.at_step:
            run_context.request_stop()


class AskingBetweenSteps(tf.train.SessionRunHook):
    """Asks to stop in a call that reads the global step alone."""

    def after_run(self, run_context, run_values):
        if run_context.original_args.fetches is tf.train.get_global_step():
            run_context.request_stop()


class StoppingAtOnce(tf.train.SessionRunHook):
    """Asks to stop before the first step."""

    def after_create_session(self, session, coord):
        coord.request_stop()


class Remembering(tf.train.SessionRunHook):
    """Has a variable of its own, which each rank would initialise otherwise."""

    def begin(self):
        with tf.variable_scope("of_hook", reuse=tf.AUTO_REUSE):
            self.variable = tf.get_variable("v", [], initializer=tf.constant_initializer(RANK + 5))

    def after_run(self, run_context, run_values):
        self.value = float(run_context.session.run(self.variable))


def train(name, hooks_of, drive=lambda job: job.train_to_end(), unknown=False, bad_sample=None, **more):
    recorder = Recorder()
    features, labels = numbered(600)
    if bad_sample is not None:
        features[bad_sample] = float("nan")

    def build(x, y):
        w, loss, log = recorder.build(x, y)
        # By this name the hooks find it.
        return w, tf.identity(loss, "the_loss"), log

    with tf.Graph().as_default():
        dataset = trainer.data.from_arrays(features, labels)
        if name == "validated":
            more["validation_dataset"] = trainer.data.from_arrays(*numbered(5))
            more["build_validation_func"] = recorder.build_validation
        if unknown:
            dataset = dataset.filter(lambda x, y: y >= 0)
        job = trainer.Trainer(
            dataset.repeat(),
            build,
            tf.train.GradientDescentOptimizer,
            {"learning_rate": 0.001},
            batch_size=2,
            log_step_size=1000,
            checkpoint_dir=os.path.join(DIRECTORY, name),
            hooks=hooks_of(recorder),
            **more,
        )
        drive(job)
        assert job.session.should_stop() or name == "validated"
        job.close()
        return {"steps": job.global_step, "batches": len(recorder.batches)}


def stop_at_time(recorder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        # The clock of one rank is far ahead.
        return [trainer.StopAtTimeHook(0.3 if ONE_RANK else 3600)]


def until_validated(job):
    """Leave the loop once the validation loss, the same on all ranks, is low."""
    first = job.validation_metrics[0][1]
    while not job.session.should_stop():
        job.train_on_batch()
        if job.global_step % 3 == 0 and job.validation_metrics[0][1] < 0.99 * first:
            break


def with_call_between(job):
    job.train_on_batch()
    job.session.run(tf.train.get_global_step())
    assert not job.session.should_stop()
    job.train_to_end()


def remember(on_this_rank):
    hooks = [Remembering()] if on_this_rank else []
    result = train(f"remember_{RANK if not on_this_rank else 'all'}", lambda r: [*hooks, Asking(r, 2)])
    return dict(result, value=hooks[0].value if hooks else None)


def main():
    results = {
        "asked": train("asked", lambda r: [Asking(r, 3 if ONE_RANK else 99)]),
        "asked_in_first_step": train("asked_in_first_step", lambda r: [Asking(r, 1 + RANK)], unknown=True),
        "asked_in_last_step": train(
            "asked_in_last_step", lambda r: [Asking(r, 3 + RANK)], max_iteration=3 * SIZE
        ),
        # As in scripts that give hooks to rank 0 alone.
        "one_rank_has_hooks": train("one_rank_has_hooks", lambda r: [Asking(r, 4)] * ONE_RANK),
        "asked_between": train(
            "asked_between", lambda r: [AskingBetweenSteps()] * ONE_RANK, with_call_between
        ),
        "asked_at_once": train("asked_at_once", lambda r: [StoppingAtOnce()] * ONE_RANK),
        "time": train("time", stop_at_time),
        "at_step": train("at_step", lambda r: [tf.train.StopAtStepHook(last_step=5)]),
        "more_steps": train("at_step", lambda r: [tf.train.StopAtStepHook(num_steps=3)]),
        # In step 3 this sample is in the last place of the last rank.
        "nan": train(
            "nan",
            lambda r: [tf.train.NanTensorHook("the_loss:0", fail_on_nan_loss=False)],
            bad_sample=6 * SIZE - 1,
        ),
        "validated": train("validated", lambda r: None, until_validated),
        "variable": remember(True),
        "variable_of_one_rank": remember(ONE_RANK),
    }
    report(**results)


main()
