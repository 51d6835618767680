"""Training steps straight on the session, where no hook has anything to do in them."""

from trainer.compat import tf


class DirectSteps:
    """Makes those steps that need no hook.

    A MonitoredSession asks every hook and puts its fetches together anew in each call, which takes about 0.2 ms: half a
    small network's step. Here the fetches are put together once. The Trainer's own hooks say beforehand when they have
    something to do; a user's hook may have something to do in every step, so with one of those this is not used.
    """

    def __init__(self, graph, steps, due):
        """Args:
        graph: the `TrainingGraph`.
        steps: the `StepHook`.
        due: the other hooks that act after some steps; `hook.is_due(step)` says so.
        """
        self._graph = graph
        self._steps = steps
        self._due = due
        self._session = None
        self._calls = {}

    def run(self):
        """Make one step, if it is one that needs no hook; return whether it was made."""
        steps = self._steps
        step = steps.step + 1
        if not steps.is_regular(step) or any(hook.is_due(step) for hook in self._due):
            return False
        fetches = steps.fetches_of(step)
        is_logged = fetches is not None
        if self._session is not steps.session:
            # The first, or one that a MonitoredSession made anew in a step with hooks or in a validation.
            self._session, self._calls = steps.session, {}
        call = self._calls.get(is_logged)
        if call is None:
            train_op = self._graph.train_op
            wanted = [train_op, *tf.nest.flatten(fetches)] if is_logged else train_op
            call = self._calls[is_logged] = self._session.make_callable(wanted)
        steps.begins()
        try:
            values = call()
        except (tf.errors.AbortedError, tf.errors.UnavailableError):
            # A MonitoredSession knows how to go on after these; it meets them again, or makes the step.
            return False
        steps.made(step, tf.nest.pack_sequence_as(fetches, values[1:]) if is_logged else {})
        return True
