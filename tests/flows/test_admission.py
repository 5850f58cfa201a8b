"""Admission as clients meet it: who runs, who waits, who leaves, and what is left afterwards."""

from __future__ import annotations

import random
from typing import Any

import pytest
import trio

from tests.flows.client import CHAT, Call, chat_body, head
from tests.flows.conftest import Start
from tests.flows.house import House, until
from tests.support import PATIENCE
from tests.web.test_conformance import Http2

# Ids to 8000 tokens at 5 ms: still running whenever a test looks.
ENDLESS = {"contains": "endless", "token_ids": [300] * 8000}
PACE = ("--itl-ms", "5")

pytestmark = pytest.mark.parametrize("http_path", ["fast", "stock"])


async def limited(start: Start, http_path: str, limit: int, size: int, **more: Any) -> House:
    limits = {"max_concurrent_requests": limit, "queue_size": size, **more}
    server = {"http_path": http_path}
    return await start(*PACE, replies=[ENDLESS], limits=limits, server=server)


async def occupy(house: House, streams: int = 1) -> list[Call]:
    """Take permits with streams that do not end by themselves."""
    calls = [await house.call("endless", stream=True) for _ in range(streams)]
    for call in calls:
        await call.read("content")
    return calls


def counts(house: House) -> tuple[int, int]:
    """Return how many run and how many wait."""
    admission = house.daemon.service.gate.admission
    return admission.running, admission.waiting


async def test_a_permit_is_held_until_the_end_of_a_stream(start: Start, http_path: str) -> None:
    house = await limited(start, http_path, 2, 5)
    calls = await occupy(house, 2)
    third = await house.call("hello", max_tokens=2)
    await until(lambda: counts(house) == (2, 1))
    assert len(house.tally.adds) == 2
    await calls[0].close()
    await third.read()
    assert third.status == 200
    await until(lambda: counts(house) == (1, 0))
    await calls[1].close()
    await house.quiet()
    assert counts(house) == (0, 0)


async def test_who_came_first_is_served_first(start: Start, http_path: str) -> None:
    house = await limited(start, http_path, 1, 2)
    [call] = await occupy(house)
    waiting = []
    for number in (1, 2):
        waiting.append(await house.call(f"number {number}", max_tokens=number))
        await until(lambda number=number: counts(house) == (1, number))  # type: ignore[misc]
    refused = await house.ask("one too many")
    assert (refused.status, refused.error["code"]) == (429, "admission_queue_full")
    assert refused.error["type"] == "rate_limit_error"
    assert refused.headers["retry-after"] == "1"
    await call.close()
    for answer in waiting:
        await answer.read()
        assert answer.status == 200
    await house.quiet()
    served = [line for line in await house.requests() if line["status"] == 200]
    assert [line["completion_tokens"] for line in served] == [1, 2]
    assert all(line["queued_ms"] > 0 for line in served)


async def test_the_body_of_a_request_that_waits_is_not_read(start: Start, http_path: str) -> None:
    house = await limited(start, http_path, 1, 1)
    [call] = await occupy(house)
    stream = await house.dial()
    size = 8 << 20
    lines = ("Content-Type: application/json", f"Content-Length: {size}")
    sent = 0
    with trio.move_on_after(0.3):
        await stream.send_all(head(CHAT, *lines))
        for _ in range(size // 65536):
            await stream.send_all(b"x" * 65536)
            sent += 65536
    await until(lambda: counts(house) == (1, 1))
    assert sent < size
    await call.close()
    await stream.aclose()
    await house.quiet()


async def post_h2(client: Http2, body: bytes, *, length: int) -> int:
    """Begin a chat over HTTP/2."""
    number = client.connection.get_next_available_stream_id()
    pseudo = [(":method", "POST"), (":path", CHAT), (":scheme", "http"), (":authority", "test")]
    headers = [("content-type", "application/json"), ("content-length", str(length))]
    client.connection.send_headers(number, pseudo + headers)
    client.connection.send_data(number, body, end_stream=len(body) == length)
    await client.flush()
    return number


async def test_a_waiting_stream_of_http2_holds_up_no_other(start: Start, http_path: str) -> None:
    house = await limited(start, http_path, 1, 5)
    body = chat_body("endless", stream=True, max_tokens=200)
    large = chat_body("x" * 400_000, max_tokens=1)
    with trio.fail_after(PATIENCE):
        async with Http2(await house.dial()) as client:
            running = await post_h2(client, body, length=len(body))
            await client.until(lambda: running in client.bodies)
            waiting = await post_h2(client, b"", length=len(large))
            while large:  # far more than is let through unread
                room = min(client.connection.local_flow_control_window(waiting), 16000)
                client.connection.send_data(waiting, large[:room], end_stream=room >= len(large))
                large = large[room:]
                await client.flush()
                if client.connection.local_flow_control_window(waiting) < 16000 and large:
                    seen = len(client.bodies[running])
                    await client.until(lambda seen=seen: len(client.bodies[running]) > seen)  # type: ignore[misc]
            assert counts(house) == (1, 1)
            await client.until(lambda: client.ended == {running, waiting})
            assert client.bodies[running].endswith(b"data: [DONE]\n\n")
            assert client.statuses == {running: 200, waiting: 400}  # it is too long
            assert b"context_length_exceeded" in client.bodies[waiting]


async def test_a_reset_stream_of_http2_leaves_the_queue(start: Start, http_path: str) -> None:
    house = await limited(start, http_path, 1, 5)
    [call] = await occupy(house)
    body = chat_body("never mind")
    async with Http2(await house.dial()) as client:
        number = await post_h2(client, body, length=len(body))
        await until(lambda: counts(house) == (1, 1))
        client.connection.reset_stream(number)
        await client.flush()
        await until(lambda: counts(house) == (1, 0))
    await call.close()
    await house.quiet()
    assert len(house.tally.adds) == 1


async def test_clients_that_leave_the_queue_leave_nothing(start: Start, http_path: str) -> None:
    house = await limited(start, http_path, 1, 200)
    [call] = await occupy(house)
    waiting = [await house.call("never mind", max_tokens=2) for _ in range(100)]
    await until(lambda: counts(house) == (1, 100))
    for number, gone in enumerate(random.Random(7).sample(waiting, 100)):
        if number % 2:
            gone.reset()
        else:
            await gone.close()
    await until(lambda: counts(house) == (1, 0))
    await call.close()
    assert (await house.ask("hello", max_tokens=2)).status == 200
    assert len(house.tally.adds) == 2  # no engine has heard of the hundred


async def test_handing_over_and_leaving_at_the_same_time(start: Start, http_path: str) -> None:
    """Every permit that comes back is handed to somebody who may be leaving."""
    house = await limited(start, http_path, 2, 200)
    order = random.Random(11)

    async def client() -> None:
        for _ in range(6):
            call = await house.call("endless", stream=order.random() < 0.5)
            with trio.move_on_after(order.random() * 0.02):
                await call.read()
            if order.random() < 0.5:
                call.reset()
            else:
                await call.close()

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            for _ in range(15):
                nursery.start_soon(client)
    await until(lambda: counts(house) == (0, 0))
    admission = house.daemon.service.gate.admission
    assert (admission.full, admission.timeouts) == (0, 0)
    assert (await house.ask("hello", max_tokens=2)).status == 200


async def test_the_limits_change_for_those_who_wait(start: Start, http_path: str) -> None:
    house = await limited(start, http_path, 1, 3)
    calls = await occupy(house)
    waiting = [await house.call("endless", stream=True) for _ in range(2)]
    await until(lambda: counts(house) == (1, 2))
    house.daemon.service.gate.admission.configure(3, 0, 60)
    for call in waiting:
        await call.read("content")
    assert counts(house) == (3, 0)
    for call in (*calls, *waiting):
        await call.close()


async def test_a_stop_lets_the_queue_go_on_and_then_sends_it_away(
    start: Start, http_path: str
) -> None:
    limits = {"max_concurrent_requests": 1, "queue_size": 5}
    server = {"http_path": http_path, "shutdown_grace": 2.0}
    house = await start(*PACE, replies=[ENDLESS], limits=limits, server=server)
    [first] = await occupy(house)
    second = await house.call("endless", stream=True)
    await until(lambda: counts(house) == (1, 1))
    third = await house.call("endless", stream=True)
    await until(lambda: counts(house) == (1, 2))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(house.stop)
        await until(lambda: house.daemon.service.draining)
        await first.close()
        await second.read("content")  # its turn has come during the stop
        for call in (second, third):
            await call.read()
        assert (second.status, second.error["code"]) == (200, "shutting_down")
        assert (third.status, third.error["code"]) == (503, "shutting_down")
    assert counts(house) == (0, 0)
    assert len(house.tally.adds) == 2
