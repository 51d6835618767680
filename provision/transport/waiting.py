"""What each thread's transport is waiting for, so that whoever gives up on the thread can say it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Wait:
    """`text` is a clause: what has not happened yet; `remedy` what to look at."""

    text: str
    remedy: str | None = None


_waits: dict[int, Wait] = {}  # by thread identifier; each thread changes its own entry only


@contextlib.contextmanager
def waiting(text: str, remedy: str | None = None) -> Iterator[None]:
    """For the length of the block, this thread waits for what `text` says."""
    thread = threading.get_ident()
    before = _waits.get(thread)
    _waits[thread] = Wait(text, remedy)
    try:
        yield
    finally:
        if before is None:
            del _waits[thread]
        else:
            _waits[thread] = before


def wait_of(thread: threading.Thread) -> Wait | None:
    """What that thread waits for now, or None where it is not known."""
    return None if thread.ident is None else _waits.get(thread.ident)
