"""The deprecated names: training with parameter servers, on TensorFlow's own distributed runtime, without MPI."""

import functools
import logging
import math
import numbers
import os
import threading
import time

from trainer.compat import tf
from trainer.legacy_spec import TaskSpecDef, spec_of_environment, warn_once

# A cluster in which one process is missing waits without a word; after this long it is told what for.
PATIENCE_S = 30

# TensorFlow tells "not given" from None, which switches summaries off.
_NOT_GIVEN = object()


def _deprecated(name, function):
    """Return `function` under a deprecated name."""

    @functools.wraps(function)
    def warns(*arguments, **options):
        warn_once(name)
        return function(*arguments, **options)

    warns.__name__ = warns.__qualname__ = name
    return warns


def _session(
    task_spec=None,
    checkpoint_dir=None,
    scaffold=None,
    hooks=None,
    chief_only_hooks=None,
    save_checkpoint_secs=600,
    save_summaries_steps=_NOT_GIVEN,
    save_summaries_secs=_NOT_GIVEN,
    config=None,
    stop_grace_period_secs=120,
    log_step_count_steps=100,
):
    """Return a `MonitoredTrainingSession` for a task of a cluster with parameter servers.

    The chief restores the last checkpoint, or else initialises the variables, and writes checkpoints and summaries;
    the others wait for it. The evaluator gets a session of its own that restores and writes nothing. A parameter server
    serves in this call until its process is ended. Deprecated since 2018-10-30: use `Trainer`.

    Args:
        task_spec: a `TaskSpecDef`; None: this process trains alone.
        checkpoint_dir: where the chief restores and writes; None: no checkpoints. Needs a global step.
        scaffold: a `tf.train.Scaffold`.
        hooks: session hooks for every task.
        chief_only_hooks: session hooks for the chief.
        save_checkpoint_secs: seconds between checkpoints; None: none are written.
        save_summaries_steps, save_summaries_secs: steps or seconds between summaries; every 100 steps if neither is
            given; None for both: no summaries.
        config: a `tf.ConfigProto`. None: one with which a task needs only the parameter servers to be up, unless
            the graph puts operations on other tasks.
        stop_grace_period_secs: seconds that threads have for ending once the session is closed.
        log_step_count_steps: global steps between two logs of the steps/s; None: no such log.

    Raises:
        RuntimeError: TensorFlow 2 executes eagerly here; the task's server cannot start.
        TypeError, ValueError: `task_spec` is none, or has no place in its cluster.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "DistributedSession: TensorFlow executes eagerly here, expected a graph: build and run inside "
            "`with tf.Graph().as_default():`, or call tf.compat.v1.disable_eager_execution() at the start of the script"
        )
    if task_spec is not None and not isinstance(task_spec, TaskSpecDef):
        raise TypeError(
            f"task_spec: got {task_spec!r}, expected a TaskSpecDef such as TaskSpec() returns, or None"
        )
    evaluates = task_spec is not None and task_spec.is_evaluator()
    if evaluates:
        # The directory is the chief's.
        save_checkpoint_secs = save_summaries_steps = save_summaries_secs = log_step_count_steps = None
    summaries = {"save_summaries_steps": save_summaries_steps, "save_summaries_secs": save_summaries_secs}
    target = None if task_spec is None else task_spec.target()
    if target is not None and config is None:
        config = _config_of(task_spec)
    patience = threading.Timer(PATIENCE_S, _tell_of_waiting, [task_spec])
    patience.daemon = True
    if target is not None:
        patience.start()
    try:
        return tf.train.MonitoredTrainingSession(
            master=target or "",
            is_chief=task_spec is None or evaluates or task_spec.is_master(),
            checkpoint_dir=None if checkpoint_dir is None else os.fspath(checkpoint_dir),
            scaffold=scaffold,
            hooks=hooks,
            chief_only_hooks=chief_only_hooks,
            save_checkpoint_secs=save_checkpoint_secs,
            config=config,
            stop_grace_period_secs=stop_grace_period_secs,
            log_step_count_steps=log_step_count_steps,
            **{name: value for name, value in summaries.items() if value is not _NOT_GIVEN},
        )
    finally:
        patience.cancel()


def _config_of(task_spec):
    """Return a configuration with which the session sees only its own task and the parameter servers.

    Otherwise it waits for every task of the cluster, those that have ended already too.
    """
    own = tf.DeviceSpec.from_string(task_spec.device())
    for name in {operation.device for operation in tf.get_default_graph().get_operations()}:
        device = tf.DeviceSpec.from_string(name)
        is_own = device.job == own.job and device.task in (None, own.task)
        if device.job not in (None, "ps") and not is_own:
            return None
    return tf.ConfigProto(device_filters=["/job:ps", task_spec.device()])


def _tell_of_waiting(task_spec):
    chief = "" if task_spec.is_master() else f", and {task_spec.chief()} to initialise the variables"
    logging.getLogger("trainer").warning(
        "%s: still waiting for its session after %d s; expected the parameter servers %s to be up%s",
        task_spec,
        PATIENCE_S,
        ", ".join(task_spec.ps_hosts),
        chief,
    )


class StopAtTimeHook(tf.train.SessionRunHook):
    """Asks to stop after the first step that ends `time_running` seconds or more after the session was asked for.

    Deprecated since 2018-10-30: use `Trainer`.

    Args:
        time_running: seconds.

    Raises:
        TypeError, ValueError: `time_running` is no number >= 0.
    """

    def __init__(self, time_running):
        warn_once("StopAtTimeHook")
        super().__init__()
        if not isinstance(time_running, numbers.Real) or isinstance(time_running, bool):
            raise TypeError(f"time_running: got {time_running!r}, expected seconds >= 0")
        if not time_running >= 0:
            raise ValueError(f"time_running: got {time_running!r}, expected seconds >= 0")
        self._time_running_s = time_running
        self._end_s = math.inf

    def begin(self):
        """Start the clock."""
        # One that setting the time of day does not move.
        self._end_s = time.monotonic() + self._time_running_s

    def after_run(self, run_context, run_values):
        """Ask to stop when time is up."""
        if time.monotonic() >= self._end_s:
            run_context.request_stop()


class LoadCheckpoint(tf.train.SessionRunHook):
    """Restores a checkpoint once, after the session is created; not again when a lost session is made anew.

    With parameter servers pass it in `chief_only_hooks`: every task that has it restores. Deprecated since 2018-10-30:
    use `Trainer`.

    Args:
        saver: a `tf.train.Saver` of the variables to restore.
        checkpoint: path of the checkpoint, as `tf.train.latest_checkpoint` returns it.

    Raises:
        TypeError: `saver` cannot restore, or `checkpoint` is no path.
    """

    def __init__(self, saver, checkpoint):
        warn_once("LoadCheckpoint")
        super().__init__()
        if not callable(getattr(saver, "restore", None)):
            raise TypeError(f"saver: got {saver!r}, expected a tf.train.Saver")
        if not isinstance(checkpoint, (str, os.PathLike)):
            raise TypeError(f"checkpoint: got {checkpoint!r}, expected the path of a checkpoint")
        self._saver = saver
        self._checkpoint = os.fspath(checkpoint)
        self._loaded = False

    def after_create_session(self, session, coord):
        """Restore, the first time."""
        if not self._loaded:
            self._saver.restore(session, self._checkpoint)
            self._loaded = True


create_task_spec_def = _deprecated("create_task_spec_def", spec_of_environment)
TaskSpec = _deprecated("TaskSpec", spec_of_environment)
create_distributed_session = _deprecated("create_distributed_session", _session)
DistributedSession = _deprecated("DistributedSession", _session)
