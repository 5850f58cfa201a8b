"""Exchanges as handlers see them, over real connections, on both HTTP paths."""

from __future__ import annotations

import socket
import struct
from collections.abc import Awaitable, Callable

import pytest
import structlog
import trio
from trio.testing import MockClock

from smgd.errors import ApiError
from smgd.web.exchange import AsgiExchange, Exchange, Routes, SinkClosed, plain_path
from tests.support import PATIENCE
from tests.web.servers import (
    Serving,
    Turns,
    closed,
    elapse,
    read_all,
    read_answer,
    read_until,
    request,
)

LIMIT = 100_000


async def no_fallback(scope: object, receive: object, send: object) -> None:
    raise AssertionError("only hot routes are asked for here")


def only(handler: Callable[[Exchange], Awaitable[None]]) -> Routes:
    return Routes({("POST", "/"): handler, ("HEAD", "/"): handler}, no_fallback)


async def echo(exchange: Exchange) -> None:
    try:
        body = await exchange.read_body(LIMIT)
    except ApiError as error:
        headers = [(b"x-code", error.code.encode())]
        await exchange.respond(error.status, headers, error.message.encode())
    else:
        await exchange.respond(200, [], b"got %d" % len(body))


class Watched:
    """Runs a handler and knows how it ended: the shape of every handler's clean-up."""

    def __init__(self, handler: Callable[[Exchange], Awaitable[None]]) -> None:
        self.handler = handler
        self.began = trio.Event()
        self.ended = trio.Event()
        self.how = ""

    async def __call__(self, exchange: Exchange) -> None:
        self.began.set()
        self.how = "cancelled"
        try:
            await self.handler(exchange)
            self.how = "returned"
        finally:
            self.ended.set()


async def leave(client: trio.SocketStream, how: str) -> None:
    if how == "reset":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await client.aclose()


async def test_what_a_handler_sees_of_a_request(serving: Serving) -> None:
    seen: list[object] = []

    async def handler(exchange: Exchange) -> None:
        seen.extend([exchange.method, exchange.path, exchange.http_version])
        seen.extend([exchange.client, exchange.header(b"x-one"), exchange.header(b"x-two")])
        seen.extend([await exchange.read_body(10), exchange.started, exchange.ended])
        await exchange.respond(200, [], b"")
        seen.extend([exchange.started, exchange.ended])

    app = Routes({("POST", "/a b"): handler}, no_fallback)
    async with serving(app) as server, await server.connect() as client:
        await client.send_all(
            request("/a%20b?c=%20", "X-One:  first ", "X-ONE: second", body=b"hi")
        )
        assert (await read_answer(client)).status == 200
    assert seen == [
        *("POST", "/a b", "1.1", "127.0.0.1", b"first", None, b"hi", False, False),
        *(True, True),
    ]


@pytest.mark.parametrize("size", [0, 1, 65536, LIMIT])
async def test_a_body_is_read_whole(serving: Serving, size: int) -> None:
    async with serving(only(echo)) as server, await server.connect() as client:
        for _ in range(2):
            await client.send_all(request("/", body=b"x" * size))
            assert (await read_answer(client)).body == b"got %d" % size


async def test_a_chunked_body_is_read_whole(serving: Serving) -> None:
    async with serving(only(echo)) as server, await server.connect() as client:
        for _ in range(2):
            await client.send_all(request("/", "Transfer-Encoding: chunked"))
            for size in (1, 70_000, 17):
                await client.send_all(b"%x;ext=1\r\n%b\r\n" % (size, b"x" * size))
            await client.send_all(b"0\r\nX-Trailer: 1\r\n\r\n")
            assert (await read_answer(client)).body == b"got 70018"


def too_much(framing: str) -> list[bytes]:
    """Return the parts of a request with a body of LIMIT + 1 bytes or of no end."""
    match framing:
        case "length":
            return [request("/", body=b"x" * (LIMIT + 1))]
        case "length told":
            return [request("/", f"Content-Length: {10**15}"), b"x" * 10**6]
        case _:
            chunk = b"10000\r\n%b\r\n" % (b"x" * 65536)
            return [request("/", "Transfer-Encoding: chunked"), *[chunk] * 30]


@pytest.mark.parametrize("framing", ["length", "length told", "chunked"])
async def test_a_body_that_is_too_large_is_refused_and_the_connection_ends(
    serving: Serving, framing: str
) -> None:
    async with serving(only(echo)) as server, await server.connect() as client:
        for part in too_much(framing):
            await client.send_all(part)
        answer = await read_answer(client)
        assert (answer.status, answer.headers["x-code"]) == (413, "request_too_large")
        assert answer.body == b"Request body is larger than 100000 bytes"
        assert answer.headers["connection"] == "close"
        with trio.fail_after(PATIENCE):
            assert await closed(client)


async def send_forever(client: trio.SocketStream) -> None:
    while True:
        await client.send_all(b"x" * 65536)


async def test_a_client_that_goes_on_sending_a_refused_body_is_cut(
    mock_clock: MockClock, serving: Serving
) -> None:
    app = only(echo)
    async with serving(app, linger_timeout=0.3) as server, await server.connect() as client:
        await client.send_all(request("/", f"Content-Length: {10**15}"))
        assert (await read_answer(client)).status == 413
        await server.limited(0.3)
        for _ in range(29):
            await client.send_all(b"x" * 65536)
            await elapse(mock_clock, 0.01)
        assert len(server.connections) == 1
        await elapse(mock_clock, 0.1)
        with pytest.raises(trio.BrokenResourceError):
            await send_forever(client)


async def test_a_body_that_is_too_slow_is_refused(serving: Serving) -> None:
    app = only(echo)
    async with serving(app, body_timeout=0.3) as server, await server.connect() as client:
        await client.send_all(request("/", "Content-Length: 10") + b"xx")
        answer = await read_answer(client)
        assert (answer.status, answer.headers["x-code"]) == (408, "request_timeout")
        assert answer.headers["connection"] == "close"
        assert await closed(client)


async def test_the_head_leaves_with_the_first_of_the_body(serving: Serving) -> None:
    begun, go_on = trio.Event(), trio.Event()

    async def handler(exchange: Exchange) -> None:
        await exchange.start(200, [(b"x-a", b"b")])
        assert exchange.started
        begun.set()
        await go_on.wait()
        await exchange.write(b"first")
        await exchange.end(b"last")

    async with serving(only(handler)) as server, await server.connect() as client:
        await client.send_all(request("/"))
        await begun.wait()
        with trio.move_on_after(0.03) as early:
            await client.receive_some()
        assert early.cancelled_caught
        go_on.set()
        data = await client.receive_some()
        assert data.startswith(b"HTTP/1.1 200")
        assert b"\r\n\r\n5\r\nfirst\r\n" in data


async def test_an_answer_may_be_empty(serving: Serving) -> None:
    async def handler(exchange: Exchange) -> None:
        await exchange.start(200, [])
        await exchange.write(b"")
        await exchange.end()

    async with serving(only(handler)) as server, await server.connect() as client:
        for _ in range(2):
            await client.send_all(request("/"))
            assert (await read_answer(client)).body == b""


@pytest.mark.parametrize("how", ["closed", "reset"])
async def test_leaving_while_the_answer_streams_cancels_the_handler(
    serving: Serving, how: str
) -> None:
    async def stream(exchange: Exchange) -> None:
        await exchange.read_body(10)
        await exchange.start(200, [])
        while True:
            await exchange.write(b"tick")
            await trio.sleep(0.01)

    handler = Watched(stream)
    async with serving(only(handler)) as server:
        client = await server.connect()
        await client.send_all(request("/"))
        await read_until(client, b"tick")
        await leave(client, how)
        with trio.fail_after(PATIENCE):
            await handler.ended.wait()
    assert handler.how == "cancelled"


@pytest.mark.parametrize("how", ["closed", "reset"])
@pytest.mark.parametrize("body", [b"", b"hi"])
@pytest.mark.parametrize("started", [False, True])
async def test_leaving_while_nothing_is_sent_cancels_the_handler(
    serving: Serving, how: str, body: bytes, started: bool
) -> None:
    async def wait(exchange: Exchange) -> None:
        await exchange.read_body(10)
        if started:
            await exchange.start(200, [])
        await trio.sleep_forever()

    handler = Watched(wait)
    async with serving(only(handler)) as server:
        client = await server.connect()
        await client.send_all(request("/", body=body))
        await handler.began.wait()
        await leave(client, how)
        with trio.fail_after(PATIENCE):
            await handler.ended.wait()
    assert handler.how == "cancelled"


@pytest.mark.parametrize("how", ["closed", "reset"])
@pytest.mark.parametrize("reads", [False, True])
async def test_leaving_in_the_middle_of_the_body_cancels_the_handler(
    serving: Serving, how: str, reads: bool
) -> None:
    async def read(exchange: Exchange) -> None:
        if reads:
            await exchange.read_body(LIMIT)
        await trio.sleep_forever()

    handler = Watched(read)
    async with serving(only(handler)) as server:
        client = await server.connect()
        await client.send_all(request("/", "Content-Length: 10") + b"half")
        await handler.began.wait()
        await leave(client, how)
        with trio.fail_after(PATIENCE):
            await handler.ended.wait()
    assert handler.how == "cancelled"


async def test_a_handler_that_ends_as_the_client_leaves_has_ended(serving: Serving) -> None:
    handler = Watched(echo)
    async with serving(only(handler)) as server, await server.connect() as client:
        await client.send_all(request("/", "Connection: close"))
        assert b"got 0" in await read_all(client)
        await handler.ended.wait()
    assert handler.how == "returned"


async def test_a_failing_handler_is_a_500_and_its_neighbours_live(serving: Serving) -> None:
    async def fail(exchange: Exchange) -> None:
        await exchange.read_body(10)
        raise KeyError("surprise")

    async with serving(only(fail)) as server, await server.connect() as client:
        with structlog.testing.capture_logs() as lines:
            for _ in range(2):
                await client.send_all(request("/"))
                answer = await read_answer(client)
                assert (answer.status, answer.body) == (500, b"Internal error\n")
    assert [line["event"] for line in lines] == ["a handler failed"] * 2


async def test_a_handler_that_fails_late_cuts_the_answer_short(serving: Serving) -> None:
    async def fail(exchange: Exchange) -> None:
        await exchange.start(200, [])
        await exchange.write(b"half")
        raise KeyError("surprise")

    async with serving(only(fail)) as server, await server.connect() as client:
        await client.send_all(request("/"))
        data = await read_all(client)
    assert data.endswith(b"4\r\nhalf\r\n")


async def test_a_handler_that_forgets_to_end_cuts_the_answer_short(serving: Serving) -> None:
    async def forget(exchange: Exchange) -> None:
        await exchange.start(200, [])
        await exchange.write(b"half")

    async with serving(only(forget)) as server, await server.connect() as client:
        with structlog.testing.capture_logs() as lines:
            await client.send_all(request("/"))
            assert (await read_all(client)).endswith(b"4\r\nhalf\r\n")
    assert [line["event"] for line in lines] == ["a handler left its response unfinished"]


async def test_a_handler_that_only_writes_lets_others_run_each_time(serving: Serving) -> None:
    """Also while the client takes all of it, so that no write waits for the socket."""
    turns = Turns()

    async def handler(exchange: Exchange) -> None:
        await exchange.start(200, [])
        for _ in range(50):
            turns.note()
            await exchange.write(b"x")
        await exchange.end()

    async with (
        serving(only(handler)) as server,
        await server.connect() as client,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(turns.run)
        await client.send_all(request("/"))
        assert (await read_answer(client)).body == b"x" * 50
        nursery.cancel_scope.cancel()
    assert turns.most <= 2


async def test_a_handler_that_only_writes_leaves_room_for_others(serving: Serving) -> None:
    async def flood(exchange: Exchange) -> None:
        await exchange.start(200, [])
        while True:
            await exchange.write(b"x")

    handler = Watched(flood)
    app = Routes({("POST", "/flood"): handler, ("POST", "/"): echo}, no_fallback)
    async with serving(app) as server, await server.connect() as client:
        greedy = await server.connect()
        await greedy.send_all(request("/flood"))
        await handler.began.wait()
        await client.send_all(request("/"))
        assert (await read_answer(client)).body == b"got 0"
        await greedy.aclose()
        with trio.fail_after(PATIENCE):
            await handler.ended.wait()
    assert handler.how == "cancelled"


async def test_a_deadline_in_the_handler_is_no_disconnect(serving: Serving) -> None:
    async def handler(exchange: Exchange) -> None:
        with trio.move_on_after(0.01):
            await trio.sleep_forever()
        await exchange.respond(200, [], b"late")

    async with serving(only(handler)) as server, await server.connect() as client:
        for _ in range(2):
            await client.send_all(request("/"))
            assert (await read_answer(client)).body == b"late"


async def test_over_asgi_nothing_is_written_at_once() -> None:
    async def receive() -> dict[str, object]:
        raise AssertionError("nothing is received")

    async def send(message: dict[str, object]) -> None:
        raise AssertionError("nothing is sent")

    scope = {"method": "GET", "path": "/", "query_string": b"", "http_version": "2"}
    exchange = AsgiExchange(
        {**scope, "client": None, "headers": []}, receive, send, 1, trio.CancelScope()
    )
    await exchange.start(200, [])
    assert not exchange.can_write_nowait
    with pytest.raises(SinkClosed, match="task only"):
        exchange.write_nowait(b"x")
    assert exchange.client == ""


@pytest.mark.parametrize("last", ["http.response.start", "http.response.body"])
async def test_a_write_to_a_client_that_is_gone_does_not_raise(last: str) -> None:
    sent: list[object] = []

    async def receive() -> dict[str, object]:
        await trio.sleep_forever()
        raise AssertionError("nothing is received")

    async def send(message: dict[str, object]) -> None:
        sent.append(message["type"])
        if message["type"] == last:
            raise trio.BrokenResourceError("the client is gone")

    scope = {"method": "GET", "path": "/", "query_string": b"", "http_version": "2"}
    with trio.CancelScope() as running:
        exchange = AsgiExchange({**scope, "client": None, "headers": []}, receive, send, 1, running)
        await exchange.respond(200, [], b"x")
    assert running.cancelled_caught
    assert not exchange.finished
    assert sent[-1] == last


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/a", "/a"),
        ("http://h:1/a/b", "/a/b"),
        ("http://h", "/"),
        ("*", "*"),
        ("//a://b", "//a://b"),
    ],
)
def test_plain_path(target: str, path: str) -> None:
    assert plain_path(target) == path
