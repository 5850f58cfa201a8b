"""A process that is missed is ended in time, and no other; in memory, on a clock that jumps."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
import trio
import trio.testing
from structlog.testing import capture_logs
from trio.testing import MockClock

from smgd.launch.wedged import WEDGED_SECONDS, Wedged
from tests.launch.programs import MemoryProcess


class Bench:
    """A process and the patience with it."""

    def __init__(self) -> None:
        self.is_loading = False
        self.process = MemoryProcess(7)
        self.wedged = Wedged(lambda: self.is_loading)

    def is_ended(self) -> bool:
        return self.process.terminated == 1

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.wedged.watch, self.process, structlog.get_logger())
            await trio.testing.wait_all_tasks_blocked()
            yield
            nursery.cancel_scope.cancel()


async def test_a_process_that_is_missed_is_ended_in_time_and_the_log_says_so(
    autojump_clock: MockClock,
) -> None:
    bench = Bench()
    with capture_logs() as logs:
        async with bench.watched():
            await trio.sleep(1000)
            bench.wedged.hear(is_missed=True)
            await trio.sleep(WEDGED_SECONDS - 1)
            bench.wedged.hear(is_missed=True)  # renews nothing
            assert not bench.is_ended()
            await trio.sleep(2)
            assert bench.is_ended()
    [line] = logs
    assert (line["log_level"], line["pid"]) == ("warning", 7)
    assert line["event"] == "engine runs, and has not served for 30 s; ending it"


async def test_one_that_is_missed_before_it_is_watched_is_ended_too(
    autojump_clock: MockClock,
) -> None:
    bench = Bench()
    bench.wedged.hear(is_missed=True)
    async with bench.watched():
        await trio.sleep(WEDGED_SECONDS + 1)
        assert bench.is_ended()


async def test_one_that_is_missed_no_more_is_left_alone(autojump_clock: MockClock) -> None:
    bench = Bench()
    async with bench.watched():
        for _ in range(3):
            bench.wedged.hear(is_missed=True)
            await trio.sleep(WEDGED_SECONDS - 1)
            bench.wedged.hear(is_missed=False)
        await trio.sleep(1000)
        assert not bench.is_ended()


async def test_one_that_loads_anew_has_all_the_time_until_it_is_missed_again(
    autojump_clock: MockClock,
) -> None:
    bench = Bench()
    bench.is_loading = True
    async with bench.watched():
        for _ in range(2):
            bench.wedged.hear(is_missed=True)
            await trio.sleep(1000)
            assert not bench.is_ended()
        bench.is_loading = False
        await trio.sleep(1000)
        assert not bench.is_ended()
        bench.wedged.hear(is_missed=True)
        await trio.sleep(WEDGED_SECONDS + 1)
        assert bench.is_ended()
