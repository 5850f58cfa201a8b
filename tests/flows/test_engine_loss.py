"""Engines that die, hang, talk nonsense or come back: what clients see, and how soon."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest
import trio

from tests.flows.client import Call, fetch
from tests.flows.conftest import Build, Start
from tests.flows.house import House, start_program, until
from tests.support import PATIENCE

ENDLESS = {"contains": "endless", "token_ids": [300] * 8000}
PATIENT = {"contains": "patience", "text": "At last.", "delay_ms": 600_000}
PACE = ("--itl-ms", "2")
IMPATIENT = {"silence": 0.4, "heartbeat": 0.4}


async def calls_in_flight(house: House) -> list[Call]:
    """Start one stream that has begun, one that has not, and one that wants a whole answer."""
    begun = await house.call("endless", stream=True)
    await begun.read("content")
    calls = [begun, await house.call("patience", stream=True), await house.call("endless")]
    await until(lambda: len(house.tally.adds) >= 3 and house.active == 3)
    return calls


async def assert_failed(calls: list[Call]) -> None:
    """All were told at once: with a real status where that was possible."""
    with trio.fail_after(PATIENCE):
        for call in calls:
            await call.read()
    begun, *others = calls
    assert (begun.status, begun.done) == (200, True)
    assert begun.finishes() == []
    for call in calls:
        error = call.error
        assert (error["code"], error["type"], error["param"]) == (
            "engine_lost",
            "server_error",
            None,
        )
        assert "The engine that ran this request was lost: " in error["message"]
    for call in others:
        assert (call.status, call.complete) == (503, True)
        assert call.headers["retry-after"] == "1"
        assert call.headers["x-smg-error-code"] == "engine_lost"


async def test_a_killed_engine_fails_its_requests_at_once_and_its_successor_serves(
    build: Build,
) -> None:
    house = build(replies=[ENDLESS, PATIENT])
    await house.open()
    process = await house.start_process(*PACE)
    await house.ready()
    calls = await calls_in_flight(house)
    process.kill()
    await assert_failed(calls)
    assert house.active == 0
    status, body = await house.readiness()
    assert (status, body["reason"]) == (503, "insufficient healthy workers")
    [record] = house.daemon.fleet.records.values()
    [line] = house.logged("engine session ended")
    assert record.worker.unready == line["reason"]
    [model] = (await fetch(house.port, "/v1/models")).json["data"]
    assert model["max_model_len"] == 8192  # as the engine has said
    answer = await house.ask("the sea")
    assert (answer.status, answer.error["code"]) == (503, "no_available_workers")
    await house.start_process()
    await until(lambda: len(house.tally.ready_at) == 2)
    await house.ready()
    assert trio.current_time() - house.tally.ready_at[1] < 1
    assert (await house.ask("the sea")).status == 200
    assert house.tally.aborts == []


async def test_an_engine_comes_back_although_somebody_has_removed_the_files(build: Build) -> None:
    house = build(replies=[ENDLESS])
    await house.open()
    process = await house.start_process(*PACE)
    await house.ready()
    [record] = house.daemon.fleet.records.values()
    for path in (record.addresses.lock, *record.addresses.sockets):
        path.unlink()
    assert (await house.ask("the sea")).status == 200  # the connections live on
    process.kill()
    await until(lambda: house.daemon.registry.ready_count() == 0)
    await house.start_process()
    await house.ready()
    assert (await house.ask("the sea")).status == 200
    gone = "files of this worker were removed or replaced; making them anew"
    assert house.take_errors() == [gone]


@pytest.mark.parametrize(
    ("then", "words"),
    [
        ("exit", "connection was closed"),
        ("sentinel", "ENGINE_CORE_DEAD"),
    ],
)
async def test_engines_that_end_by_themselves(start: Start, then: str, words: str) -> None:
    last = {"contains": "last words", "text": "Good bye", "then": then}
    house = await start(*PACE, replies=[ENDLESS, PATIENT, last])
    calls = await calls_in_flight(house)
    final = await house.call("last words", stream=True)
    await assert_failed([*calls])
    await final.read()
    assert "Good bye".startswith(final.text())  # what came with the end may be lost with it
    assert final.error["code"] == "engine_lost"
    assert (final.status, final.done) == (200, True)
    [line] = house.logged("engine session ended")
    assert words in line["reason"]
    assert line["requests_failed"] == 4
    house.start_engine()
    await house.ready()
    assert (await house.ask("the sea")).status == 200
    assert house.tally.aborts == []


async def test_a_process_killed_by_its_own_hand(build: Build) -> None:
    last = {"contains": "last words", "text": "Good bye", "then": "kill"}
    house = build(replies=[last])
    await house.open()
    process = await house.start_process(*PACE)
    await house.ready()
    final = await house.ask("last words", stream=True)
    assert final.error["code"] == "engine_lost"
    assert "Good bye".startswith(final.text())
    await until(lambda: process.returncode is not None)
    assert process.returncode == -signal.SIGKILL
    await house.start_process()
    await house.ready()
    assert (await house.ask("the sea")).status == 200


async def test_a_leaving_engine_is_a_lost_engine(start: Start) -> None:
    house = await start(*PACE, replies=[ENDLESS, PATIENT])
    calls = await calls_in_flight(house)
    engine = house.engines[0]
    engine.terminate()
    await assert_failed(calls)
    await engine.ended.wait()
    assert engine.status == 0
    await until(lambda: house.daemon.registry.ready_count() == 0)
    house.start_engine()
    await house.ready()
    assert (await house.ask("the sea")).status == 200
    assert house.tally.aborts == []


async def test_an_engine_that_hangs_is_given_up_after_silence(start: Start) -> None:
    last = {"contains": "last words", "text": "Good bye", "then": "hang"}
    house = await start(*PACE, timeouts=IMPATIENT, replies=[ENDLESS, last])
    begun = await house.call("endless", stream=True)
    await begun.read("content")
    final = await house.call("last words", stream=True)
    with trio.fail_after(PATIENCE):
        await begun.read()
        await final.read()
    for call in (begun, final):
        assert (call.status, call.done) == (200, True)
        assert call.error["code"] == "engine_lost"
        assert "for 0.4s with requests in flight" in call.error["message"]
    assert (await house.readiness())[0] == 503
    house.start_engine()  # takes over the identity of the one that hangs
    await house.ready()
    assert (await house.ask("the sea")).status == 200


async def test_an_engine_that_lives_but_does_not_work_is_given_up_as_well(start: Start) -> None:
    house = await start(*PACE, timeouts={"silence": 0.4, "heartbeat": 2}, replies=[PATIENT])
    call = await house.call("patience", stream=True)
    with trio.fail_after(PATIENCE):
        await call.read()
    assert (call.status, call.error["code"]) == (503, "engine_lost")
    assert "no output for" in call.error["message"]
    await house.ready()  # it still answers
    await house.barrier()
    assert house.tally.aborts == house.tally.adds[:1]


async def test_silence_is_not_held_against_an_idle_engine(start: Start) -> None:
    house = await start(timeouts={"silence": 0.1, "heartbeat": 0.1})
    assert (await house.ask("the sea", max_tokens=3)).status == 200
    await trio.sleep(0.3)  # three times what would be the end of a busy one
    assert (await house.readiness())[0] == 200
    assert house.logged("engine session ended") == []


async def test_a_frozen_engine_that_thaws_is_served_again(build: Build) -> None:
    house = build(timeouts=IMPATIENT, replies=[ENDLESS])
    await house.open()
    process = await house.start_process(*PACE)
    await house.ready()
    call = await house.call("endless", stream=True)
    await call.read("content")
    process.send_signal(signal.SIGSTOP)
    with trio.fail_after(PATIENCE):
        await call.read()
    assert call.error["code"] == "engine_lost"
    assert (await house.readiness())[0] == 503
    process.send_signal(signal.SIGCONT)
    await house.ready()
    await house.barrier()
    # It was told while it was frozen, and only once.
    assert house.tally.aborts == house.tally.adds[:1]
    assert (await house.ask("the sea")).status == 200


async def test_garbage_ends_the_session_but_not_the_engine(start: Start) -> None:
    noise = {"contains": "noise", "text": "Listen:", "then": "garbage"}
    house = await start(*PACE, replies=[ENDLESS, PATIENT, noise])
    calls = await calls_in_flight(house)
    ids = house.tally.adds[:]
    noisy = await house.ask("noise")
    assert noisy.status == 200
    assert noisy.json["choices"][0]["message"]["content"] == "Listen:"
    await assert_failed(calls)
    assert "could not be decoded" in calls[0].error["message"]
    # It is alive and answers the heartbeat: no restart is needed.
    await house.ready()
    await house.barrier()
    assert sorted(house.tally.aborts) == sorted(ids)
    assert (await house.ask("the sea")).status == 200


@pytest.mark.parametrize("engine_first", [True, False])
async def test_engine_and_daemon_start_in_any_order(build: Build, engine_first: bool) -> None:
    house = build()
    if engine_first:
        house.start_engine()
        await trio.sleep(0.05)  # it dials by now, and in vain
        await house.open()
    else:
        await house.open()
        house.start_engine("--startup-ms", "50")
    await house.ready()
    assert (await house.ask("the sea")).status == 200


async def test_a_second_daemon_on_the_same_path_is_refused_by_name(
    start: Start, nursery: trio.Nursery
) -> None:
    house = await start()
    lines: list[str] = []
    process = await start_program(
        nursery,
        [sys.executable, "-m", "smgd.cli", "launch", "--worker-urls", f"ipc://{house.paths[0]}",
         "--model-path", "smgd-sim", "--port", "0", "--prometheus-port", "0"],
        lines.append,
    )  # fmt: skip
    with trio.fail_after(PATIENCE):
        await process.wait()
    assert process.returncode == 1
    await until(lambda: any("smgd failed" in line for line in lines))
    [line] = [line for line in lines if "smgd failed" in line]

    assert f"is in use by the process with pid {os.getpid()}" in line
    assert "Traceback" not in "".join(lines)
    assert (await house.ask("the sea")).status == 200, "the first is not disturbed"


async def test_an_engine_that_is_started_anew_takes_over_at_once(start: Start) -> None:
    """Nobody told us that the old one is gone, as after a machine's power failure."""
    house = await start(*PACE, replies=[ENDLESS, PATIENT])
    calls = await calls_in_flight(house)
    house.start_engine(*PACE)
    await assert_failed(calls)
    assert "started anew" in calls[0].error["message"]
    await house.ready()
    for _ in range(3):
        assert (await house.ask("the sea", max_tokens=4)).status == 200


@pytest.mark.parametrize("in_flight", [False, True])
async def test_of_two_engines_with_one_index_the_end_of_the_one_in_use_is_seen_at_once(
    start: Start, in_flight: bool
) -> None:
    house = await start(*PACE, replies=[ENDLESS])
    second = house.start_engine(*PACE)
    await until(lambda: len(house.tally.ready_at) == 2)
    await house.ready()
    [line] = [line for line in house.lines if "duplicate HELLO" in line["event"]]
    assert "two engines with index 0 dial the same address" in line["event"]
    assert line["log_level"] == "warning"
    if in_flight:
        call = await house.call("endless", stream=True)
        await call.read("content")
    await second.kill()
    await until(lambda: house.daemon.registry.ready_count() == 0, 1)
    assert (await house.readiness())[0] == 503
    [record] = house.daemon.fleet.records.values()
    assert record.worker.unready == "its connection was closed"
    if in_flight:
        await call.read()
        assert call.error["code"] == "engine_lost"
    house.start_engine(*PACE)
    await house.ready()
    assert (await house.ask("the sea", max_tokens=4)).status == 200
    assert len([line for line in house.lines if "duplicate HELLO" in line["event"]]) == 1


async def test_the_end_of_an_engine_that_was_replaced_disturbs_nobody(start: Start) -> None:
    house = await start(*PACE)
    [first] = house.engines
    house.start_engine(*PACE)
    await until(lambda: len(house.tally.ready_at) == 2)
    await house.ready()
    alone = await house.ask("the sea", **LONG)
    call = await house.call("the sea", **LONG)
    await call.read("content")
    await first.kill()
    assert (await call.read()).text() == alone.text()
    assert len(house.logged("engine session ended")) == 1
    [record] = house.daemon.fleet.records.values()
    assert record.worker.usable == [0]


# ------------------------------------------------------------------------------ two workers

LONG: dict[str, Any] = {
    "temperature": 0.0,
    "max_tokens": 80,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}


async def test_streams_go_on_with_the_other_worker(start: Start) -> None:
    house = await start(*PACE, workers=2, routing={"policy": "round_robin"})
    alone = await house.ask("the sea", **LONG)
    calls = [await house.call("the sea", **LONG) for _ in range(4)]
    calls.append(await house.call("the sea", **{**LONG, "stream": False, "stream_options": None}))
    for call in calls[:4]:
        await call.read("content")
    await until(lambda: house.active == 5)
    await house.engines[0].kill()
    with trio.fail_after(PATIENCE):
        for call in calls:
            await call.read()
    for call in calls[:4]:
        assert (call.done, call.text(), call.finishes()) == (True, alone.text(), ["length"])
        usage, expected = call.frames[-1]["usage"], alone.frames[-1]["usage"]
        assert usage["completion_tokens"] == expected["completion_tokens"] == 80
        assert usage["prompt_tokens"] == expected["prompt_tokens"]
    assert calls[4].json["choices"][0]["message"]["content"] == alone.text()
    one = {"status": "ready", "healthy_workers": 1, "total_workers": 2}
    assert await house.readiness() == (200, one)
    house.start_engine(worker=0)
    await house.ready(2)


async def test_without_migration_the_other_worker_is_not_disturbed(start: Start) -> None:
    house = await start(
        *PACE, workers=2, routing={"policy": "round_robin", "migration": "off"}, replies=[PATIENT]
    )
    alone = await house.ask("the sea", **LONG)
    calls = [await house.call("the sea", **LONG) for _ in range(4)]
    for call in calls:
        await call.read("content")
    await house.engines[0].kill()
    with trio.fail_after(PATIENCE):
        for call in calls:
            await call.read()
    lost = [call for call in calls if call.error is not None]
    kept = [call for call in calls if call.error is None]
    assert (len(lost), len(kept)) == (2, 2)
    assert {call.error["code"] for call in lost} == {"engine_lost"}
    assert all(call.done for call in calls)
    assert {call.text() for call in kept} == {alone.text()}
    assert all(alone.text().startswith(call.text()) for call in lost)


# ---------------------------------------------------------------- an engine that fails a request


# So far apart are the tokens that none of them shares a wake with the failure.
SLOW = ("--itl-ms", "150")


async def test_a_request_that_the_engine_fails(start: Start) -> None:
    replies = [
        {"contains": "at once", "finish": "error"},
        {"contains": "midway", "text": "It was a dark", "finish": "error"},
    ]
    house = await start(*SLOW, replies=replies)
    for content, stream in (("at once", False), ("at once", True), ("midway", False)):
        answer = await house.ask(content, stream=stream)
        assert (answer.status, answer.complete) == (500, True)
        error = answer.json["error"]
        assert (error["code"], error["type"]) == ("engine_error", "server_error")
    answer = await house.ask("midway", stream=True)
    assert (answer.status, answer.done) == (200, True)
    assert answer.text() == "It was a dark"
    assert answer.error["code"] == "engine_error"
    assert answer.finishes() == []
    assert (await house.readiness())[0] == 200
    await house.barrier()
    assert house.tally.aborts == []
    labels = {"error_code": "engine_error", "path": "/v1/chat/completions"}
    assert await house.metric("smg_http_responses_total", status_code="500", **labels) == 3
    labels["error_code"] = "stream_error"
    assert await house.metric("smg_http_responses_total", status_code="200", **labels) == 1
    [line] = [line for line in await house.requests() if line.get("cause")]
    assert (line["error_code"], line["cause"]) == ("stream_error", "engine_error")


async def test_one_failed_choice_ends_its_siblings(start: Start) -> None:
    # The script is the same for all choices, so the second is failed by its engine's end.
    house = await start(
        *SLOW, replies=[{"contains": "midway", "text": "It was", "finish": "error"}]
    )
    answer = await house.ask("midway", stream=True, n=3)
    assert (answer.done, answer.error["code"]) == (True, "engine_error")
    await house.barrier()
    assert (await house.readiness())[0] == 200
