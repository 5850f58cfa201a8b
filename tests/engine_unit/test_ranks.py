"""The seed's score in numbers, and how ties rotate."""

from __future__ import annotations

import pytest

from smgd.core import EngineLoad
from smgd.engine import ranks


@pytest.mark.parametrize(
    ("in_flight", "load", "expected"),
    [
        (0, EngineLoad(), 0),
        (3, EngineLoad(), 3),  # the floor: nothing was reported yet
        (1, EngineLoad(running=2, waiting=1), 3),
        (9, EngineLoad(running=2, waiting=1), 9),
        (0, EngineLoad(running=4, waiting=0, kv_usage=1.0), 4),  # nobody waits for the full cache
        (0, EngineLoad(running=4, waiting=2, kv_usage=0.5), 6),
        (0, EngineLoad(running=4, waiting=2, kv_usage=0.75), 6 + 2 * 6 * 0.25),
        (10, EngineLoad(running=4, waiting=2, kv_usage=1.0), 10 + 2 * 6 * 0.5),
    ],
)
def test_score(in_flight: int, load: EngineLoad, expected: float) -> None:
    assert ranks.score(in_flight, load) == pytest.approx(expected)


def test_the_lowest_wins_and_ties_rotate() -> None:
    assert ranks.lowest([2, 1, 3], first=0) == 1
    assert [ranks.lowest([1, 1, 1], first) for first in range(4)] == [0, 1, 2, 0]
    assert ranks.lowest([1, 5, 1], first=1) == 2
    assert ranks.lowest([1, 5, 1], first=3) == 0
    assert ranks.lowest([7], first=5) == 0


def test_a_rank_without_requests_is_idle_but_keeps_its_cache() -> None:
    assert ranks.settled(EngineLoad(3, 2, 0.7)) == EngineLoad(0, 0, 0.7)
