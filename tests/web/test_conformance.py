"""HTTP as clients and attackers speak it, on both HTTP paths.

The stock path is h11's reading of HTTP, the fast path llhttp's; where they differ, both within what
RFC 9112 leaves open, the row says so.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import msgspec
import pytest
import structlog
import trio
import trustme
from h2.settings import SettingCodes
from quart import request as incoming
from quart_trio import QuartTrio
from trio.testing import MockClock, wait_all_tasks_blocked

from smgd.errors import ApiError
from smgd.web.exchange import Exchange, Routes
from smgd.web.protocols import StockH2, StockH11
from smgd.web.tls import server_context
from tests.support import PATIENCE
from tests.web.servers import (
    NEVER,
    Serving,
    closed,
    elapse,
    elapse_until,
    read_all,
    read_answer,
    read_until,
    request,
)

HOST = b"Host: test\r\n"
CLOSE = b"Connection: close\r\n\r\n"
SMUGGLED = b"POST /smuggled HTTP/1.1\r\nHost: test\r\nContent-Length: 0\r\n\r\n"


class Site:
    """A small site with hot and Quart routes; `seen` is every request that reached a handler."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, bytes]] = []
        self.running = trio.Event()
        self.cancelled = 0
        hot = {
            ("POST", "/echo"): self.echo,
            ("HEAD", "/echo"): self.echo,
            ("POST", "/smuggled"): self.echo,
            ("POST", "/refuse"): self.refuse,
            ("POST", "/stream"): self.stream,
            ("POST", "/wait"): self.wait,
            ("POST", "/nothing"): self.nothing,
        }
        self.app = Routes(hot, self.quart())

    async def echo(self, exchange: Exchange) -> None:
        try:
            body = await exchange.read_body(1_000_000)
        except ApiError as error:
            await exchange.respond(error.status, [], error.message.encode())
            return
        self.seen.append((exchange.method, exchange.path, body))
        await exchange.respond(200, [(b"content-type", b"text/plain")], b"echo:" + body)

    async def refuse(self, exchange: Exchange) -> None:
        self.seen.append((exchange.method, exchange.path, b""))
        await exchange.respond(401, [], b"no")

    async def stream(self, exchange: Exchange) -> None:
        await exchange.read_body(1000)
        await exchange.start(200, [])
        for number in range(3):
            await exchange.write(b"piece%d" % number)
            await trio.lowlevel.checkpoint()
        await exchange.end(b"end")

    async def wait(self, exchange: Exchange) -> None:
        self.running.set()
        try:
            await exchange.read_body(1000)
            await trio.sleep_forever()
        finally:
            self.cancelled += 1

    async def nothing(self, exchange: Exchange) -> None:
        await exchange.read_body(1000)
        await exchange.start(204, [])
        await exchange.end()

    def quart(self) -> QuartTrio:
        app = QuartTrio("test")

        @app.route("/quart", methods=["GET", "POST", "OPTIONS"])
        async def quart() -> bytes:
            body = await incoming.get_data(as_text=False)
            assert isinstance(body, bytes)
            self.seen.append((incoming.method, incoming.path, body))
            return b"quart:" + body

        return app


# ------------------------------------------------------------------------------------ keep-alive


async def test_routes_of_both_kinds_share_a_connection(serving: Serving) -> None:
    site = Site()
    async with serving(site.app) as server, await server.connect() as client:
        for body in (b"", b"one"):
            await client.send_all(request("/echo", body=body))
            assert (await read_answer(client)).body == b"echo:" + body
            await client.send_all(request("/quart", body=body))
            assert (await read_answer(client)).body == b"quart:" + body
            await client.send_all(request("/stream", body=body))
            assert (await read_answer(client)).body == b"piece0piece1piece2end"
            await client.send_all(request("/unknown", body=body))
            assert (await read_answer(client)).status == 404


async def test_pipelined_requests_are_answered_in_order(serving: Serving) -> None:
    async with serving(Site().app) as server, await server.connect() as client:
        paths = ["/echo", "/quart", "/stream"] * 5
        await client.send_all(b"".join(request(path, body=b"x") for path in paths))
        for _ in range(5):
            assert (await read_answer(client)).body == b"echo:x"
            assert (await read_answer(client)).body == b"quart:x"
            assert (await read_answer(client)).body == b"piece0piece1piece2end"


async def test_pipelined_requests_may_be_cut_anywhere(serving: Serving) -> None:
    data = request("/echo", body=b"first") + request("/quart", body=b"second")
    async with serving(Site().app) as server, await server.connect() as client:
        for cut in range(1, len(data), 7):
            await client.send_all(data[:cut])
            await trio.sleep(0.001)
            await client.send_all(data[cut:])
            assert (await read_answer(client)).body == b"echo:first"
            assert (await read_answer(client)).body == b"quart:second"


@pytest.mark.parametrize("between", [b"\r\n", b"\n", b"\r\n" * 100])
@pytest.mark.parametrize("path", ["/echo", "/quart"])
async def test_line_breaks_before_a_request_are_ignored(
    serving: Serving, path: str, between: bytes
) -> None:
    """As some send them behind a body (RFC 9112, 2.2)."""
    asked = request(path, body=b"x")
    async with serving(Site().app) as server, await server.connect() as client:
        await client.send_all((between + asked) * 5)
        for _ in range(5):
            assert (await read_answer(client)).body.endswith(b":x")
        await client.send_all(between[:1])
        await trio.sleep(0.01)
        await client.send_all(between[1:])
        await trio.sleep(0.01)
        await client.send_all(asked)
        assert (await read_answer(client)).body.endswith(b":x")


async def test_line_breaks_of_many_requests_are_not_added_up(serving: Serving) -> None:
    app = Site().app
    async with serving(app, max_header_bytes=300) as server, await server.connect() as client:
        for _ in range(10):
            await client.send_all(b"\r\n" * 100 + request("/echo", body=b"x"))
            assert (await read_answer(client)).body == b"echo:x"
        await client.send_all(b"\r\n" * 151)
        assert (await read_answer(client)).status in (400, 431)


async def test_requests_byte_by_byte(serving: Serving) -> None:
    async with serving(Site().app) as server, await server.connect() as client:
        for byte in request("/echo", "X: y", body=b"body"):
            await client.send_all(bytes([byte]))
        assert (await read_answer(client)).body == b"echo:body"


@pytest.mark.parametrize("how", ["closed", "reset"])
async def test_a_disconnect_behind_a_pipelined_request_cancels(serving: Serving, how: str) -> None:
    site = Site()
    async with serving(site.app) as server:
        client = await server.connect()
        await client.send_all(request("/wait", body=b"x") + request("/echo", body=b"y"))
        await site.running.wait()
        if how == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await client.aclose()
        with trio.fail_after(PATIENCE):
            while not site.cancelled:  # noqa: ASYNC110  (the handler's end has no event)
                await trio.sleep(0.01)
    assert site.seen == []


async def test_pipelined_requests_and_half_close(serving: Serving) -> None:
    app = Site().app
    async with serving(app, half_close_grace=NEVER) as server, await server.connect() as client:
        await client.send_all(request("/echo", body=b"1") + request("/quart", body=b"2"))
        await client.send_eof()
        assert (await read_answer(client)).body == b"echo:1"
        assert (await read_answer(client)).body == b"quart:2"
        assert await closed(client)


@pytest.mark.parametrize(
    "behind", [b"\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01", b"x" * 9999]
)
@pytest.mark.parametrize("path", ["/echo", "/quart", "/stream"])
async def test_what_comes_behind_the_last_request_is_ignored(
    serving: Serving, path: str, behind: bytes
) -> None:
    site = Site()
    last = request(path, "Connection: close", body=b"x")
    old = last.replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"Connection: close\r\n", b"")
    async with serving(site.app) as server:
        for data in (last, old):
            for pause in (False, True):
                async with await server.connect() as client:
                    await client.send_all(data if pause else data + behind)
                    if pause:
                        await client.send_all(behind)
                    assert statuses(await read_all(client)) == [200]
    assert len(site.seen) == (0 if path == "/stream" else 4)


async def test_half_a_request_and_half_close_is_the_end(serving: Serving) -> None:
    site = Site()
    async with serving(site.app) as server, await server.connect() as client:
        await client.send_all(request("/echo", "Content-Length: 10") + b"half")
        await client.send_eof()
        with trio.fail_after(PATIENCE):
            assert await read_all(client) == b""
    assert site.seen == []


# ---------------------------------------------------------------------------- kinds of requests


@pytest.mark.parametrize("path", ["/echo", "/quart"])
async def test_head(serving: Serving, path: str) -> None:
    async with serving(Site().app) as server, await server.connect() as client:
        await client.send_all(request(path, method="HEAD") + request("/echo", body=b"next"))
        answer = await read_answer(client, head_only=True)
        assert answer.status in (200, 405)
        assert int(answer.headers["content-length"]) > 0
        assert (await read_answer(client)).body == b"echo:next"


async def test_an_answer_without_a_body(serving: Serving) -> None:
    async with serving(Site().app) as server, await server.connect() as client:
        for _ in range(2):
            await client.send_all(request("/nothing"))
            answer = await read_answer(client)
            assert answer.status == 204
            assert "transfer-encoding" not in answer.headers


@pytest.mark.parametrize("path", ["/echo", "/quart"])
async def test_expect_continue(serving: Serving, path: str) -> None:
    async with serving(Site().app) as server, await server.connect() as client:
        await client.send_all(request(path, "Content-Length: 4", "Expect: 100-continue"))
        assert (await read_until(client, b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        await client.send_all(b"body")
        assert (await read_answer(client)).body.endswith(b":body")


async def answer_first(scope: Any, receive: Any, send: Any) -> None:
    """Answer, and only then ask for the body, as an application with a reader of its own may."""
    await send({"type": "http.response.start", "status": 404, "headers": []})
    await send({"type": "http.response.body", "body": b"nothing ", "more_body": True})
    with trio.move_on_after(0.05):
        await receive()
    await send({"type": "http.response.body", "body": b"here"})


async def test_a_body_is_not_invited_behind_its_answer(serving: Serving) -> None:
    head = request("/unknown", "Content-Length: 100", "Expect: 100-continue")
    async with serving(Routes({}, answer_first)) as server:
        client = await server.connect()
        await client.send_all(head)
        data = await read_all(client)
        await client.aclose()
    assert statuses(data) in ([404], [100, 404])
    assert data.endswith((b"8\r\nnothing \r\n4\r\nhere\r\n0\r\n\r\n",))


async def test_quart_invites_no_body_behind_its_answer(serving: Serving) -> None:
    head = request("/unknown", "Content-Length: 100", "Expect: 100-continue")
    async with serving(Site().app) as server:
        for _ in range(20):
            async with await server.connect() as client:
                await client.send_all(head)
                assert statuses(await read_all(client)) in ([404], [100, 404])


async def test_a_body_that_turns_bad_behind_its_answer_does_not_cut_it(
    mock_clock: MockClock, serving: Serving
) -> None:
    head = request("/unknown", "Transfer-Encoding: chunked")
    done = trio.Event()
    with structlog.testing.capture_logs() as lines:
        async with (
            serving(Site().app, linger_timeout=0.3) as server,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(elapse_until, mock_clock, done.is_set)
            for turns in [0, 3, 10, 30] * 5:
                async with await server.connect() as client:
                    await client.send_all(head)
                    for _ in range(turns):
                        await trio.lowlevel.checkpoint()
                    await client.send_all(b"zz\r\n")
                    assert statuses(await read_all(client)) in ([404], [400])
            done.set()
    assert [line["event"] for line in lines if line["log_level"] == "error"] == []


async def test_what_comes_behind_the_last_request_is_not_kept(serving: Serving) -> None:
    site = Site()
    async with (
        serving(site.app, half_close_grace=NEVER, shutdown_grace=0.1) as server,
        await server.connect() as client,
    ):
        await client.send_all(request("/wait", "Connection: close", body=b"x"))
        await site.running.wait()
        with trio.move_on_after(0.2):  # the fast path leaves it to the client's kernel
            for _ in range(100):
                await client.send_all(b"x" * 65536)
        [connection] = server.connections
        protocol = connection.protocol.protocol
        kept = protocol.connection.trailing_data[0] if isinstance(protocol, StockH11) else b""
        assert len(kept) < 65536


def statuses(data: bytes) -> list[int]:
    """Return the statuses of all answers in what came, 1xx among them."""
    return [int(part[:3]) for part in data.split(b"HTTP/1.1 ")[1:]]


async def test_expect_continue_with_the_body_at_once(serving: Serving) -> None:
    async with serving(Site().app) as server, await server.connect() as client:
        await client.send_all(request("/echo", "Expect: 100-continue", body=b"body"))
        data = await read_until(client, b"echo:body")
        assert data.count(b"HTTP/1.1 200") == 1


@pytest.mark.parametrize("path", ["/echo", "/quart"])
async def test_chunked_bodies(serving: Serving, path: str) -> None:
    async with serving(Site().app) as server, await server.connect() as client:
        for _ in range(2):
            head = request(path, "Transfer-Encoding: chunked")
            await client.send_all(head + b"3\r\nabc\r\n5;x=y\r\ndefgh\r\n0\r\nX-T: 1\r\n\r\n")
            assert (await read_answer(client)).body.endswith(b":abcdefgh")


@pytest.mark.parametrize("path", ["/echo", "/quart"])
async def test_a_body_that_turns_bad_is_refused(serving: Serving, path: str) -> None:
    site = Site()
    async with serving(site.app) as server, await server.connect() as client:
        await client.send_all(request(path, "Transfer-Encoding: chunked") + b"3\r\nabc\r\n")
        await trio.sleep(0.01)
        await client.send_all(b"nonsense\r\n")
        data = await read_all(client)
        assert data.startswith(b"HTTP/1.1 400")
        assert data.count(b"HTTP/1.1") == 1
    assert site.seen == []


async def test_trailers_are_not_headers(serving: Serving) -> None:
    headers: list[bytes | None] = []

    async def handler(exchange: Exchange) -> None:
        await exchange.read_body(10)
        headers.append(exchange.header(b"authorization"))
        await exchange.respond(200, [], b"")

    async with serving(Routes({("POST", "/"): handler}, Site().app.fallback)) as server:
        client = await server.connect()
        head = request("/", "Transfer-Encoding: chunked")
        await client.send_all(head + b"0\r\nAuthorization: let me in\r\n\r\n")
        assert (await read_answer(client)).status == 200
        await client.aclose()
    assert headers == [None]


@pytest.mark.parametrize("path", ["/echo", "/stream", "/quart"])
async def test_http_1_0(serving: Serving, path: str) -> None:
    async with serving(Site().app) as server, await server.connect() as client:
        await client.send_all(f"POST {path} HTTP/1.0\r\nContent-Length: 2\r\n\r\nhi".encode())
        data = await read_all(client)
        head, _, body = data.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert b"chunked" not in head.lower()
        assert body in (b"echo:hi", b"quart:hi", b"piece0piece1piece2end")


async def test_http_1_0_with_keep_alive(serving: Serving, http_path: str) -> None:
    head = b"POST /echo HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nhi"
    async with serving(Site().app) as server, await server.connect() as client:
        for _ in range(2 if http_path == "fast" else 1):
            await client.send_all(head)
            answer = await read_answer(client)
            assert answer.body == b"echo:hi"
        # h11 keeps no HTTP/1.0 connection open, whatever the client asks for.
        said = answer.headers.get("connection", "").lower()
        assert said == ("keep-alive" if http_path == "fast" else "close")


async def test_http_1_0_streams_end_the_connection(serving: Serving) -> None:
    async with serving(Site().app) as server, await server.connect() as client:
        await client.send_all(b"POST /stream HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert (await read_all(client)).endswith(b"\r\n\r\npiece0piece1piece2end")


@pytest.mark.parametrize("offer", ["websocket", "h2c", "nonsense"])
@pytest.mark.parametrize("path", ["/echo", "/quart"])
async def test_upgrades_are_ignored(serving: Serving, offer: str, path: str) -> None:
    # Java's HttpClient offers h2c with every request, those with a body included.
    headers = ["Connection: Upgrade, HTTP2-Settings", f"Upgrade: {offer}", "HTTP2-Settings: AAMA"]
    async with serving(Site().app) as server, await server.connect() as client:
        await client.send_all(request(path, *headers, body=b"body"))
        assert (await read_answer(client)).body.endswith(b":body")
        chunked = request(path, *headers, "Transfer-Encoding: chunked")
        await client.send_all(chunked + b"4\r\nmore\r\n0\r\n\r\n")
        assert (await read_answer(client)).body.endswith(b":more")


async def test_a_websocket_is_not_begun(serving: Serving) -> None:
    headers = [
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Version: 13",
    ]
    async with serving(Site().app) as server, await server.connect() as client:
        offer = request("/quart", *headers, method="GET")
        await client.send_all(offer + offer + request("/echo", body=b"x"))
        for body in (b"quart:", b"quart:", b"echo:x"):
            answer = await read_answer(client)
            assert (answer.status, answer.body) == (200, body)


@pytest.mark.parametrize("target", ["?", "?a=b", "quart", "*", "ftp://x/quart", "//"])
async def test_a_target_without_a_path_is_refused(serving: Serving, target: str) -> None:
    site = Site()
    with structlog.testing.capture_logs() as lines:
        async with serving(site.app) as server, await server.connect() as client:
            await client.send_all(f"GET {target} HTTP/1.1\r\n".encode() + HOST + CLOSE)
            expected = 404 if target == "//" else 400
            assert statuses(await read_all(client)) == [expected]
    assert site.seen == []
    assert [line for line in lines if line["log_level"] == "error"] == []


@pytest.mark.parametrize("scheme", ["http", "HTTPS"])
@pytest.mark.parametrize("path", ["/echo", "/quart"])
async def test_absolute_urls(serving: Serving, scheme: str, path: str) -> None:
    site = Site()
    async with serving(site.app) as server, await server.connect() as client:
        await client.send_all(request(f"{scheme}://example.com:80{path}?q=1", body=b"x"))
        assert (await read_answer(client)).status == 200
    assert site.seen == [("POST", path, b"x")]


@pytest.mark.parametrize("path", ["/echo", "/quart"])
async def test_a_path_in_the_query_of_an_absolute_url_is_none(serving: Serving, path: str) -> None:
    site = Site()
    async with serving(site.app) as server, await server.connect() as client:
        await client.send_all(request(f"http://example.com?a={path}", body=b"x"))
        assert (await read_answer(client)).status == 404
    assert site.seen == []


async def test_a_long_url_is_read(serving: Serving) -> None:
    async with serving(Site().app) as server, await server.connect() as client:
        await client.send_all(request("/echo?" + "x" * 60_000, body=b"x"))
        assert (await read_answer(client)).body == b"echo:x"


async def test_large_headers_are_read(serving: Serving) -> None:
    headers = [f"X-{number}: {'y' * 1000}" for number in range(60)]
    async with serving(Site().app) as server, await server.connect() as client:
        await client.send_all(request("/echo", *headers, body=b"x"))
        assert (await read_answer(client)).body == b"echo:x"


TOO_LARGE = {
    "long URL": request("/" + "x" * 200_000),
    "long header": request("/echo", "X: " + "y" * 200_000),
    "many headers": request("/echo", *["X: y"] * 50_000),
    "endless URL": b"POST /" + b"x" * 200_000,
    "endless header": b"POST / HTTP/1.1\r\nHost: " + b"x" * 200_000,
    "endless blank lines": b"\r\n" * 100_000,
}


@pytest.mark.parametrize("name", TOO_LARGE)
async def test_heads_that_are_too_large_are_refused(serving: Serving, name: str) -> None:
    async with serving(Site().app) as server, await server.connect() as client:
        await client.send_all(TOO_LARGE[name])
        answer = await read_answer(client)
        assert answer.status in (400, 414, 431)
        assert answer.headers["connection"].lower() == "close"
        assert await closed(client)


ENDLESS = {
    "trailer": b"0\r\nX: ",
    "trailer's name": b"0\r\n",
    "extension": b"1;x=",
    "second trailer": b"0\r\nA: b\r\nX: ",
}


@pytest.mark.parametrize("path", ["/echo", "/quart"])
@pytest.mark.parametrize("name", ENDLESS)
async def test_what_is_endless_beside_a_body_is_refused(
    serving: Serving, path: str, name: str
) -> None:
    site = Site()
    head = request(path, "Transfer-Encoding: chunked")
    async with (
        serving(site.app, max_header_bytes=4096) as server,
        await server.connect() as client,
    ):
        await client.send_all(head + b"1\r\n{\r\n" + ENDLESS[name] + b"a" * 200_000)
        answer = await read_answer(client)
        assert answer.status in (400, 431)
        assert answer.headers["connection"].lower() == "close"
        assert await closed(client)
    assert site.seen == []


async def test_an_answer_before_the_body_is_read(serving: Serving) -> None:
    async with serving(Site().app) as server, await server.connect() as client:
        await client.send_all(request("/refuse", f"Content-Length: {10**7}") + b"x" * 500_000)
        answer = await read_answer(client)
        assert (answer.status, answer.body) == (401, b"no")
        with trio.fail_after(PATIENCE):
            assert await closed(client)


async def test_an_answer_before_a_short_body_is_read_keeps_the_connection(serving: Serving) -> None:
    async with serving(Site().app) as server, await server.connect() as client:
        await client.send_all(request("/refuse", body=b"short") + request("/echo", body=b"next"))
        assert (await read_answer(client)).status == 401
        data = await read_until(client, b"echo:next")
        assert data == b"" or data.endswith(b"echo:next")  # closing is allowed, mixing up is not


# ------------------------------------------------------------------------------------- smuggling


def framed(*headers: bytes, body: bytes = b"") -> bytes:
    head = b"".join(header + b"\r\n" for header in headers)
    return b"POST /echo HTTP/1.1\r\n" + HOST + head + b"\r\n" + body


ATTACKS = {
    "length and coding": framed(
        b"Content-Length: 6", b"Transfer-Encoding: chunked", body=b"0\r\n\r\nX"
    ),
    "coding and length": framed(
        b"Transfer-Encoding: chunked", b"Content-Length: 6", body=b"0\r\n\r\nX"
    ),
    "two lengths": framed(b"Content-Length: 5", b"Content-Length: 6", body=b"hello!"),
    "list of lengths": framed(b"Content-Length: 5, 6", body=b"hello!"),
    "negative length": framed(b"Content-Length: -1", body=b"hello"),
    "plus length": framed(b"Content-Length: +5", body=b"hello"),
    "hex length": framed(b"Content-Length: 0x5", body=b"hello"),
    "blank in length": framed(b"Content-Length: 5 0", body=b"hello"),
    "empty length": framed(b"Content-Length:", body=b"hello"),
    "underscore length": framed(b"Content-Length: 1_0", body=b"hellohello"),
    "huge length": framed(b"Content-Length: 184467440737095516160", body=b"hello"),
    "unknown coding": framed(b"Transfer-Encoding: xchunked", body=b"0\r\n\r\n"),
    "coding after chunked": framed(b"Transfer-Encoding: chunked, identity", body=b"0\r\n\r\n"),
    "coding before chunked": framed(b"Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n"),
    "chunked twice": framed(
        b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"
    ),
    "vertical tab in coding": framed(b"Transfer-Encoding: \x0bchunked", body=b"0\r\n\r\n"),
    "blank before colon": framed(b"Content-Length : 5", body=b"hello"),
    "blank before coding's colon": framed(b"Transfer-Encoding : chunked", body=b"0\r\n\r\n"),
    "blank before name": b"POST /echo HTTP/1.1\r\n X: y\r\n" + HOST + b"\r\n",
    "no name": framed(b": x"),
    "no colon": framed(b"Header"),
    "nul in value": framed(b"X: a\0b"),
    "nul in name": framed(b"X\0: a"),
    "carriage return in value": framed(b"X: a\rContent-Length: 5", body=b"hello"),
    "bad chunk size": framed(b"Transfer-Encoding: chunked", body=b"zz\r\nhello\r\n0\r\n\r\n"),
    "negative chunk size": framed(b"Transfer-Encoding: chunked", body=b"-5\r\nhello\r\n0\r\n\r\n"),
    "hex prefix": framed(b"Transfer-Encoding: chunked", body=b"0x5\r\nhello\r\n0\r\n\r\n"),
    "endless chunk size": framed(b"Transfer-Encoding: chunked", body=b"f" * 30 + b"\r\nhello"),
    "no end of chunk": framed(b"Transfer-Encoding: chunked", body=b"5\r\nhelloXX0\r\n\r\n"),
    "HTTP/1.0 and coding": (
        b"POST /echo HTTP/1.0\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    ),
    "no host": b"POST /echo HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
    "two hosts": framed(b"Host: other"),
    "HTTP/1.2": b"POST /echo HTTP/1.2\r\n" + HOST + b"\r\n",
    "HTTP/2.0": b"POST /echo HTTP/2.0\r\n" + HOST + b"\r\n",
    "HTTP/0.9": b"GET /echo\r\n\r\n",
    "no method": b" /echo HTTP/1.1\r\n" + HOST + b"\r\n",
    "odd method": b"P\0ST /echo HTTP/1.1\r\n" + HOST + b"\r\n",
    "no target": b"POST HTTP/1.1\r\n" + HOST + b"\r\n",
    "not ASCII": "POST /echö HTTP/1.1\r\n".encode() + HOST + b"\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 60,
    "connect": b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\n\r\n",
}

# Allowed to be read, though not read by everybody: with one meaning only, so nothing is smuggled.
TOLERATED = {
    "bare line feeds": b"POST /echo HTTP/1.1\nHost: test\nContent-Length: 5\n\nhello",
    "equal lengths": framed(b"Content-Length: 5", b"Content-Length: 5", body=b"hello"),
    "folded header": framed(b"X: a\r\n b", b"Content-Length: 5", body=b"hello"),
    "folded coding": framed(b"Transfer-Encoding:\r\n chunked", body=b"5\r\nhello\r\n0\r\n\r\n"),
    "blank lines first": b"\r\n\r\n" + framed(b"Content-Length: 5", body=b"hello"),
    "blanks around a length": framed(b"Content-Length:  5 \t", body=b"hello"),
}


@pytest.mark.parametrize("name", ATTACKS)
async def test_what_could_be_read_in_two_ways_is_refused(
    serving: Serving, http_path: str, name: str
) -> None:
    site = Site()
    async with serving(site.app) as server, await server.connect() as client:
        await client.send_all(ATTACKS[name] + SMUGGLED)
        data = await read_all(client)
        statuses = {int(part[:3]) for part in data.split(b"HTTP/1.1 ")[1:]}
        assert statuses <= {400, 404, 405, 413, 501, 505}
        assert statuses or data == b""
    assert site.seen == []


@pytest.mark.parametrize("name", TOLERATED)
async def test_what_is_tolerated_has_one_meaning(serving: Serving, name: str) -> None:
    site = Site()
    async with serving(site.app) as server, await server.connect() as client:
        await client.send_all(TOLERATED[name] + request("/echo", "Connection: close", body=b"next"))
        data = await read_all(client)
        if data.startswith(b"HTTP/1.1 200"):
            assert [body for _, _, body in site.seen] == [b"hello", b"next"]
        else:
            assert data.startswith(b"HTTP/1.1 400")
            assert site.seen == []


# ------------------------------------------------------------------------- after something ended


async def test_a_connection_is_used_again_after_a_handler_gave_up_waiting(
    serving: Serving,
) -> None:
    async def impatient(exchange: Exchange) -> None:
        await exchange.read_body(10)
        await exchange.start(200, [])
        await exchange.write(b"some")
        with trio.move_on_after(0.02):
            await trio.sleep_forever()
        await exchange.end(b" and an error")

    app = Routes({("POST", "/"): impatient}, Site().app.fallback)
    async with serving(app) as server, await server.connect() as client:
        for _ in range(3):
            await client.send_all(request("/"))
            assert (await read_answer(client)).body == b"some and an error"


# ----------------------------------------------------------------------------------- TLS, HTTP/2


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def tls(authority: trustme.CA, tmp_path: Path) -> ssl.SSLContext | None:
    """Return the context of a server with a certificate of `authority` for 127.0.0.1."""
    certificate = authority.issue_cert("127.0.0.1")
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    for blob in certificate.cert_chain_pems:
        blob.write_to_path(chain, append=True)
    certificate.private_key_pem.write_to_path(key)
    return server_context(str(chain), str(key))


def secured(
    authority: trustme.CA, stream: trio.SocketStream, *alpn: str
) -> trio.SSLStream[trio.SocketStream]:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    context.set_alpn_protocols(list(alpn))
    return trio.SSLStream(stream, context, server_hostname="127.0.0.1", https_compatible=True)


async def test_tls_with_http_1_1(
    serving: Serving, tls: ssl.SSLContext, authority: trustme.CA
) -> None:
    async with (
        serving(Site().app, tls=tls) as server,
        secured(authority, await server.connect(), "http/1.1") as client,
    ):
        for path in ("/echo", "/quart"):
            await client.send_all(request(path, body=b"x"))
            assert (await read_answer(client)).body.endswith(b":x")
        await client.send_all(request("/stream", "Connection: close"))
        assert (await read_answer(client)).body == b"piece0piece1piece2end"
        assert await closed(client)


async def test_tls_is_not_written_directly(
    serving: Serving, tls: ssl.SSLContext, authority: trustme.CA
) -> None:
    async def handler(exchange: Exchange) -> None:
        await exchange.start(200, [])
        await exchange.write(b"task")
        await exchange.end(b"" if not exchange.can_write_nowait else b" direct")

    app = Routes({("POST", "/"): handler}, Site().app.fallback)
    async with (
        serving(app, tls=tls) as server,
        secured(authority, await server.connect()) as client,
    ):
        await client.send_all(request("/"))
        assert (await read_answer(client)).body == b"task"


async def test_a_client_that_says_nothing_under_tls_is_cut(
    serving: Serving, tls: ssl.SSLContext
) -> None:
    async with (
        serving(Site().app, tls=tls, header_timeout=0.3) as server,
        await server.connect() as client,
    ):
        with trio.fail_after(PATIENCE):
            assert await closed(client)


class Http2:
    """An HTTP/2 client, just enough of one."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        config = h2.config.H2Configuration(validate_outbound_headers=False)
        self.connection = h2.connection.H2Connection(config)
        self.bodies: dict[int, bytes] = {}
        self.statuses: dict[int, int] = {}
        self.ended: set[int] = set()
        self.resets: dict[int, int] = {}
        self.pings = 0
        self.acknowledge = True

    async def __aenter__(self) -> Http2:
        self.connection.initiate_connection()
        await self.flush()
        return self

    async def __aexit__(self, *_: object) -> None:
        await trio.aclose_forcefully(self.stream)

    async def flush(self) -> None:
        await self.stream.send_all(self.connection.data_to_send())

    async def ask(self, path: str, body: bytes = b"", *, end: bool = True) -> int:
        headers = {":method": "POST", ":path": path, ":scheme": "http", ":authority": "x"}
        number = await self.begin(headers)
        self.connection.send_data(number, body, end_stream=end)
        await self.flush()
        return number

    async def begin(self, headers: dict[str, str]) -> int:
        number = self.connection.get_next_available_stream_id()
        self.connection.send_headers(number, list(headers.items()))
        await self.flush()
        return number

    async def until(self, done: Callable[[], bool]) -> None:
        while not done():
            data = await self.stream.receive_some()
            if not data:
                return
            for event in self.connection.receive_data(bytes(data)):
                self.hear(event)
            await self.flush()

    def hear(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.ResponseReceived(stream_id=number, headers=headers):
                self.statuses[number] = int(dict(headers)[b":status"])
            case h2.events.DataReceived(stream_id=number, data=data):
                self.bodies[number] = self.bodies.get(number, b"") + data
                if self.acknowledge:
                    size = event.flow_controlled_length
                    self.connection.acknowledge_received_data(size, number)
            case h2.events.StreamEnded(stream_id=number):
                self.ended.add(number)
            case h2.events.StreamReset(stream_id=number, error_code=code):
                self.resets[number] = code
            case h2.events.PingAckReceived():
                self.pings += 1

    async def ping(self) -> None:
        """Wait until all that was sent is known to the server."""
        before = self.pings
        self.connection.ping(b"12345678")
        await self.flush()
        await self.until(lambda: self.pings > before)

    async def without_window(self) -> None:
        """Take nothing of what is sent from now on."""
        self.connection.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
        await self.flush()
        await self.until(lambda: self.connection.local_settings.initial_window_size == 0)

    async def with_window(self) -> None:
        """Take what is sent, in streams that are asked for from now on."""
        self.connection.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 65535})
        await self.flush()
        await self.until(lambda: self.connection.local_settings.initial_window_size == 65535)


async def test_http2_over_tls(serving: Serving, tls: ssl.SSLContext, authority: trustme.CA) -> None:
    async with serving(Site().app, tls=tls) as server:
        stream = secured(authority, await server.connect(), "h2")
        async with Http2(stream) as client:
            assert stream.selected_alpn_protocol() == "h2"
            one, two = await client.ask("/echo", b"1"), await client.ask("/quart", b"2")
            three = await client.ask("/stream")
            await client.until(lambda: client.ended == {one, two, three})
            assert client.bodies == {
                one: b"echo:1",
                two: b"quart:2",
                three: b"piece0piece1piece2end",
            }


async def test_http2_with_prior_knowledge(serving: Serving) -> None:
    async with serving(Site().app) as server, Http2(await server.connect()) as client:
        number = await client.ask("/echo", b"hi")
        await client.until(lambda: number in client.ended)
        assert client.bodies == {number: b"echo:hi"}


async def test_http2_preface_in_pieces(serving: Serving) -> None:
    async with serving(Site().app) as server:
        for cut in range(1, 24):
            stream = await server.connect()
            client = Http2(stream)
            client.connection.initiate_connection()
            data = client.connection.data_to_send()
            await stream.send_all(data[:cut])
            await trio.sleep(0.005)
            await stream.send_all(data[cut:])
            number = await client.ask("/echo", b"hi")
            await client.until(lambda c=client, n=number: n in c.ended)  # type: ignore[misc]
            assert client.bodies == {number: b"echo:hi"}
            await stream.aclose()


async def test_a_method_that_begins_like_the_preface(serving: Serving) -> None:
    async with serving(Site().app) as server, await server.connect() as client:
        data = request("/echo", body=b"x")
        await client.send_all(data[:1])
        await trio.sleep(0.01)
        await client.send_all(data[1:])
        assert (await read_answer(client)).body == b"echo:x"


async def test_http2_large_bodies(serving: Serving) -> None:
    async with serving(Site().app) as server, Http2(await server.connect()) as client:
        number = await client.ask("/echo", b"x" * 16000, end=False)
        for _ in range(20):
            await client.until(lambda: client.connection.local_flow_control_window(number) > 16000)
            client.connection.send_data(number, b"x" * 16000)
            await client.flush()
        client.connection.end_stream(number)
        await client.flush()
        await client.until(lambda: number in client.ended)
        assert client.bodies == {number: b"echo:" + b"x" * 16000 * 21}


async def test_http2_a_reset_stream_is_cancelled_and_the_others_live(serving: Serving) -> None:
    site = Site()
    async with serving(site.app) as server, Http2(await server.connect()) as client:
        number = await client.ask("/wait", b"x")
        await site.running.wait()
        client.connection.reset_stream(number)
        other = await client.ask("/echo", b"y")
        await client.until(lambda: other in client.ended)
        with trio.fail_after(PATIENCE):
            while not site.cancelled:  # noqa: ASYNC110  (the handler's end has no event)
                await trio.sleep(0.01)


@pytest.mark.parametrize("how", ["closed", "reset"])
async def test_http2_leaving_cancels(serving: Serving, how: str) -> None:
    site = Site()
    async with serving(site.app) as server:
        raw = await server.connect()
        async with Http2(raw) as client:
            await client.ask("/wait", b"x")
            await site.running.wait()
            if how == "reset":
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with trio.fail_after(PATIENCE):
            while not site.cancelled:  # noqa: ASYNC110  (the handler's end has no event)
                await trio.sleep(0.01)


async def test_http2_body_that_comes_after_the_answer_does_no_harm(serving: Serving) -> None:
    async with serving(Site().app) as server, Http2(await server.connect()) as client:
        number = await client.ask("/refuse", b"x", end=False)
        await client.until(lambda: number in client.ended)
        assert client.statuses[number] == 401
        client.connection.send_data(number, b"late" * 100)
        await client.flush()
        other = await client.ask("/echo", b"y")
        await client.until(lambda: other in client.ended)
        assert client.bodies[other] == b"echo:y"


async def test_http2_a_client_that_opens_no_window_is_cancelled(
    mock_clock: MockClock, serving: Serving
) -> None:
    ended = trio.Event()

    async def flood(exchange: Exchange) -> None:
        try:
            await exchange.read_body(10)
            await exchange.start(200, [])
            while True:
                await exchange.write(b"x" * 65536)
        finally:
            ended.set()

    app = Routes({("POST", "/"): flood}, Site().app.fallback)
    async with (
        serving(app, write_timeout=0.3) as server,
        Http2(await server.connect()) as client,
    ):
        client.acknowledge = False
        await client.ask("/", b"x")
        await client.until(lambda: len(client.bodies.get(1, b"")) >= 65535)
        await elapse(mock_clock, 0.29)
        assert not ended.is_set()
        await elapse_until(mock_clock, ended.is_set)


class Ends:
    """Handlers that end in every way, and how their answers ended."""

    def __init__(self) -> None:
        self.finished: list[bool] = []

    async def respond(self, exchange: Exchange) -> None:
        await self._watch(exchange, exchange.respond(200, [], b"small"))

    async def big(self, exchange: Exchange) -> None:
        await self._watch(exchange, exchange.respond(200, [], b"x" * 20_000_000))

    async def stream(self, exchange: Exchange) -> None:
        await self._watch(exchange, self._stream(exchange))

    async def _stream(self, exchange: Exchange) -> None:
        await exchange.start(200, [])
        while True:
            await exchange.write(b"x" * 1000)

    async def _watch(self, exchange: Exchange, answering: Awaitable[None]) -> None:
        try:
            await exchange.read_body(100)
            await answering
        finally:
            self.finished.append(exchange.finished)

    async def give_up(self, exchange: Exchange) -> None:
        await exchange.read_body(100)
        await exchange.start(200, [])
        await exchange.write(b"some")

    async def fail(self, exchange: Exchange) -> None:
        await self.give_up(exchange)
        raise ValueError("broken")

    @property
    def app(self) -> Routes:
        ways = (self.respond, self.big, self.stream, self.give_up, self.fail)
        hot = {("POST", f"/{way.__name__}"): way for way in ways}
        return Routes({**hot, ("POST", "/echo"): Site().echo}, Site().app.fallback)


@pytest.mark.parametrize("way", ["respond", "big", "stream", "give_up", "fail", "quart"])
async def test_http2_a_cut_stream_is_reset_and_leaves_nothing(
    mock_clock: MockClock, serving: Serving, way: str
) -> None:
    ends = Ends()
    async with (
        serving(ends.app, write_timeout=0.3) as server,
        Http2(await server.connect()) as client,
        trio.open_nursery() as nursery,
    ):
        if way not in ("give_up", "fail"):
            await client.without_window()
        cut = [await client.ask(f"/{way}", b"x") for _ in range(3)]
        nursery.start_soon(elapse_until, mock_clock, lambda: len(client.resets) == 3)
        await client.until(lambda: len(client.resets) == 3)
        assert client.resets == dict.fromkeys(cut, h2.errors.ErrorCodes.CANCEL)
        assert client.ended == set()
        assert not any(ends.finished)
        await client.with_window()
        other = await client.ask("/echo", b"y")
        await client.until(lambda: other in client.ended)
        assert client.bodies[other] == b"echo:y"
        [connection] = server.connections
        protocol = connection.protocol.protocol
        assert isinstance(protocol, StockH2)
        assert protocol.stream_buffers == {}
        assert protocol.streams == {}
        assert protocol.connection.open_inbound_streams == 0


async def test_http2_who_resets_during_the_last_write_has_not_got_it(serving: Serving) -> None:
    ends = Ends()
    async with serving(ends.app) as server, Http2(await server.connect()) as client:
        await client.without_window()
        number = await client.ask("/respond", b"x")
        await client.until(lambda: number in client.statuses)
        client.connection.reset_stream(number)
        await client.with_window()
        other = await client.ask("/respond", b"y")
        await client.until(lambda: other in client.ended)
    assert ends.finished == [False, True]


@pytest.mark.parametrize("how", ["closed", "reset", "stalled"])
async def test_who_leaves_during_the_last_write_has_not_got_it(
    mock_clock: MockClock, serving: Serving, how: str
) -> None:
    ends = Ends()
    async with (
        serving(ends.app, write_timeout=0.3) as server,
        await server.connect(4096) as client,
    ):
        await client.send_all(request("/big", body=b"x"))
        await read_until(client, b"\r\n\r\n")
        if how == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if how != "stalled":
            await client.aclose()
        await elapse_until(mock_clock, lambda: ends.finished)
        async with await server.connect() as other:
            await other.send_all(request("/respond", body=b"x"))
            assert (await read_answer(other)).body == b"small"
    assert ends.finished == [False, True]


@pytest.mark.parametrize(
    "head",
    [
        {":path": "/ech\N{LATIN SMALL LETTER O WITH DIAERESIS}"},
        {":path": "?"},
        {":path": "?a=b"},
        {":path": "*"},
        {":path": "http://x/quart"},
        {":method": "connect"},
        {":method": "CONNECT", ":protocol": "websocket", "sec-websocket-version": "13"},
    ],
)
async def test_http2_head_that_cannot_be_read_resets_the_stream_only(
    serving: Serving, head: dict[str, str]
) -> None:
    site, refused = Site(), list[tuple[int, str]]()
    app = msgspec.structs.replace(
        site.app, refused=lambda _, status, reason: refused.append((status, reason))
    )
    usual = {":method": "GET", ":path": "/quart", ":scheme": "http", ":authority": "x"}
    async with serving(app) as server, Http2(await server.connect()) as client:
        running = await client.ask("/wait", b"x")
        await site.running.wait()
        bad = await client.begin(usual | head)
        other = await client.ask("/echo", b"y")
        await client.until(lambda: other in client.ended)
        assert client.bodies == {other: b"echo:y"}
        assert client.resets.keys() == {bad}
        assert running not in client.ended
        assert client.connection.remote_settings.enable_connect_protocol == 0
    assert refused == [(400, "Malformed request")]
    assert site.seen == [("POST", "/echo", b"y")]


async def test_http2_connect_without_a_path_resets_the_stream_only(serving: Serving) -> None:
    async with serving(Site().app) as server, Http2(await server.connect()) as client:
        bad = await client.begin({":method": "CONNECT", ":authority": "x"})
        other = await client.ask("/echo", b"y")
        await client.until(lambda: other in client.ended)
        assert client.bodies == {other: b"echo:y"}
        assert client.resets.keys() == {bad}


async def test_http2_stream_that_is_reset_takes_no_frames_of_others_along(
    serving: Serving,
) -> None:
    """What waits to be sent is all streams', and headers are compressed by those before them."""

    async def big(exchange: Exchange) -> None:
        await exchange.read_body(10)
        await exchange.respond(200, [(b"x-big", b"1")], b"x" * 8_000_000)

    async def small(exchange: Exchange) -> None:
        await exchange.read_body(10)
        await exchange.start(200, [(b"x-small", b"of all that are small")])
        await exchange.write(b"small")
        await exchange.end()

    app = Routes({("POST", "/big"): big, ("POST", "/small"): small}, Site().app.fallback)
    async with serving(app, write_timeout=60) as server, await server.connect(4096) as raw:
        client = Http2(raw)
        client.connection.initiate_connection()
        client.connection.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 2**30})
        client.connection.increment_flow_control_window(2**30)
        large = await client.ask("/big", b"x")
        await wait_all_tasks_blocked(0.02)  # the socket is full
        left = [await client.ask("/small", b"x") for _ in range(3)]
        await wait_all_tasks_blocked(0.02)  # their heads wait
        for number in left:
            client.connection.reset_stream(number)
        await client.flush()
        await wait_all_tasks_blocked(0.02)
        last = await client.ask("/small", b"x")
        await client.until(lambda: client.ended >= {large, last})
        assert (client.statuses[last], client.bodies[last]) == (200, b"small")
        assert len(client.bodies[large]) == 8_000_000


@pytest.mark.parametrize("how", ["closed", "reset"])
@pytest.mark.parametrize("way", ["respond", "big", "stream", "quart"])
async def test_http2_client_that_leaves_without_a_window_is_waited_for_by_nobody(
    serving: Serving, how: str, way: str
) -> None:
    ends = Ends()
    async with serving(ends.app, write_timeout=3600, keep_alive_timeout=3600) as server:
        raw = await server.connect()
        client = await Http2(raw).__aenter__()
        await client.without_window()
        number = await client.ask(f"/{way}", b"x")
        await client.until(lambda: number in client.statuses)
        if how == "reset":
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await raw.aclose()
        while server.connections:  # noqa: ASYNC110  (there is no event to wait for)
            await trio.sleep(0.01)
    assert not any(ends.finished)


@pytest.mark.parametrize("used", [False, True])
async def test_http2_idle_connections_are_closed(
    mock_clock: MockClock, serving: Serving, used: bool
) -> None:
    async with (
        serving(Site().app, keep_alive_timeout=0.3) as server,
        Http2(await server.connect()) as client,
    ):
        if used:
            number = await client.ask("/echo", b"x")
            await client.until(lambda: number in client.ended)
        await client.ping()
        await server.limited(0.3)
        await elapse(mock_clock, 0.29)
        assert len(server.connections) == 1
        await elapse(mock_clock, 0.1)
        await client.until(lambda: False)


async def test_http2_pings_are_no_slow_head(mock_clock: MockClock, serving: Serving) -> None:
    app = Site().app
    async with (
        serving(app, header_timeout=0.1) as server,
        Http2(await server.connect()) as client,
    ):
        await client.ping()
        await elapse(mock_clock, 3)
        number = await client.ask("/echo", b"x")
        await client.until(lambda: number in client.ended)
        assert client.bodies == {number: b"echo:x"}


async def test_http2_stopping_drains(serving: Serving) -> None:
    begun, go_on = trio.Event(), trio.Event()

    async def slow(exchange: Exchange) -> None:
        await exchange.read_body(10)
        begun.set()
        await go_on.wait()
        await exchange.respond(200, [], b"slow")

    app = Routes({("POST", "/"): slow}, Site().app.fallback)
    async with (
        serving(app) as server,
        Http2(await server.connect()) as client,
    ):
        number = await client.ask("/", b"x")
        await begun.wait()
        server.stopping.set()
        await wait_all_tasks_blocked()
        go_on.set()
        await client.until(lambda: False)
        assert client.bodies == {number: b"slow"}
        with trio.fail_after(PATIENCE):
            await server.done.wait()
