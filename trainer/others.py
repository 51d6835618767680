"""Checkpoints that a Trainer of this package did not write, such as those of TensorLayer's; rank 0's business alone."""

import logging
import os

from trainer.compat import tf
from trainer.ranks import SharedError

logger = logging.getLogger("trainer")

_NAMES_SHOWN = 3


def saver_for(directory, state, size):
    """Check the checkpoint that training goes on from, and return what restores it.

    Args:
        directory: path of the checkpoints.
        state: the variable that holds how far into the data the training is.
        size: ranks.

    Returns:
        A `tf.train.Saver` where the checkpoint holds everything but `state`, else None: any saver will do.

    Raises:
        SharedError: it lacks variables of this training, or has them in another shape.
    """
    path = tf.train.latest_checkpoint(directory)
    if path is None:
        return None
    shapes = tf.train.load_checkpoint(path).get_variable_to_shape_map()
    problems = [
        problem for variable in _to_restore(state) for problem in [_problem(variable, shapes)] if problem
    ]
    if problems:
        more = len(problems) - _NAMES_SHOWN
        raise SharedError(
            "checkpoint_dir: {}: {}{}; expected a checkpoint of the same network and optimizer: use another directory, "
            "or empty this one to start from the first step".format(
                path, ", ".join(problems[:_NAMES_SHOWN]), f" and {more} more" if more > 0 else ""
            )
        )
    return None if state.op.name in shapes else _WithoutState(state, size)


def _to_restore(state):
    return [variable for variable in tf.global_variables() if variable is not state]


def _problem(variable, shapes):
    name = variable.op.name
    if name not in shapes:
        # The parts of a partitioned variable are saved as one.
        whole = name.rpartition("/part_")[0]
        return None if whole in shapes else f"it lacks {name}"
    if not variable.shape.is_compatible_with(shapes[name]):
        return f"it has {name} in shape {shapes[name]} instead of {variable.shape.as_list()}"
    return None


class _WithoutState(tf.train.Saver):
    """Saves like any other; restores also a checkpoint that lacks the state, which then starts at the data's start."""

    def __init__(self, state, size):
        super().__init__(sharded=True, allow_empty=True)
        saveables = [*_to_restore(state), *tf.get_collection(tf.GraphKeys.SAVEABLE_OBJECTS)]
        self._state_name = state.op.name
        self._others = tf.train.Saver(saveables, sharded=True, allow_empty=True)
        self._step = tf.cast(tf.train.get_or_create_global_step(), tf.int64)
        self._start = state.assign(
            tf.stack([tf.zeros([], tf.int64), self._step * size, state.initial_value[2]])
        )

    def restore(self, session, path):
        """Restore; without a state every step made counts as one mini-batch on each of today's ranks."""
        if self._state_name in tf.train.load_checkpoint(path).get_variable_to_shape_map():
            super().restore(session, path)
            return
        self._others.restore(session, path)
        session.run(self._start)
        logger.warning(
            "%s was written by another program: weights, optimizer and step go on, but how far into the data it was is "
            "not known: the data starts at its beginning",
            os.path.basename(path),
        )
