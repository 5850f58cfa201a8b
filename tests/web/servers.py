"""A server on the loopback for every test that wants one, and a client that speaks in bytes.

Rules: port 0; real sockets and the real clock, so all limits are fractions of a second and every
test has an absolute deadline; both HTTP paths run the same tests (`http_path`).
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import h11
import msgspec
import trio

from smgd.web.connection import Connection
from smgd.web.exchange import Routes
from smgd.web.hyper import AsgiApp
from smgd.web.server import ServerSettings, open_listeners, serve

QUICK = ServerSettings(
    header_timeout=0.3,
    body_timeout=0.3,
    keep_alive_timeout=0.3,
    write_timeout=0.3,
    half_close_grace=0.15,
    linger_timeout=0.3,
    shutdown_grace=0.5,
)


@dataclass
class Server:
    port: int
    stopping: trio.Event
    done: trio.Event
    scope: trio.CancelScope
    connections: set[Connection]

    def cancel(self) -> None:
        self.scope.cancel()

    async def connect(self, receive_buffer: int | None = None) -> trio.SocketStream:
        sock = trio.socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, receive_buffer)
        try:
            await sock.connect(("127.0.0.1", self.port))
        except OSError:
            sock.close()
            raise
        return trio.SocketStream(sock)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


Serving = Callable[..., AbstractAsyncContextManager[Server]]


@asynccontextmanager
async def running_server(
    app: AsgiApp | Routes,
    *,
    http_path: Literal["fast", "stock"],
    tls: ssl.SSLContext | None = None,
    **limits: Any,
) -> AsyncIterator[Server]:
    if tls is not None:  # a handshake takes milliseconds, or many on a busy machine
        limits = {"header_timeout": 5.0} | limits
    settings = msgspec.structs.replace(QUICK, http_path=http_path, **limits)
    listeners = await open_listeners("127.0.0.1", 0, settings.backlog)
    server = Server(
        listeners[0].socket.getsockname()[1],
        trio.Event(),
        trio.Event(),
        trio.CancelScope(),
        set(),
    )

    async def run(task_status: trio.TaskStatus[None]) -> None:
        with server.scope:
            await serve(
                app,
                listeners,
                settings,
                stopping=server.stopping,
                tls=tls,
                connections=server.connections,
                task_status=task_status,
            )
        server.done.set()

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            await nursery.start(run)
            yield server
            server.stopping.set()


async def read_until(stream: trio.abc.ReceiveStream, mark: bytes) -> bytes:
    """Read until `mark` has come, at most to the end of the stream."""
    data = b""
    while mark not in data:
        more = await stream.receive_some()
        if not more:
            break
        data += more
    return data


async def read_all(stream: trio.abc.ReceiveStream) -> bytes:
    """Read to the end of the stream; a reset is told apart by the error it raises."""
    data = b""
    while more := await stream.receive_some():
        data += more
    return data


def request(path: str, *headers: str, body: bytes = b"", method: str = "POST") -> bytes:
    """Return a request's bytes, framed by Content-Length if there is a body."""
    lines = [f"{method} {path} HTTP/1.1", "Host: test", *headers]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def read_answer(stream: trio.abc.ReceiveStream, *, head_only: bool = False) -> Answer:
    """Read one response and not a byte more; parsed strictly, by h11."""
    client = h11.Connection(h11.CLIENT)
    client.send(
        h11.Request(method="HEAD" if head_only else "GET", target="/", headers=[("host", "x")])
    )
    client.send(h11.EndOfMessage())
    answer = Answer(0, {}, b"")
    while True:
        event = client.next_event()
        if event is h11.NEED_DATA:
            client.receive_data(bytes(await stream.receive_some(1)))
        elif isinstance(event, h11.Response):
            answer.status = event.status_code
            answer.headers = {k.decode(): v.decode() for k, v in event.headers}
        elif isinstance(event, h11.Data):
            answer.body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            return answer


async def closed(stream: trio.abc.ReceiveStream) -> bool:
    """Tell whether the other side has closed its end properly by the time something comes."""
    return await stream.receive_some() == b""
