"""The controller side of Ringmaster: it needs Python 3.9 or newer; the nodes do not."""

import sys

if sys.version_info < (3, 9):
    raise ImportError(
        "ringmaster's `provision` package runs on the controller and needs Python >= 3.9; "
        "this is Python %d.%d. On training nodes import `trainer` instead." % sys.version_info[:2]
    )
