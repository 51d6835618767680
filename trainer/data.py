"""Datasets: feeding arrays, finding out about a dataset, and dealing its samples to the ranks."""

import weakref

import numpy as np

from trainer.compat import is_dataset, replace_input, tf, variant_of
from trainer.spec import INFINITE, UNKNOWN

# Graph -> {placeholder name: array}: a placeholder cannot carry its value, and a graph collection would be
# written to disk with every checkpoint.
_FED_ARRAYS = weakref.WeakKeyDictionary()

# An absolute name scope: nothing of the user's is named like this.
_ORDER_SCOPE = "trainer_order/"

_SAME_COUNT = {
    "CacheDataset",
    "CacheDatasetV2",
    "MapDataset",
    "ModelDataset",
    "OptimizeDataset",
    "OptionsDataset",
    "ParallelMapDataset",
    "ParallelMapDatasetV2",
    "PrefetchDataset",
    "ShuffleDataset",
    "ShuffleDatasetV2",
    "ShuffleDatasetV3",
}
_INPUT_THREADS = 4

_MAPS = {"MapDataset", "ParallelMapDataset", "ParallelMapDatasetV2"}
_SAME_ELEMENTS = (_SAME_COUNT - _MAPS) | {
    "RepeatDataset",
    "ShardDataset",
    "ShuffleAndRepeatDataset",
    "ShuffleAndRepeatDatasetV2",
    "SkipDataset",
    "TakeDataset",
}
_BATCHING = {
    "BatchDataset",
    "BatchDatasetV2",
    "MapAndBatchDataset",
    "PaddedBatchDataset",
    "PaddedBatchDatasetV2",
    "ExperimentalMapAndBatchDataset",
    "ParallelBatchDataset",
}


def from_arrays(*arrays):
    """Make a dataset of the rows of arrays, which are fed when training starts and never enter the graph.

    Like `tf.data.Dataset.from_tensor_slices`, for arrays of any size: `from_arrays(images, labels)` yields
    pairs of a row of `images` and the same row of `labels`. The arrays must not change while training.

    Args:
        *arrays: NumPy arrays (or what `np.asarray` takes) with equal first dimensions; a single tuple will do.

    Raises:
        ValueError: no array, an array without rows, or first dimensions that differ.
    """
    if len(arrays) == 1 and isinstance(arrays[0], (tuple, list)):
        arrays = tuple(arrays[0])
    arrays = tuple(np.asarray(array) for array in arrays)
    shapes = [array.shape for array in arrays]
    if not arrays or any(not shape for shape in shapes) or len({shape[0] for shape in shapes}) != 1:
        raise ValueError(f"from_arrays: got arrays of shapes {shapes}, expected equal first dimensions")
    graph = tf.get_default_graph()
    fed = _FED_ARRAYS.setdefault(graph, {})
    placeholders = []
    for array in arrays:
        placeholder = tf.placeholder(tf.as_dtype(array.dtype), array.shape, name="from_arrays")
        fed[placeholder.op.name] = array
        placeholders.append(placeholder)
    return tf.data.Dataset.from_tensor_slices(
        placeholders[0] if len(placeholders) == 1 else tuple(placeholders)
    )


def upstream_ops(dataset):
    """Return every graph operation that `dataset` depends on, nearest first, in a repeatable order."""
    found, waiting, seen = [], [variant_of(dataset).op], set()
    while waiting:
        op = waiting.pop(0)
        if op.name in seen:
            continue
        seen.add(op.name)
        found.append(op)
        waiting.extend(tensor.op for tensor in op.inputs)
    return found


def feeds_of(dataset):
    """Return the feed dict that initialises an iterator over `dataset`.

    Raises:
        ValueError: the dataset depends on a placeholder that `from_arrays` did not make.
    """
    graph = variant_of(dataset).graph
    fed, feeds = _FED_ARRAYS.get(graph, {}), {}
    for op in upstream_ops(dataset):
        if op.type != "Placeholder":
            continue
        if op.name not in fed:
            raise ValueError(
                f"dataset: it depends on the placeholder {op.name!r}, which nothing feeds; use "
                "trainer.data.from_arrays(arrays)"
            )
        feeds[op.outputs[0]] = fed[op.name]
    return feeds


def check_pairs(name, dataset):
    """Refuse what is not a dataset of single (sample, label) pairs in the current graph.

    Raises:
        TypeError: not a dataset, or its elements are not pairs.
        ValueError: it is batched already, or belongs to another graph.
    """
    if not is_dataset(dataset):
        raise TypeError(
            f"{name}: got {type(dataset).__name__!r}, expected a tf.data.Dataset of (sample, label) pairs"
        )
    types = tf.data.get_output_types(dataset)
    if not isinstance(types, tuple) or len(types) != 2:
        raise TypeError(
            f"{name}: got elements of types {types!r}, expected pairs (sample, label); zip the two"
        )
    if variant_of(dataset).graph is not tf.get_default_graph():
        raise ValueError(
            f"{name}: it was made in another graph; expected one made in the graph the Trainer is made in"
        )
    batching = _find_batching(dataset)
    if batching is not None:
        raise ValueError(
            f"{name}: it is already batched ({batching.type}, elements of shapes "
            f"{tf.data.get_output_shapes(dataset)}); expected single samples: leave out .batch(), "
            "the Trainer batches with batch_size"
        )


def _find_batching(dataset):
    """Return the operation that batches the elements of `dataset`, or None.

    A map after it may turn a batch into one sample (a sequence, say), so then the shapes must speak for a batch
    too: every component with a first dimension of unknown length.
    """
    shapes = tf.nest.flatten(tf.data.get_output_shapes(dataset))
    looks_batched = all(shape.ndims and shape.dims[0].value is None for shape in shapes)
    op = variant_of(dataset).op
    while op.type in _SAME_ELEMENTS or (looks_batched and op.type in _SAME_COUNT):
        op = op.inputs[0].op
    return op if op.type in _BATCHING else None


def count_samples(dataset):
    """Return how many elements `dataset` has, without running it: a number, `INFINITE`, or `UNKNOWN`."""
    return _count(variant_of(dataset).op)


def samples_per_epoch(dataset):
    """Return the number of elements of `dataset` before it is repeated, or `UNKNOWN`."""
    op = variant_of(dataset).op
    while op.type in _SAME_COUNT:
        op = op.inputs[0].op
    if op.type in ("RepeatDataset", "ShuffleAndRepeatDataset", "ShuffleAndRepeatDatasetV2"):
        op = op.inputs[0].op
    return _count(op)


def _count(op):
    """Count from the graph alone: a session would copy every constant of the graph only to tell a number."""
    kind = op.type
    if kind in _SAME_COUNT:
        return _count(op.inputs[0].op)
    if kind == "TensorDataset":
        return 1
    if kind == "TensorSliceDataset":
        dims = op.inputs[0].shape.dims
        return UNKNOWN if not dims or dims[0].value is None else dims[0].value
    if kind == "RangeDataset":
        start, stop, step = (_constant(tensor) for tensor in op.inputs[:3])
        return UNKNOWN if None in (start, stop, step) else len(range(start, stop, step))
    if kind == "ZipDataset":
        return _smallest([_count(tensor.op) for tensor in op.inputs])
    if kind == "ConcatenateDataset":
        counts = [_count(tensor.op) for tensor in op.inputs[:2]]
        return INFINITE if INFINITE in counts else UNKNOWN if UNKNOWN in counts else sum(counts)
    if kind in ("RepeatDataset", "ShuffleAndRepeatDataset", "TakeDataset", "SkipDataset"):
        argument = _constant(op.inputs[4 if kind == "ShuffleAndRepeatDataset" else 1])
        if argument is None:
            return UNKNOWN
        return _resized(kind, _count(op.inputs[0].op), argument)
    return UNKNOWN


def _resized(kind, count, argument):
    if kind == "TakeDataset":
        return count if argument < 0 else _smallest([count, argument])
    if kind == "SkipDataset":
        return 0 if argument < 0 else count if count < 0 else max(0, count - argument)
    if count == 0 or argument == 0:
        return 0
    return INFINITE if argument < 0 and count != UNKNOWN else count if count < 0 else count * argument


def _smallest(counts):
    if UNKNOWN in counts:
        return UNKNOWN
    finite = [count for count in counts if count >= 0]
    return min(finite) if finite else INFINITE


def _constant(tensor):
    value = tf.get_static_value(tensor)
    return None if value is None else int(value)


def share_order(dataset, base_seed):
    """Make every shuffle of `dataset` draw the same order on all ranks and in every restart.

    Args:
        dataset: changed in place, before any session has run it.
        base_seed: int64 scalar tensor, the same on all ranks; it seeds what the user left unseeded.

    Returns:
        A local variable [n, 2] with the user's own seeds, to be broadcast from rank 0 before the dataset is used,
        or None where nothing is random.
    """
    seeded = []
    for op in upstream_ops(dataset):
        names = [argument.name for argument in op.op_def.input_arg]
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


def training_batches(dataset, *, size, rank, batch_size, position, prefetch, lookahead, is_shared=False):
    """Deal the stream of samples to the ranks and batch this rank's share.

    Sample i of the stream goes to rank i % size, so the samples of any number of whole steps are a prefix of the
    stream: what a checkpoint has to remember is one number.

    Args:
        position: int64 scalar tensor, samples of the stream to skip; read when the iterator is initialised.
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
    return _finish(batches, prefetch)


def validation_batches(dataset, *, size, rank, batch_size, prefetch):
    """Deal a validation set to the ranks and batch this rank's share."""
    if not _deal_before_maps(dataset, size, rank, tf.constant(0, tf.int64)):
        dataset = dataset.shard(size, rank)
    return _finish(dataset.batch(batch_size), prefetch)


def _deal_before_maps(dataset, size, rank, position):
    """Deal the samples before the maps at the end of `dataset` instead of after them, so a rank maps only its own.

    Returns:
        Whether `dataset` was changed so; not where it does not end with a map, or where its maps feed something else.
    """
    lowest, op, users = None, variant_of(dataset).op, 0
    while op.type in _MAPS | {"PrefetchDataset"} and len(op.outputs[0].consumers()) == users:
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


def _finish(batches, prefetch):
    if prefetch:
        batches = batches.prefetch(prefetch)
    if batches.options().experimental_threading.private_threadpool_size is not None:
        return batches
    # Threads of the input's own: a map that waits would take those of the training step, and the other way round.
    options = tf.data.Options()
    options.experimental_threading.private_threadpool_size = _INPUT_THREADS
    return batches.with_options(options)


def _with_next_count(batches):
    """Pair every batch with the number of samples of the one after it; the first pair's batch is empty.

    So the ranks can agree on a step before any of them starts it, whatever the dataset turns out to hold.

    Raises:
        TypeError: an element holds something else than dense tensors.
    """
    if any(kind is not tf.Tensor for kind in tf.nest.flatten(tf.data.get_output_classes(batches))):
        raise TypeError(
            "training_dataset: got sparse or ragged elements and an unknown number of samples; expected "
            "dense "
            "tensors (or end the dataset with .take(n))"
        )
    types, shapes = tf.data.get_output_types(batches), tf.data.get_output_shapes(batches)
    empty = tf.nest.map_structure(
        lambda dtype, shape: tf.zeros(
            [0] + [dim or 0 for dim in (shape.as_list()[1:] if shape.ndims else [])], dtype
        ),
        types,
        shapes,
    )

    def hold_back(held, arriving):
        rows = tf.shape(tf.nest.flatten(arriving)[0], out_type=tf.int64)[0]
        return arriving, (held, rows)

    with_end = batches.concatenate(tf.data.Dataset.from_tensors(empty))
    return with_end.apply(tf.data.experimental.scan(empty, hold_back))
