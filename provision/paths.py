"""Where things lie: the shipped scripts and packages, the state directory, the cache."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE_DIR = Path(__file__).resolve().parent


def data_dir() -> Path:
    """The folder that holds `scripts/` and `trainer/`: the checkout, or the installed package's own data."""
    packaged = PACKAGE_DIR / "_data"
    return packaged if packaged.is_dir() else PACKAGE_DIR.parent


def scripts_dir() -> Path:
    return data_dir() / "scripts"


def trainer_dir() -> Path:
    """The `trainer` package's folder: beside `provision`, in a checkout as in an installed wheel."""
    return PACKAGE_DIR.parent / "trainer"


def state_dir() -> Path:
    """`.ringmaster/` in the working directory (or `$RINGMASTER_STATE_DIR`); not created here."""
    return Path(os.environ.get("RINGMASTER_STATE_DIR") or ".ringmaster").absolute()


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/ringmaster`: downloads and built archives, shared by all clusters of this user."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "ringmaster"
