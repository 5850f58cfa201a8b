"""The fixture of the flows: `build(**tables)` makes a house, `start(**tables)` one that serves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import trio

from tests.flows.house import House, Tally, captured_log, short_directory

Build = Callable[..., House]
Start = Callable[..., Awaitable[House]]


@pytest.fixture
async def build(nursery: trio.Nursery) -> AsyncIterator[Build]:
    """Return `build(workers=1, replies=(), **tables)`: a house whose daemon does not run yet."""
    houses: list[House] = []
    tally = Tally()
    with short_directory() as directory, captured_log() as lines, tally.listening():

        def build(**options: Any) -> House:
            houses.append(House(nursery, directory, lines, tally, **options))
            return houses[-1]

        yield build
        for house in houses:
            await house.close()


@pytest.fixture
async def start(build: Build) -> Start:
    """Return `await start(*engine_flags, **options)`: a house with one ready engine a worker."""

    async def start(*flags: str, workers: int = 1, **options: Any) -> House:
        house = build(workers=workers, **options)
        await house.open()
        for worker in range(workers):
            house.start_engine(*flags, worker=worker)
        await house.ready(workers)
        return house

    return start
