"""Published data files: fetch them from mirrors, and verify what came."""

import contextlib
import errno
import fcntl
import glob
import gzip
import hashlib
import os
import shutil
import tempfile
import urllib.error
import urllib.request
import zlib
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

_DOWNLOAD_TIMEOUT_S = 30
_BLOCK_BYTES = 1 << 20


class DatasetError(Exception):
    """A data file is missing, damaged, or cannot be fetched; the message names it and the remedy."""


@dataclass(frozen=True)
class LabelledImages:
    """Images with their labels: uint8 [n, height, width] or [n, height, width, 3], and int64 [n]."""

    images: Any
    labels: Any

    def __len__(self):
        return len(self.labels)


@dataclass(frozen=True)
class PublishedFile:
    """One file of a data set as its authors published it.

    `sha256` is that of the file, or with `is_gzip` that of its uncompressed content: copies of those differ in how they
    were compressed.
    """

    name: str
    sha256: str
    is_gzip: bool

    @property
    def expected(self):
        """What the file should be, in words."""
        return (
            f"a gzip file whose content has sha256 {self.sha256}" if self.is_gzip else f"sha256 {self.sha256}"
        )

    def digest(self, path):
        """Return the sha256 of what lies at `path`, or words on why there is none."""
        sha256 = hashlib.sha256()
        try:
            with (gzip.open if self.is_gzip else open)(path, "rb") as source:
                for block in iter(lambda: source.read(_BLOCK_BYTES), b""):
                    sha256.update(block)
        except (OSError, EOFError, zlib.error) as error:
            return f"(none: {error})"
        return sha256.hexdigest()


def fetch(directory, mirrors, files):
    """Fetch the files that `directory` lacks or holds damaged, verified.

    A file appears under its name only once it is whole. Ranks of one host that fetch into the same directory wait for
    the first of them.

    Args:
        mirrors: addresses that end with a slash, tried in order.
        files: `PublishedFile`s.

    Raises:
        DatasetError: no mirror gave a file with the expected checksum, or the directory cannot be written.
    """
    try:
        os.makedirs(directory, exist_ok=True)
        with _alone_in(directory):
            for file in files:
                path = os.path.join(directory, file.name)
                if not (os.path.exists(path) and file.digest(path) == file.sha256):
                    _fetch_file(path, file, mirrors)
    except OSError as error:
        raise DatasetError(
            f"{directory}: it cannot be written ({error}); expected a folder for the downloaded files: name another "
            "one with --data-dir"
        ) from error


@contextlib.contextmanager
def _alone_in(directory):
    """Wait until no other process fetches into `directory`; clear away what killed ones left."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            pass  # some network file systems lock no directories: then each process fetches for itself
        else:
            for left in glob.glob(os.path.join(glob.escape(directory), "*.part")):
                os.unlink(left)
        yield
    finally:
        os.close(handle)


def _fetch_file(path, file, mirrors):
    problems = []
    for mirror in mirrors:
        url = mirror + file.name
        handle, part = tempfile.mkstemp(prefix=file.name + ".", suffix=".part", dir=os.path.dirname(path))
        try:
            with os.fdopen(handle, "wb") as target:
                problem = _copy(url, target)
            if problem is None:
                got = file.digest(part)
                if got == file.sha256:
                    os.chmod(part, 0o644)
                    os.rename(part, path)
                    return
                problem = f"got sha256 {got}"
            problems.append(f"{url}: {problem}")
        finally:
            if os.path.exists(part):
                os.unlink(part)
    raise DatasetError(
        f"{path}: it could not be downloaded ({'; '.join(problems) or 'no mirror was named'}); expected "
        f"{file.expected}: fetch it elsewhere and put it there"
    )


def _copy(url, target):
    """Copy what `url` gives to an open file; returns what went wrong, or None."""
    try:
        source = urllib.request.urlopen(url, timeout=_DOWNLOAD_TIMEOUT_S)
    except (
        OSError,
        HTTPException,
        ValueError,
    ) as error:  # URLError is an OSError, a malformed URL a ValueError
        return str(error)
    with source:
        size = source.headers.get("Content-Length")
        try:
            shutil.copyfileobj(source, target)
        except HTTPException as error:
            return f"it broke off ({error!r})"
        except OSError as error:
            # The disk's problem is not the mirror's.
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            return f"it broke off ({error})"
    got = target.tell()
    return None if size is None or int(size) == got else f"it broke off after {got} of {size} bytes"
