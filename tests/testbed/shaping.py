"""Slows a host's cable down: puts a delay line between its port and the switch, and takes it out again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.testbed import net, processes
from tests.testbed.spec import TestbedError

DELAY_LINE = Path(__file__).with_name("delay_line.py")
SLOW_MARK = "RINGMASTER_TESTBED_SLOW"


def slow(
    tag: str,
    switch: int,
    index: int,
    log: Path,
    *,
    delay_ms: float,
    rate_mbit: float | None,
    loss_percent: float,
) -> None:
    """Every frame of port `index` takes `delay_ms` longer each way, at most at `rate_mbit`."""
    unslow(tag, switch, index)
    port, near, far = net.port_name(index), f"slow{index}", f"slow{index}s"
    net.batch([f"link add {near} type veth peer name {far}", f"link set {near} up"], pid=switch)
    net.batch([f"link set {far} master {net.MAIN_BRIDGE} up", f"link set {port} nomaster"], pid=switch)
    bytes_per_s = 0.0 if rate_mbit is None else rate_mbit * 1e6 / 8
    values = [f"{delay_ms / 1000:g}", f"{bytes_per_s:g}", f"{loss_percent / 100:g}"]
    argv = ["nsenter", "--target", str(switch), "--net", "--", sys.executable, "-I", str(DELAY_LINE)]
    with open(log, "ab") as errors:
        process = subprocess.Popen(
            [*argv, port, near, *values],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, processes.TAG: tag, SLOW_MARK: f"{tag}/{index}"},
            start_new_session=True,
        )
    assert process.stdout is not None
    with process.stdout:
        if process.stdout.readline() != b"ready\n":
            unslow(tag, switch, index)
            raise TestbedError(f"the delay line of {port} did not start\n{log.read_text().strip()}")


def unslow(tag: str, switch: int, index: int) -> None:
    """Back to the plain cable; nothing to do where it is one."""
    if not processes.kill_all_with(SLOW_MARK, f"{tag}/{index}"):
        return
    net.in_net(switch, ["ip", "link", "delete", f"slow{index}"], check=False)
    net.in_net(switch, ["ip", "link", "set", net.port_name(index), "master", net.MAIN_BRIDGE], check=False)
