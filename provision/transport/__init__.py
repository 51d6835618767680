"""Commands and files on a node, over SSH or on this machine; the only importer of fabric, the only quoter."""

from __future__ import annotations

from provision.transport.base import OnLine, Result, Transport, TreeChange
from provision.transport.connections import Connections, connect
from provision.transport.tree import DEFAULT_EXCLUDE

__all__ = ["DEFAULT_EXCLUDE", "Connections", "OnLine", "Result", "Transport", "TreeChange", "connect"]
