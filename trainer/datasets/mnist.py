"""MNIST: 28 by 28 pictures of handwritten digits, 60,000 to train and 10,000 to test."""

import gzip
import hashlib
import logging
import os
import struct
import zlib

import numpy as np

from trainer.datasets.files import DatasetError, LabelledImages, PublishedFile, fetch

logger = logging.getLogger("trainer")

TRAIN_IMAGES = PublishedFile(
    "train-images-idx3-ubyte.gz", "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db", True
)
TRAIN_LABELS = PublishedFile(
    "train-labels-idx1-ubyte.gz", "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5", True
)
TEST_IMAGES = PublishedFile(
    "t10k-images-idx3-ubyte.gz", "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7", True
)
TEST_LABELS = PublishedFile(
    "t10k-labels-idx1-ubyte.gz", "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2", True
)
MNIST_FILES = (TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS)

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)

Digits = LabelledImages  # images uint8 [n, 28, 28]


def load_training(directory):
    """Read the 60,000 training images from `directory`.

    Raises:
        DatasetError: a file is missing or damaged.
    """
    return _load(directory, TRAIN_IMAGES, TRAIN_LABELS)


def load_test(directory):
    """Read the 10,000 test images from `directory`.

    Raises:
        DatasetError: a file is missing or damaged.
    """
    return _load(directory, TEST_IMAGES, TEST_LABELS)


def split(digits, every=5):
    """Hold out every `every`-th image: returns (training, held out)."""
    held_out = np.arange(len(digits)) % every == 0
    return (
        Digits(digits.images[~held_out], digits.labels[~held_out]),
        Digits(digits.images[held_out], digits.labels[held_out]),
    )


def download(directory, mirrors=MIRRORS, files=MNIST_FILES):
    """Fetch what `directory` lacks, verified; an interrupted download leaves no partial file.

    Raises:
        DatasetError: no mirror gave a file with the expected checksum, or the directory cannot be written.
    """
    fetch(directory, mirrors, files)


def _load(directory, images, labels):
    digits = Digits(read_idx(directory, images, 3), read_idx(directory, labels, 1).astype(np.int64))
    if len(digits.images) != len(digits.labels):
        raise DatasetError(
            f"{directory}: got {len(digits.images)} images in {images.name} and {len(digits.labels)} "
            f"labels in {labels.name}; expected as many"
        )
    return digits


def read_idx(directory, file, dimensions):
    """Read one gzip-compressed IDX file of unsigned bytes into an array with `dimensions` dimensions.

    Raises:
        DatasetError: it is missing, no such file, cut off or altered.
    """
    path = os.path.join(directory, file.name)
    try:
        with gzip.open(path, "rb") as source:
            content = source.read()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DatasetError(
            f"{path}: no such file; expected {file.name} of MNIST (content with sha256 {file.sha256}): "
            "name the folder that holds it with --data-dir, or "
            "add --download"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(path, file, f"it is no complete gzip file ({error})") from error
    got = hashlib.sha256(content).hexdigest()
    header = 4 + 4 * dimensions
    magic = 0x0800 + dimensions
    if len(content) < header or struct.unpack(">I", content[:4])[0] != magic:
        raise _damaged(path, file, f"it does not begin with the IDX number 0x{magic:08x}")
    shape = struct.unpack(">" + "I" * dimensions, content[4:header])
    wanted = int(np.prod(shape, dtype=np.int64))
    if len(content) - header != wanted:
        raise _damaged(
            path,
            file,
            f"it holds {len(content) - header} bytes after its header, which promises {wanted}",
        )
    if got != file.sha256:
        # Other digits in the same format are welcome, but nobody should take them for MNIST.
        logger.warning("%s: its content has sha256 %s, not %s as published for MNIST", path, got, file.sha256)
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _damaged(path, file, problem):
    return DatasetError(
        f"{path}: {problem}; expected {file.expected}: delete the file and fetch it again (--download)"
    )
