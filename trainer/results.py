"""Checks of what the user's build functions return."""

import contextlib

from trainer.compat import graph_of, tf


@contextlib.contextmanager
def explained_eager_tensors(name):
    """Say of TensorFlow's refusal of an eager tensor in a graph where it comes from.

    Args:
        name: the function of the user's that runs meanwhile.
    """
    try:
        yield
    except RuntimeError as error:
        if "EagerTensor" not in str(error):
            raise
        raise ValueError(
            f"{name}: it uses a tensor, variable or model that was made outside the graph, while TensorFlow "
            f"{tf.__version__} executed eagerly ({error}); expected everything made in it, or in the graph that the "
            "Trainer is made in"
        ) from error


def training_result(result):
    """Check what `build_training_func` returned.

    Returns:
        (network, loss, log tensors by name).

    Raises:
        TypeError, ValueError: it is something else.
    """
    expected = "expected (network, loss, log_tensors)"
    if not isinstance(result, (tuple, list)) or len(result) != 3:
        raise TypeError(f"build_training_func: it returned {_describe(result)}, {expected}")
    network, loss, log_tensors = result
    if not _is_made_here(loss) or not loss.dtype.is_floating:
        raise TypeError(f"build_training_func: its loss is {loss!r}, {expected} with a float tensor")
    if loss.shape.ndims not in (0, None):
        raise ValueError(
            f"build_training_func: its loss has shape {loss.shape}, expected a scalar: take "
            "tf.reduce_mean of it"
        )
    if isinstance(log_tensors, dict):
        named = {name: _tensor_of(value) for name, value in log_tensors.items()}
    elif isinstance(log_tensors, (list, tuple)):
        named = _named([_tensor_of(value) for value in log_tensors])
    else:
        named = None
    if named is None or not all(map(_is_made_here, named.values())):
        raise TypeError(
            f"build_training_func: its log_tensors is {log_tensors!r}, expected a dict name -> tensor or "
            "a list of tensors (or of names of tensors that the function made)"
        )
    return network, loss, named


def validation_result(result):
    """Check what `build_validation_func` returned, and return its metrics as a list.

    Raises:
        TypeError: it is something else.
    """
    expected = "expected (network, list of metric tensors)"
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise TypeError(f"build_validation_func: it returned {_describe(result)}, {expected}")
    # Old scripts may hand over anything that makes a list, such as a generator.
    metrics = []
    if not isinstance(result[1], dict):
        with contextlib.suppress(TypeError):
            metrics = [_tensor_of(value) for value in result[1]]
    if not metrics or not all(map(_is_made_here, metrics)):
        raise TypeError(f"build_validation_func: its metrics are {result[1]!r}, {expected}")
    return metrics


def _tensor_of(value):
    """Return the tensor that `value` names in the graph; `value` itself where it names none."""
    if isinstance(value, str):
        # That nothing has this name, or that it cannot be one, comes up in the caller's check.
        with contextlib.suppress(KeyError, ValueError):
            return tf.get_default_graph().get_tensor_by_name(value if ":" in value else value + ":0")
    return value


def _is_made_here(value):
    """Say whether `value` is a tensor or a variable of the graph, not an eager one."""
    is_tensor = tf.is_tensor(value) or isinstance(value, tf.Variable)
    return is_tensor and graph_of(value) is tf.get_default_graph()


def _named(tensors):
    if not all(hasattr(tensor, "name") for tensor in tensors):
        return None
    short = [short_name(tensor) for tensor in tensors]
    names = short if len(set(short)) == len(short) else [tensor.name for tensor in tensors]
    return dict(zip(names, tensors))


def _describe(result):
    kind = type(result).__name__
    return f"a {kind} of {len(result)}" if isinstance(result, (tuple, list)) else "a " + kind


def short_name(tensor):
    """Return the name of a tensor without its output number, for people."""
    return tensor.name.split(":")[0]
