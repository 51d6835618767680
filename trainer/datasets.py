"""The MNIST files: find, download, verify, read. Needs NumPy only."""

import gzip
import hashlib
import logging
import os
import shutil
import struct
import tempfile
import urllib.error
import urllib.request
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

logger = logging.getLogger("trainer")


@dataclass(frozen=True)
class MnistFile:
    """One file of the set as its authors published it."""

    name: str
    sha256: str  # of the uncompressed content: copies differ in how they were compressed
    count: int


TRAIN_IMAGES = MnistFile(
    "train-images-idx3-ubyte.gz", "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db", 60000
)
TRAIN_LABELS = MnistFile(
    "train-labels-idx1-ubyte.gz", "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5", 60000
)
TEST_IMAGES = MnistFile(
    "t10k-images-idx3-ubyte.gz", "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7", 10000
)
TEST_LABELS = MnistFile(
    "t10k-labels-idx1-ubyte.gz", "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2", 10000
)
MNIST_FILES = (TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS)

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)

_DOWNLOAD_TIMEOUT_S = 30


class DatasetError(Exception):
    """A data file is missing, damaged, or cannot be fetched; the message names it and the remedy."""


@dataclass(frozen=True)
class Digits:
    """Images with their labels: uint8 [n, 28, 28] and int64 [n]."""

    images: Any
    labels: Any

    def __len__(self):
        return len(self.labels)


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
        DatasetError: no mirror gave a file with the expected checksum.
    """
    os.makedirs(directory, exist_ok=True)
    for file in files:
        path = os.path.join(directory, file.name)
        if not (os.path.exists(path) and _content_sha256(path) == file.sha256):
            _download_file(path, file, mirrors)


def _download_file(path, file, mirrors):
    problems = []
    for mirror in mirrors:
        url = mirror + file.name
        handle, part = tempfile.mkstemp(prefix=file.name + ".", suffix=".part", dir=os.path.dirname(path))
        try:
            with os.fdopen(handle, "wb") as target, urllib.request.urlopen(
                url, timeout=_DOWNLOAD_TIMEOUT_S
            ) as source:
                shutil.copyfileobj(source, target)
            got = _content_sha256(part)
            if got == file.sha256:
                os.chmod(part, 0o644)
                os.rename(part, path)
                return
            problems.append(f"{url}: got content with sha256 {got}")
        except (OSError, urllib.error.URLError) as error:
            problems.append(f"{url}: {error}")
        finally:
            if os.path.exists(part):
                os.unlink(part)
    raise DatasetError(
        "{}: it could not be downloaded; expected a gzip file whose content has sha256 {}.\n  {}\nFetch "
        "it elsewhere "
        "and put it there.".format(path, file.sha256, "\n  ".join(problems))
    )


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
    except FileNotFoundError as error:
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
        f"{path}: {problem}; expected a gzip file whose content has sha256 {file.sha256}: delete the file "
        "and fetch it again "
        "(--download)"
    )


def _content_sha256(path):
    """Return the sha256 of what a gzip file holds, or a word on why it holds nothing."""
    digest = hashlib.sha256()
    try:
        with gzip.open(path, "rb") as source:
            for block in iter(lambda: source.read(1 << 20), b""):
                digest.update(block)
    except (OSError, EOFError, zlib.error) as error:
        return f"(none: {error})"
    return digest.hexdigest()
