"""Checks of what the user's build functions return."""

from trainer.compat import tf


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
    if not tf.is_tensor(loss) or not loss.dtype.is_floating:
        raise TypeError(f"build_training_func: its loss is {loss!r}, {expected} with a float tensor")
    if loss.shape.ndims not in (0, None):
        raise ValueError(
            f"build_training_func: its loss has shape {loss.shape}, expected a scalar: take "
            "tf.reduce_mean of it"
        )
    if isinstance(log_tensors, (list, tuple)):
        named = _named(log_tensors)
    else:
        named = dict(log_tensors) if isinstance(log_tensors, dict) else None
    if named is None or not all(tf.is_tensor(t) or isinstance(t, tf.Variable) for t in named.values()):
        raise TypeError(
            f"build_training_func: its log_tensors is {log_tensors!r}, expected a dict name -> tensor or "
            "a list of tensors"
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
    metrics = result[1]
    if not isinstance(metrics, (list, tuple)) or not metrics or not all(tf.is_tensor(m) for m in metrics):
        raise TypeError(f"build_validation_func: its metrics are {metrics!r}, {expected}")
    return list(metrics)


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
