"""Streams survive their engine: a hundred at once, and those that cannot be continued say so."""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from tests.flows.client import Call
from tests.flows.conftest import Build
from tests.flows.house import House, short_directory, start_program, until
from tests.flows.town import Town
from tests.support import PATIENCE

STREAMS = 100
# Slow enough that all have begun long before the first is done.
PACE = ("--itl-ms", "30")
# What is to end in the middle is not done before, though the machine stands still for seconds.
DOOMED = ("--itl-ms", "200")
LONG: dict[str, Any] = {
    "temperature": 0.0,
    "max_tokens": 60,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}


async def two_workers(build: Build, **tables: Any) -> tuple[House, list[trio.Process]]:
    house = build(workers=2, **tables)
    await house.open()
    paces = (DOOMED, PACE)
    engines = [await house.start_process(*paces[worker], worker=worker) for worker in range(2)]
    await house.ready(2)
    return house, engines


async def read_all(calls: list[Call]) -> None:
    with trio.fail_after(60):
        for call in calls:
            await call.read()


async def run_streams(house: House, engine: trio.Process | None, number: int) -> list[Call]:
    """Run a hundred streams; send a signal to an engine when all have begun."""
    calls = [await house.call(f"story {index}", **LONG) for index in range(STREAMS)]
    with trio.fail_after(PATIENCE):
        for call in calls:
            await call.read("content")
    if engine is not None:
        engine.send_signal(number)
    await read_all(calls)
    return calls


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_hundred_streams_and_the_end_of_an_engine(
    build: Build, number: signal.Signals
) -> None:
    house = build(workers=2, routing={"policy": "round_robin"})
    await house.open()
    await house.start_process(*PACE, worker=1)
    await house.ready(1)
    undisturbed = await run_streams(house, None, 0)
    engine = await house.start_process(*DOOMED)
    await house.ready(2)
    calls = await run_streams(house, engine, number)
    migrated = len(house.logged("stream migrated"))
    assert migrated == STREAMS // 2
    for call, expected in zip(calls, undisturbed, strict=True):
        assert (call.error, call.done, call.finishes()) == (None, True, ["length"])
        assert call.text() == expected.text()
        usage, before = call.frames[-1]["usage"], expected.frames[-1]["usage"]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert usage[name] == before[name]
    await until(lambda: house.daemon.registry.ready_count() == 1)
    labels = {"model": "smgd-sim", "result": "migrated"}
    assert await house.metric("smg_router_migrations_total", **labels) == migrated
    # What was told to an engine that leaves is that nobody waits any more, and only to that one.
    assert len(set(house.tally.aborts)) == len(house.tally.aborts) <= migrated


async def after_a_kill(house: House, engine: trio.Process, **fields: Any) -> Call:
    """Stream from the engine of the first worker, and kill it in the middle."""
    call = await house.call("the sea", **LONG | fields)
    await call.read("content")
    engine.kill()
    await read_all([call])
    return call


SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 7}
PENALIZED: dict[str, Any] = {"presence_penalty": 0.5}


@pytest.mark.parametrize("fields", [SEEDED, PENALIZED])
async def test_best_effort_continues_what_is_not_exact(
    build: Build, fields: dict[str, Any]
) -> None:
    house, engines = await two_workers(build, routing={"policy": "round_robin"})
    call = await after_a_kill(house, engines[0], **fields)
    assert (call.error, call.finishes()) == (None, ["length"])
    assert call.frames[-1]["usage"]["completion_tokens"] == 60


@pytest.mark.parametrize(
    ("mode", "fields", "reason"),
    [
        ("exact", SEEDED, "its sampling (seed or penalties) cannot be continued exactly"),
        ("exact", PENALIZED, "its sampling (seed or penalties) cannot be continued exactly"),
        ("off", {}, "migration is off"),
    ],
)
async def test_what_cannot_go_on_says_why(
    build: Build, mode: str, fields: dict[str, Any], reason: str
) -> None:
    routing = {"policy": "round_robin", "migration": mode}
    house, engines = await two_workers(build, routing=routing)
    call = await after_a_kill(house, engines[0], **fields)
    assert call.error["code"] == "engine_lost"
    assert call.error["message"].endswith(reason)
    assert (call.finishes(), call.done) == ([], True)
    labels = {"model": "smgd-sim", "result": "failed"}
    assert await house.metric("smg_router_migrations_total", **labels) == 1
    assert await house.metric("smg_engine_losses_total", worker=f"ipc://{house.paths[0]}") == 1


# --------------------------------------------------------------------- several engines, one worker


@pytest.fixture
async def town(nursery: trio.Nursery) -> AsyncIterator[Town]:
    with short_directory(1) as directory:
        town = Town(nursery, directory)
        yield town
        await town.close()


async def group(town: Town, *flags: str) -> list[trio.Process]:
    """Start smgd with two engines in processes of their own behind one worker."""
    await town.start_smgd("--zmq-engine-count", "2", *flags)
    paces = (PACE, DOOMED)
    engines = [await town.start_engine("--engine-index", str(i), *paces[i]) for i in range(2)]
    await town.ready()
    return engines


async def test_a_rank_takes_over_what_another_has_lost(town: Town) -> None:
    engines = await group(town)
    alone = await (await town.ask("the sea", **LONG)).read()
    calls = [await town.ask("the sea", **LONG) for _ in range(8)]
    for call in calls:
        await call.read("content")
    assert await town.metric("smg_engine_ready", dp_rank="1") == 1
    engines[1].kill()
    await read_all(calls)
    assert {call.text() for call in calls} == {alone.text()}
    assert [call.error for call in calls] == [None] * 8
    assert len(town.logged("stream migrated")) == 4
    [line] = town.logged("engines lost")
    assert (line["engines"], line["requests_failed"]) == ([1], 4)
    assert town.logged("engine session ended") == []
    assert await town.metric("smg_engine_ready", dp_rank="0") == 1
    assert await town.metric("smg_engine_ready", dp_rank="1") == 0
    await town.start_engine("--engine-index", "1")
    with trio.fail_after(PATIENCE):
        while await town.metric("smg_engine_ready", dp_rank="1") == 0:  # noqa: ASYNC110
            await trio.sleep(0.01)


async def test_ranks_of_one_process_go_together_and_come_back_together(town: Town) -> None:
    await town.start_smgd("--zmq-engine-count", "2")
    parent = await town.start_engine("--data-parallel-size", "2", *DOOMED)
    await town.ready()
    calls = [await town.ask("the sea", **LONG) for _ in range(4)]
    for call in calls:
        await call.read("content")
    parent.kill()
    await read_all(calls)
    assert {call.error["code"] for call in calls} == {"engine_lost"}
    await town.start_engine("--data-parallel-size", "2", *PACE)
    await town.answered()


async def test_one_engine_too_many_is_named_and_changes_nothing(town: Town) -> None:
    await group(town)
    await town.start_engine("--engine-index", "2")
    text = "an engine with identity 0200 has dialled in, but this worker waits for 2 engine(s)"
    await until(lambda: [line for line in town.log if line["event"].startswith(text)])
    assert (await town.answered()).status == 200


async def test_a_missing_engine_leaves_the_worker_waiting_and_is_reported(town: Town) -> None:
    await town.start_smgd("--zmq-engine-count", "2", "--zmq-startup-timeout-secs", "0.5")
    await town.start_engine("--engine-index", "0")
    text = "while waiting for HELLO after 0.5s (HELLO of engine 1)"
    await until(lambda: [line for line in town.log if text in line["event"]])
    await town.start_engine("--engine-index", "1")
    assert (await town.answered()).status == 200


async def test_a_frozen_engine_is_noticed_and_gets_nothing_once_it_was_replaced(
    build: Build, nursery: trio.Nursery
) -> None:
    house = build(workers=2, timeouts={"heartbeat": 1.0}, routing={"policy": "round_robin"})
    await house.open()
    heard: list[str] = []
    await house.start_process(*PACE, worker=1)
    await house.ready(1)
    alone = await house.ask("the sea", **LONG)
    command = [sys.executable, "-m", "smgd.sim.cli", *house.engine_flags(*DOOMED)]
    frozen = await start_program(nursery, command, heard.append)
    await house.ready(2)
    calls = [await house.call("the sea", **LONG) for _ in range(4)]
    for call in calls:
        await call.read("content")
    stopped_at = trio.current_time()
    frozen.send_signal(signal.SIGSTOP)
    await until(lambda: house.daemon.registry.ready_count() == 1)
    seconds = trio.current_time() - stopped_at
    print(f"noticed {seconds:.2f} s after it was frozen, with a heartbeat of 1 s")
    assert seconds < 2
    await read_all(calls)
    assert {call.text() for call in calls} == {alone.text()}
    [line] = house.logged("engine session ended")
    assert line["reason"] == "no sign of life for 1s with requests in flight"

    await house.start_process(*PACE, worker=0)
    await house.ready(2)
    heard.clear()
    frozen.send_signal(signal.SIGCONT)
    for _ in range(8):
        assert (await house.ask("the sea", max_tokens=2)).status == 200
    await until(lambda: any(line.startswith("sim abort") for line in heard))
    assert [line for line in heard if line.startswith("sim add")] == []
    assert house.logged("engine session ended") == [line]
