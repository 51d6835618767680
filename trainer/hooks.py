"""Session hooks of the Trainer: broadcast, the agreed sequence of steps, summaries."""

from trainer.compat import horovod, tf
from trainer.ranks import SharedError
from trainer.spec import plan_steps


class BroadcastHook(tf.train.SessionRunHook):
    """Gives every rank rank 0's variables, initial or restored, before anything else happens."""

    def __init__(self, ranks, more_variables=()):
        self._ranks = ranks
        self._more_variables = list(more_variables)
        self._broadcast = None
        self._is_done = False

    def begin(self):
        """Build the operation while the graph can still grow."""
        variables = tf.global_variables() + self._more_variables
        self._broadcast = horovod().broadcast_variables(variables, root_rank=0)

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
        self._is_done = True


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
        self.step = 0
        self.is_finished = False

    def after_create_session(self, session, coord):
        """Plan the steps from the state that was initialised or restored."""
        graph, size = self._graph, self._ranks.size
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
        if self._reporter is not None:
            self._reporter.step_begins(self._position)
        wanted = {"step": self._graph.step_after, "samples": self._graph.samples_after}
        if self._graph.agree is not None:
            wanted["next"] = self._graph.agree
        if (self.step + 1) % self._spec.log_step_size == 0:
            if self._reporter is not None:
                wanted["log"] = self._graph.log_tensors
                wanted["rate"] = self._graph.learning_rate
            else:
                # What is logged may need every rank, such as an average over them.
                wanted["log_ops"] = [tensor.op for tensor in self._graph.log_tensors.values()]
        return tf.train.SessionRunArgs(wanted)

    def after_run(self, run_context, run_values):
        """Count the step; stop where all ranks stop."""
        results = run_values.results
        if results is None:
            return
        self.step, self._position = int(results["step"]), int(results["samples"])
        if self._reporter is not None:
            extra = {"learning_rate": results.get("rate")}
            self._reporter.step_done(self.step, self._last_step, self._position, results.get("log"), extra)
        if "next" in results and results["next"][1] < self._ranks.size:
            self._left_out, self._ends_with_data = int(results["next"][0]), True
            self._finish(run_context)
        elif self._last_step is not None and self.step >= self._last_step:
            self._finish(run_context)

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


class SharedStopHook(tf.train.SessionRunHook):
    """Stops all ranks after the step in which a hook of the user's asks for it on any of them.

    It comes after those hooks. Ranks that stop at different steps would wait for each other for ever.
    """

    def __init__(self, train_op):
        self._train_op = train_op
        self._wish = None
        self._wishes = None

    def begin(self):
        """Build the operation while the graph can still grow."""
        self._wish = tf.placeholder(tf.int32, [], name="trainer/stop_wish")
        self._wishes = horovod().allreduce(self._wish, op=horovod().Sum, name="trainer_stop")

    def after_run(self, run_context, run_values):
        """Ask the other ranks."""
        if not is_training_step(run_context, self._train_op):
            return
        wish = int(run_context.stop_requested)
        if run_context.session.run(self._wishes, {self._wish: wish}):
            run_context.request_stop()


class SummaryHook(tf.train.SummarySaverHook):
    """Writes the user's summaries of training steps; in another `run` call they would take a batch."""

    def __init__(self, train_op, **options):
        super().__init__(**options)
        self._train_op = train_op

    def before_run(self, run_context):
        """Ask for the summaries where the call is a training step."""
        return super().before_run(run_context) if is_training_step(run_context, self._train_op) else None

    def after_run(self, run_context, run_values):
        """Write them."""
        if run_values.results is not None:
            super().after_run(run_context, run_values)
