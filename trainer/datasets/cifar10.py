"""CIFAR-10: 32 by 32 colour pictures of ten kinds of things, 50,000 to train and 10,000 to test.

Alex Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009; https://www.cs.toronto.edu/~kriz/cifar.html
describes the format of the binary version, which is the one read here.
"""

import hashlib
import os
import tarfile
import zlib

import numpy as np

from trainer.datasets.files import DatasetError, LabelledImages, PublishedFile, fetch

# That page publishes an MD5 only (c32a1d4ab5d03f1284b67883e8d87530). The SHA-256 of the archive is what several public
# programs verify it with, among them GoMLX and torchvision-ruby; those of its files are torchvision-ruby's.
ARCHIVE = PublishedFile(
    "cifar-10-binary.tar.gz", "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd", False
)
MIRRORS = ("https://www.cs.toronto.edu/~kriz/",)

TRAINING_FILES = (
    PublishedFile(
        "data_batch_1.bin", "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5", False
    ),
    PublishedFile(
        "data_batch_2.bin", "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed", False
    ),
    PublishedFile(
        "data_batch_3.bin", "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67", False
    ),
    PublishedFile(
        "data_batch_4.bin", "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48", False
    ),
    PublishedFile(
        "data_batch_5.bin", "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add", False
    ),
)
TEST_FILES = (
    PublishedFile(
        "test_batch.bin", "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b", False
    ),
)
FILES = TRAINING_FILES + TEST_FILES

_FOLDER = "cifar-10-batches-bin"  # as the archive has it
_OTHER_VERSIONS = (
    "cifar-10-python.tar.gz",
    "cifar-10-batches-py",
    "cifar-10-matlab.tar.gz",
    "cifar-10-batches-mat",
)
_SIDE, _COLOURS, _CLASSES = 32, 3, 10
_RECORD_BYTES = 1 + _COLOURS * _SIDE * _SIDE
_REMEDY = "fetch it again (--download)"


def download(directory, mirrors=MIRRORS, archive=ARCHIVE):
    """Fetch the archive into `directory` unless it is there already, verified.

    Raises:
        DatasetError: no mirror gave a file with the expected checksum, or the directory cannot be written.
    """
    fetch(directory, mirrors, [archive])


def load(path, is_verified=True):
    """Read CIFAR-10's binary version.

    Args:
        path: the archive as published, or a folder that holds it or what is in it.
        is_verified: refuse everything but the published content. Otherwise other images in the same format will do.

    Returns:
        (training images, held-out images): uint8 [n, 32, 32, 3] with int64 [n] labels from 0 to 9.

    Raises:
        DatasetError: something is missing, cut off or altered.
    """
    path = os.fspath(path)
    place = _find(path)
    if os.path.isdir(place):
        contents = {file.name: _read(os.path.join(place, file.name)) for file in FILES}
    else:
        contents = _read_archive(place)
        if is_verified and ARCHIVE.digest(place) == ARCHIVE.sha256:
            is_verified = False  # nothing is left to verify
    parts = []
    for files in (TRAINING_FILES, TEST_FILES):
        read = [_parse(place, file, contents.pop(file.name), is_verified) for file in files]
        parts.append(LabelledImages(*(np.concatenate(arrays) for arrays in zip(*read))))
    return tuple(parts)


def _find(path):
    """Return the archive, or the folder of the binary files, that `path` means."""
    if os.path.isfile(path):
        return path
    for folder in (path, os.path.join(path, _FOLDER)):
        if any(os.path.exists(os.path.join(folder, file.name)) for file in FILES):
            return folder
    archive = os.path.join(path, ARCHIVE.name)
    if os.path.exists(archive):
        return archive
    if not os.path.exists(path):
        got = "no such file or folder"
    elif os.path.basename(os.path.abspath(path)) in _OTHER_VERSIONS:
        got = "this is another version of CIFAR-10"
    else:
        others = [name for name in _OTHER_VERSIONS if os.path.exists(os.path.join(path, name))]
        got = f"it holds another version of CIFAR-10 ({others[0]})" if others else "it holds no CIFAR-10"
    raise DatasetError(
        f"{path}: {got}; expected the binary version, {ARCHIVE.name} or the folder {_FOLDER} with {FILES[0].name} and "
        "so on: name the folder that holds it with --data-dir, or add --download"
    )


def _read(path):
    try:
        with open(path, "rb") as source:
            return source.read()
    except OSError as error:
        raise DatasetError(
            f"{path}: it cannot be read ({error.strerror}); expected a file of CIFAR-10's binary version: {_REMEDY}"
        ) from error


def _read_archive(path):
    """Return name -> content of the files that are needed; nothing is unpacked onto the disk."""
    names, contents = {file.name for file in FILES}, {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                name = os.path.basename(member.name)
                if member.isfile() and name in names:
                    contents[name] = archive.extractfile(member).read()
                    if len(contents[name]) != member.size:
                        raise EOFError(f"{name} is cut off")
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise DatasetError(
            f"{path}: it is no complete tar.gz archive ({error}); expected {ARCHIVE.name} with {ARCHIVE.expected}: "
            f"delete it and {_REMEDY}"
        ) from error
    missing = sorted(names - set(contents))
    if missing:
        raise DatasetError(
            f"{path}: it holds no {', '.join(missing)}; expected {ARCHIVE.name} with {ARCHIVE.expected}: {_REMEDY}"
        )
    return contents


def _parse(place, file, content, is_verified):
    """Return (images, labels) of one file: records of a byte for the label and a plane of bytes for each colour."""
    got = hashlib.sha256(content).hexdigest()
    records = np.frombuffer(content, np.uint8)
    problem = None
    if not len(content) or len(content) % _RECORD_BYTES:
        problem = f"it has {len(content)} bytes, which are no images of {_RECORD_BYTES} bytes each"
    elif records[::_RECORD_BYTES].max() >= _CLASSES:
        problem = f"it has the label {records[::_RECORD_BYTES].max()}, which is none of 0 to {_CLASSES - 1}"
    elif is_verified and got != file.sha256:
        problem = f"its content is not as published (sha256 {got})"
    if problem is not None:
        raise DatasetError(
            f"{os.path.join(place, file.name)}: {problem}; expected {file.expected}: {_REMEDY}, or take other images "
            "in the same format as they are with --unverified"
        )
    records = records.reshape(-1, _RECORD_BYTES)
    images = records[:, 1:].reshape(-1, _COLOURS, _SIDE, _SIDE).transpose(0, 2, 3, 1)
    return images, records[:, 0].astype(np.int64)
