"""One job at a time writes to a checkpoint directory: a second would tidy away what the first is just saving."""

import contextlib
import errno
import fcntl
import logging
import os
import socket
import time

from trainer.ranks import SharedError

logger = logging.getLogger("trainer")

_NAME = "trainer.lock"
# A job that was killed may take a moment to end.
_PATIENCE_S = 10.0
_IS_HELD = (errno.EAGAIN, errno.EACCES)
# Directory -> descriptor. The kernel lets go of the lock when the process ends, however it ends, or closes the file.
_HELD = {}


def claim(directory):
    """Claim `directory` for this process, until `release` or its end; where the file system has no locks, do nothing.

    A claim from another host only warns: a network file system may keep the lock of a host that died.

    Raises:
        SharedError: another process of this host holds it.
    """
    directory = os.path.realpath(directory)
    if directory in _HELD:
        return
    try:
        handle = os.open(os.path.join(directory, _NAME), os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        # A full disk, say: the first checkpoint tells of it.
        return
    problem = _lock(handle)
    if problem is not None:
        holder = os.pread(handle, 1000, 0).decode(errors="replace").strip()
        os.close(handle)
        if problem in _IS_HELD:
            _refuse(directory, holder)
        return
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    _HELD[directory] = handle


def _lock(handle):
    """Lock an open file, when need be after some waiting; return the number of the error, or None."""
    until_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return None
        except OSError as error:
            if error.errno not in _IS_HELD or time.monotonic() > until_s:
                return error.errno
        time.sleep(0.1)


def _refuse(directory, holder):
    if holder and not holder.endswith(f" on {socket.gethostname()}"):
        logger.warning(
            "checkpoint_dir: %s: %s has claimed it; if that job still runs, end one of the two",
            directory,
            holder,
        )
        return
    raise SharedError(
        f"checkpoint_dir: {directory}: another job writes there ({holder or 'a process'}); expected one job at a time: "
        "end that one, or give this one a directory of its own"
    )


def release(directory):
    """Give up what `claim` took."""
    handle = _HELD.pop(os.path.realpath(directory), None)
    if handle is not None:
        os.close(handle)
