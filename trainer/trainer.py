"""The Trainer: one object that trains a TensorFlow network on every rank of an MPI job."""

import atexit
import contextlib
import math
import time

from trainer import checkpoints, claim, constants, data, others
from trainer.compat import in_graph, is_closed, tf
from trainer.direct import DirectSteps
from trainer.graph import build_training_graph
from trainer.hooks import BroadcastHook, StepHook, SummaryHook
from trainer.progress import Reporter
from trainer.ranks import (
    before_last_words,
    does_log,
    has_failed,
    session_config,
    set_up_logging,
    start,
    visible_gpus,
)
from trainer.results import short_name
from trainer.sharing import SharedVariables
from trainer.spec import TrainSpec, warmup_step_count
from trainer.user_hooks import SharedStopHook
from trainer.validation import Validation

# Far enough apart that two runs' seeds do not meet on different ranks.
_SEED_STRIDE = 1000003

_SUMMARY_STEPS = 100  # as a MonitoredTrainingSession has it

# What Horovod calls the end of its work on another rank; it has no error class of its own.
_RANK_LEFT = "Horovod has been shut down"


class Trainer:
    """Trains a network on all ranks that `mpirun` started, data-parallel, through Horovod.

    Every rank makes the same Trainer. The sample stream of `training_dataset` is dealt to the ranks, gradients are
    averaged over them, and all ranks make the same number of steps whatever the number of samples.

    Args:
        training_dataset: `tf.data.Dataset` of single (sample, label) pairs, shuffled and repeated as wanted, not
            batched.
        build_training_func: `(x, y) -> (network, loss, log_tensors)` for a batch; `log_tensors` is a dict
            name -> tensor or a list of tensors.
        optimizer: a `tf.train.Optimizer` class.
        optimizer_args: its arguments; `learning_rate` is that of one rank. Never modified.
        batch_size: samples per rank and step.
        prefetch_size: batches kept ready on each rank; None means `batch_size`, at most 16.
        checkpoint_dir: rank 0 writes checkpoints there and restores the last one; None: no checkpoints.
        scaling_learning_rate: multiply the learning rate by the number of ranks (arXiv 1706.02677).
        log_step_size: log every so many steps.
        validation_dataset: like `training_dataset`, or None.
        build_validation_func: `(x, y) -> (network, metrics)`; shares the weights of the training network.
        max_iteration: mini-batches over all ranks together after which training ends.
        warmup_steps: raise the learning rate linearly from that of one rank during so many steps (same paper).
        warmup_epochs: the same, in epochs (the part of `training_dataset` before its `repeat`).
        gradient_compression: "none", or "fp16" to send gradients as 16-bit floats.
        metrics_dir: rank 0 writes `metrics.jsonl` and TensorBoard scalars there.
        hooks: more session hooks, run on every rank (those that save checkpoints or summaries on rank 0 only). One
            that asks to stop stops all ranks after the same step.
        seed: makes initial weights and the order of the data repeatable.
        save_checkpoint_secs: seconds between checkpoints; there is always one at the end.
        save_checkpoint_steps: steps between checkpoints; takes the place of `save_checkpoint_secs`.

    Raises:
        TypeError, ValueError: an argument is wrong; says what was given and what is expected.
    """

    def __init__(
        self,
        training_dataset,
        build_training_func,
        optimizer,
        optimizer_args,
        batch_size=32,
        prefetch_size=None,
        checkpoint_dir=None,
        scaling_learning_rate=True,
        log_step_size=1,
        validation_dataset=None,
        build_validation_func=None,
        max_iteration=math.inf,
        *,
        warmup_steps=None,
        warmup_epochs=None,
        gradient_compression="none",
        metrics_dir=None,
        hooks=None,
        seed=None,
        save_checkpoint_secs=600,
        save_checkpoint_steps=None,
    ):
        spec = self._spec = TrainSpec(
            training_dataset,
            build_training_func,
            optimizer,
            dict(optimizer_args) if isinstance(optimizer_args, dict) else optimizer_args,
            batch_size=batch_size,
            prefetch_size=prefetch_size,
            checkpoint_dir=checkpoint_dir,
            scaling_learning_rate=scaling_learning_rate,
            log_step_size=log_step_size,
            validation_dataset=validation_dataset,
            build_validation_func=build_validation_func,
            max_iteration=max_iteration,
            warmup_steps=warmup_steps,
            warmup_epochs=warmup_epochs,
            gradient_compression=gradient_compression,
            metrics_dir=metrics_dir,
            hooks=tuple(hooks or ()),
            seed=seed,
            save_checkpoint_secs=save_checkpoint_secs,
            save_checkpoint_steps=save_checkpoint_steps,
        )
        _check_with_tensorflow(spec)
        samples = data.count_samples(training_dataset)
        # Refuses an epoch of unknown length before MPI starts.
        warmup_step_count(spec, data.samples_per_epoch(training_dataset), 1)
        replaced = constants.feed_arrays(
            [each for each in (training_dataset, validation_dataset) if each is not None]
        )
        feeds = data.feeds_of(training_dataset)
        if validation_dataset is not None:
            data.feeds_of(validation_dataset)
            if data.never_ends(validation_dataset):
                raise ValueError(
                    "validation_dataset: it never ends; expected a dataset without .repeat(), which is read once "
                    "for each validation"
                )

        self._ranks = start()
        set_up_logging(self._ranks)
        config = session_config(self._ranks, visible_gpus())
        if seed is not None:
            # The initial weights come from rank 0; a seed of its own gives each rank its own dropout.
            tf.set_random_seed(seed + _SEED_STRIDE * self._ranks.rank)
        self._graph = tf.get_default_graph()
        shared = SharedVariables()
        with shared.training():
            graph = self._training_graph = build_training_graph(spec, self._ranks, samples)
        with shared.validation():
            self._validation = None if validation_dataset is None else Validation(spec, self._ranks)
        shared.check()
        constants.empty(replaced)
        self._reporter = Reporter(self._ranks, metrics_dir) if does_log(self._ranks) else None
        if self._reporter is not None:
            before_last_words(self._reporter.clear_bar)
        self._steps = StepHook(spec, self._ranks, graph, samples, feeds, self._reporter)
        self._session = self._make_session(config, graph.shuffle_seeds)
        # Kept until then: a script may drop it before its last steps are saved and its scalars written.
        atexit.register(self._close_at_exit)

    # ---- members ---------------------------------------------------------------------------------------------

    @property
    def is_master(self):
        """Whether this is rank 0."""
        return self._ranks.is_master

    @property
    def training_network(self):
        """The network that `build_training_func` returned."""
        return self._training_graph.network

    @property
    def session(self):
        """The `MonitoredTrainingSession`."""
        return self._session

    @property
    def global_step(self):
        """Steps made so far, those before a restart included; reading it runs nothing."""
        return self._steps.step

    @property
    def validation_metrics(self):
        """List of (metric tensor, average over all samples of the validation set on all ranks).

        Runs the whole validation set; every rank must read it at the same step, and gets the same numbers.

        Raises:
            AttributeError: no validation set was given.
            ValueError: the validation set is empty.
            RuntimeError: another rank has left the training.
        """
        if self._validation is None:
            raise AttributeError("Validation is not setup.")
        started_s = time.monotonic()
        with self._need_of_other_ranks(), in_graph(self._graph):
            averages = self._session.run_step_fn(
                lambda step_context: self._validation.run(step_context.session)
            )
        if self._reporter is not None:
            self._reporter.pause(time.monotonic() - started_s)
        return list(zip(self._validation.metrics, averages))

    def train_on_batch(self):
        """Train on one mini-batch.

        Raises:
            tf.errors.OutOfRangeError: training is over, on all ranks.
            RuntimeError: another rank has left the training.
        """
        if self._session.should_stop():
            raise tf.errors.OutOfRangeError(None, None, f"training is over after step {self.global_step}")
        try:
            with self._need_of_other_ranks():
                if not self._direct.run():
                    # What hooks save and write needs a graph, wherever the user calls this from.
                    with in_graph(self._graph):
                        self._session.run(self._training_graph.train_op)
        except tf.errors.OutOfRangeError as error:
            raise RuntimeError(
                f"training_dataset: it ended before step {self.global_step + 1}, earlier than its size "
                "promised; expected the same number of samples every time it is read"
            ) from error

    def train_to_end(self):
        """Train until the data or `max_iteration` is used up."""
        while not self._session.should_stop():
            self.train_on_batch()

    def train_and_validate_to_end(self, validate_step_size=50):
        """Train to the end, and log the validation metrics every `validate_step_size` steps.

        Raises:
            AttributeError: no validation set was given.
            ValueError: `validate_step_size` is not a positive number.
        """
        if self._validation is None:
            raise AttributeError("Validation is not setup.")
        if validate_step_size < 1:
            raise ValueError(f"validate_step_size: got {validate_step_size!r}, expected an integer >= 1")
        while not self._session.should_stop():
            self.train_on_batch()
            if self.global_step % validate_step_size == 0:
                averages = self.validation_metrics
                if self._reporter is not None:
                    text = ", ".join(f"{short_name(metric)} {value:.6g}" for metric, value in averages)
                    self._reporter.say("step %d, validation: %s", self.global_step, text)

    @contextlib.contextmanager
    def _need_of_other_ranks(self):
        """Say in plain words that another rank is gone."""
        try:
            yield
        except tf.errors.UnknownError as error:
            if _RANK_LEFT not in str(error):
                raise
            raise RuntimeError(
                f"trainer: another rank left the training before step {self.global_step + 1}; expected every rank "
                "to make the same steps: leave the loop on all ranks at the same step, or on none"
            ) from None

    def _make_session(self, config, shuffle_seeds):
        spec, train_op = self._spec, self._training_graph.train_op
        one_writer = (tf.train.CheckpointSaverHook, tf.train.SummarySaverHook)
        theirs = [hook for hook in spec.hooks if self.is_master or not isinstance(hook, one_writer)]
        broadcast = BroadcastHook(self._ranks, len(theirs), shuffle_seeds)
        shared_stop = SharedStopHook(train_op, self._ranks, broadcast)
        hooks = [broadcast, self._steps, *shared_stop.wrapped(theirs), shared_stop]
        due = [shared_stop]
        scaffold = tf.train.Scaffold()
        if spec.checkpoint_dir is not None and self.is_master:
            directory = str(spec.checkpoint_dir)
            checkpoints.make_directory("checkpoint_dir", directory)
            claim.claim(directory)
            # Not one of TensorFlow's cache, which writes the whole graph, arrays and all.
            events = tf.summary.FileWriter(directory)
            checkpoints.choose(directory)
            saver = others.saver_for(directory, self._training_graph.state, self._ranks.size)
            if saver is not None:
                scaffold = tf.train.Scaffold(saver=saver)
            by_steps = spec.save_checkpoint_steps
            savers = [
                SummaryHook(train_op, self._steps, events, scaffold, _SUMMARY_STEPS),
                checkpoints.CheckpointHook(
                    directory,
                    self._steps,
                    scaffold,
                    events,
                    save_secs=None if by_steps else spec.save_checkpoint_secs,
                    save_steps=by_steps,
                ),
            ]
            hooks.extend(savers)
            due.extend(savers)
        self._direct = DirectSteps(self._training_graph, self._steps, due)
        return tf.train.MonitoredTrainingSession(
            checkpoint_dir=str(spec.checkpoint_dir)
            if spec.checkpoint_dir is not None and self.is_master
            else None,
            scaffold=scaffold,
            hooks=hooks,
            save_checkpoint_secs=None,
            save_summaries_steps=None,
            save_summaries_secs=None,
            # The Reporter tells the speed, without a fetch in every step.
            log_step_count_steps=None,
            config=config,
        )

    def close(self):
        """Close the session and what rank 0 writes; the process's end does it too."""
        atexit.unregister(self._close_at_exit)
        if not is_closed(self._session):
            with in_graph(self._graph):
                self._session.close()
        if self._spec.checkpoint_dir is not None and self.is_master:
            claim.release(str(self._spec.checkpoint_dir))
        if self._reporter is not None:
            self._reporter.close()

    def _close_at_exit(self):
        # What an exception interrupted is not worth a checkpoint.
        if not has_failed():
            self.close()


def _check_with_tensorflow(spec):
    """Check what only TensorFlow knows; starts nothing."""
    data.check_graph("Trainer")
    data.check_pairs("training_dataset", spec.training_dataset)
    if spec.validation_dataset is not None:
        data.check_pairs("validation_dataset", spec.validation_dataset)
    if isinstance(spec.optimizer, type) and not issubclass(spec.optimizer, tf.train.Optimizer):
        raise TypeError(
            f"optimizer: got {spec.optimizer.__name__}, expected a tf.train.Optimizer class such as "
            "tf.train.AdamOptimizer"
        )
    for hook in spec.hooks:
        if not isinstance(hook, tf.train.SessionRunHook):
            raise TypeError(f"hooks: got {hook!r}, expected tf.train.SessionRunHook objects")
