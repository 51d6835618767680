"""The Trainer: one object that trains a TensorFlow network on every rank of an MPI job."""

import atexit
import math
import os
import random
import time
import weakref
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from trainer import data
from trainer.compat import horovod, tf
from trainer.hooks import BroadcastHook, LastCheckpointHook, StepHook
from trainer.progress import Reporter
from trainer.ranks import SharedError, session_config, set_up_logging, start
from trainer.spec import INFINITE, UNKNOWN, TrainSpec, warmup_step_count


@dataclass(frozen=True)
class TrainingGraph:
    """The operations of a training that the hooks run."""

    iterator: Any
    train_op: Any
    global_step: Any
    state: (
        Any  # int64 variable: samples used, mini-batches made (both over all ranks), seed of the data order
    )
    step_after: Any  # the global step once the train op is done
    samples_after: Any  # samples used once the train op is done
    agree: Optional[
        Any
    ]  # [samples, ranks with samples] of the next step over all ranks; None: known beforehand
    learning_rate: Any
    log_tensors: dict


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
        hooks: more session hooks, run on every rank (those that save checkpoints or summaries on rank 0 only). A
            hook that asks to stop must do so at the same step on all ranks.
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
        warmup = warmup_step_count(spec, data.samples_per_epoch(training_dataset), 1) and spec

        self._ranks = start()
        set_up_logging(self._ranks)
        config = session_config(self._ranks)
        if seed is not None:
            # The initial weights come from rank 0; a seed of its own gives each rank its own dropout.
            tf.set_random_seed(seed + 1000003 * self._ranks.rank)
        self._reporter = Reporter(log_step_size, metrics_dir) if self.is_master else None
        graph, shuffle_seeds = self._build_training(samples, warmup)
        self._validation = self._build_validation() if validation_dataset is not None else None
        self._steps = StepHook(
            spec, self._ranks, graph, samples, data.feeds_of(training_dataset), self._reporter
        )
        self._train_op = graph.train_op
        self._session = self._make_session(config, shuffle_seeds)
        atexit.register(_close, weakref.ref(self))

    # ---- members ---------------------------------------------------------------------------------------------

    @property
    def is_master(self):
        """Whether this is rank 0."""
        return self._ranks.is_master

    @property
    def training_network(self):
        """The network that `build_training_func` returned."""
        return self._training_network

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
        """
        if self._validation is None:
            raise AttributeError("Validation is not setup.")
        started_s = time.monotonic()
        averages = self._session.run_step_fn(lambda step_context: self._validation.run(step_context.session))
        if self._reporter is not None:
            self._reporter.pause(time.monotonic() - started_s)
        return list(zip(self._validation.metrics, averages))

    def train_on_batch(self):
        """Train on one mini-batch.

        Raises:
            tf.errors.OutOfRangeError: training is over, on all ranks.
        """
        if self._session.should_stop():
            raise tf.errors.OutOfRangeError(None, None, f"training is over after step {self.global_step}")
        try:
            self._session.run(self._train_op)
        except tf.errors.OutOfRangeError as error:
            raise RuntimeError(
                f"training_dataset: it ended before step {self.global_step + 1}, earlier than its size "
                "promised; expected the same number "
                "of samples every time it is read"
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
                    text = ", ".join(f"{_short_name(metric)} {value:.6g}" for metric, value in averages)
                    self._reporter.say("step %d, validation: %s", self.global_step, text)

    # ---- construction ----------------------------------------------------------------------------------------

    def _build_training(self, samples, warmup):
        spec, size = self._spec, self._ranks.size
        first_seed = random.SystemRandom().randrange(1, 2**31) if spec.seed is None else spec.seed + 1
        state = tf.Variable(
            np.array([0, 0, first_seed], np.int64), trainable=False, use_resource=True, name="trainer/state"
        )
        held = state.read_value()
        position, base_seed = held[0], held[2]
        seeds = [data.share_order(spec.training_dataset, base_seed)]
        if spec.validation_dataset is not None:
            seeds.append(data.share_order(spec.validation_dataset, base_seed))

        lookahead = samples == UNKNOWN
        batches = data.training_batches(
            spec.training_dataset,
            size=size,
            rank=self._ranks.rank,
            batch_size=spec.batch_size,
            position=position,
            prefetch=spec.prefetch_batches,
            lookahead=lookahead,
        )
        iterator = tf.data.make_initializable_iterator(batches)
        batch = iterator.get_next()
        (x, y), next_count = batch if lookahead else (batch, None)
        network, loss, log_tensors = _training_result(spec.build_training_func(x, y))
        self._training_network = network
        updates = list(tf.get_collection(tf.GraphKeys.UPDATE_OPS))
        if isinstance(network, tf.keras.layers.Layer):
            # Keras layers keep their updates to themselves.
            updates.extend(update for update in network.updates if update not in updates)

        global_step = tf.train.get_or_create_global_step()
        learning_rate = self._learning_rate(global_step, warmup)
        optimizer = spec.optimizer(**dict(spec.optimizer_args, learning_rate=learning_rate))
        if not isinstance(optimizer, tf.train.Optimizer):
            raise TypeError(
                f"optimizer: {spec.optimizer!r} made a {type(optimizer).__name__}, expected a "
                "tf.train.Optimizer"
            )
        if size > 1:
            hvd = horovod()
            compression = (
                hvd.Compression.fp16 if spec.gradient_compression == "fp16" else hvd.Compression.none
            )
            optimizer = hvd.DistributedOptimizer(optimizer, compression=compression)

        mine = tf.shape(tf.nest.flatten(x)[0], out_type=tf.int64)[0]
        total, agree = self._agreement(samples, held, mine, next_count)
        if total is not None and size > 1:
            # Ranks with fewer samples in the last step weigh less: the average is that over all its samples.
            weight = tf.cast(mine * size, tf.float64) / tf.cast(total, tf.float64)
            loss = loss * tf.cast(weight, loss.dtype)
        step_op = optimizer.minimize(loss, global_step=global_step)
        used = mine if total is None else total
        if total is None:
            used = tf.constant(size * spec.batch_size, tf.int64)
        with tf.control_dependencies([held]):
            state_op = state.assign_add(
                tf.stack([used, tf.constant(size, tf.int64), tf.constant(0, tf.int64)])
            )
        train_op = tf.group(step_op, state_op, *updates, name="trainer/train")
        with tf.control_dependencies([train_op]):
            step_after = tf.identity(
                global_step.read_value() if hasattr(global_step, "read_value") else global_step
            )
            samples_after = state.read_value()[0]
        graph = TrainingGraph(
            iterator,
            train_op,
            global_step,
            state,
            step_after,
            samples_after,
            agree,
            learning_rate,
            log_tensors,
        )
        return graph, [variable for variable in seeds if variable is not None]

    def _agreement(self, samples, held, mine, next_count):
        """Build the number of samples of this step over all ranks, and the same for the next step.

        Returns:
            (total, agree): `total` is None where every step is full, `agree` where it is known beforehand.
        """
        spec, size = self._spec, self._ranks.size
        full = size * spec.batch_size
        if samples == INFINITE:
            return None, None
        if samples != UNKNOWN:
            return tf.minimum(tf.constant(full, tf.int64), samples - held[0]), None
        agreed = tf.Variable(
            np.zeros(2, np.int64),
            trainable=False,
            use_resource=True,
            collections=[tf.GraphKeys.LOCAL_VARIABLES],
            name="trainer/agreed",
        )
        # Read before the next step's number takes its place.
        total = agreed.read_value()[0]
        coming = tf.stack([next_count, tf.cast(next_count > 0, tf.int64)])
        if size > 1:
            # Nothing in this step waits for it, so it travels while the step computes.
            coming = horovod().allreduce(coming, op=horovod().Sum, name="trainer_agreement")
        with tf.control_dependencies([total]):
            assign = agreed.assign(coming)
        with tf.control_dependencies([assign]):
            return total, tf.identity(coming)

    def _learning_rate(self, global_step, warmup):
        spec, size = self._spec, self._ranks.size
        rate = spec.optimizer_args["learning_rate"]
        if spec.scaling_learning_rate:
            rate = rate * size
        steps = warmup_step_count(spec, data.samples_per_epoch(spec.training_dataset), size)
        if not steps or size == 1:
            return tf.convert_to_tensor(rate, tf.float32) if not tf.is_tensor(rate) else rate
        done = tf.minimum(1.0, tf.cast(global_step, tf.float32) / float(steps))
        return rate * (1.0 / size + (1.0 - 1.0 / size) * done)

    def _build_validation(self):
        spec = self._spec
        batches = data.validation_batches(
            spec.validation_dataset,
            size=self._ranks.size,
            rank=self._ranks.rank,
            batch_size=spec.batch_size,
            prefetch=spec.prefetch_batches,
        )
        iterator = tf.data.make_initializable_iterator(batches)
        x, y = iterator.get_next()
        metrics = _validation_result(spec.build_validation_func(x, y))
        rows = tf.shape(tf.nest.flatten(x)[0])[0]
        return Validation(iterator, data.feeds_of(spec.validation_dataset), metrics, rows, self._ranks.size)

    def _make_session(self, config, shuffle_seeds):
        spec = self._spec
        hooks = [BroadcastHook(shuffle_seeds), self._steps]
        scaffold = tf.train.Scaffold()
        if spec.checkpoint_dir is not None and self.is_master:
            os.makedirs(str(spec.checkpoint_dir), exist_ok=True)
            by_steps = spec.save_checkpoint_steps
            hooks.append(
                LastCheckpointHook(
                    str(spec.checkpoint_dir),
                    save_secs=None if by_steps else spec.save_checkpoint_secs,
                    save_steps=by_steps,
                    scaffold=scaffold,
                )
            )
        one_writer = (tf.train.CheckpointSaverHook, tf.train.SummarySaverHook)
        hooks.extend(hook for hook in spec.hooks if self.is_master or not isinstance(hook, one_writer))
        return tf.train.MonitoredTrainingSession(
            checkpoint_dir=str(spec.checkpoint_dir)
            if spec.checkpoint_dir is not None and self.is_master
            else None,
            scaffold=scaffold,
            hooks=hooks,
            save_checkpoint_secs=None,
            config=config,
        )

    def close(self):
        """Close the session and what rank 0 writes; the process's end does it too."""
        self._session.close()
        if self._reporter is not None:
            self._reporter.close()


class Validation:
    """The validation network and its input on this rank."""

    def __init__(self, iterator, feeds, metrics, rows, size):
        self.metrics = metrics
        self._iterator = iterator
        self._feeds = feeds
        self._rows = rows
        self._values = [tf.reduce_mean(tf.cast(metric, tf.float64)) for metric in metrics]
        self._sums = tf.placeholder(tf.float64, [len(metrics) + 1], name="trainer/validation_sums")
        self._summed = self._sums
        if size > 1:
            self._summed = horovod().allreduce(self._sums, op=horovod().Sum, name="trainer_validation")

    def run(self, session):
        """Return the average of every metric over the samples of all ranks.

        Raises:
            ValueError: there is no sample.
        """
        session.run(self._iterator.initializer, feed_dict=self._feeds)
        sums = np.zeros(len(self.metrics) + 1)
        while True:
            try:
                rows, values = session.run([self._rows, self._values])
            except tf.errors.OutOfRangeError:
                break
            sums += np.array([*values, 1.0]) * rows
        summed = session.run(self._summed, feed_dict={self._sums: sums})
        if summed[-1] == 0:
            raise SharedError(
                "validation_dataset: it is empty; expected at least one sample (or validation_dataset=None)"
            )
        return [float(value) for value in summed[:-1] / summed[-1]]


def _check_with_tensorflow(spec):
    """Check what only TensorFlow knows; starts nothing."""
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


def _training_result(result):
    expected = "expected (network, loss, log_tensors)"
    if not isinstance(result, (tuple, list)) or len(result) != 3:
        raise TypeError(f"build_training_func: it returned {_describe(result)}, {expected}")
    network, loss, log_tensors = result
    if not tf.is_tensor(loss) or not loss.dtype.is_floating:
        raise TypeError(f"build_training_func: its loss is {loss!r}, {expected} with a float tensor")
    if loss.shape.ndims not in (0, None):
        raise ValueError(
            f"build_training_func: its loss has shape {loss.shape}, expected a scalar: take "
            "tf.reduce_mean of it"
        )
    if isinstance(log_tensors, (list, tuple)):
        named = {_short_name(tensor): tensor for tensor in log_tensors if hasattr(tensor, "name")}
        if len(named) != len(log_tensors):
            named = None
    else:
        named = dict(log_tensors) if isinstance(log_tensors, dict) else None
    if named is None or not all(tf.is_tensor(t) or isinstance(t, tf.Variable) for t in named.values()):
        raise TypeError(
            f"build_training_func: its log_tensors is {log_tensors!r}, expected a dict name -> tensor or "
            "a list of "
            "tensors"
        )
    return network, loss, named


def _validation_result(result):
    expected = "expected (network, list of metric tensors)"
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise TypeError(f"build_validation_func: it returned {_describe(result)}, {expected}")
    metrics = result[1]
    if not isinstance(metrics, (list, tuple)) or not metrics or not all(tf.is_tensor(m) for m in metrics):
        raise TypeError(f"build_validation_func: its metrics are {metrics!r}, {expected}")
    return list(metrics)


def _describe(result):
    kind = type(result).__name__
    return f"a {kind} of {len(result)}" if isinstance(result, (tuple, list)) else "a " + kind


def _short_name(tensor):
    return tensor.name.split(":")[0]


def _close(reference):
    trainer = reference()
    if trainer is not None:
        trainer.close()
