"""The C library's memory: kept between steps instead of given back to the system and asked for again."""

import ctypes
import os

_MB = 1 << 20
# Every step allocates and frees the same tens of megabytes, from several threads. By default glibc gives a thread's
# memory back as soon as it is free, and the next step takes it from the system again, page by page.
# Number in mallopt(3), value, and the variable by which users set it.
_SETTINGS = (
    # Where glibc's own rule ends up anyway; to set any of the three switches that rule off.
    (-3, 32 * _MB, "MALLOC_MMAP_THRESHOLD_"),
    (-1, 256 * _MB, "MALLOC_TRIM_THRESHOLD_"),
    # Each thread's memory that is free is kept up to here.
    (-2, 64 * _MB, "MALLOC_TOP_PAD_"),
)


def keep_between_steps():
    """Let glibc keep the memory that a step frees, unless the user has set what it keeps.

    Returns:
        Whether it does now; never with another C library.
    """
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(
        variable in os.environ for _, _, variable in _SETTINGS
    ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(mallopt(number, value) for number, value, _ in _SETTINGS)
