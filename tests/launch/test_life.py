"""When an engine that ended is started again, and what is said about it."""

from __future__ import annotations

import pytest

from smgd.launch.life import (
    CRASH_LOOP,
    FIRST_WAIT,
    LONGEST_WAIT,
    STABLE_SECONDS,
    EngineLife,
    describe,
)


def lives(life: EngineLife, *seconds: float, status: int = 1) -> list[float]:
    """Live some lives, one right after the other; return the waits between them."""
    now, waits = 0.0, []
    for lived in seconds:
        life.started(now, 1)
        now += lived
        waits.append(life.ended(now, status).wait)
    return waits


def test_the_states() -> None:
    life = EngineLife()
    assert (life.state, life.pid, life.starts) == ("waiting", None, 0)
    life.started(5.0, 77)
    assert (life.state, life.pid, life.starts) == ("running", 77, 1)
    life.ended(6.0, 0)
    assert (life.state, life.pid, life.starts) == ("waiting", None, 1)
    assert (life.restarts, life.last_end) == (1, "ended with status 0 after 1.0 s")
    life.started(7.0, 78)
    life.stopped()
    assert (life.pid, life.restarts) == (None, 1)
    assert life.state == "stopped"


def test_waits_double_up_to_the_longest() -> None:
    waits = lives(EngineLife(), *[0.5] * 2000)
    assert waits[:7] == [FIRST_WAIT, 2.0, 4.0, 8.0, 16.0, 32.0, LONGEST_WAIT]
    assert waits[-1] == LONGEST_WAIT


def test_a_life_that_was_long_enough_starts_the_count_anew() -> None:
    assert lives(EngineLife(), 1, 1, STABLE_SECONDS, 1) == [1.0, 2.0, 1.0, 2.0]
    assert lives(EngineLife(), 1, 1, STABLE_SECONDS - 1, 1) == [1.0, 2.0, 4.0, 8.0]


def test_what_ended_with_status_0_is_started_again_all_the_same() -> None:
    life = EngineLife()
    life.started(0.0, 1)
    end = life.ended(100.0, 0)
    assert end.text == "engine ended with status 0 after 100.0 s; next start in 1 s"
    assert not end.is_crash_loop


def test_a_crash_loop_is_called_so_until_a_life_is_long_enough() -> None:
    life = EngineLife()
    ends = []
    for _ in range(CRASH_LOOP + 1):
        life.started(0.0, 1)
        ends.append(life.ended(0.1, 137))
    assert [end.is_crash_loop for end in ends] == [False] * (CRASH_LOOP - 1) + [True, True]
    assert ends[-2].text == (
        "engine was ended by SIGKILL after 0.1 s, the 5th time in a row that it did not last 60 s;"
        " next start in 16 s"
    )
    life.started(0.0, 1)
    assert not life.ended(STABLE_SECONDS, 1).is_crash_loop


def test_what_cannot_even_be_started_is_tried_again_like_a_crash() -> None:
    life = EngineLife()
    ends = [life.not_started("no memory") for _ in range(CRASH_LOOP)]
    assert ends[0].text == "engine cannot be started: no memory; next start in 1 s"
    assert [end.wait for end in ends] == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert ends[-1].is_crash_loop


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (None, "ended"),
        (0, "ended with status 0"),
        (127, "ended with status 127"),
        (137, "was ended by SIGKILL"),
        (143, "was ended by SIGTERM"),
        (255, "ended with status 255"),
    ],
)
def test_how_an_end_is_described(status: int | None, text: str) -> None:
    assert describe(status) == text
