"""The training graph: input, the user's network, averaged gradients, and the state a restart needs."""

import logging
import random
from dataclasses import dataclass
from typing import Any, Dict, Optional, Tuple

import numpy as np

from trainer import data, dealing
from trainer.compat import (
    called_layers,
    graph_of,
    horovod,
    is_eager,
    keras_layer_class,
    seeded_keras,
    tf,
    users_of,
)
from trainer.ranks import cpu_threads
from trainer.results import explained_eager_tensors, training_result
from trainer.spec import INFINITE, UNKNOWN, warmup_step_count

logger = logging.getLogger("trainer")


@dataclass(frozen=True)
class TrainingGraph:
    """What the hooks run and the Trainer hands out."""

    network: Any
    iterator: Any
    train_op: Any
    global_step: Any
    # int64 variable: samples used, mini-batches made (both over all ranks), seed of the data's order.
    state: Any
    # The first two once the train op is done, and the global step likewise.
    step_after: Any
    samples_after: Any
    # [samples, ranks with samples] of the next step over all ranks; None where it is known beforehand.
    agree: Optional[Any]
    learning_rate: Any
    log_tensors: Dict[str, Any]
    # Local variables to broadcast before the input starts.
    shuffle_seeds: Tuple[Any, ...]


def build_training_graph(spec, ranks, samples):
    """Build everything that one training step on this rank needs, the same on all ranks.

    Args:
        spec: a `TrainSpec`.
        ranks: a `Ranks`.
        samples: what `data.count_samples` says of the training dataset.

    Returns:
        A TrainingGraph.

    Raises:
        TypeError, ValueError: `build_training_func` or `optimizer` made something unexpected.
    """
    # Before the dealing takes the stream apart.
    warmup_steps = warmup_step_count(spec, data.samples_per_epoch(spec.training_dataset), ranks.size)
    state = _state_variable(spec)
    held = state.read_value()
    datasets = (spec.training_dataset, spec.validation_dataset)
    seeds = [dealing.share_order(dataset, held[2]) for dataset in datasets if dataset is not None]
    lookahead = samples == UNKNOWN
    batches = dealing.training_batches(
        spec.training_dataset,
        size=ranks.size,
        rank=ranks.rank,
        batch_size=spec.batch_size,
        position=held[0],
        prefetch=spec.prefetch_batches,
        threads=cpu_threads(ranks.local_size),
        lookahead=lookahead,
        is_shared=spec.validation_dataset is spec.training_dataset,
    )
    iterator = tf.data.make_initializable_iterator(batches)
    batch = iterator.get_next()
    (x, y), next_count = batch if lookahead else (batch, None)
    earlier = set(tf.get_default_graph().get_operations())
    with called_layers() as layers, seeded_keras(spec.seed), explained_eager_tensors("build_training_func"):
        network, loss, log_tensors = training_result(spec.build_training_func(x, y))
    updates = _updates_of(network, layers, earlier)
    if ranks.is_master and _asks_keras_whether_it_trains(loss):
        logger.warning(
            "build_training_func: a Keras layer such as batch normalisation or dropout is called without training=True "
            "and works as in use, not as in training"
        )

    global_step = tf.train.get_or_create_global_step()
    learning_rate = _learning_rate(spec, ranks.size, warmup_steps, global_step)
    optimizer = _optimizer(spec, ranks.size, learning_rate)

    mine = tf.shape(tf.nest.flatten(x)[0], out_type=tf.int64)[0]
    total, agree = _step_total(samples, spec.batch_size, ranks.size, held[0], next_count)
    if ranks.size > 1 and samples != INFINITE:
        # Ranks with fewer samples in the last step weigh less: the average is that over all its samples.
        weight = tf.cast(mine * ranks.size, tf.float64) / tf.cast(total, tf.float64)
        loss = loss * tf.cast(weight, loss.dtype)
    step_op = optimizer.minimize(loss, global_step=global_step, var_list=_weights_to_train(layers))
    with tf.control_dependencies([held]):
        state_op = state.assign_add(
            tf.stack([total, tf.constant(ranks.size, tf.int64), tf.constant(0, tf.int64)])
        )
    train_op = tf.group(step_op, state_op, *updates, name="trainer/train")
    with tf.control_dependencies([train_op]):
        step_after = tf.identity(global_step.read_value())
        samples_after = state.read_value()[0]
    return TrainingGraph(
        network=network,
        iterator=iterator,
        train_op=train_op,
        global_step=global_step,
        state=state,
        step_after=step_after,
        samples_after=samples_after,
        agree=agree,
        learning_rate=learning_rate,
        log_tensors=log_tensors,
        shuffle_seeds=tuple(variable for variable in seeds if variable is not None),
    )


def _state_variable(spec):
    """Make the variable that goes into every checkpoint beside the weights, and from rank 0 to all ranks."""
    seed = random.SystemRandom().randrange(1, 2**31) if spec.seed is None else spec.seed + 1
    start = np.array([0, 0, seed], np.int64)
    return tf.Variable(start, trainable=False, use_resource=True, name="trainer/state")


def _updates_of(network, layers, earlier):
    """Return the update operations of the training network, such as those of batch normalisation.

    Args:
        layers: the Keras layers that were called to make it.
        earlier: the graph's operations before that.
    """
    fed = _ops_that_need_feeding(tf.get_default_graph())
    # A network that the script made before, on a placeholder, has left updates that could not run.
    collected = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
    updates = [update for update in collected if getattr(update, "op", update) not in fed]
    # Keras layers keep their updates to themselves, together with those of other calls: in another graph, on other
    # data, on the placeholder that a model is made with.
    owners = [*layers, network] if isinstance(network, keras_layer_class()) else layers
    for update in [update for layer in owners for update in layer.updates]:
        op = getattr(update, "op", update)
        if graph_of(op) is tf.get_default_graph() and op not in earlier and op not in fed:
            updates.append(update)
    return updates


def _weights_to_train(layers):
    """Return the trainable variables without those of Keras layers that the user set to `trainable = False`.

    TensorFlow's optimizers know nothing of that. None stands for all of them.
    """
    frozen = {id(weight) for layer in layers for weight in layer.non_trainable_weights}
    weights = tf.trainable_variables()
    kept = [weight for weight in weights if id(weight) not in frozen]
    return kept if len(kept) < len(weights) else None


def _asks_keras_whether_it_trains(loss):
    """Say whether the loss depends on Keras's learning phase while the user has not set it."""
    waiting, seen = [loss.op], set()
    while waiting:
        op = waiting.pop()
        if op.type == "PlaceholderWithDefault" and "keras_learning_phase" in op.name:
            return True
        before = [tensor.op for tensor in op.inputs if tensor.op not in seen]
        seen.update(before)
        waiting.extend(before)
    return False


def _ops_that_need_feeding(graph):
    """Return the operations that depend on a placeholder without a default."""
    waiting = [op for op in graph.get_operations() if op.type == "Placeholder"]
    found = set(waiting)
    while waiting:
        op = waiting.pop()
        users = users_of(op)
        waiting.extend(user for user in users if user not in found)
        found.update(users)
    return found


def _learning_rate(spec, size, warmup_steps, global_step):
    """Return the scaled learning rate as a tensor, rising from that of one rank during the warm-up."""
    rate = spec.optimizer_args["learning_rate"]
    if is_eager(rate):
        rate = float(rate.numpy())
    if spec.scaling_learning_rate:
        rate = rate * size
    if not warmup_steps or size == 1:
        return rate if tf.is_tensor(rate) else tf.constant(rate, tf.float32, name="trainer/learning_rate")
    done = tf.minimum(1.0, tf.cast(global_step, tf.float32) / float(warmup_steps))
    return rate * (1.0 / size + (1.0 - 1.0 / size) * done)


def _optimizer(spec, size, learning_rate):
    optimizer = spec.optimizer(**dict(spec.optimizer_args, learning_rate=learning_rate))
    if not isinstance(optimizer, tf.train.Optimizer):
        raise TypeError(
            f"optimizer: {spec.optimizer!r} made a {type(optimizer).__name__}, expected a tf.train.Optimizer"
        )
    if size == 1:
        return optimizer
    hvd = horovod()
    fp16 = spec.gradient_compression == "fp16"
    return hvd.DistributedOptimizer(
        optimizer, compression=hvd.Compression.fp16 if fp16 else hvd.Compression.none
    )


def _step_total(samples, batch_size, size, position, next_count):
    """Build the number of samples of this step over all ranks, and the same of the next step.

    Args:
        position: int64 scalar tensor, samples used before this step.
        next_count: int64 scalar tensor, samples of this rank in the next step; None where `samples` is known.

    Returns:
        (total, agree); `agree` is None where nothing needs to be agreed on.
    """
    full = tf.constant(size * batch_size, tf.int64)
    if samples == INFINITE:
        return full, None
    if samples != UNKNOWN:
        return tf.minimum(full, samples - position), None
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
