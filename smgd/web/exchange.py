"""One request and its response, as raw handlers see them, whatever HTTP lies beneath.

A handler is cancelled when its client leaves, at whatever point: before the body is read, while it
waits, between two chunks. So it needs no error handling for that; its `finally` blocks do what has
to be done, synchronously. A write to a client that is gone does not raise, it is where the
cancellation arrives.

`AsgiExchange` is the form on top of Hypercorn (HTTP/2, and HTTP/1.x on the stock path); the fast
HTTP/1.x path has its own (`h1.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import msgspec
import structlog
import trio

from smgd.errors import ApiError
from smgd.web.headers import Headers
from smgd.web.hyper import AsgiApp, Message, Receive, Scope, Send

log = structlog.get_logger("smgd.web")


class SinkClosed(Exception):  # noqa: N818  (a state that is reported, like trio's EndOfChannel)
    """There is no response any more that `write_nowait` could write to."""


class Exchange(Protocol):
    """A request, and the response to it.

    Calls in order: `read_body` at most once, then either `respond`, or `start`, any number of
    `write`, and `end`. `path` is without the query and unquoted; header names are lower case.
    `ended` says that `end` was called, `finished` that all of the response went out to the client.
    """

    method: str
    path: str
    http_version: str
    client: str
    started: bool
    ended: bool
    finished: bool

    def header(self, name: bytes) -> bytes | None:
        """Return the value of the first header of that (lower-case) name."""
        ...

    async def read_body(self, limit: int) -> bytes:
        """Return the whole body. Raises `ApiError` 413 above `limit` bytes, 408 if it comes too
        slowly; the rest is not read then, and the connection ends after the answer."""
        ...

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole response; `content-length` is added."""
        ...

    async def start(self, status: int, headers: Headers) -> None:
        """Begin a response. Its head is held back until there is something to send after it."""
        ...

    async def write(self, data: bytes) -> None:
        """Send some of the body, and before it what is held back."""
        ...

    async def end(self, data: bytes = b"") -> None:
        """Send the last of the body and end the response."""
        ...

    @property
    def can_write_nowait(self) -> bool:
        """Whether `write_nowait` would write now: between `start` and `end`, while no `write` is
        going on and the socket took all so far, on a connection that allows it at all."""
        ...

    def write_nowait(self, data: bytes) -> bytes:
        """Send some of the body at once, from any task.

        Returns what the socket did not take. It is kept, and goes out first with the next `write`
        (`write(b"")` sends it alone). Raises `SinkClosed` if the response is over or the client
        is gone.
        """
        ...


Handler = Callable[[Exchange], Awaitable[None]]


def too_large(limit: int) -> ApiError:
    """Return the 413 for a body of more than `limit` bytes."""
    return ApiError(413, "request_too_large", f"Request body is larger than {limit} bytes")


def too_slow(seconds: float) -> ApiError:
    """Return the 408 for a body that did not come in time."""
    text = f"Request body did not arrive within {seconds:g} seconds"
    return ApiError(408, "request_timeout", text)


def plain_path(path: str) -> str:
    """Return the path of a request target that may be an absolute URL (RFC 9112, 3.2.2)."""
    if path.startswith("/") or "://" not in path:
        return path
    return "/" + path.partition("://")[2].partition("/")[2]


class AsgiExchange:
    """An exchange over ASGI messages.

    `body_timeout` is in seconds; `running` is cancelled when the client is gone.
    """

    can_write_nowait = False

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        body_timeout: float,
        running: trio.CancelScope,
    ) -> None:
        self.method: str = scope["method"]
        self.path = plain_path(scope["path"])
        self.http_version: str = scope["http_version"]
        self.client: str = scope["client"][0] if scope["client"] else ""
        self.started = False
        self.ended = False
        self.finished = False
        self._headers: Headers = scope["headers"]
        self._receive = receive
        self._send = send
        self._body_timeout = body_timeout
        self._head: Message | None = None
        self._body_done = trio.Event()
        self._close = False
        self._running = running

    def header(self, name: bytes) -> bytes | None:
        for key, value in self._headers:
            if key == name:
                return value
        return None

    async def read_body(self, limit: int) -> bytes:
        length = self.header(b"content-length")
        try:
            if length is not None and int(length) > limit:
                raise too_large(limit)
            with trio.fail_after(self._body_timeout):
                return await self._read_up_to(limit)
        except trio.TooSlowError:
            self._close = True
            raise too_slow(self._body_timeout) from None
        except ApiError:
            self._close = True
            raise
        finally:
            self._body_done.set()

    async def _read_up_to(self, limit: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                await self._lost()
                raise trio.BrokenResourceError("the client left in the middle of its request")
            parts.append(message["body"])
            size += len(message["body"])
            if size > limit:
                raise too_large(limit)
            if not message["more_body"]:
                return parts[0] if len(parts) == 1 else b"".join(parts)

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.end(body)

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True
        if self._close and self.http_version != "2":
            headers = [*headers, (b"connection", b"close")]
        self._head = {"type": "http.response.start", "status": status, "headers": headers}
        self._body_done.set()

    async def write(self, data: bytes) -> None:
        await self._write(data, more=True)

    async def end(self, data: bytes = b"") -> None:
        self.ended = True
        await self._write(data, more=False)
        self.finished = True

    async def _write(self, data: bytes, *, more: bool) -> None:
        try:
            if self._head is not None:
                head, self._head = self._head, None
                await self._send(head)
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except trio.BrokenResourceError:
            await self._lost()

    async def _lost(self) -> None:
        self._running.cancel(reason="the client is gone")
        await trio.lowlevel.checkpoint()

    def write_nowait(self, data: bytes) -> bytes:
        raise SinkClosed("this connection is written by the request's task only")

    async def watch(self) -> None:
        """Wait for the client to leave, throwing away what it sends unasked.

        Hypercorn tells of the disconnect from inside the last `send` as well; that one must not be
        cancelled, or the connection would be neither recycled nor closed.
        """
        await self._body_done.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self.ended:
            self._running.cancel(reason="the client is gone")


async def answer(exchange: Exchange, handler: Handler) -> None:
    """Run a handler; what it lets out becomes a bare 500, or an aborted response if it began."""
    try:
        await handler(exchange)
        if not exchange.ended:
            log.error("a handler left its response unfinished", path=exchange.path)
    except Exception:
        log.exception("a handler failed", path=exchange.path)
    if not exchange.started:
        await exchange.respond(500, [(b"content-type", b"text/plain")], b"Internal error\n")


async def run_exchange(
    scope: Scope, receive: Receive, send: Send, handler: Handler, *, body_timeout: float
) -> None:
    """Run a handler over ASGI, cancelled when the client leaves before the response's end."""
    async with trio.open_nursery() as nursery:
        exchange = AsgiExchange(scope, receive, send, body_timeout, nursery.cancel_scope)
        nursery.start_soon(exchange.watch)
        await answer(exchange, handler)
        nursery.cancel_scope.cancel(reason="answered")


def _unnoticed(_client: str, _status: int, _reason: str) -> None:
    """Take no note."""


class Routes(msgspec.Struct, frozen=True):
    """What is served: hot routes, by method and path, to raw handlers, all the rest to an ASGI
    application.

    `refused` is told of requests that no handler sees, since they cannot be read: the client's
    address, the status that it was answered, and the reason.
    """

    hot: Mapping[tuple[str, str], Handler]
    fallback: AsgiApp
    refused: Callable[[str, int, str], None] = _unnoticed
