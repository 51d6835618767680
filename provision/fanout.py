"""One function over many nodes at once: bounded, with a deadline for each node and one outcome for each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from provision.cluster import Node, fold
from provision.errors import DeadlineExceeded, NodeError, NodesFailed, RingmasterError
from provision.transport.waiting import Wait, wait_of

T = TypeVar("T")

MAX_WORKERS = 32


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What one node came to: its value, or the error if there is one."""

    value: T | None = None
    error: RingmasterError | None = None

    @property
    def ok(self) -> bool:
        return self.error is None


class FanOutInterrupted(KeyboardInterrupt):
    """Ctrl-C while nodes were at work: `unfinished` names them, `outcomes` holds the others' results."""

    def __init__(self, what: str, unfinished: tuple[str, ...], outcomes: Mapping[str, Outcome[Any]]) -> None:
        super().__init__(f"{what}: interrupted, not finished on {fold(unfinished)}")
        self.unfinished = unfinished
        self.outcomes = dict(outcomes)


def fan_out(
    nodes: Sequence[Node],
    fn: Callable[[Node], T],
    *,
    max_workers: int = MAX_WORKERS,
    deadline_s: float,
    what: str,
) -> dict[str, Outcome[T]]:
    """`fn(node)` for every node, at most `max_workers` at a time; outcomes by name, in the nodes' order.

    Each node has `deadline_s` from its own start. One that misses it gets DeadlineExceeded, with what its
    transport was waiting for, and is left to itself, in a thread that keeps no program alive; the next waiting
    node takes its place. `what` begins a sentence in messages: "asking for facts". An exception that
    is no RingmasterError becomes a NodeError with that exception as its cause. FanOutInterrupted on Ctrl-C.
    """
    if max_workers < 1:
        raise ValueError(f"max_workers is {max_workers}, expected 1 or more")
    changed = threading.Condition()
    outcomes: dict[str, Outcome[T]] = {}
    deadlines: dict[str, float] = {}  # of the nodes at work
    threads: dict[str, threading.Thread] = {}
    waiting = list(reversed(nodes))

    def work(node: Node) -> None:
        outcome = _call(fn, node, what)
        with changed:
            # A node that missed its deadline has its outcome already.
            if deadlines.pop(node.name, None) is not None:
                outcomes[node.name] = outcome
                changed.notify()

    try:
        with changed:
            while waiting or deadlines:
                while waiting and len(deadlines) < max_workers:
                    node = waiting.pop()
                    deadlines[node.name] = time.monotonic() + deadline_s
                    threads[node.name] = threading.Thread(
                        target=work, args=(node,), name=f"{what}@{node.name}", daemon=True
                    )
                    threads[node.name].start()
                changed.wait(max(0.0, min(deadlines.values()) - time.monotonic()))
                now = time.monotonic()
                for name in [name for name, deadline in deadlines.items() if deadline <= now]:
                    del deadlines[name]
                    outcomes[name] = Outcome(error=_missed(name, what, deadline_s, wait_of(threads[name])))
    except KeyboardInterrupt as interrupt:
        unfinished = tuple(node.name for node in nodes if node.name not in outcomes)
        raise FanOutInterrupted(what, unfinished, outcomes) from interrupt
    return {node.name: outcomes[node.name] for node in nodes}


def values_or_raise(outcomes: Mapping[str, Outcome[T]], what: str) -> dict[str, T]:
    """The values by node name; NodesFailed with every error if there is one."""
    errors = {name: outcome.error for name, outcome in outcomes.items() if outcome.error is not None}
    if errors:
        raise NodesFailed(what, errors, len(outcomes))
    return {name: outcome.value for name, outcome in outcomes.items()}  # type: ignore[misc]


def _missed(node: str, what: str, deadline_s: float, wait: Wait | None) -> DeadlineExceeded:
    text = f"{what} did not end within {deadline_s:g} s"
    if wait is None:
        return DeadlineExceeded(node, text)
    return DeadlineExceeded(node, f"{text}: {wait.text}", remedy=wait.remedy)


def _call(fn: Callable[[Node], T], node: Node, what: str) -> Outcome[T]:
    try:
        return Outcome(value=fn(node))
    except RingmasterError as error:
        return Outcome(error=error)
    except BaseException as error:  # whatever it is, the node needs an outcome
        wrapped = NodeError(node.name, f"{what} failed unexpectedly: {type(error).__name__}: {error}")
        wrapped.__cause__ = error
        return Outcome(error=wrapped)
