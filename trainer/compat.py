"""The only importer of TensorFlow (as its 1.x API) and of Horovod (on demand)."""

import contextlib
import os
import warnings

# Start-up chatter about CPU features and, on a host without an NVIDIA driver, errors about its absence. Set the
# variable yourself to see them; what makes a step fail is raised as an exception at any level.
_HAS_DRIVER = any(os.path.exists(device) for device in ("/dev/nvidiactl", "/dev/dxg"))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1" if _HAS_DRIVER else "3")

with warnings.catch_warnings():
    # NumPy warns about dtypes inside TensorFlow 1.15's own modules; only their import is silenced.
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    import tensorflow.compat.v1 as tf
    import tensorflow.compat.v2 as _tf2
    from tensorflow.python.util import deprecation as _deprecation
    from tensorflow.python.util import module_wrapper as _module_wrapper

# TensorFlow 1.15 calls its own deprecated functions and tells every script for TensorFlow 1 to rename what it uses;
# a user of this package can do nothing about the first and need not do the second.
_deprecation._PRINT_DEPRECATION_WARNINGS = False
_module_wrapper._PER_MODULE_WARNING_LIMIT = 0

__all__ = ["called_layers", "horovod", "is_dataset", "replace_input", "tf", "users_of", "variant_of"]


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


@contextlib.contextmanager
def called_layers():
    """Collect in a list every Keras layer that is called meanwhile: a tensor does not tell which layer made it."""
    layers, call = [], tf.keras.layers.Layer.__call__

    def noted_call(self, *arguments, **options):
        if not any(layer is self for layer in layers):
            layers.append(self)
        return call(self, *arguments, **options)

    tf.keras.layers.Layer.__call__ = noted_call
    try:
        yield layers
    finally:
        tf.keras.layers.Layer.__call__ = call


def is_dataset(value):
    """Say whether `value` is a `tf.data.Dataset` of either API version."""
    return isinstance(value, (tf.data.Dataset, _tf2.data.Dataset))


def variant_of(dataset):
    """Return the graph tensor that stands for a dataset (TensorFlow has no public name for it)."""
    return dataset._variant_tensor


def users_of(op):
    """Return the operations that need `op` done (no public name for those that only wait for it)."""
    return [user for tensor in op.outputs for user in tensor.consumers()] + list(op._control_outputs)


def replace_input(op, index, tensor):
    """Feed `tensor` to input `index` of `op`, before any session has run `op` (no public name either)."""
    op._update_input(index, tensor)
