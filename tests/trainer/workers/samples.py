"""The samples the workers train on; needs no TensorFlow, so that tests can import it."""

import numpy as np


def numbered(count, width=3):
    """Return `count` rows of fixed pseudo-random features, and their numbers as labels."""
    features = np.random.RandomState(7).rand(count, width).astype(np.float32)
    return features, np.arange(count, dtype=np.int64)
