"""Real SSH hosts on one Linux machine, for trying and testing a cluster. See docs/testbed.md."""

from tests.testbed.bed import Testbed
from tests.testbed.node import ExecResult, TestbedNode
from tests.testbed.spec import Bind, Interface, NodeSpec, TestbedError

__all__ = ["Bind", "ExecResult", "Interface", "NodeSpec", "Testbed", "TestbedError", "TestbedNode"]
