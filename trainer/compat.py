"""The only importer of TensorFlow (as its 1.x API) and of Horovod (on demand); every private name is here.

Works with TensorFlow 1.15 and 2.x. Of TensorFlow's behaviour nothing is switched: what is said below keeps it quiet.
"""

import contextlib
import importlib
import os
import random
import sys
import warnings

# Start-up chatter about CPU features and, on a host without an NVIDIA driver, errors about its absence. Set the
# variable yourself to see them; what makes a step fail is raised as an exception at any level.
HAS_DRIVER = any(os.path.exists(device) for device in ("/dev/nvidiactl", "/dev/dxg"))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1" if HAS_DRIVER else "3")

with warnings.catch_warnings():
    # NumPy warns about dtypes inside TensorFlow 1.15's own modules; only their import is silenced.
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    import tensorflow.compat.v1 as tf
    import tensorflow.compat.v2 as _tf2

# TensorFlow calls its own deprecated functions and tells every script for TensorFlow 1 to rename what it uses; a user
# of this package can do nothing about the first and need not do the second.
for _module, _switch, _quiet in (
    ("deprecation", "_PRINT_DEPRECATION_WARNINGS", False),
    ("module_wrapper", "_PER_MODULE_WARNING_LIMIT", 0),
):
    with contextlib.suppress(ImportError):
        _module = importlib.import_module("tensorflow.python.util." + _module)
        if hasattr(_module, _switch):
            setattr(_module, _switch, _quiet)
warnings.filterwarnings("ignore", message=r"`tf\.layers\.\w+` is deprecated", category=UserWarning)

__all__ = [
    "HAS_DRIVER",
    "called_layers",
    "function_ops",
    "graph_of",
    "horovod",
    "in_graph",
    "is_closed",
    "is_dataset",
    "is_eager",
    "keras_layer_class",
    "replace_input",
    "seeded_keras",
    "set_attribute",
    "set_constant",
    "tf",
    "users_of",
    "variant_of",
    "with_options",
]


def horovod():
    """Import Horovod for TensorFlow; it starts MPI only when its `init` is called.

    Raises:
        ImportError: Horovod is not installed for this interpreter.
    """
    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        raise ImportError(
            f"trainer: horovod.tensorflow cannot be imported ({error}); expected Horovod built with "
            "TensorFlow and MPI "
            "support in this Python environment: run the script in the environment that was provisioned for "
            "training"
        ) from error
    return hvd


# ---- graphs --------------------------------------------------------------------------------------------------


def graph_of(tensor):
    """Return the graph that `tensor` belongs to, or None where it was made eagerly."""
    try:
        return tensor.graph
    except AttributeError:
        return None


def is_eager(value):
    """Say whether `value` is a tensor or a variable that was made eagerly, outside any graph."""
    return (tf.is_tensor(value) or isinstance(value, tf.Variable)) and graph_of(value) is None


@contextlib.contextmanager
def in_graph(graph):
    """Enter `graph` where TensorFlow executes eagerly: many of its v1 functions need that."""
    if not tf.executing_eagerly():
        yield
        return
    with graph.as_default():
        yield


def is_closed(session):
    """Say whether a `MonitoredSession` is closed, which can be done once only (no public name)."""
    return session._is_closed()


def users_of(op):
    """Return the operations that need `op` done (no public name for those that only wait for it)."""
    return [user for tensor in op.outputs for user in tensor.consumers()] + list(op._control_outputs)


def replace_input(op, index, tensor):
    """Feed `tensor` to input `index` of `op`, before any session has run `op` (no public name either)."""
    op._update_input(index, tensor)


def set_attribute(op, name, text):
    """Set a text attribute of `op`, before any session has run it (no public name either)."""
    op._set_attr(name, tf.AttrValue(s=text.encode()))


def set_constant(op, array):
    """Set the value of a constant, before any session has run it (no public name either)."""
    op._set_attr("value", tf.AttrValue(tensor=tf.make_tensor_proto(array)))


# ---- Keras ---------------------------------------------------------------------------------------------------


def keras_layer_class():
    """Return the class of all Keras layers."""
    return tf.keras.layers.Layer


@contextlib.contextmanager
def called_layers():
    """Collect in a list every Keras layer that is called meanwhile: a tensor does not tell which layer made it."""
    layers, seen, calls = [], set(), {}

    def noting(call):
        def noted_call(self, *arguments, **options):
            if id(self) not in seen:
                seen.add(id(self))
                layers.append(self)
            return call(self, *arguments, **options)

        return noted_call

    # TensorFlow 2 has a second class for layers in graphs, without a public name: what a layer made here is.
    for kind in type(keras_layer_class()(name="trainer_probe")).__mro__:
        if "__call__" in vars(kind) and issubclass(kind, keras_layer_class()):
            calls[kind] = vars(kind)["__call__"]
    for kind, call in calls.items():
        kind.__call__ = noting(call)
    try:
        yield layers
    finally:
        for kind, call in calls.items():
            kind.__call__ = call


@contextlib.contextmanager
def seeded_keras(seed):
    """Let Keras draw initial weights from `seed` meanwhile, unless None: in TensorFlow 2 it ignores the graph's."""
    generators = getattr(sys.modules.get("keras.src.backend"), "_SEED_GENERATOR", None)
    if seed is None or generators is None:
        yield
        return
    before = getattr(generators, "generator", None)
    generators.generator = random.Random(seed)
    try:
        yield
    finally:
        generators.generator = before


# ---- datasets ------------------------------------------------------------------------------------------------


def is_dataset(value):
    """Say whether `value` is a `tf.data.Dataset` of either API version."""
    return isinstance(value, (tf.data.Dataset, _tf2.data.Dataset))


def variant_of(dataset):
    """Return the graph tensor that stands for a dataset (TensorFlow has no public name for it)."""
    return dataset._variant_tensor


def function_ops(op):
    """Return the types of the operations in the functions that a graph operation calls, nested ones too."""
    functions, found, seen = op.graph._functions, set(), set()
    waiting = _functions_named(op.node_def)
    while waiting:
        name = waiting.pop()
        if name in seen or name not in functions:
            continue
        seen.add(name)
        for node in functions[name].definition.node_def:
            found.add(node.op)
            waiting.extend(_functions_named(node))
    return found


def _functions_named(node):
    attributes = node.attr.values()
    return [
        function.name for value in attributes for function in (value.func, *value.list.func) if function.name
    ]


def with_options(dataset, input_threads):
    """Give a dataset threads of its own, unless the user has, and a deterministic order, whatever the user has."""
    with warnings.catch_warnings():
        # In a graph TensorFlow 2 knows only the options that were set in Python, which is all that is asked here.
        warnings.filterwarnings("ignore", category=UserWarning)
        given = dataset.options()
    options = tf.data.Options()
    if hasattr(type(options), "threading"):
        options.deterministic = True
        if given.threading.private_threadpool_size is None:
            options.threading.private_threadpool_size = input_threads
        if hasattr(type(options.experimental_optimization), "inject_prefetch"):
            # How far to read ahead is for the user to say.
            options.experimental_optimization.inject_prefetch = False
        return dataset.with_options(options)
    if given.experimental_threading.private_threadpool_size is None:
        options.experimental_threading.private_threadpool_size = input_threads
    dataset = dataset.with_options(options)
    # TensorFlow 1.15 refuses to overrule an option, but these are a copy of the user's.
    dataset.options().experimental_deterministic = True
    return dataset
