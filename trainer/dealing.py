"""Dealing the samples of a dataset to the ranks, in one order that all of them share, and batching them."""

from trainer.compat import replace_input, set_attribute, tf, variant_of, with_options
from trainer.data import MAPS, may_wait, upstream_ops

# An absolute name scope: nothing of the user's is named like this.
_ORDER_SCOPE = "trainer_order/"

# The fewest threads of an input that may wait.
_WAITING_THREADS = 4

# Between the maps at the end of a dataset these change no element.
_BETWEEN_MAPS = {"ModelDataset", "OptimizeDataset", "OptionsDataset", "PrefetchDataset"}


def share_order(dataset, base_seed):
    """Make every shuffle of `dataset` draw the same order on all ranks and in every restart.

    Parallel maps and interleaves keep their order too, where the user allowed them not to.

    Args:
        dataset: changed in place, before any session has run it.
        base_seed: int64 scalar tensor, the same on all ranks; it seeds what the user left unseeded.

    Returns:
        A local variable [n, 2] with the user's own seeds, to be broadcast from rank 0 before the dataset is used,
        or None where nothing is random.
    """
    seeded = []
    for op in upstream_ops(dataset):
        if "deterministic" in op.node_def.attr:
            set_attribute(op, "deterministic", "true")
        names = [argument.name for argument in op.op_def.input_arg]
        if "sloppy" in names and len(names) == len(op.inputs):
            replace_input(op, names.index("sloppy"), tf.constant(False))
        if "seed" in names and "seed2" in names and len(names) == len(op.inputs):
            first, second = names.index("seed"), names.index("seed2")
            # The training and the validation set may share a shuffle, which then is done already.
            if not op.inputs[first].op.name.startswith(_ORDER_SCOPE):
                seeded.append((op, first, second))
    if not seeded:
        return None
    with tf.name_scope(_ORDER_SCOPE):
        own = [
            tf.cast(tf.stack([op.inputs[first], op.inputs[second]]), tf.int64) for op, first, second in seeded
        ]
        seeds = tf.Variable(
            tf.stack(own),
            dtype=tf.int64,
            trainable=False,
            use_resource=True,
            collections=[tf.GraphKeys.LOCAL_VARIABLES],
        )
        given = seeds.read_value()
        for index, (op, first, second) in enumerate(seeded):
            # Two zeros are what TensorFlow makes of no seed at all.
            is_unseeded = tf.reduce_all(tf.equal(given[index], 0))
            pair = tf.where(is_unseeded, tf.stack([base_seed, index + 1]), given[index])
            replace_input(op, first, pair[0])
            replace_input(op, second, pair[1])
    return seeds


def training_batches(
    dataset, *, size, rank, batch_size, position, prefetch, threads, lookahead, is_shared=False
):
    """Deal the stream of samples to the ranks and batch this rank's share.

    Sample i of the stream goes to rank i % size, so the samples of any number of whole steps are a prefix of the
    stream: what a checkpoint has to remember is one number.

    Args:
        position: int64 scalar tensor, samples of the stream to skip; read when the iterator is initialised.
        threads: how many run the dataset's functions; more where those may wait.
        lookahead: also tell the number of samples in the next batch (see `_with_next_count`).
        is_shared: something else uses the very same dataset.

    Returns:
        A dataset of batches `(x, y)`, or with `lookahead` of `((x, y), samples in the next batch)`.
    """
    # One rank is dealt its samples too: with as many operations before the network as on several ranks, the same
    # seed makes the same initial weights.
    if is_shared or not _deal_before_maps(dataset, size, rank, position):
        dataset = dataset.skip(position).shard(size, rank)
    batches = dataset.batch(batch_size)
    if lookahead:
        batches = _with_next_count(batches)
    return _finish(batches, prefetch, threads)


def validation_batches(dataset, *, size, rank, batch_size, prefetch, threads):
    """Deal a validation set to the ranks and batch this rank's share; see `training_batches`."""
    if not _deal_before_maps(dataset, size, rank, tf.constant(0, tf.int64)):
        dataset = dataset.shard(size, rank)
    return _finish(dataset.batch(batch_size), prefetch, threads)


def _deal_before_maps(dataset, size, rank, position):
    """Deal the samples before the maps at the end of `dataset` instead of after them, so a rank maps only its own.

    Returns:
        Whether `dataset` was changed so; not where it does not end with a map, or where its maps feed something else.
    """
    lowest, op, users = None, variant_of(dataset).op, 0
    while op.type in MAPS | _BETWEEN_MAPS and len(op.outputs[0].consumers()) == users:
        lowest, op, users = op, op.inputs[0].op, 1
    types = next((name for name in ("output_types", "Toutput_types") if name in op.node_def.attr), None)
    if lowest is None or types is None or "output_shapes" not in op.node_def.attr:
        return False
    structure = {
        "output_types": op.get_attr(types),
        "output_shapes": [tf.TensorShape(shape) for shape in op.get_attr("output_shapes")],
    }
    rest = tf.raw_ops.SkipDataset(input_dataset=lowest.inputs[0], count=position, **structure)
    mine = tf.raw_ops.ShardDataset(
        input_dataset=rest,
        num_shards=tf.constant(size, tf.int64),
        index=tf.constant(rank, tf.int64),
        **structure,
    )
    replace_input(lowest, 0, mine)
    return True


def _finish(batches, prefetch, threads):
    if prefetch:
        batches = batches.prefetch(prefetch)
    # Threads of the input's own: a map that waits would take those of the training step, and the other way round.
    # More of them than cores only help where they wait; where they compute, they keep cores from the step.
    return with_options(
        batches, input_threads=max(threads, _WAITING_THREADS) if may_wait(batches) else threads
    )


def _with_next_count(batches):
    """Pair every batch with the number of samples of the one after it; the first pair's batch is empty.

    So the ranks can agree on a step before any of them starts it, whatever the dataset turns out to hold.

    Raises:
        TypeError: an element holds something else than dense tensors.
    """
    if any(kind is not tf.Tensor for kind in tf.nest.flatten(tf.data.get_output_classes(batches))):
        raise TypeError(
            "training_dataset: got sparse or ragged elements and an unknown number of samples; expected dense tensors: "
            "make them so in a map (tf.sparse.to_dense)"
        )
    types, shapes = tf.data.get_output_types(batches), tf.data.get_output_shapes(batches)
    empty = tf.nest.map_structure(
        lambda dtype, shape: tf.zeros(
            [0] + [dim or 0 for dim in (shape.as_list()[1:] if shape.ndims else [])], dtype
        ),
        types,
        shapes,
    )

    @tf.autograph.experimental.do_not_convert
    def hold_back(held, arriving):
        rows = tf.shape(tf.nest.flatten(arriving)[0], out_type=tf.int64)[0]
        return arriving, (held, rows)

    with_end = batches.concatenate(tf.data.Dataset.from_tensors(empty))
    return with_end.apply(tf.data.experimental.scan(empty, hold_back))
