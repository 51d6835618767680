"""Datasets: feeding arrays, and finding out about a dataset without running it."""

import weakref

import numpy as np

from trainer.compat import function_ops, graph_of, is_dataset, tf, variant_of
from trainer.spec import INFINITE, UNKNOWN

# Graph -> {placeholder name: array}: a placeholder cannot carry its value, and a graph collection would be
# written to disk with every checkpoint.
_FED_ARRAYS = weakref.WeakKeyDictionary()

MAPS = {"MapDataset", "ParallelMapDataset", "ParallelMapDatasetV2"}
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
    "RewriteDataset",
    "ScanDataset",
    "ExperimentalScanDataset",
    "ShuffleDataset",
    "ShuffleDatasetV2",
    "ShuffleDatasetV3",
}
_SAME_ELEMENTS = (_SAME_COUNT - MAPS - {"ScanDataset", "ExperimentalScanDataset"}) | {
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

# They wait for Python or for a disk.
_WAITING = {
    "EagerPyFunc",
    "FixedLengthRecordDataset",
    "FixedLengthRecordDatasetV2",
    "GeneratorDataset",
    "PyFunc",
    "PyFuncStateless",
    "ReadFile",
    "TFRecordDataset",
    "TFRecordDatasetV2",
    "TextLineDataset",
}

_REPEATING = {"RepeatDataset", "ShuffleAndRepeatDataset", "ShuffleAndRepeatDatasetV2"}

EAGER_REMEDY = (
    "put the main part of the script under `with tf.Graph().as_default():`, or call "
    "tf.compat.v1.disable_eager_execution() at its top"
)


def from_arrays(*arrays):
    """Make a dataset of the rows of arrays, which are fed when training starts and never enter the graph.

    Like `tf.data.Dataset.from_tensor_slices`, for arrays of any size: `from_arrays(images, labels)` yields
    pairs of a row of `images` and the same row of `labels`. The arrays must not change while training.

    Args:
        *arrays: NumPy arrays (or what `np.asarray` takes) with equal first dimensions; a single tuple will do.

    Raises:
        ValueError: no array, an array without rows, or first dimensions that differ; or TensorFlow 2 executes eagerly.
    """
    check_graph("from_arrays")
    if len(arrays) == 1 and isinstance(arrays[0], (tuple, list)):
        arrays = tuple(arrays[0])
    arrays = tuple(np.asarray(array) for array in arrays)
    shapes = [array.shape for array in arrays]
    if not arrays or any(not shape for shape in shapes) or len({shape[0] for shape in shapes}) != 1:
        raise ValueError(f"from_arrays: got arrays of shapes {shapes}, expected equal first dimensions")
    placeholders = [feed(array) for array in arrays]
    return tf.data.Dataset.from_tensor_slices(
        placeholders[0] if len(placeholders) == 1 else tuple(placeholders)
    )


def feed(array):
    """Make a placeholder of the current graph that `feeds_of` knows the value of."""
    placeholder = tf.placeholder(tf.as_dtype(array.dtype), array.shape, name="from_arrays")
    _FED_ARRAYS.setdefault(tf.get_default_graph(), {})[placeholder.op.name] = array
    return placeholder


def check_graph(name):
    """Refuse to work outside a graph: there TensorFlow 2 executes everything at once.

    Raises:
        ValueError: TensorFlow executes eagerly.
    """
    if tf.executing_eagerly():
        raise ValueError(
            f"{name}: called while TensorFlow {tf.__version__} executes eagerly, expected a graph to build in: "
            f"{EAGER_REMEDY}"
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
    graph = graph_of(variant_of(dataset))
    if graph is None:
        raise ValueError(
            f"{name}: it was made while TensorFlow {tf.__version__} executed eagerly, expected one made in a graph: "
            f"{EAGER_REMEDY}"
        )
    if graph is not tf.get_default_graph():
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


def never_ends(dataset):
    """Say whether `dataset` has no end, also where the number of samples that it repeats is unknown."""
    op = variant_of(dataset).op
    if _count(op) == INFINITE:
        return True
    while op.type in _SAME_COUNT or op.type == "SkipDataset":
        op = op.inputs[0].op
    if op.type not in _REPEATING:
        return False
    times = _constant(op.inputs[1 if op.type == "RepeatDataset" else 4])
    return times is not None and times < 0


def may_wait(dataset):
    """Say whether making samples may take time without taking a core: Python functions, files."""
    ops = upstream_ops(dataset)
    return any(op.type in _WAITING or not _WAITING.isdisjoint(function_ops(op)) for op in ops)


def samples_per_epoch(dataset):
    """Return the number of elements of `dataset` before it is repeated, or `UNKNOWN`."""
    return _epoch(variant_of(dataset).op)


def _epoch(op):
    while op.type in _SAME_COUNT:
        op = op.inputs[0].op
    if op.type in _REPEATING:
        return _count(op.inputs[0].op)
    if op.type in ("TakeDataset", "SkipDataset"):
        return _smallest([_epoch(op.inputs[0].op), _count(op)])
    if op.type in ("ZipDataset", "ConcatenateDataset"):
        # A range beside others only numbers them, as enumerate() does.
        parts = [tensor.op for tensor in op.inputs if not _is_range(tensor.op)]
        lengths = {_epoch(part) for part in parts}
        if any(_epoch(part) != _count(part) for part in parts):
            # What was repeated before it was joined has an epoch only where all agree on it.
            agree = op.type == "ZipDataset" and len(lengths) == 1
            return _smallest([*lengths, _count(op)]) if agree else UNKNOWN
    return _count(op)


def _is_range(op):
    while op.type in _SAME_COUNT - MAPS:
        op = op.inputs[0].op
    return op.type == "RangeDataset"


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
