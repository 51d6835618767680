"""The hooks of the user's: on several ranks they may be different ones, or wish to stop at different steps."""

from trainer.compat import horovod, tf
from trainer.hooks import is_training_step


class UserHook(tf.train.SessionRunHook):
    """A hook of the user's, whose wish to stop is kept from its own rank until all ranks know."""

    def __init__(self, hook, shared):
        """Args:
        shared: the `SharedStopHook`.
        """
        self._hook = hook
        self._shared = shared

    def begin(self):
        """Pass it on."""
        self._hook.begin()

    def after_create_session(self, session, coord):
        """Pass it on."""
        self._hook.after_create_session(session, coord)

    def before_run(self, run_context):
        """Pass it on."""
        return self._hook.before_run(self._shared.context_of(run_context))

    def after_run(self, run_context, run_values):
        """Pass it on."""
        self._hook.after_run(self._shared.context_of(run_context), run_values)

    def end(self, session):
        """Pass it on."""
        self._hook.end(session)


class SharedStopHook(tf.train.SessionRunHook):
    """Stops all ranks after the training step by whose end a hook of the user's asked for it on any of them.

    It comes after those hooks. Ranks that stop at different steps would wait for each other for ever.
    """

    def __init__(self, train_op, ranks, broadcast):
        """Args:
        broadcast: the `BroadcastHook`, which knows whether any rank has hooks of the user's.
        """
        self._train_op = train_op
        self._ranks = ranks
        self._broadcast = broadcast
        self._outer = None
        self._inner = None
        self._is_wished = False
        self._wish = None
        self._wishes = None

    def wrapped(self, hooks):
        """Return what stands for the user's `hooks` in the session."""
        return [UserHook(hook, self) for hook in hooks] if self._ranks.size > 1 else list(hooks)

    def context_of(self, run_context):
        """Return the context to give to the user's hooks in place of that of the session, one for each call."""
        if run_context is not self._outer:
            self._outer = run_context
            self._inner = tf.train.SessionRunContext(run_context.original_args, run_context.session)
        if run_context.stop_requested:
            # This is the last step on all ranks.
            self._inner.request_stop()
        return self._inner

    def is_due(self, step):
        """Say whether hooks of the user's have to be called, or other ranks asked."""
        return self._broadcast.is_with_hooks

    def begin(self):
        """Build what is needed while the graph can still grow, now that the user's hooks have made their variables."""
        self._broadcast.build()
        self._wish = tf.placeholder(tf.int32, [], name="trainer/stop_wish")
        self._wishes = horovod().allreduce(self._wish, op=horovod().Sum, name="trainer_stop")

    def after_create_session(self, session, coord):
        """Stop all ranks where a hook of the user's stops one at once."""
        if self._ranks.size > 1 and self._broadcast.is_with_hooks:
            self._ask(session, coord.should_stop(), coord)

    def after_run(self, run_context, run_values):
        """Ask the other ranks after a training step; a wish in another call waits for the next one."""
        if self._ranks.size == 1 or not self._broadcast.is_with_hooks:
            return
        if run_context is self._outer and self._inner.stop_requested:
            self._is_wished = True
        if is_training_step(run_context, self._train_op):
            self._ask(run_context.session, self._is_wished or run_context.stop_requested, run_context)

    def _ask(self, session, wish, stoppable):
        if session.run(self._wishes, {self._wish: int(wish)}):
            stoppable.request_stop()
