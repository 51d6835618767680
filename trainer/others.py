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
    is_ours = state.op.name in shapes
    anew = [] if is_ours else _slots_of_more_weights(shapes)
    wanted = _to_restore([state, *anew])
    problems = [problem for variable in wanted for problem in [_problem(variable, shapes)] if problem]
    if problems:
        more = len(problems) - _NAMES_SHOWN
        raise SharedError(
            "checkpoint_dir: {}: {}{}; expected a checkpoint of the same network and optimizer: use another directory, "
            "or empty this one to start from the first step".format(
                path, ", ".join(problems[:_NAMES_SHOWN]), f" and {more} more" if more > 0 else ""
            )
        )
    return None if is_ours else _WithoutState(state, anew, size)


def _to_restore(others):
    left_out = {id(variable) for variable in others}
    return [variable for variable in tf.global_variables() if id(variable) not in left_out]


def _slots_of_more_weights(shapes):
    """Return the optimizer's variables that a checkpoint lacks for some weights while it has those for others.

    TensorLayer's Trainer builds the validation first, and what that makes untrainable, such as gamma and beta of
    TensorLayer's batch normalisation, it never trains; with Adam, say, they have no moments then.
    """
    weights = {variable.op.name for variable in tf.trainable_variables()}
    kinds = {name.rpartition("/")[2] for name in shapes if name.rpartition("/")[0] in weights}
    found = []
    for variable in tf.global_variables():
        weight, _, kind = variable.op.name.rpartition("/")
        if variable.op.name not in {*weights, *shapes} and weight in weights and kind in kinds:
            found.append(variable)
    return found


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

    def __init__(self, state, anew, size):
        """Args:
        anew: more variables that the checkpoint may lack; they start with their initial values.
        """
        super().__init__(sharded=True, allow_empty=True)
        saveables = [*_to_restore([state, *anew]), *tf.get_collection(tf.GraphKeys.SAVEABLE_OBJECTS)]
        self._state_name = state.op.name
        self._others = tf.train.Saver(saveables, sharded=True, allow_empty=True)
        self._step = tf.cast(tf.train.get_or_create_global_step(), tf.int64)
        start = state.assign(tf.stack([tf.zeros([], tf.int64), self._step * size, state.initial_value[2]]))
        self._start = tf.group(start, *[variable.initializer for variable in anew])
        self._untrained = sorted({variable.op.name.rpartition("/")[0] for variable in anew})

    def restore(self, session, path):
        """Restore; without a state every step made counts as one mini-batch on each of today's ranks."""
        if self._state_name in tf.train.load_checkpoint(path).get_variable_to_shape_map():
            super().restore(session, path)
            return
        self._others.restore(session, path)
        session.run(self._start)
        logger.warning(
            "%s was written by another program: weights, optimizer and step go on, but how far into the data it was is "
            "not known: the data starts at its beginning%s",
            os.path.basename(path),
            f"; not trained so far: {', '.join(self._untrained)}" if self._untrained else "",
        )
