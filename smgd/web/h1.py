"""The fast HTTP/1.x path: one task a connection, no ASGI messages for hot routes.

The task that reads a connection also runs its handlers, one after the other, in between two reads.
While a handler runs nobody reads: what a client pipelines stays in the kernel, and that it hung up
is told by `hangups.py`, which cancels the connection's scope and so the handler. Bodies are read
when the handler asks for them.

Between `start` and `end` of a response on a plain socket, `write_nowait` puts bytes on the wire
from any task, without a task switch; all else is written by the request's own task, under the write
deadline of the stream. There is one place for what must go out first, `_held`: the head, or what a
full socket did not take. So the order on the wire is that of the calls, and after `end` nothing is
written whatever is called.
"""

from __future__ import annotations

from typing import Any

import trio

from smgd.errors import ApiError
from smgd.web.asgi import run_asgi
from smgd.web.exchange import Routes, SinkClosed, answer, too_large, too_slow
from smgd.web.h1parse import Refusal, Request, RequestParser
from smgd.web.h1write import CONTINUE, LAST_CHUNK, Framing, chunk, plan_response, render_head
from smgd.web.headers import Headers
from smgd.web.hyper import Closed, Event, Http2Assumed, RawData
from smgd.web.protocols import Link, Peers, Protocols
from smgd.web.settings import ServerSettings

# The first bytes of HTTP/2 with prior knowledge (RFC 9113, 3.4).
H2_PREFACE = b"PRI * HTTP/2.0\r\n\r\n"


class FastProtocols(Protocols):
    """HTTP/1.x by `H1`, HTTP/2 by Hypercorn."""

    def __init__(self, routes: Routes, settings: ServerSettings, *arguments: Any) -> None:
        self.routes = routes
        self.settings = settings
        super().__init__(*arguments)

    def http1(self) -> H1:
        return H1(self.link, self.peers, self.routes, self.settings)


class H1:
    """The HTTP/1.x of one connection; used by `Connection` like one of Hypercorn's protocols."""

    idle_is_silent = True

    def __init__(self, link: Link, peers: Peers, routes: Routes, settings: ServerSettings) -> None:
        self.link = link
        self.peers = peers
        self.client = peers.client[0] if peers.client else ""
        self.unread = False
        self._routes = routes
        self.settings = settings
        self._parser = RequestParser(settings.max_header_bytes)
        self._first: bytes | None = b""  # what may still become HTTP/2's preface

    @property
    def in_head(self) -> bool:
        """Whether a request has begun whose head is not complete."""
        return self._parser.in_head

    async def initiate(self) -> None:
        """Do what Hypercorn's protocols do at the start of a connection: nothing."""

    async def gone(self) -> None:
        """Do nothing: who sends waits for the socket alone, which has a deadline."""

    async def handle(self, event: Event) -> None:
        """Take bytes and answer the requests that are complete with them."""
        if not isinstance(event, RawData):
            return
        data = event.data
        if self._first is not None:
            data = self._first + data
            if self._is_preface(data):
                return
        self._parser.feed(data)
        requests = self._parser.requests
        while requests:
            if not await self._answer(requests.popleft()):
                await self._close()
                return
            if requests:
                await trio.lowlevel.checkpoint()  # pipelining must not starve other connections
        if self._parser.refusal is not None:
            await self._refuse(self._parser.refusal)

    def _is_preface(self, data: bytes) -> bool:
        """Tell whether the first bytes of all may yet become HTTP/2's preface, which may come in
        pieces. Raises `Http2Assumed` once they are it."""
        if data.startswith(H2_PREFACE):
            raise Http2Assumed(data)
        waits = H2_PREFACE.startswith(data)
        self._first = data if waits else None
        return waits

    async def _answer(self, request: Request) -> bool:
        """Run a request to its end; tell whether the connection can take another one."""
        link = self.link
        link.request_started()
        exchange = FastExchange(request, self)
        try:
            handler = self._routes.hot.get((request.method, request.path))
            if handler is None:
                await run_asgi(self._routes.fallback, exchange, request, self, self.peers)
            else:
                await answer(exchange, handler)
            reusable = exchange.reusable
        finally:
            exchange.ended = True
        if not reusable:
            self.unread = not request.complete
            return False
        link.request_ended()
        return True

    async def _refuse(self, refusal: Refusal) -> None:
        """Answer what cannot be read, and end: where the next request begins is unknown."""
        body = refusal.reason.encode() + b"\n"
        headers = [
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        self.unread = True
        self.link.request_started()
        self._routes.refused(self.client, refusal.status, refusal.reason)
        await self.write(render_head(refusal.status, headers) + body)
        await self._close()

    async def _close(self) -> None:
        await self.link.protocol_send(Closed())

    # ----------------------------------------------------------------------------- for the exchange

    async def write(self, data: bytes) -> None:
        """Send bytes: at once if the socket takes them (and then without a checkpoint), else under
        the write deadline."""
        link = self.link
        rest = memoryview(data)
        if link.direct:
            try:
                sent = link.raw.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                await self.lost()
                return
            if sent == len(data):
                return
            rest = rest[sent:]
        try:
            await link.send_all(rest)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await self.lost()

    async def lost(self) -> None:
        """Give the connection up; the caller is cancelled here."""
        self.link.expire("the client is gone")
        await trio.lowlevel.checkpoint()

    async def read_more(self, request: Request) -> None:
        """Wait for more of the body. Raises `ApiError` 400 or 431 if it cannot be read."""
        refusal = self._parser.refusal
        if refusal is not None:
            raise ApiError(refusal.status, "invalid_body", refusal.reason)
        if request.expects_continue:
            request.expects_continue = False
            await self.write(CONTINUE)
        data = await self.link.receive()
        if not data:
            await self.lost()
            raise trio.BrokenResourceError("the client left in the middle of its request")
        self._parser.feed(data)


class FastExchange:
    """An `Exchange` on an HTTP/1.x connection."""

    __slots__ = (
        "_framing",
        "_h1",
        "_headers",
        "_held",
        "_remaining",
        "_request",
        "_send_raw",
        "_writing",
        "can_write_nowait",
        "client",
        "ended",
        "finished",
        "http_version",
        "keep_alive",
        "method",
        "path",
        "started",
    )

    def __init__(self, request: Request, h1: H1) -> None:
        self.method = request.method
        self.path = request.path
        self.http_version = request.version
        self.client = h1.client
        self.keep_alive = False
        self.started = False
        self.ended = False
        self.finished = False
        self.can_write_nowait = False
        self._request = request
        self._h1 = h1
        self._send_raw = h1.link.raw.send
        self._headers: dict[bytes, bytes] | None = None
        self._held = b""
        self._writing = False  # stays true when a write was cut off: the wire is then unusable
        self._framing = Framing.NO_BODY
        self._remaining = 0  # bytes of a body whose length was told

    @property
    def reusable(self) -> bool:
        """Whether another response may follow on the connection."""
        return (
            self.finished
            and self.keep_alive
            and self._request.complete
            and not self._writing
            and not self._remaining
        )

    def header(self, name: bytes) -> bytes | None:
        if self._headers is None:  # the first of a name counts
            self._headers = dict(reversed(self._request.headers))
        return self._headers.get(name)

    async def read_body(self, limit: int) -> bytes:
        request = self._request
        if request.content_length is not None and request.content_length > limit:
            raise too_large(limit)
        if request.complete:
            body = request.take_body()
        else:
            body = await self._read_in_time(limit)
        if len(body) > limit:
            raise too_large(limit)
        return body

    async def _read_in_time(self, limit: int) -> bytes:
        timeout = self._h1.settings.body_timeout
        try:
            with trio.fail_after(timeout):
                return await self._read(limit)
        except trio.TooSlowError:
            raise too_slow(timeout) from None

    async def _read(self, limit: int) -> bytes:
        request = self._request
        parts = [request.take_body()]
        size = len(parts[0])
        while not request.complete and size <= limit:
            await self._h1.read_more(request)
            parts.append(request.take_body())
            size += len(parts[-1])
        return b"".join(parts)

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.end(body)

    async def start(self, status: int, headers: Headers) -> None:
        plan = plan_response(self._request, status, headers, closing=self._h1.link.stopping)
        self._held = render_head(status, plan.headers)  # may raise, and then nothing has begun
        self.started = True
        self.keep_alive = plan.keep_alive
        self._framing = plan.framing
        self._remaining = plan.length
        self.can_write_nowait = self._may_go_direct

    async def write(self, data: bytes) -> None:
        await self._send(self._framed(data))
        await trio.lowlevel.checkpoint()  # a fast client must not keep all others waiting

    async def end(self, data: bytes = b"") -> None:
        framed = self._framed(data)
        self.ended = True
        self.can_write_nowait = False
        await self._send(framed + LAST_CHUNK if self._framing is Framing.CHUNKED else framed)
        self.finished = True

    def _framed(self, data: bytes) -> bytes:
        if self.ended or not self.started:
            raise RuntimeError("a response is written between its start and its end")
        if self._framing is Framing.CHUNKED:
            return chunk(data)
        if self._framing is Framing.NO_BODY:
            return b""
        if self._framing is Framing.LENGTH:
            self._remaining -= len(data)
            if self._remaining < 0:
                raise RuntimeError("a response is longer than its content-length")
        return data

    @property
    def _may_go_direct(self) -> bool:
        return self._h1.link.direct and self.http_version == "1.1"

    async def _send(self, framed: bytes) -> None:
        data, self._held = self._held + framed, b""
        self.can_write_nowait = False
        if self._writing:
            await self._h1.lost()  # half of something is on the wire: nothing can follow it
        while data:
            self._writing = True
            await self._h1.write(data)
            self._writing = False
            data, self._held = self._held, b""
        self.can_write_nowait = self._may_go_direct and not self.ended

    def write_nowait(self, data: bytes) -> bytes:
        if self.ended or not self.started:
            raise SinkClosed("the response is over")
        if self._framing is Framing.CHUNKED and data:  # as `_framed` does, without the calls
            framed = b"%x\r\n%b\r\n" % (len(data), data)
        else:
            framed = self._framed(data)
        if self._held:
            framed = self._held + framed
        if not self.can_write_nowait:
            self._held = framed
            return framed
        try:
            sent = self._send_raw(framed)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._writing = True
            self.can_write_nowait = False
            self._h1.link.expire("the client is gone")
            raise SinkClosed("the client is gone") from error
        self._held = framed[sent:]
        self.can_write_nowait = sent == len(framed)
        return self._held
