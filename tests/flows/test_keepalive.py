"""Comments that keep a silent stream open, and how long a stream's head is held back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

from smgd.web.exchange import AsgiExchange
from smgd.web.h1 import FastExchange
from tests.flows.client import COMMENT, chat_body, post
from tests.flows.conftest import Start
from tests.flows.house import HTTP_PATH, until
from tests.support import PATIENCE

SERVER = {"sse_keepalive": 0.1}


async def test_comments_come_before_and_between_tokens(start: Start) -> None:
    slow = {"contains": "slow", "text": "one two three", "delay_ms": 350}
    house = await start("--itl-ms", "350", server=SERVER, replies=[slow])
    call = await house.ask("slow", stream=True)
    assert (call.status, call.done, call.text()) == (200, True, "one two three")
    assert call.headers["content-type"] == "text/event-stream; charset=utf-8"
    kinds = [block == COMMENT for block in call.blocks]
    first = kinds.index(False)
    assert first >= 2, "comments before the first token"
    assert any(kinds[first:]), "and between tokens"


async def test_no_comment_interrupts_a_lively_stream(start: Start) -> None:
    house = await start("--itl-ms", "5", server={"sse_keepalive": 2.0})
    call = await house.ask("the sea", stream=True, max_tokens=60, ignore_eos=True)
    assert call.done
    assert COMMENT not in call.blocks


async def test_the_head_does_not_wait_for_the_first_token_for_ever(start: Start) -> None:
    never = {"contains": "never", "text": "?", "delay_ms": 600_000}
    house = await start(server=SERVER, replies=[never])
    call = await house.call("never", stream=True)
    with trio.fail_after(PATIENCE):
        await call.read(COMMENT)
    assert call.status == 200
    assert set(call.blocks) == {COMMENT}
    await call.close()
    await house.quiet()
    await house.barrier()
    assert house.tally.aborts == house.tally.adds[:1]


async def test_a_whole_answer_has_no_comments(start: Start) -> None:
    slow = {"contains": "slow", "text": "one two", "delay_ms": 250}
    house = await start(server=SERVER, replies=[slow])
    call = await house.ask("slow")
    assert call.json["choices"][0]["message"]["content"] == "one two"


async def test_an_early_failure_keeps_its_status_and_a_late_one_is_an_event(start: Start) -> None:
    replies = [
        {"contains": "early", "finish": "error"},
        {"contains": "late", "finish": "error", "delay_ms": 250},
    ]
    house = await start(server=SERVER, replies=replies)
    assert (await house.ask("early", stream=True)).status == 500
    late = await house.ask("late", stream=True)
    assert (late.status, late.done, late.error["code"]) == (200, True, "engine_error")
    assert late.blocks[0] == COMMENT


async def test_the_end_of_a_stream_is_one_write(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last text, the finish, the usage and `[DONE]` leave together.

    On the fast path the last chunk of HTTP goes with them; Hypercorn sends its own afterwards. Two
    writes may still reach a client as one piece, so those of the task are looked at, too.
    """
    writes: list[tuple[str, bytes]] = []
    for kind in (FastExchange, AsgiExchange):
        for name in ("write", "end"):
            monkeypatch.setattr(kind, name, noting(getattr(kind, name), writes))
    house = await start("--itl-ms", "20")
    stream = await house.dial()
    options = {"include_usage": True}
    await stream.send_all(post(chat_body("x", stream=True, max_tokens=4, stream_options=options)))
    pieces: list[bytes] = []
    with trio.fail_after(PATIENCE):
        while not pieces or b"[DONE]" not in pieces[-1]:
            pieces.append(bytes(await stream.receive_some()))
    name, data = writes[-1]
    assert (name, data.endswith(b"data: [DONE]\n\n")) == ("end", True)
    assert b'"finish_reason":"length"' in data
    assert b'"finish_reason":"length"' in pieces[-1]
    assert b'"usage":{"prompt_tokens"' in pieces[-1]
    if HTTP_PATH == "fast":
        assert b"0\r\n\r\n" in pieces[-1]
    await until(lambda: house.answering == 0)
    assert [name for name, _ in writes].count("end") == 1


def noting(
    method: Callable[..., Awaitable[None]], writes: list[tuple[str, bytes]]
) -> Callable[..., Awaitable[None]]:
    """Return the method of an exchange, which notes in `writes` what it is given."""

    async def noted(exchange: Any, data: bytes = b"") -> None:
        writes.append((method.__name__, data))
        await method(exchange, data)

    return noted
