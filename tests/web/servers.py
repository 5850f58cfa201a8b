"""A server on the loopback for every test that wants one, and a client that speaks in bytes.

Rules: port 0; real sockets; both HTTP paths run the same tests (`http_path`). No limit is reached
by accident, however slow the machine is: a test sets the one that it is about. If its verdict
depends on when that is reached, it has a clock that stands still (`mock_clock`) and moves it.
"""

from __future__ import annotations

import math
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import h11
import msgspec
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from smgd.web.connection import Connection
from smgd.web.exchange import Routes
from smgd.web.hyper import AsgiApp
from smgd.web.server import ServerSettings, open_listeners, serve
from tests.support import PATIENCE, real_deadline

# Seconds; no test takes so long.
NEVER = 3600.0
# But for the grace: a client that has left is told from one that only sends no more by it.
LIMITS = ServerSettings(
    header_timeout=NEVER,
    body_timeout=NEVER,
    keep_alive_timeout=NEVER,
    write_timeout=NEVER,
    half_close_grace=0.15,
    linger_timeout=NEVER,
    shutdown_grace=NEVER,
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

    async def limited(self, seconds: float) -> None:
        """Wait until every connection has so many seconds left, by a clock that stands still."""

        def are_limited() -> bool:
            left = [c.expires_at - trio.current_time() for c in self.connections]
            return bool(left) and all(math.isclose(one, seconds) for one in left)

        await until(are_limited)


async def until(condition: Callable[[], object]) -> None:
    """Wait until `condition` holds, on any clock."""
    with real_deadline(PATIENCE):
        while not condition():
            await trio.lowlevel.checkpoint()


async def elapse(clock: MockClock, seconds: float) -> None:
    """Let time pass, and what it sets off happen; so does what the kernel still has on its way."""
    clock.jump(seconds)
    await wait_all_tasks_blocked(0.001)


async def elapse_until(
    clock: MockClock, condition: Callable[[], object], step: float = 0.01
) -> None:
    """Let time pass until `condition` holds, no faster than what it sets off."""
    while not condition():
        await elapse(clock, step)


class Turns:
    """Counts the loop's turns; in one, every task runs that is ready when it begins.

    In which order is trio's whim: so within one count parts of two turns may happen.
    """

    def __init__(self) -> None:
        self.count = 0
        self.seen: list[int] = []

    async def run(self) -> None:
        while True:
            await trio.lowlevel.checkpoint()
            self.count += 1

    def note(self) -> None:
        """Note that something happens now."""
        self.seen.append(self.count)

    @property
    def most(self) -> int:
        """How often something happened within one count."""
        return max(Counter(self.seen).values())


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
    settings = msgspec.structs.replace(LIMITS, http_path=http_path, **limits)
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

    with real_deadline(3 * PATIENCE):  # longer than what is waited for within
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
