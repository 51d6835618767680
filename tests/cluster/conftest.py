"""Real hosts for the tests of this folder, made on this machine by tests/testbed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.testbed import Testbed, preconditions
from tests.testbed.spec import Nodes

MakeTestbed = Callable[..., Testbed]


def require_hosts(kinds: frozenset[str]) -> None:
    """Skips, with the reason, where no hosts can be made; under CI that is a failure."""
    missing = preconditions.problems_here(kinds)
    if not missing:
        return
    reason = "no hosts can be made here: " + "; and ".join(missing)
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def make_testbed() -> Iterator[MakeTestbed]:
    """`make_testbed(3, kind="clone", ...)`: a fresh testbed that is up, under a name of its own.

    Takes what `Testbed` takes. Take it down when done, or leave that to the end of the session.
    """
    made: list[Testbed] = []
    numbers = itertools.count(1)

    def make(nodes: Nodes, **options: Any) -> Testbed:
        require_hosts(frozenset({options.get("kind", "clone")}))
        bed = Testbed(nodes, **{"name": f"test-{os.getpid()}-{next(numbers)}", **options})
        made.append(bed)
        return bed.up()

    yield make
    for bed in made:
        bed.down()


@pytest.fixture
def three_clones(make_testbed: MakeTestbed) -> Iterator[Testbed]:
    """Hosts h1, h2, h3 of kind clone, fresh for this test."""
    bed = make_testbed(3)
    yield bed
    bed.down()
