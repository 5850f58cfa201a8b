"""Direct writes on the fast path: who may write when, in which order it arrives, how it ends."""

from __future__ import annotations

import select
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

from smgd.web.connection import Connection
from smgd.web.exchange import Exchange, Routes, SinkClosed
from smgd.web.h1 import FastExchange
from tests.support import PATIENCE
from tests.web.servers import Serving, read_all, read_answer, read_until, request, running_server

PIECE = b"0123456789abcdef" * 4096


@pytest.fixture
def serving() -> Serving:
    return partial(running_server, http_path="fast")


async def no_fallback(scope: object, receive: object, send: object) -> None:
    raise AssertionError("only hot routes are asked for here")


class Stage:
    """A handler that hands its exchange to the test, step by step."""

    def __init__(self) -> None:
        self.exchange: Exchange
        self.script: Callable[[Exchange], object] | None = None
        self.begun = trio.Event()
        self.go_on = trio.Event()
        self.ended = trio.Event()
        self.cancelled = False

    async def __call__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.cancelled = True
        try:
            await exchange.read_body(100)
            await exchange.start(200, [])
            self.begun.set()
            await self.go_on.wait()
            await exchange.end(b"|last")
            self.cancelled = False
        finally:
            self.ended.set()

    def again(self) -> None:
        self.begun, self.go_on, self.ended = trio.Event(), trio.Event(), trio.Event()


@asynccontextmanager
async def staged(
    serving: Serving, receive_buffer: int | None = None, **limits: float
) -> AsyncIterator[tuple[Stage, trio.SocketStream]]:
    stage = Stage()
    app = Routes({("POST", "/"): stage}, no_fallback)
    async with serving(app, **limits) as server, await server.connect(receive_buffer) as client:
        await client.send_all(request("/"))
        await stage.begun.wait()
        yield stage, client


async def test_head_and_first_piece_leave_in_one_write(serving: Serving) -> None:
    async with staged(serving) as (stage, client):
        assert stage.exchange.can_write_nowait
        assert stage.exchange.write_nowait(b"first") == b""
        data = await client.receive_some()
        assert data.startswith(b"HTTP/1.1 200 OK\r\n")
        assert data.endswith(b"\r\n\r\n5\r\nfirst\r\n")
        stage.go_on.set()
        assert await read_until(client, b"0\r\n\r\n") == b"5\r\n|last\r\n0\r\n\r\n"


async def test_after_the_end_nothing_is_written(serving: Serving) -> None:
    async with staged(serving) as (stage, client):
        old = stage.exchange
        stage.go_on.set()
        assert (await read_answer(client)).body == b"|last"
        assert not old.can_write_nowait
        stage.again()
        await client.send_all(request("/"))
        await stage.begun.wait()
        with pytest.raises(SinkClosed, match="over"):
            old.write_nowait(b"late")
        stage.exchange.write_nowait(b"new")
        stage.go_on.set()
        assert (await read_answer(client)).body == b"new|last"


async def test_before_the_start_nothing_is_written(serving: Serving) -> None:
    async def handler(exchange: Exchange) -> None:
        assert not exchange.can_write_nowait
        with pytest.raises(SinkClosed):
            exchange.write_nowait(b"early")
        await exchange.respond(200, [], b"fine")

    app = Routes({("POST", "/"): handler}, no_fallback)
    async with serving(app) as server, await server.connect() as client:
        await client.send_all(request("/"))
        assert (await read_answer(client)).body == b"fine"


def fill(exchange: Exchange) -> int:
    """Write until the socket is full; return how many pieces were given."""
    count = 1
    while not exchange.write_nowait(PIECE):
        count += 1
    return count


async def test_what_a_full_socket_does_not_take_goes_first_later(serving: Serving) -> None:
    async with staged(serving, receive_buffer=4096) as (stage, client):
        exchange = stage.exchange
        count = fill(exchange)
        assert not exchange.can_write_nowait
        assert exchange.write_nowait(b"more").endswith(b"4\r\nmore\r\n")
        async with trio.open_nursery() as nursery:

            async def flush() -> None:
                await exchange.write(b"")
                assert exchange.can_write_nowait
                assert exchange.write_nowait(b"direct") == b""
                stage.go_on.set()

            nursery.start_soon(flush)
            answer = await read_until(client, b"0\r\n\r\n")
        body = b"".join(answer.partition(b"\r\n\r\n")[2].split(b"\r\n")[1::2])
        assert body == PIECE * count + b"more" + b"direct" + b"|last"


async def test_direct_writes_during_a_write_of_the_task_keep_their_place(serving: Serving) -> None:
    async with staged(serving, receive_buffer=4096) as (stage, client):
        exchange = stage.exchange
        count = fill(exchange)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(exchange.write, b"task")
            await trio.testing.wait_all_tasks_blocked()
            assert not exchange.can_write_nowait
            exchange.write_nowait(b"meanwhile")
            answer = await read_until(client, b"meanwhile\r\n")
        body = b"".join(answer.partition(b"\r\n\r\n")[2].split(b"\r\n")[1::2])
        assert body == PIECE * count + b"task" + b"meanwhile"


async def test_a_stalled_reader_is_cut_once_the_task_writes(serving: Serving) -> None:
    async with staged(serving, receive_buffer=4096, write_timeout=0.3) as (stage, _):
        fill(stage.exchange)
        stage.go_on.set()
        with trio.fail_after(PATIENCE):
            await stage.ended.wait()
        assert stage.cancelled
        with pytest.raises(SinkClosed):
            stage.exchange.write_nowait(b"x")


def wait_for_reset(exchange: Exchange) -> None:
    """Wait for what the kernel may yet be about to do, and let no task see it meanwhile."""
    assert isinstance(exchange, FastExchange)
    poll = select.poll()
    poll.register(exchange._h1.link.raw, 0)  # for errors
    assert poll.poll(PATIENCE * 1000)


async def reset_unnoticed(stage: Stage, client: trio.SocketStream) -> None:
    """Reset the connection, of which nothing but a write can tell its task."""
    assert isinstance(stage.exchange, FastExchange)
    connection = stage.exchange._h1.link
    assert isinstance(connection, Connection)
    connection._shared.hangups.remove(connection.raw.fileno(), connection)
    stage.exchange.write_nowait(b"unread")  # unread input makes the client's close a reset
    await trio.lowlevel.wait_readable(client.socket)
    client.socket.close()
    wait_for_reset(stage.exchange)


async def test_a_reset_found_by_a_direct_write_cancels_the_handler(serving: Serving) -> None:
    async with staged(serving) as (stage, client):
        await reset_unnoticed(stage, client)
        with pytest.raises(SinkClosed, match="gone"):
            stage.exchange.write_nowait(b"x")
        with trio.fail_after(PATIENCE):
            await stage.ended.wait()
        assert stage.cancelled


async def test_a_reset_found_by_the_last_write_cancels_the_handler(serving: Serving) -> None:
    async with staged(serving) as (stage, client):
        await reset_unnoticed(stage, client)
        stage.go_on.set()
        with trio.fail_after(PATIENCE):
            await stage.ended.wait()
        assert stage.cancelled
        assert not stage.exchange.finished


async def test_a_write_that_was_cut_off_ends_the_connection(serving: Serving) -> None:
    cut_off = trio.Event()

    async def handler(exchange: Exchange) -> None:
        await exchange.start(200, [])
        fill(exchange)
        with trio.move_on_after(0.02):
            await exchange.write(b"")
        cut_off.set()
        await exchange.end(b"never to be seen")

    app = Routes({("POST", "/"): handler}, no_fallback)
    async with serving(app) as server, await server.connect(4096) as client:
        await client.send_all(request("/"))
        await cut_off.wait()
        assert b"never" not in await read_until(client, b"never")


async def test_http_1_0_is_written_by_the_task_only(serving: Serving) -> None:
    stage = Stage()
    app = Routes({("POST", "/"): stage}, no_fallback)
    async with serving(app) as server, await server.connect() as client:
        await client.send_all(b"POST / HTTP/1.0\r\n\r\n")
        await stage.begun.wait()
        assert not stage.exchange.can_write_nowait
        stage.go_on.set()
        assert (await read_all(client)).endswith(b"\r\n\r\n|last")


@pytest.mark.parametrize("value", [b"a\r\nb: c", b"a\nb", b"a\0b"])
async def test_headers_cannot_break_out(serving: Serving, value: bytes) -> None:
    async def handler(exchange: Exchange) -> None:
        with pytest.raises(ValueError, match="line break"):
            await exchange.start(200, [(b"x", value)])
        await exchange.respond(200, [], b"fine")

    app = Routes({("POST", "/"): handler}, no_fallback)
    async with serving(app) as server, await server.connect() as client:
        await client.send_all(request("/"))
        assert (await read_answer(client)).body == b"fine"


@pytest.mark.parametrize("sent", [b"toolong", b"abc"])
async def test_a_length_that_is_not_kept_ends_the_connection(serving: Serving, sent: bytes) -> None:
    async def handler(exchange: Exchange) -> None:
        await exchange.start(200, [(b"content-length", b"5")])
        await exchange.end(sent)

    app = Routes({("POST", "/"): handler}, no_fallback)
    async with serving(app) as server, await server.connect() as client:
        await client.send_all(request("/") * 2)
        data = await read_all(client)
        assert data.count(b"HTTP/1.1") == 1 or sent == b"toolong"
        assert b"toolong" not in data
