"""Clients that leave, at every point of a request's life; and clients that stop reading."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest
import trio

from smgd.core import GenerationRequest
from smgd.dispatch import Generation
from tests.flows.client import CHAT, Call, chat_body, head, post
from tests.flows.conftest import Start
from tests.flows.house import House, until
from tests.support import PATIENCE

# A prompt with "endless" gets tokens until it is aborted; one with "patience" gets none at first.
ENDLESS = {"contains": "endless", "token_ids": [300] * 8000}
PATIENT = {"contains": "patience", "text": "At last.", "delay_ms": 600_000}
REPLIES = [ENDLESS, PATIENT]
PACE = ("--itl-ms", "2")


async def leave_while_streaming(house: House) -> None:
    call = await house.call("endless", stream=True)
    await call.read("content")
    await call.close()


async def leave_while_streaming_by_reset(house: House) -> None:
    call = await house.call("endless", stream=True)
    await call.read("content")
    call.reset()


async def leave_while_waiting_for_the_whole(house: House) -> None:
    before = len(house.tally.adds)
    call = await house.call("endless")
    await until(lambda: len(house.tally.adds) > before)
    await call.close()


async def leave_before_the_first_token(house: House) -> None:
    before = len(house.tally.adds)
    call = await house.call("patience", stream=True)
    await until(lambda: len(house.tally.adds) > before)
    await call.close()


async def leave_with_several_choices(house: House) -> None:
    call = await house.call("endless", stream=True, n=3)
    await call.read('"index":2')
    await call.close()


async def leave_right_after_sending(house: House) -> None:
    call = await house.call("endless", stream=True)
    call.reset()


async def leave_with_half_a_body(house: House) -> None:
    stream = await house.dial()
    await stream.send_all(post(chat_body("endless", stream=True))[:-9])
    await stream.aclose()


async def leave_with_half_a_head(house: House) -> None:
    stream = await house.dial()
    await stream.send_all(head(CHAT)[:20])
    await stream.aclose()


async def leave_when_just_connected(house: House) -> None:
    await (await house.dial()).aclose()


async def stay_to_the_end(house: House) -> None:
    call = await house.ask("the sea", max_tokens=5, stream=True)
    assert call.done


Way = Callable[[House], Awaitable[None]]


@pytest.mark.parametrize(
    ("leave", "aborted"),
    [
        (leave_while_streaming, 1),
        (leave_while_streaming_by_reset, 1),
        (leave_while_waiting_for_the_whole, 1),
        (leave_before_the_first_token, 1),
        (leave_with_several_choices, 3),
        (leave_with_half_a_body, 0),
        (leave_with_half_a_head, 0),
        (leave_when_just_connected, 0),
        (stay_to_the_end, 0),
    ],
)
async def test_who_leaves_frees_the_engine_with_one_abort(
    start: Start, leave: Way, aborted: int
) -> None:
    house = await start(*PACE, replies=REPLIES)
    for _ in range(3):
        await leave(house)
    await house.quiet()
    await until(lambda: len(house.tally.aborts) >= 3 * aborted)
    await house.barrier()
    adds = house.tally.adds[:-1]  # the last is the barrier's
    assert sorted(house.tally.aborts) == sorted(adds[: 3 * aborted])
    statuses = {line["status"] for line in (await house.requests())[:-1]}
    if aborted or leave is leave_with_half_a_body:
        assert statuses == {499}


async def test_nothing_is_left_of_a_hundred_rounds(start: Start) -> None:
    house = await start(*PACE, replies=REPLIES)
    ways: list[Way] = [
        leave_while_streaming,
        leave_while_streaming_by_reset,
        leave_while_waiting_for_the_whole,
        leave_before_the_first_token,
        leave_with_several_choices,
        leave_right_after_sending,
        leave_with_half_a_body,
        leave_with_half_a_head,
        leave_when_just_connected,
        stay_to_the_end,
    ]

    async def round_of_all() -> None:
        async with trio.open_nursery() as nursery:
            for way in ways:
                nursery.start_soon(way, house)

    def tasks() -> int:
        return trio.lowlevel.current_statistics().tasks_living

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - only their number counts

    async def all_gone(tasks_before: int) -> None:
        await house.quiet()
        await house.barrier()
        await until(lambda: tasks() == tasks_before)

    await until(lambda: house.connections == 0)
    await trio.sleep(0.3)  # the engine closes the socket of its handshake by then
    idle = tasks()
    await round_of_all()
    await all_gone(idle)
    before = descriptors()  # not earlier: the first round has opened what stays open for good
    for _ in range(10):
        await round_of_all()
    await all_gone(idle)
    await until(lambda: descriptors() <= before)
    finished = [line for line in await house.requests() if line["status"] == 200]
    assert len(finished) == 11 + 2
    assert len(house.tally.adds) == len(house.tally.aborts) + len(finished)


async def test_a_client_that_leaves_during_tokenization_never_reaches_the_engine(
    start: Start,
) -> None:
    house = await start("--max-model-len", "10000000")
    limiter = house.daemon.service.stage.limiter
    call = await house.call("the sea and the ships " * 60_000)
    await until(lambda: limiter.borrowed_tokens == 1)
    call.reset()
    await house.quiet()
    assert limiter.borrowed_tokens == 1, "it was abandoned, not awaited"
    await until(lambda: limiter.borrowed_tokens == 0)
    await house.barrier()
    assert len(house.tally.adds) == 1
    assert [line["status"] for line in await house.requests()] == [499, 200]


async def test_who_only_closes_the_sending_side_gets_a_short_answer(start: Start) -> None:
    house = await start()
    call = await house.call("the sea", max_tokens=5, stream=True)
    await call.stream.send_eof()
    async with call.stream:
        await call.read()
    assert call.done
    await house.barrier()
    assert house.tally.aborts == []


async def test_who_closes_the_sending_side_of_a_long_answer_is_gone(start: Start) -> None:
    house = await start(*PACE, replies=REPLIES)
    call = await house.call("endless", stream=True)
    await call.stream.send_eof()
    async with call.stream:
        await call.read()
    assert (call.cut, call.done) == (True, False)
    await until(lambda: house.tally.aborts)
    assert house.tally.aborts == house.tally.adds


async def test_a_pipelined_request_does_not_hide_that_the_client_left(start: Start) -> None:
    house = await start(*PACE, replies=REPLIES)
    body = chat_body("endless", stream=True)
    stream = await house.dial()
    await stream.send_all(post(body) + post(body))
    await Call(stream).read("content")
    await stream.aclose()
    await house.quiet()
    await house.barrier()
    assert house.tally.aborts == house.tally.adds[:1]
    assert len(house.tally.adds) == 2  # the barrier's is the second


async def test_keep_alive_and_pipelining_answer_in_order(start: Start) -> None:
    house = await start()
    bodies = [chat_body("one", max_tokens=n, stream=n % 2 == 0) for n in range(1, 6)]
    stream = await house.dial()
    async with stream:
        for body in bodies:
            await stream.send_all(post(body))
            call = await Call(stream).read()
            assert (call.status, call.complete) == (200, True)
        await stream.send_all(b"".join(post(chat_body("x", max_tokens=n)) for n in (1, 2, 3)))
        data = b""
        while data.count(b'"chat.completion"') < 3:
            data += await stream.receive_some()
    tokens = [int(part.split(b",")[0]) for part in data.split(b'"completion_tokens":')[1:]]
    assert tokens == [1, 2, 3]


# ------------------------------------------------------------------------------ slow readers

# Frames are large in proportion to their text, and eight sequences fill a socket's buffers soon.
WIDE: dict[str, Any] = {
    "n": 8,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}


def watched(house: House) -> list[Generation]:
    """Return a list that all generations from now on are put into."""
    generations: list[Generation] = []
    dispatcher = house.daemon.service.dispatcher
    make = dispatcher.generation

    def generation(requests: Sequence[GenerationRequest], request_id: str) -> Generation:
        generations.append(make(requests, request_id))
        return generations[-1]

    dispatcher.generation = generation  # type: ignore[method-assign]
    return generations


async def test_a_stalled_reader_is_cut_and_disturbs_nobody(start: Start) -> None:
    flood = {"contains": "flood", "token_ids": [300] * 100_000}
    house = await start(
        "--max-model-len", "200000", server={"write_timeout": 0.5}, replies=[flood]
    )  # fmt: skip
    alone = await house.ask("the sea", seed=3, max_tokens=100, stream=True)
    generations = watched(house)
    stalled = await house.call("flood", receive_buffer=4096, **WIDE)
    await stalled.read('"index":7')
    names = house.tally.adds[-8:]
    others: list[Call] = []

    async def other() -> None:
        others.append(await house.ask("the sea", seed=3, max_tokens=100, stream=True))

    taken: list[int] = []
    there: list[int] = []
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(other)
        [sequence, *_] = generations[0].sequences
        with trio.fail_after(PATIENCE):
            while not house.tally.aborts:
                await trio.sleep(0.01)
                taken.append(sequence._taken)
                there.append(len(sequence.ids))
    # What the client did not take stays a row of numbers: nothing more is rendered of it. (The task
    # of the stock path may look once more when the connection is cut.)
    [(stuck, _)] = Counter(taken).most_common(1)
    unread = [count for at, count in zip(taken, there, strict=True) if at == stuck]
    assert unread[-1] > unread[0]
    assert [call.text() for call in others] == [alone.text()] * 3
    assert all(call.done for call in others)
    await stalled.read()
    assert stalled.cut
    await house.barrier()
    assert sorted(house.tally.aborts) == sorted(names)
    [line] = [line for line in await house.requests() if line["status"] != 200]
    assert line["status"] == 499


@pytest.mark.parametrize("how", ["closed", "reset", "stalled"])
async def test_who_leaves_during_the_last_write_has_not_got_it(start: Start, how: str) -> None:
    house = await start(server={"write_timeout": 0.5})
    body = msgspec.json.encode({"prompt": "a " * 2_000_000})
    stream = await house.dial(receive_buffer=4096)
    await stream.send_all(post(body, path="/tokenize"))
    call = Call(stream)
    await call.read("tokens")
    assert call.status == 200
    if how == "closed":
        await call.close()
    elif how == "reset":
        call.reset()
    await house.quiet()
    [line] = await house.requests()
    assert (line["status"], line["error_code"]) == (499, "client_closed_request")
    assert await house.metric("smg_http_responses_total", status_code="499") == 1


async def test_requests_that_cannot_be_read_are_counted_and_told(start: Start) -> None:
    house = await start()
    for data in (b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"):
        stream = await house.dial()
        await stream.send_all(data)
        async with stream:
            assert (await Call(stream).read()).status == 400
    lines = house.logged("request refused")
    assert [(line["client"], line["status"]) for line in lines] == [("127.0.0.1", 400)] * 2
    assert all(line["reason"] for line in lines)
    assert await house.requests() == []
    labels = {"path": "other", "status_code": "400", "error_code": "bad_http"}
    assert await house.metric("smg_http_responses_total", **labels) == 2


async def test_a_slow_reader_gets_everything(start: Start) -> None:
    flood = {"contains": "flood", "token_ids": [3163] * 1500}
    house = await start("--max-model-len", "200000", replies=[flood])
    generations = watched(house)
    call = await house.call("flood", receive_buffer=65536, **WIDE)
    await until(lambda: generations and house.active == 0)
    [sequence, *_] = generations[0].sequences
    assert sequence._taken < len(sequence.ids) == 1501, "the socket is full, the rest waits as ids"
    await trio.sleep(0.3)
    with trio.fail_after(PATIENCE):
        await call.read()
    assert call.done
    assert [call.text(index) for index in range(8)] == [" nevertheless" * 1500] * 8
    assert call.finishes() == ["stop"] * 8
    assert call.frames[-1]["usage"]["completion_tokens"] == 8 * 1501  # with the ends of text
    assert house.tally.aborts == []
    await house.requests()
    duration = await house.metric("smg_router_request_duration_seconds_sum")
    generation = await house.metric("smg_router_generation_duration_seconds_sum")
    decode = await house.metric("smg_router_stage_duration_seconds_sum", stage="decode")
    assert 0 < decode < duration - 0.3, "what the client takes its time for is no engine's"
    assert 0 < generation < duration - 0.3
