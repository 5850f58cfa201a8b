"""Many at a time, and clients and engines of every odd kind beside each other."""

from __future__ import annotations

import fcntl
import gc
import termios
from array import array
from typing import Any

import pytest
import trio

from smgd.daemon import GC_THRESHOLDS, _main
from smgd.dispatch import Generation, Sequence
from tests.flows.client import CHAT, Call, chat_body, post
from tests.flows.conftest import Build, Start
from tests.flows.house import HTTP_PATH, until
from tests.support import PATIENCE

ENDLESS = {"contains": "endless", "token_ids": [300] * 100_000}


async def test_two_hundred_streams_at_once_are_as_each_alone(start: Start) -> None:
    house = await start("--max-num-seqs", "64")
    seeds = range(8)
    options = {"max_tokens": 30, "stream": True}
    alone = {seed: await house.ask("the sea", seed=seed, **options) for seed in seeds}
    calls: list[tuple[int, Call]] = []

    async def one(number: int) -> None:
        seed = number % len(seeds)
        calls.append((seed, await house.ask("the sea", seed=seed, **options)))

    async with trio.open_nursery() as nursery:
        for number in range(200):
            nursery.start_soon(one, number)
    assert len(calls) == 200
    for seed, call in calls:
        assert call.done
        assert call.text() == alone[seed].text()
    await house.barrier()
    assert house.tally.aborts == []
    requests = await house.requests()
    assert len(requests) == 200 + len(seeds) + 1
    assert len({line["request_id"] for line in requests}) == len(requests)


async def test_the_engines_reader_writes_to_clients_by_itself(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream's task wakes for the first token and for the end, on the fast path."""
    wakes = 0
    wait = Generation.wait

    async def counted(generation: Generation) -> list[Sequence]:
        nonlocal wakes
        news = await wait(generation)
        wakes += 1
        return news

    monkeypatch.setattr(Generation, "wait", counted)
    house = await start("--itl-ms", "5")
    call = await house.ask("the sea", stream=True, max_tokens=60, ignore_eos=True)
    assert (call.done, len(call.frames) > 10) == (True, True)
    assert (wakes <= 3) is (HTTP_PATH == "fast"), wakes


async def test_what_lives_for_ever_is_out_of_the_collectors_sight(build: Build) -> None:
    """A full collection stops every stream: what the start has made is not looked at again."""
    house, thresholds, frozen = build(), gc.get_threshold(), gc.get_freeze_count()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_main, house.daemon)
            await until(lambda: gc.get_threshold() == GC_THRESHOLDS)
            assert gc.get_freeze_count() > frozen + 10_000
            await house.daemon.drain()
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


async def test_a_client_of_http_1_0_gets_its_stream_to_the_end_of_the_connection(
    start: Start,
) -> None:
    house = await start()
    stream = await house.dial()
    body = chat_body("the sea", stream=True, max_tokens=9)
    await stream.send_all(post(body).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    data = b""
    with trio.fail_after(PATIENCE):
        while more := await stream.receive_some():
            data += more
    head, _, events = data.partition(b"\r\n\r\n")
    assert b" 200 " in head.splitlines()[0]
    assert b"chunked" not in head.lower()
    assert events.startswith(b"data: {")
    assert events.endswith(b"data: [DONE]\n\n")


async def test_ids_beyond_the_tokenizer_do_not_end_a_stream(start: Start) -> None:
    """Models have more ids than their tokenizers: the rest has no text."""
    ids = [300, 4095, 5000, 4294967295, 301]
    house = await start(replies=[{"contains": "odd", "token_ids": ids}])
    plain = await house.ask("odd", stream=True)
    assert (plain.done, plain.finishes()) == (True, ["stop"])
    answer = await house.ask("odd")
    assert answer.json["usage"]["completion_tokens"] == len(ids) + 1
    assert answer.json["choices"][0]["message"]["content"] == plain.text()


async def test_an_error_reaches_a_stalled_reader_behind_its_tokens(start: Start) -> None:
    house = await start(replies=[ENDLESS], server={"write_timeout": 20.0})
    options = {"include_usage": True, "continuous_usage_stats": True}
    call = await house.call(
        "endless", receive_buffer=16384, n=8, stream=True, stream_options=options
    )
    await call.read('"index":7')
    sizes = [0, 1]
    with trio.fail_after(PATIENCE):
        while sizes[-1] != sizes[-2]:  # until the kernel takes no more for this client
            await trio.sleep(0.1)
            sizes.append(unread(call))
    await house.engines[0].kill()
    await until(lambda: house.active == 0)
    with trio.fail_after(PATIENCE):
        await call.read()
    assert call.done
    assert call.error["code"] == "engine_lost"
    texts = [call.text(index) for index in range(8)]
    assert all(text and set(text) == set(texts[0]) for text in texts)


def unread(call: Call) -> int:
    """Return how many bytes wait for a client in its own socket."""
    count = array("i", [0])
    fcntl.ioctl(call.stream.socket.fileno(), termios.FIONREAD, count)
    return count[0]


async def test_one_connection_takes_what_comes(start: Start) -> None:
    """Errors, streams and whole answers follow each other on a connection that is kept."""
    house = await start("--itl-ms", "1")
    stream = await house.dial()
    expected: list[tuple[int, str, dict[str, Any]]] = [
        (400, "x", {"max_tokens": 0}),
        (200, "the sea", {"max_tokens": 5, "stream": True}),
        (404, "x", {"model": "nobody"}),
        (200, "the sea", {"max_tokens": 5}),
    ]
    for status, content, fields in expected * 3:
        await stream.send_all(post(chat_body(content, **fields)))
        call = await Call(stream).read()
        assert (call.status, call.complete) == (status, True)
    labels = {"method": "POST", "path": CHAT}
    assert await house.metric("smg_http_requests_total", **labels) == 12
