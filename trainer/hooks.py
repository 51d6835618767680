"""Session hooks of the Trainer: broadcast, the agreed sequence of steps, summaries."""

import zlib

from trainer.compat import horovod, tf
from trainer.ranks import SharedError
from trainer.spec import plan_steps


class BroadcastHook(tf.train.SessionRunHook):
    """Gives every rank rank 0's variables, initial or restored, before anything else happens."""

    def __init__(self, ranks, hook_count, more_variables=()):
        """Args:
        hook_count: hooks of the user's on this rank.
        more_variables: local variables to broadcast as well.
        """
        self._ranks = ranks
        self._hook_count = hook_count
        self._more_variables = list(more_variables)
        self._ours = []
        self._broadcast = None
        self._broadcast_of_hooks = None
        self._hooks_everywhere = None
        self._is_done = False
        self.is_with_hooks = hook_count > 0

    def begin(self):
        """Note the variables that every rank has."""
        self._ours = tf.global_variables()

    def build(self):
        """Build the operations, once the hooks of the user's have made their variables."""
        names = {variable.name for variable in self._ours}
        of_hooks = [variable for variable in tf.global_variables() if variable.name not in names]
        self._broadcast = horovod().broadcast_variables(self._ours + self._more_variables, root_rank=0)
        if of_hooks:
            self._broadcast_of_hooks = horovod().broadcast_variables(of_hooks, root_rank=0)
        mine = tf.constant([[self._hook_count, digest_of(of_hooks)]], tf.int64)
        self._hooks_everywhere = horovod().allgather(mine, name="trainer_hooks")

    def after_create_session(self, session, coord):
        """Broadcast.

        Raises:
            RuntimeError: TensorFlow makes the session anew, as it does after some errors, on this rank alone.
        """
        if self._is_done and self._ranks.size > 1:
            # The other ranks are in the middle of a step: they would not answer.
            raise RuntimeError(
                f"trainer: rank {self._ranks.rank} lost its session (a step was aborted, or a device went away) and "
                "cannot go on in step with the other ranks: start the job again, it goes on from its last checkpoint"
            )
        session.run(self._broadcast)
        everywhere = session.run(self._hooks_everywhere)
        self.is_with_hooks = bool(everywhere[:, 0].any())
        # A hook that one rank has alone keeps its variables to itself.
        if self._broadcast_of_hooks is not None and len(set(everywhere[:, 1])) == 1:
            session.run(self._broadcast_of_hooks)
        self._is_done = True


def digest_of(variables):
    """Return a number that is the same on two ranks where `variables` have the same names, types and shapes."""
    return zlib.crc32(repr(sorted((v.name, v.dtype.name, str(v.shape)) for v in variables)).encode())


def is_training_step(run_context, train_op):
    """Say whether this `run` call is a training step: everything else must not take a batch."""
    return any(fetch is train_op for fetch in tf.nest.flatten(run_context.original_args.fetches))


class StepHook(tf.train.SessionRunHook):
    """Starts the input at the right sample, counts steps, reports them, and stops all ranks at the same step.

    It adds to a `run` call only where that call is a training step anyway, so that nothing else ever takes a batch.
    """

    def __init__(self, spec, ranks, graph, samples, feeds, reporter):
        """Args:
        graph: the `TrainingGraph`.
        samples: what `count_samples` says of the training stream.
        feeds: feed dict for the iterator's initializer.
        reporter: a `Reporter` on a rank that logs, else None.
        """
        self._spec = spec
        self._ranks = ranks
        self._graph = graph
        self._samples = samples
        self._feeds = feeds
        self._reporter = reporter
        self._last_step = None
        self._left_out = 0
        self._ends_with_data = False
        self._position = 0
        self.session = None  # the plain one below the monitored one
        self.step = 0
        self.is_finished = False

    def after_create_session(self, session, coord):
        """Plan the steps from the state that was initialised or restored."""
        graph, size = self._graph, self._ranks.size
        self.session = session
        self.step, (position, minibatches, _) = session.run([graph.global_step, graph.state])
        self.step, self._position = int(self.step), int(position)
        plan = plan_steps(
            self._samples,
            position,
            size=size,
            batch_size=self._spec.batch_size,
            minibatches_done=minibatches,
            max_iteration=self._spec.max_iteration,
        )
        self._left_out, self._ends_with_data = plan.left_out, plan.ends_with_data
        self._last_step = None if plan.steps is None else self.step + int(plan.steps)
        if position == 0 and plan.ends_with_data and plan.steps == 0:
            raise _too_few(self._samples, size)
        if self._reporter is not None and self.step:
            self._reporter.say("restored step %d, %d samples into the training data", self.step, position)
        if plan.steps == 0:
            if self._reporter is not None and not self.step:
                self._reporter.say(
                    "no step to make: max_iteration %s is less than one mini-batch for each of %d rank%s",
                    self._spec.max_iteration,
                    size,
                    "" if size == 1 else "s",
                )
            self._finish(coord)
            return
        session.run(graph.iterator.initializer, feed_dict=self._feeds)
        if graph.agree is not None:
            samples, with_data = (int(number) for number in session.run(graph.agree))
            if with_data < size:
                if position == 0:
                    raise _too_few(samples, size)
                self._left_out, self._ends_with_data = samples, True
                self._finish(coord)

    def before_run(self, run_context):
        """Ask for what a training step yields besides; nothing where the call is none."""
        if not is_training_step(run_context, self._graph.train_op):
            return None
        self.begins()
        wanted = {"step": self._graph.step_after, "samples": self._graph.samples_after}
        if self._graph.agree is not None:
            wanted["next"] = self._graph.agree
        wanted.update(self.fetches_of(self.step + 1) or {})
        return tf.train.SessionRunArgs(wanted)

    def after_run(self, run_context, run_values):
        """Count the step; stop where all ranks stop."""
        results = run_values.results
        if results is None:
            return
        self._count(int(results["step"]), int(results["samples"]), results)
        if "next" in results and results["next"][1] < self._ranks.size:
            self._left_out, self._ends_with_data = int(results["next"][0]), True
            self._finish(run_context)
        elif self._last_step is not None and self.step >= self._last_step:
            self._finish(run_context)

    def fetches_of(self, step):
        """Return what has to be fetched in `step` to report it; None where nothing has."""
        if step % self._spec.log_step_size:
            return None
        if self._reporter is not None:
            return {"log": self._graph.log_tensors, "rate": self._graph.learning_rate}
        # What is logged may need every rank, such as an average over them.
        return {"log_ops": [tensor.op for tensor in self._graph.log_tensors.values()]}

    def is_regular(self, step):
        """Say whether `step` is one with full batches, known beforehand, after which training goes on."""
        return self._graph.agree is None and not self.is_finished and step != self._last_step

    def begins(self):
        """Note that a training step begins."""
        if self._reporter is not None:
            self._reporter.step_begins(self._position)

    def made(self, step, results):
        """Count a regular step that was made without the hooks.

        Args:
            results: what `fetches_of` asked for.
        """
        self._count(step, self._position + self._ranks.size * self._spec.batch_size, results)

    def _count(self, step, position, results):
        self.step, self._position = step, position
        if self._reporter is not None:
            extra = {"learning_rate": results.get("rate")}
            self._reporter.step_done(step, self._last_step, position, results.get("log"), extra)

    def _finish(self, stoppable):
        self.is_finished = True
        if self._reporter is not None and self._ends_with_data and self._left_out:
            self._reporter.say(
                "%d sample%s of the training data left out: fewer than one for each of %d ranks",
                self._left_out,
                "" if self._left_out == 1 else "s",
                self._ranks.size,
            )
        if self._reporter is not None:
            # What the script prints after the training stands below it, not behind a bar.
            self._reporter.clear_bar()
        stoppable.request_stop()


def _too_few(samples, size):
    return SharedError(
        "training_dataset: it has {} sample{} for {} rank{}; expected at least one for each rank: add "
        "data or start "
        "fewer ranks".format(samples, "" if samples == 1 else "s", size, "" if size == 1 else "s")
    )


class SummaryHook(tf.train.SessionRunHook):
    """Writes the user's summaries of training steps; in another `run` call they would take a batch."""

    def __init__(self, train_op, steps, events, scaffold, every_steps):
        """Args:
        steps: the `StepHook`, which comes before this one.
        events: the `tf.summary.FileWriter` to write them with.
        """
        self._train_op = train_op
        self._steps = steps
        self._events = events
        self._scaffold = scaffold
        self._timer = tf.train.SecondOrStepTimer(every_steps=every_steps)
        self._summaries = None

    def after_create_session(self, session, coord):
        """Find out whether there are summaries at all: the graph is complete now."""
        self._summaries = self._scaffold.summary_op

    def is_due(self, step):
        """Say whether the summaries of `step` are to be written."""
        return self._summaries is not None and self._timer.should_trigger_for_step(step)

    def before_run(self, run_context):
        """Ask for the summaries where the call is a training step that is due."""
        if not is_training_step(run_context, self._train_op) or not self.is_due(self._steps.step + 1):
            return None
        return tf.train.SessionRunArgs(self._summaries)

    def after_run(self, run_context, run_values):
        """Write them."""
        if run_values.results is not None:
            self._timer.update_last_triggered_step(self._steps.step)
            self._events.add_summary(run_values.results, self._steps.step)

    def end(self, session):
        """Leave nothing in memory."""
        self._events.flush()
