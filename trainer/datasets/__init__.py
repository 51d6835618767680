"""Data sets for examples and measurements. Needs NumPy only.

`mnist` and `cifar10` find, download, verify and read the published files; `synthetic` draws labelled pictures. What
MNIST needs is here too: most programs here train on it.
"""

from trainer.datasets.files import DatasetError, LabelledImages
from trainer.datasets.mnist import (
    MIRRORS,
    MNIST_FILES,
    TEST_IMAGES,
    TEST_LABELS,
    TRAIN_IMAGES,
    TRAIN_LABELS,
    Digits,
    download,
    load_test,
    load_training,
    split,
)

__all__ = [
    "MIRRORS",
    "MNIST_FILES",
    "TEST_IMAGES",
    "TEST_LABELS",
    "TRAIN_IMAGES",
    "TRAIN_LABELS",
    "DatasetError",
    "Digits",
    "LabelledImages",
    "download",
    "load_test",
    "load_training",
    "split",
]
