"""The server's own behaviour: ends of connections, deadlines, stopping. On both HTTP paths."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import structlog
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, RawData, Updated
from hypercorn.protocol.events import EndBody, StreamClosed
from hypercorn.protocol.h2 import H2Protocol, StreamBuffer
from hypercorn.protocol.h11 import H2ProtocolAssumedError, H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.worker_context import WorkerContext
from quart_trio import QuartTrio
from trio.testing import MockClock, wait_all_tasks_blocked

import smgd.web
from smgd.errors import ApiError, ConfigError
from smgd.web import hyper
from smgd.web.exchange import Exchange, Routes
from smgd.web.hyper import check_hypercorn
from smgd.web.server import ServerSettings, open_listeners, serve
from smgd.web.turns import WIDTH
from tests.support import PATIENCE
from tests.web.servers import (
    NEVER,
    Serving,
    Turns,
    closed,
    elapse,
    elapse_until,
    read_all,
    read_answer,
    read_until,
    request,
    until,
)

BIG = b"x" * 65536


def make_quart() -> QuartTrio:
    app = QuartTrio("test")

    @app.get("/quart")
    async def quart() -> str:
        return "from quart"

    return app


async def hello(exchange: Exchange) -> None:
    await exchange.read_body(1000)
    await exchange.respond(200, [(b"content-type", b"text/plain")], b"hello")


class Stream:
    """A handler that streams until told to end; knows how each of its requests ended."""

    def __init__(self, pieces: int = 10**9, pause: float = 0.01, piece: bytes = b"tick") -> None:
        self.pieces = pieces
        self.pause = pause
        self.piece = piece
        self.ends: list[str] = []
        self.ended = trio.Event()

    async def __call__(self, exchange: Exchange) -> None:
        try:
            await exchange.read_body(1000)
            await exchange.start(200, [])
            for _ in range(self.pieces):
                await exchange.write(self.piece)
                await trio.sleep(self.pause)
            await exchange.end()
        finally:
            self.ended.set()
            self.ends.append("complete" if exchange.ended else "cancelled")


nothing = Routes({}, make_quart())


def app_of(**hot: object) -> Routes:
    return Routes({("POST", f"/{name}"): h for name, h in hot.items()}, make_quart())  # type: ignore[misc]


@pytest.mark.parametrize("target", [("GET", "/quart"), ("POST", "/hello")])
async def test_connections_that_say_close_are_closed(
    serving: Serving, target: tuple[str, str]
) -> None:
    method, path = target
    async with serving(app_of(hello=hello)) as server:
        for _ in range(20):
            async with await server.connect() as client:
                await client.send_all(request(path, "Connection: close", method=method))
                answer = await read_answer(client)
                assert answer.status == 200
                assert answer.headers["connection"] == "close"
                with trio.fail_after(PATIENCE):
                    assert await closed(client)


@pytest.mark.parametrize("target", [("GET", "/quart"), ("POST", "/hello")])
async def test_idle_connections_are_closed(
    mock_clock: MockClock, serving: Serving, target: tuple[str, str]
) -> None:
    method, path = target
    ends = 0

    async def one() -> None:
        nonlocal ends
        async with await server.connect() as client:
            for _ in range(2):
                await client.send_all(request(path, method=method))
                assert (await read_answer(client)).status == 200
            answered.release()
            assert await closed(client)
            ends += 1

    app = app_of(hello=hello)
    answered = trio.Semaphore(0)
    async with serving(app, keep_alive_timeout=0.6) as server, trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(one)
        for _ in range(20):
            await answered.acquire()
        await server.limited(0.6)
        await elapse(mock_clock, 0.59)
        assert (len(server.connections), ends) == (20, 0)
        await elapse(mock_clock, 0.2)
    assert ends == 20


async def test_a_connection_lives_as_long_as_it_is_used(
    mock_clock: MockClock, serving: Serving
) -> None:
    app = app_of(hello=hello)
    async with serving(app, keep_alive_timeout=0.5) as server, await server.connect() as client:
        for _ in range(4):
            await client.send_all(request("/hello"))
            assert (await read_answer(client)).body == b"hello"
            await server.limited(0.5)
            await elapse(mock_clock, 0.49)
        await elapse(mock_clock, 0.2)
        assert await closed(client)


@pytest.mark.parametrize(
    ("start", "limit"),
    [(b"", "keep_alive_timeout"), (b"POST /hello HTTP/1.1\r\nHos", "header_timeout")],
)
async def test_a_slow_head_is_cut(
    mock_clock: MockClock, serving: Serving, start: bytes, limit: str
) -> None:
    app = app_of(hello=hello)
    async with serving(app, **{limit: 0.3}) as server, await server.connect() as client:
        await client.send_all(start)
        await server.limited(0.3)
        await elapse(mock_clock, 0.29)
        assert len(server.connections) == 1
        await elapse(mock_clock, 0.1)
        assert await closed(client)


async def trickle(client: trio.SocketStream, clock: MockClock) -> None:
    for _ in range(1000):
        await client.send_all(b"x")
        await elapse(clock, 0.02)


async def test_a_head_that_trickles_is_cut(mock_clock: MockClock, serving: Serving) -> None:
    app = app_of(hello=hello)
    async with serving(app, header_timeout=0.3) as server, await server.connect() as client:
        await client.send_all(b"POST /hello HTTP/1.1\r\nHost: ")
        await server.limited(0.3)
        for _ in range(14):
            await client.send_all(b"x")
            await elapse(mock_clock, 0.02)
            assert len(server.connections) == 1
        with pytest.raises(trio.BrokenResourceError):
            await trickle(client, mock_clock)


@pytest.mark.parametrize("target", [("GET", "/quart"), ("POST", "/hello")])
@pytest.mark.parametrize("start", [b"G", b"GET /vers", b"GET / HTTP/1.1\r\nHost: x\r\n"])
async def test_a_slow_head_behind_a_request_is_cut(
    mock_clock: MockClock, serving: Serving, target: tuple[str, str], start: bytes
) -> None:
    method, path = target
    app = app_of(hello=hello)
    async with serving(app, header_timeout=0.3) as server, await server.connect() as client:
        await client.send_all(request(path, method=method) + start)
        assert (await read_answer(client)).status == 200
        await server.limited(0.3)
        await elapse(mock_clock, 0.29)
        assert len(server.connections) == 1
        await elapse(mock_clock, 0.1)
        assert await closed(client)


async def test_only_a_head_that_has_begun_is_slow(
    mock_clock: MockClock, serving: Serving, http_path: str
) -> None:
    app = app_of(hello=hello)
    behind = b"\r\n" if http_path == "fast" else b""  # h11 takes no blank lines
    async with (
        serving(app, header_timeout=0.1) as server,
        await server.connect() as client,
    ):
        for _ in range(2):
            await client.send_all(request("/hello") + behind)
            assert (await read_answer(client)).body == b"hello"
            await until(lambda: not any(one.busy for one in server.connections))
            await wait_all_tasks_blocked()
            await elapse(mock_clock, 3)


async def test_a_stalled_reader_is_cut_and_others_are_not_disturbed(serving: Serving) -> None:
    flood, ticks = Stream(piece=BIG, pause=0), Stream(pieces=40)
    async with (
        serving(app_of(flood=flood, ticks=ticks), write_timeout=0.3) as server,
        await server.connect(4096) as stalled,
        await server.connect() as reader,
    ):
        await stalled.send_all(request("/flood"))
        await reader.send_all(request("/ticks"))
        assert (await read_answer(reader)).body == b"tick" * 40
        with trio.fail_after(PATIENCE):
            await flood.ended.wait()
    assert (flood.ends, ticks.ends) == (["cancelled"], ["complete"])


async def test_a_slow_reader_that_reads_is_not_cut(mock_clock: MockClock, serving: Serving) -> None:
    whole = 200 * len(BIG)  # half of which is more than all buffers on the way

    async def big(exchange: Exchange) -> None:
        await exchange.respond(200, [], bytes(whole))

    async with (
        serving(app_of(big=big), write_timeout=0.5) as server,
        await server.connect(65536) as client,
    ):
        await client.send_all(request("/big", "Connection: close"))
        size = 0
        while data := await client.receive_some(65536):
            size += len(data)
            await elapse(mock_clock, len(data) / whole)
    assert size > whole
    assert trio.current_time() >= 1


@pytest.mark.parametrize("target", [("GET", "/quart"), ("POST", "/hello")])
async def test_a_client_that_half_closes_gets_its_answer(
    serving: Serving, target: tuple[str, str]
) -> None:
    method, path = target
    app = app_of(hello=hello)
    async with serving(app, half_close_grace=NEVER) as server, await server.connect() as client:
        await client.send_all(request(path, method=method))
        await client.send_eof()
        assert (await read_answer(client)).status == 200
        assert await closed(client)


async def test_a_half_closed_request_that_takes_long_is_cancelled(
    mock_clock: MockClock, serving: Serving
) -> None:
    stream = Stream()
    app = app_of(stream=stream)
    async with serving(app, half_close_grace=0.15) as server, await server.connect() as client:
        await client.send_all(request("/stream"))
        await read_until(client, b"tick")
        began = trio.current_time()
        await client.send_eof()
        await elapse_until(mock_clock, stream.ended.is_set)
        assert trio.current_time() - began >= 0.15
        assert b"tick" in await read_all(client)
    assert stream.ends == ["cancelled"]


async def test_stopping_drains(serving: Serving) -> None:
    stream = Stream(pieces=30)
    app = app_of(stream=stream, hello=hello)
    async with (
        serving(app) as server,
        await server.connect() as idle,
        await server.connect() as fresh,
        await server.connect() as busy,
    ):
        await idle.send_all(request("/hello"))
        await read_answer(idle)
        await busy.send_all(request("/stream"))
        await read_until(busy, b"tick")
        server.stopping.set()
        with trio.fail_after(PATIENCE):
            assert await closed(idle)
            assert await closed(fresh)
        with pytest.raises(OSError, match="refused"):
            await server.connect()
        assert (await read_until(busy, b"\r\n0\r\n\r\n")).endswith(b"\r\n0\r\n\r\n")
        assert await closed(busy)
        with trio.fail_after(PATIENCE):
            await server.done.wait()
    assert stream.ends == ["complete"]


async def test_stopping_takes_no_longer_than_the_grace(serving: Serving) -> None:
    flood, silent = Stream(piece=BIG, pause=0), Stream(pieces=1, pause=NEVER)
    app = app_of(flood=flood, silent=silent)
    async with (
        serving(app, shutdown_grace=0.2) as server,
        await server.connect(4096) as stalled,
        await server.connect() as waiting,
    ):
        await stalled.send_all(request("/flood"))
        await waiting.send_all(request("/silent"))
        await stalled.receive_some(1)
        await read_until(waiting, b"tick")
        server.stopping.set()
        with trio.fail_after(PATIENCE):
            await server.done.wait()
    assert (flood.ends, silent.ends) == (["cancelled"], ["cancelled"])


async def test_cancelling_the_server_ends_it_at_once(serving: Serving) -> None:
    flood = Stream(piece=BIG, pause=0)
    async with (
        serving(app_of(flood=flood)) as server,
        await server.connect(4096) as stalled,
    ):
        await stalled.send_all(request("/flood"))
        await stalled.receive_some(1)
        await trio.sleep(0.1)  # the socket fills up
        with trio.fail_after(PATIENCE):
            server.cancel()
            await server.done.wait()
    assert flood.ends == ["cancelled"]


async def test_a_burst_of_requests_leaves_the_loop_to_what_runs(serving: Serving) -> None:
    turns = Turns()

    async def handler(exchange: Exchange) -> None:
        turns.note()
        await hello(exchange)

    async with serving(app_of(handler=handler)) as server, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(await server.connect()) for _ in range(100)]
        await wait_all_tasks_blocked()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(turns.run)
            for client in clients:
                os.write(client.socket.fileno(), request("/handler"))  # all in one turn
            for client in clients:
                assert (await read_answer(client)).body == b"hello"
            nursery.cancel_scope.cancel()
    assert len(turns.seen) == 100
    assert turns.most <= 3 * WIDTH


async def test_pipelined_requests_leave_the_loop_to_others(serving: Serving) -> None:
    turns = Turns()

    async def handler(exchange: Exchange) -> None:
        turns.note()
        await exchange.respond(200, [], b"")

    async with (
        serving(app_of(handler=handler)) as server,
        await server.connect() as client,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(turns.run)
        await client.send_all(request("/handler") * 50)
        for _ in range(50):
            assert (await read_answer(client)).status == 200
        nursery.cancel_scope.cancel()
    assert turns.most <= 2


async def test_no_descriptor_is_left_behind(serving: Serving) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    async def one(number: int) -> None:
        async with await server.connect() as client:
            await client.send_all(request("/quart", method="GET") * (number % 3))
            if number % 3 == 1:
                await client.receive_some()

    async with serving(app_of(hello=hello)) as server:
        await one(0)
        before = descriptors()
        for start in range(0, 200, 20):
            async with trio.open_nursery() as nursery:
                for number in range(start, start + 20):
                    nursery.start_soon(one, number)
        with trio.fail_after(PATIENCE):
            while descriptors() > before:  # noqa: ASYNC110  (there is no event to wait for)
                await trio.sleep(0.01)


async def test_accepted_sockets_have_their_options(serving: Serving) -> None:
    listeners = await open_listeners("127.0.0.1", 0, 5)
    settings = ServerSettings(write_timeout=7)
    async with trio.open_nursery() as nursery:
        stopping = trio.Event()
        await nursery.start(partial(serve, nothing, listeners, settings, stopping=stopping))
        options = listeners[0].socket
        assert options.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 12000
        assert options.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        stopping.set()


async def test_running_out_of_descriptors_is_waited_out(
    mock_clock: MockClock, serving: Serving
) -> None:
    async with serving(app_of(hello=hello)) as server:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        client = socket.create_connection(("127.0.0.1", server.port))
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(client))
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            with structlog.testing.capture_logs() as lines:
                await elapse_until(mock_clock, lambda: lines)
                await elapse(mock_clock, 0.1)
                await elapse(mock_clock, 0.1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        [line] = lines  # of three
        assert line["reason"].endswith("Too many open files")
        await elapse(mock_clock, 0.2)
        await stream.send_all(request("/hello"))
        assert (await read_answer(stream)).body == b"hello"
        await stream.aclose()


@pytest.mark.parametrize("target", [("GET", "/quart"), ("POST", "/hello")])
async def test_unread_input_does_not_turn_the_end_into_a_reset(
    serving: Serving, target: tuple[str, str]
) -> None:
    method, path = target
    async with serving(app_of(hello=hello)) as server, await server.connect() as client:
        await client.send_all(request(path, "Connection: close", method=method) + BIG * 3)
        assert (await read_answer(client)).status == 200
        assert await closed(client)


async def test_unix_sockets(http_path: Literal["fast", "stock"], tmp_path: Path) -> None:
    async def who(exchange: Exchange) -> None:
        await exchange.respond(200, [], exchange.client.encode() or b"nobody")

    sock = trio.socket.socket(socket.AF_UNIX)
    await sock.bind(str(tmp_path / "http"))
    sock.listen(5)
    stopping = trio.Event()
    settings = ServerSettings(http_path=http_path)
    listeners = [trio.SocketListener(sock)]
    async with trio.open_nursery() as nursery:
        app = app_of(who=who)
        await nursery.start(partial(serve, app, listeners, settings, stopping=stopping))
        async with await trio.open_unix_socket(str(tmp_path / "http")) as client:
            await client.send_all(request("/who"))
            assert (await read_answer(client)).body == b"nobody"
            await client.send_all(request("/quart", method="GET"))
            assert (await read_answer(client)).body == b"from quart"
        stopping.set()


REFUSED = [
    (b"nonsense\r\n\r\n", 400),
    (b"POST /hello HTTP/1.1\r\n\r\n", 400),
    (b"POST /hello HTTP/1.2\r\nHost: a\r\n\r\n", 505),
    (b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n", 405),
    (b"POST /hello HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 200_000, 431),
]


@pytest.mark.parametrize(("data", "status"), REFUSED)
async def test_who_cannot_be_read_is_told_of(serving: Serving, data: bytes, status: int) -> None:
    told: list[tuple[str, int]] = []

    def refused(client: str, status: int, reason: str) -> None:
        assert reason
        told.append((client, status))

    app = Routes({("POST", "/hello"): hello}, make_quart(), refused)
    async with serving(app) as server, await server.connect() as client:
        await client.send_all(request("/hello") + data)
        assert (await read_answer(client)).body == b"hello"
        answered = (await read_answer(client)).status
        assert answered in (status, 400)  # h11 knows no more of the last but one
    assert told == [("127.0.0.1", answered)]


async def test_who_writes_while_the_end_is_told_is_told_so(serving: Serving) -> None:
    """In whatever order trio runs the two: hence more than once."""
    async with serving(nothing) as server:
        for _ in range(20):
            async with await server.connect():
                await until(lambda: server.connections)
                [connection] = server.connections
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(connection.protocol_send, Closed())
                    await until(lambda: connection._ending)  # noqa: B023  (it is called here)
                    with pytest.raises(trio.BrokenResourceError, match="the client is gone"):
                        await connection.protocol_send(RawData(b"late"))
                await until(lambda: not server.connections)


async def test_a_malformed_body_is_its_requests_and_told_once(serving: Serving) -> None:
    told: list[int] = []

    async def handler(exchange: Exchange) -> None:
        with pytest.raises(ApiError) as caught:
            await exchange.read_body(1000)
        await exchange.respond(caught.value.status, [], b"")

    app = Routes(
        {("POST", "/"): handler}, make_quart(), lambda _client, status, _reason: told.append(status)
    )
    async with serving(app) as server, await server.connect() as client:
        await client.send_all(request("/", "Transfer-Encoding: chunked") + b"nonsense\r\n")
        assert (await read_answer(client)).status == 400
    assert told == []


@pytest.mark.parametrize("name", ["StreamBuffer", "nothing"])
def test_an_unknown_hypercorn_is_refused_in_words(name: str, tmp_path: Path) -> None:
    """Whether it has what we import or not: the daemon says which one it needs."""
    config = tmp_path / "smgd.toml"
    config.write_text("server.port = 0\nmetrics.port = 0\n")
    command = [sys.executable, "-c", UNKNOWN.format(name=name), str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (2, "")
    assert "is built on Hypercorn 0.18.x, but 0.19.1" in done.stderr
    assert ("StreamBuffer" in done.stderr) == (name == "StreamBuffer")
    assert "Traceback" not in done.stderr


UNKNOWN = """
import importlib.metadata, sys
import hypercorn.protocol.h2
if hasattr(hypercorn.protocol.h2, "{name}"):
    del hypercorn.protocol.h2.{name}
known = importlib.metadata.version
importlib.metadata.version = lambda name: "0.19.1" if name == "hypercorn" else known(name)
from smgd.cli import main
sys.exit(main(["run", "--config", sys.argv[1]]))
"""


async def test_the_server_checks_hypercorn(monkeypatch: pytest.MonkeyPatch) -> None:
    check_hypercorn()
    monkeypatch.setattr("smgd.web.hyper.version", lambda name: "0.19.1")
    with (
        trio.fail_after(PATIENCE),
        pytest.raises(ConfigError, match=r"0\.18\.x, but 0\.19\.1 is installed"),
    ):
        await serve(nothing, [], ServerSettings(), stopping=trio.Event())


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (H11Protocol, "_send_error_response"),
        (H11Protocol, "_check_protocol"),
        (H2Protocol, "_flush"),
        (H2Protocol, "_window_updated"),
        (H2Protocol, "stream_send"),
        (StreamBuffer, "complete"),
        (Config, "h2_max_concurrent_streams"),
        (TaskGroup, "spawn_app"),
        (WorkerContext, "event_class"),
    ],
)
def test_whatever_of_hypercorn_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    monkeypatch.delattr(owner, name)
    with pytest.raises(ConfigError, match=rf"without .*{owner.__name__}\.{name}"):
        check_hypercorn()


@pytest.mark.parametrize(
    ("owner", "missing"),
    [
        (H2Protocol, r"H2Protocol\.stream_buffers"),
        (H11Protocol, r"H11Protocol\.connection"),
        (StreamBuffer, r"StreamBuffer\.buffer"),
        (WorkerContext, r"WorkerContext\.terminated"),
        (WorkerContext, r"WorkerContext\(max_requests\)"),
    ],
)
def test_a_constructor_that_does_something_else_is_named(
    monkeypatch: pytest.MonkeyPatch, owner: type, missing: str
) -> None:
    def __init__(self: object) -> None: ...  # noqa: N807

    monkeypatch.setattr(owner, "__init__", __init__)
    with pytest.raises(ConfigError, match=missing):
        check_hypercorn()


@dataclass
class Renamed:
    name: str


@pytest.mark.parametrize(
    ("event", "missing"),
    [
        (RawData, r"RawData\(data, address\)"),
        (Updated, r"Updated\(idle\)"),
        (EndBody, r"EndBody\(stream_id\)"),
        (StreamClosed, r"StreamClosed\(stream_id\)"),
        (H2ProtocolAssumedError, r"H2ProtocolAssumedError\(data\)"),
    ],
)
def test_an_event_that_says_something_else_is_named(
    monkeypatch: pytest.MonkeyPatch, event: type, missing: str
) -> None:
    monkeypatch.setattr(event, "__init__", Renamed.__init__)
    with pytest.raises(ConfigError, match=missing):
        check_hypercorn()


def test_what_is_behind_the_context_s_names_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerContext, "event_class", Renamed)
    with pytest.raises(ConfigError, match=r"without WorkerContext\.terminated\.set, .*is_set"):
        check_hypercorn()


@pytest.mark.parametrize(
    ("name", "other", "missing"),
    [
        ("parse_socket_addr", lambda address: address, r"\(family, address\)"),
        ("ConnectionState", Renamed, "ConnectionState"),
    ],
)
def test_another_function_of_a_name_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, other: Any, missing: str
) -> None:
    known = getattr(hyper, name)
    signatures = {other if f is known else f: p for f, p in hyper._SIGNATURES.items()}
    monkeypatch.setattr(hyper, "_SIGNATURES", signatures)
    monkeypatch.setattr(hyper, name, other)
    with pytest.raises(ConfigError, match=missing):
        check_hypercorn()


def test_one_module_knows_hypercorn() -> None:
    modules = Path(smgd.web.__file__).parent.glob("*.py")
    assert [m.stem for m in modules if "hypercorn." in m.read_text()] == ["hyper"]
