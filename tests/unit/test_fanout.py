"""Fan-out: bounded, in order, one outcome for each node whatever happens to the others."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from provision.cluster import Node
from provision.errors import DeadlineExceeded, NodeError, NodesFailed, NodeUnreachable
from provision.fanout import FanOutInterrupted, Outcome, fan_out, values_or_raise
from provision.transport import connect
from provision.transport.waiting import Wait, wait_of, waiting

ROOT = Path(__file__).resolve().parents[2]
NODES = [Node(f"h{number}", f"h{number}") for number in range(1, 9)]


def test_values_come_in_the_order_of_the_nodes() -> None:
    def slow_first(node: Node) -> str:
        time.sleep(0.1 if node.name == "h1" else 0)
        return node.name.upper()

    outcomes = fan_out(NODES, slow_first, deadline_s=10, what="try")
    assert [(name, outcome.value) for name, outcome in outcomes.items()] == [
        (node.name, node.name.upper()) for node in NODES
    ]
    assert values_or_raise(outcomes, "try")["h3"] == "H3"
    assert fan_out([], slow_first, deadline_s=1, what="try") == {}


def test_no_more_at_once_than_allowed() -> None:
    lock, now, most = threading.Lock(), 0, 0

    def count(node: Node) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.05)
        with lock:
            now -= 1

    begun = time.monotonic()
    fan_out(NODES, count, max_workers=3, deadline_s=10, what="try")
    assert most == 3
    assert time.monotonic() - begun < 2
    with pytest.raises(ValueError, match="max_workers is 0"):
        fan_out(NODES, count, max_workers=0, deadline_s=10, what="try")


def test_one_bad_node_hides_nobody() -> None:
    def work(node: Node) -> int:
        if node.name == "h2":
            raise NodeUnreachable("h2", "no answer", remedy="look")
        if node.name == "h4":
            raise ZeroDivisionError("a bug")
        if node.name == "h5":
            sys.exit(3)
        return 1

    outcomes = fan_out(NODES, work, deadline_s=10, what="ask")
    assert sum(outcome.value or 0 for outcome in outcomes.values()) == 5
    assert isinstance(outcomes["h2"].error, NodeUnreachable)
    assert str(outcomes["h4"].error) == "h4: ask failed unexpectedly: ZeroDivisionError: a bug"
    assert isinstance(outcomes["h4"].error, NodeError)
    assert isinstance(outcomes["h4"].error.__cause__, ZeroDivisionError)
    assert "SystemExit" in str(outcomes["h5"].error)
    with pytest.raises(NodesFailed) as caught:
        values_or_raise(outcomes, "ask")
    assert list(caught.value.errors) == ["h2", "h4", "h5"]
    assert str(caught.value).startswith("ask: 3 of 8 nodes failed\n  h2: no answer; look\n")


def test_a_stuck_node_misses_its_deadline_and_makes_room() -> None:
    release = threading.Event()

    def work(node: Node) -> str:
        if node.name in ("h1", "h2"):
            release.wait(30)
        return node.name

    begun = time.monotonic()
    outcomes = fan_out(NODES, work, max_workers=2, deadline_s=0.5, what="ask")
    took = time.monotonic() - begun
    release.set()
    assert 0.5 <= took < 3
    for name in ("h1", "h2"):
        assert isinstance(outcomes[name].error, DeadlineExceeded)
        assert str(outcomes[name].error) == f"{name}: ask did not end within 0.5 s"
    assert [name for name, outcome in outcomes.items() if outcome.ok] == [f"h{n}" for n in range(3, 9)]
    time.sleep(0.1)  # what comes too late changes nothing
    assert outcomes["h1"] == Outcome(error=outcomes["h1"].error)


def test_a_missed_deadline_tells_what_the_transport_waited_for(tmp_path: Path) -> None:
    transport = connect(Node("h1", "localhost", local=True), known_hosts=tmp_path / "known_hosts")

    def work(node: Node) -> None:
        if node.name == "h1":
            transport.run(["sleep", "20"], timeout_s=25)
        else:
            with waiting("outer"), waiting("it had not said hello", "greet it"):
                time.sleep(20)

    try:
        outcomes = fan_out(NODES[:2], work, deadline_s=2, what="asking for facts")
    finally:
        transport.close()
    prefix = "asking for facts did not end within 2 s"
    assert str(outcomes["h1"].error) == f"h1: {prefix}: `sleep 20` was still running"
    assert str(outcomes["h2"].error) == f"h2: {prefix}: it had not said hello; greet it"


def test_what_a_thread_waits_for_ends_with_its_block() -> None:
    here = threading.current_thread()
    with waiting("outer"):
        with contextlib.suppress(ZeroDivisionError), waiting("inner"):
            assert wait_of(here) == Wait("inner")
            raise ZeroDivisionError
        assert wait_of(here) == Wait("outer")
    assert wait_of(here) is None


def test_the_deadline_counts_from_each_nodes_own_start() -> None:
    outcomes = fan_out(NODES, lambda node: time.sleep(0.3), max_workers=2, deadline_s=0.9, what="ask")
    assert all(outcome.ok for outcome in outcomes.values())


def test_ctrl_c_is_prompt_and_tells_who_had_not_finished() -> None:
    def work(node: Node) -> str:
        if node.name == "h3":
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)
        return node.name

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt) as caught:
        fan_out(NODES, work, deadline_s=60, what="ask")
    assert time.monotonic() - begun < 3
    assert isinstance(caught.value, FanOutInterrupted)
    assert caught.value.unfinished == ("h3",)
    assert caught.value.outcomes["h1"] == Outcome(value="h1")
    assert str(caught.value) == "ask: interrupted, not finished on h3"


def test_a_stuck_node_keeps_no_program_alive() -> None:
    program = (
        "import time\n"
        "from provision.cluster import Node\n"
        "from provision.fanout import fan_out\n"
        "outcomes = fan_out([Node('h1', 'h1')], lambda node: time.sleep(60), deadline_s=0.2, what='ask')\n"
        "print(outcomes['h1'].error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True
    )
    assert done.stdout == "h1: ask did not end within 0.2 s\n"
