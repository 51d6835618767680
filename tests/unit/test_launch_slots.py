"""Placement by slot, and what is refused before anything starts."""

from __future__ import annotations

import pytest

from provision.cluster import Cluster, Node
from provision.errors import LaunchError, RingmasterError, UsageError
from provision.launch.slots import hostfile_text, hosts_of_ranks, seats


def cluster(*slots: int | None) -> Cluster:
    return Cluster(tuple(Node(f"h{i}", f"10.0.0.{i}", slots=n) for i, n in enumerate(slots, start=1)))


@pytest.mark.parametrize(
    ("slots", "np", "gpus", "ranks"),
    [
        ((2, 2), 4, {}, [2, 2]),
        ((2, 2), 3, {}, [2, 1]),
        ((2, 2), 1, {}, [1, 0]),
        ((2, 2), 0, {}, [2, 2]),
        ((None, None), 0, {}, [1, 1]),
        ((0, 2), 2, {}, [0, 2]),
        ((4, 4), 0, {"h1": 4, "h2": 4}, [4, 4]),
        ((4, 4), 0, {"h1": 0, "h2": 0}, [4, 4]),
        ((8, 4), 4, {"h1": 4, "h2": None}, [4, 0]),
        ((4, 4, 4), 6, {}, [2, 2, 2]),
        ((1, 4), 4, {}, [1, 3]),
        ((4, 4), 5, {"h1": 4, "h2": 4}, [4, 1]),
    ],
)
def test_ranks_spread_without_gpus_and_pack_with_them(
    slots: tuple[int | None, ...], np: int, gpus: dict[str, int | None], ranks: list[int]
) -> None:
    placed = seats(cluster(*slots), np, gpus)
    assert [seat.ranks for seat in placed] == ranks


@pytest.mark.parametrize(
    ("slots", "np", "gpus", "kind", "words"),
    [
        ((2, 2), 5, {}, LaunchError, ["5 ranks wanted, 4 slots", "h1        2", "--np 4 or less"]),
        ((0, 0), 0, {}, LaunchError, ["no node has a slot"]),
        ((0, 1), 2, {}, LaunchError, ["2 ranks wanted, 1 slot in", "-> use --np 1 or less"]),
        ((2, 2), -1, {}, UsageError, ["--np -1"]),
        (
            (3, 2),
            0,
            {"h1": 2, "h2": 2},
            LaunchError,
            ["h1 would run 3 ranks on 2 GPUs", "4 ranks fit in all"],
        ),
    ],
    ids=["too many", "no slots", "head without slots", "negative", "gpus"],
)
def test_what_does_not_fit_is_refused_with_a_table(
    slots: tuple[int, ...],
    np: int,
    gpus: dict[str, int | None],
    kind: type[RingmasterError],
    words: list[str],
) -> None:
    with pytest.raises(kind) as caught:
        seats(cluster(*slots), np, gpus)
    for word in words:
        assert word in str(caught.value)


def test_the_table_names_every_host() -> None:
    with pytest.raises(LaunchError) as caught:
        seats(cluster(2, 0), 3, {"h1": 1})
    lines = str(caught.value).splitlines()
    assert [line.split()[:4] for line in lines[1:3]] == [
        ["host", "slots", "GPUs", "ranks"],
        ["h1", "2", "1", "2"],
    ]
    assert lines[3].split()[:3] == ["h2", "0", "?"]


def test_a_host_without_ranks_is_in_no_hostfile() -> None:
    placed = seats(cluster(2, 0, 4, 1), 3, {"h1": 2})
    assert hostfile_text(placed, "h1") == "localhost slots=2\nh3 slots=1\n"
    assert hostfile_text(placed, "h2") == "h1 slots=2\nh3 slots=1\n"
    assert hosts_of_ranks(placed) == ("h1", "h1", "h3")


@pytest.mark.parametrize(
    ("slots", "np", "gpus", "ranks"),
    [
        ((2, 2, 2), 3, {}, [1, 1, 1]),
        ((2, 2, 2), 4, {}, [2, 1, 1]),
        ((2, 2, 2), 2, {"h1": 0, "h2": 0, "h3": 0}, [1, 1, 0]),
        ((1, 4, 2), 6, {}, [1, 3, 2]),
        ((0, 4, 2), 3, {}, [0, 2, 1]),
        ((2, 2, 2), 0, {}, [2, 2, 2]),
        ((2, 2, 2), 3, {"h1": 2, "h2": 2, "h3": 2}, [2, 1, 0]),
    ],
)
def test_ranks_spread_over_cpus_and_pack_onto_gpus(
    slots: tuple[int, ...], np: int, gpus: dict[str, int], ranks: list[int]
) -> None:
    assert [seat.ranks for seat in seats(cluster(*slots), np, gpus)] == ranks
