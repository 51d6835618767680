"""Checkpoints on disk: which one a restart goes on from, and what is written when; rank 0's business alone."""

import contextlib
import errno
import glob
import logging
import os
import re
import shutil

from trainer.compat import in_graph, tf
from trainer.constants import without_large_constants
from trainer.ranks import SharedError

logger = logging.getLogger("trainer")

_NAME = "model.ckpt"
_STATE = "checkpoint"

# What a save that was killed or met a full disk leaves behind, under names that are never used again.
_REMAINS = re.compile(
    rf"{_NAME}-\d+(_temp(_[0-9a-f]{{32}})?|\.(data-\d+-of-\d+|index)\.tempstate\d+|\.meta\.new)|{_STATE}\.tmp[0-9a-f]+"
)
_PART = re.compile(rf"({_NAME}-\d+)\.(data-\d+-of-\d+|meta)")


def make_directory(argument, directory):
    """Make `directory`, which the user gave as `argument`, where it does not exist.

    Raises:
        SharedError: it cannot be made or written.
    """
    problem = None
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:
        problem = error.strerror
    else:
        if not os.access(directory, os.W_OK | os.X_OK):
            problem = "not writable"
    if problem is not None:
        raise SharedError(
            f"{argument}: got {directory} ({problem}), expected a directory that rank 0 can make or write to"
        )


def choose(directory):
    """Make sure that training goes on from the newest checkpoint that can be read, and tidy up after killed saves.

    A machine that crashed, unlike a killed job, may leave the newest files empty or cut off: then the one before it is
    taken, with a warning. A directory without the file `checkpoint` has nothing to go on from, whatever else it holds.

    Args:
        directory: path of an existing directory.

    Raises:
        SharedError: there were checkpoints, but none can be read.
    """
    _tidy(directory)
    if not os.path.exists(os.path.join(directory, _STATE)):
        return
    listed = _listed(directory)
    problems = []
    paths = listed + [path for path in _found(directory) if path not in listed]
    for place, path in enumerate(paths):
        problem = _problem_with(path)
        if problem is None:
            if place or not listed:
                older = [other for other in reversed(paths[place + 1 :]) if os.path.exists(other + ".index")]
                tf.train.update_checkpoint_state(directory, path, [*older, path])
                for line in problems or [f"{os.path.join(directory, _STATE)}: it names no checkpoint"]:
                    logger.warning("%s", line)
                logger.warning("checkpoint_dir: training goes on from %s instead", os.path.basename(path))
            return
        problems.append(f"{path}: it cannot be read ({problem})")
    raise SharedError(
        "checkpoint_dir: {}: it has no checkpoint that can be read; expected the files of at least one that the file "
        "{!r} there names: put them back, or empty the directory to start from the first step{}".format(
            directory, _STATE, "".join("\n  " + problem for problem in problems)
        )
    )


def _listed(directory):
    """Return the checkpoints that the file `checkpoint` names, newest first; none where it makes no sense."""
    with open(os.path.join(directory, _STATE), "rb") as file:
        if not file.read(1):
            return []
    state = None
    with contextlib.suppress(UnicodeDecodeError):
        state = tf.train.get_checkpoint_state(directory)
    if state is None or not state.model_checkpoint_path:
        return []
    newest = state.model_checkpoint_path
    return [newest] + [path for path in reversed(state.all_model_checkpoint_paths) if path != newest]


def _found(directory):
    """Return the checkpoints that lie in `directory`, newest first: it may have been moved since it was written."""
    steps = {}
    for path in glob.glob(os.path.join(glob.escape(directory), _NAME + "-*.index")):
        step = path[: -len(".index")].rpartition("-")[2]
        if step.isdigit():
            steps[int(step)] = path[: -len(".index")]
    return [steps[step] for step in sorted(steps, reverse=True)]


def _problem_with(path):
    """Read every tensor of a checkpoint, whose checksums TensorFlow compares; return what is wrong, or None."""
    try:
        reader = tf.train.load_checkpoint(path)
        for name in reader.get_variable_to_shape_map():
            reader.get_tensor(name)
    except (tf.errors.OpError, OSError, RuntimeError, ValueError, LookupError) as error:
        # TensorFlow 2 says with an IndexError that a file is cut off.
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return None


def _tidy(directory):
    """Remove what killed saves left: a job that dies often would fill the disk with it."""
    names = os.listdir(directory)
    for name in names:
        part = _PART.fullmatch(name)
        if _REMAINS.fullmatch(name) or (part and part.group(1) + ".index" not in names):
            path = os.path.join(directory, name)
            # What cannot be removed does no harm.
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


class CheckpointHook(tf.train.SessionRunHook):
    """Saves at the start, when due after a training step, and when training stops.

    It also saves where the session stays open after the last step, and never writes anew the very checkpoint that
    training goes on from: killed at that moment, nothing would be left.
    """

    def __init__(self, directory, steps, scaffold, events, *, save_secs, save_steps):
        """Args:
        events: the `tf.summary.FileWriter` of the directory.
        steps: what counts the steps in its attribute `step`; a hook that comes before this one.
        save_secs, save_steps: how often, one of the two; with neither at the start and the end only.
        """
        self._directory = directory
        self._steps = steps
        self._scaffold = scaffold
        self._timer = None
        if save_secs is not None or save_steps is not None:
            self._timer = tf.train.SecondOrStepTimer(every_secs=save_secs, every_steps=save_steps)
        self._meta_graph = None
        self._events = events
        self._last_saved_step = None

    def after_create_session(self, session, coord):
        """Write the graph once, and the first checkpoint where nothing was restored."""
        with in_graph(session.graph):
            meta_graph = without_large_constants(self._scaffold.saver.export_meta_graph())
        self._meta_graph = meta_graph.SerializeToString()
        self._events.add_event(tf.Event(graph_def=meta_graph.graph_def.SerializeToString()))
        step = self._steps.step
        restored = [os.path.basename(path) for path in self._scaffold.saver.last_checkpoints]
        if f"{_NAME}-{step}" in restored:
            self._last_saved_step = step
        else:
            self._save(session, step)
        if self._timer is not None:
            self._timer.update_last_triggered_step(step)

    def is_due(self, step):
        """Say whether it is time to save after `step`."""
        return self._timer is not None and self._timer.should_trigger_for_step(step)

    def after_run(self, run_context, run_values):
        """Save when due, or when this was the last step."""
        step = self._steps.step
        if step == self._last_saved_step:
            return
        is_due = self.is_due(step)
        if is_due:
            self._timer.update_last_triggered_step(step)
        if is_due or run_context.stop_requested:
            self._save(run_context.session, step)

    def end(self, session):
        """Save the last step once."""
        if self._steps.step != self._last_saved_step:
            self._save(session, self._steps.step)

    def _save(self, session, step):
        """Save, and have the disk hold it before the training goes on.

        Raises:
            RuntimeError: it cannot be written; what was written earlier stays as it is.
        """
        prefix = os.path.join(self._directory, _NAME)
        path = f"{prefix}-{step}"
        try:
            # The user may run the session anywhere; saving needs a graph.
            with in_graph(session.graph):
                self._scaffold.saver.save(session, prefix, global_step=step, write_meta_graph=False)
            with open(path + ".meta.new", "wb") as file:
                file.write(self._meta_graph)
            os.replace(path + ".meta.new", path + ".meta")
            _flush_to_disk(path)
        except (tf.errors.OpError, OSError, ValueError) as error:
            _tidy(self._directory)
            raise RuntimeError(
                f"checkpoint_dir: {self._directory}: the checkpoint of step {step} could not be written "
                f"({str(error).splitlines()[0]}); expected a directory with room for it: make room, then start the job "
                "again, it goes on from the checkpoint before"
            ) from error
        self._last_saved_step = step
        log = tf.SessionLog(status=tf.SessionLog.CHECKPOINT, checkpoint_path=path)
        self._events.add_session_log(log, step)


def _flush_to_disk(path):
    """Have the disk hold a checkpoint: after a crash of the machine its files might be empty otherwise."""
    directory = os.path.dirname(path)
    parts = [*glob.glob(glob.escape(path) + ".*"), os.path.join(directory, _STATE), directory]
    for part in parts:
        handle = os.open(part, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            # Some network file systems have no such thing for directories.
            if error.errno != errno.EINVAL:
                raise
        finally:
            os.close(handle)
