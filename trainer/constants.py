"""Large constants: arrays given to `from_tensor_slices` are fed instead, others are left out of the graph on disk."""

import numpy as np

from trainer import data
from trainer.compat import replace_input, set_constant, tf, users_of, variant_of

LARGE_BYTES = 1 << 20


def feed_arrays(datasets):
    """Feed the large arrays that `datasets` hold as constants, as if they had been made by `data.from_arrays`.

    In the graph such an array is copied into every session and into every description of the graph. One that anything
    else than these datasets uses stays where it is.

    Args:
        datasets: what the Trainer uses of the current graph, before any session has run it.

    Returns:
        The constants that the datasets need no more, for `empty`.
    """
    replaced = []
    ours = {op.name for dataset in datasets for op in data.upstream_ops(dataset)}
    for dataset in datasets:
        for op in data.upstream_ops(dataset):
            if op.type == "Const" and _size_bytes(op) > LARGE_BYTES and _users_beyond(op) <= ours:
                with variant_of(dataset).graph.as_default():
                    _feed(op)
                replaced.append(op)
    return replaced


def empty(replaced):
    """Take the arrays of these constants out of the graph, once it is complete, where nothing in it uses them.

    No operation can be taken out of a graph, only its value. A build function may have used the very tensor that the
    script made the dataset of, for its mean, say.
    """
    for op in replaced:
        if not users_of(op):
            set_constant(op, np.zeros([0], op.outputs[0].dtype.as_numpy_dtype))


def _size_bytes(op):
    """Return the size of a constant without reading it; that of strings is not known beforehand."""
    output = op.outputs[0]
    count = output.shape.num_elements() or 0
    return 0 if output.dtype == tf.string else count * output.dtype.size


def _users_beyond(op):
    """Return the names of all operations that depend on `op`."""
    found, waiting = set(), [op]
    while waiting:
        for user in users_of(waiting.pop()):
            if user.name not in found:
                found.add(user.name)
                waiting.append(user)
    return found


def _feed(op):
    output = op.outputs[0]
    placeholder = data.feed(tf.make_ndarray(op.get_attr("value")))
    for user in output.consumers():
        for index, taken in enumerate(user.inputs):
            if taken is output:
                replace_input(user, index, placeholder)


def without_large_constants(meta_graph):
    """Put a placeholder in place of every large constant of a meta graph, which is changed and returned."""
    graph = meta_graph.graph_def
    for nodes in (graph.node, *(function.node_def for function in graph.library.function)):
        for node in nodes:
            if node.op == "Const" and node.attr["value"].ByteSize() > LARGE_BYTES:
                node.attr["shape"].shape.CopyFrom(node.attr["value"].tensor.tensor_shape)
                node.op = "Placeholder"
                del node.attr["value"]
    return meta_graph
