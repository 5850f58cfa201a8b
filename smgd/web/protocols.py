"""The protocols of a connection that Hypercorn speaks: HTTP/2, and HTTP/1.x on the stock path.

They are Hypercorn's, with faults of theirs mended by subclassing; what of their insides that takes
is listed and checked in `hyper.py`. `Protocols` chooses the one that a connection speaks.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any, Protocol

import h2.events
import h2.exceptions
import h11
import msgspec
import trio
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from smgd.web.h1parse import Refusal, origin_form
from smgd.web.hyper import (
    Closed,
    Config,
    ConnectionState,
    EndBody,
    Event,
    H2Protocol,
    H11Protocol,
    Http2Assumed,
    ProtocolWrapper,
    RawData,
    StreamClosed,
    TaskGroup,
    WorkerContext,
)


class _Requests(h11.Connection):
    """h11's reading of a client, deaf to what has no meaning any more.

    Behind the last request that it is to make, a client may send anything (RFC 9112, 9.6): h11
    takes that for an error, and Hypercorn for one of the request that is being answered. And once
    an answer is on its way, a body that turns bad must not cut it. Before a request there may be
    line breaks (RFC 9112, 2.2), though no more than a head has bytes: the next is h11's to refuse.
    """

    def __init__(self, max_head: int) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size=max_head)
        self._max_breaks = self._breaks = max_head

    def _deaf(self) -> bool:
        return self.their_state is h11.MUST_CLOSE or (
            self.their_state is h11.ERROR and self.our_state is h11.SEND_BODY
        )

    def receive_data(self, data: bytes) -> None:
        if not self._deaf():
            super().receive_data(data)

    def next_event(self) -> Any:
        if self._deaf():
            return h11.NEED_DATA
        if self.their_state is h11.IDLE:
            self._skip_line_breaks()
        else:
            self._breaks = self._max_breaks
        try:
            return super().next_event()
        except h11.RemoteProtocolError:
            if not self._deaf():
                raise
            return h11.NEED_DATA

    def _skip_line_breaks(self) -> None:
        waiting = self.trailing_data[0]
        breaks = min(len(waiting) - len(waiting.lstrip(b"\r\n")), self._breaks)
        self._breaks -= breaks
        self._receive_buffer.maybe_extract_at_most(breaks)


class StockH11(H11Protocol):
    """HTTP/1.x by h11. The head goes with what follows it; of upgrades only HTTP/2's preface."""

    app: Any  # a `GuardedApp`
    idle_is_silent = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.connection = _Requests(self.config.h11_max_incomplete_size)
        self._head = b""

    @property
    def in_head(self) -> bool:
        """Whether a request has begun whose head is not complete."""
        if self.connection.their_state is not h11.IDLE:
            return False
        return self.connection.trailing_data[0].strip(b"\r\n") != b""

    @property
    def unread(self) -> bool:
        """Whether the client may still be sending a request that nobody wants any more."""
        return self.connection.their_state in (h11.SEND_BODY, h11.ERROR)

    async def gone(self) -> None:
        """Do nothing: who sends waits for the socket alone, which has a deadline."""

    async def _send_h11_event(self, event: Any) -> None:
        try:
            data = self.connection.send(event)
        except h11.LocalProtocolError:
            if self.connection.their_state != h11.ERROR:
                raise
            return
        if isinstance(event, h11.Response):
            self._head = data
            return
        data, self._head = self._head + data, b""
        if data:
            await self.send(RawData(data))

    async def _create_stream(self, request: h11.Request) -> None:
        try:
            _check_head(request)
            target = origin_form(request.target, request.method.decode())
        except Refusal as refusal:
            await self._send_error_response(refusal.status)
            await self.send(Closed())
        else:
            await super()._create_stream(_without_upgrade(request, target))

    async def _send_error_response(self, status_code: int) -> None:
        if self.stream is None:  # else it is the body that is malformed
            _tell_refused(self, status_code)
        await super()._send_error_response(status_code)

    async def _check_protocol(self, event: h11.Request) -> None:
        # h2c by upgrade is obsolete (RFC 9113, 3.1) and a way around proxies: answered as HTTP/1.1.
        if event.method == b"PRI" and event.target == b"*" and event.http_version == b"2.0":
            raise Http2Assumed(b"PRI * HTTP/2.0\r\n\r\n" + self.connection.trailing_data[0])


def _check_head(request: h11.Request) -> None:
    """Refuse what h11 reads and we had better not (RFC 9112, 6.1). Raises `Refusal`."""
    names = {name for name, _ in request.headers}
    if request.method == b"CONNECT":
        raise Refusal(405, "CONNECT is for proxies")
    if request.http_version not in (b"1.0", b"1.1"):
        raise Refusal(505, "this version of HTTP is not supported here")
    if b"transfer-encoding" in names and (
        b"content-length" in names or request.http_version == b"1.0"
    ):
        raise Refusal(400, "two ways to tell where the body ends")


def _without_upgrade(request: h11.Request, target: bytes) -> h11.Request:
    """Return a request for path and query alone, which Hypercorn cannot take for a WebSocket's."""
    headers = [(name, value) for name, value in request.headers if name != b"upgrade"]
    return h11.Request(
        method=request.method, target=target, headers=headers, http_version=request.http_version
    )


class StockH2(H2Protocol):
    """HTTP/2, with faults of Hypercorn's mended.

    What a client sends late, to a stream that is answered, and a head that has no path, or none
    that is ASCII, raise in it, which would end the connection and all the other streams on it: such
    data is thrown away, such a stream reset. So is CONNECT, for proxies and for WebSockets, which
    it would begin behind the gate's back. While a client opens no window, its empty reads of a
    stream's buffer wake the writer as if something had been sent, so that the buffer grows without
    end. And of an application that stops in the middle of its answer (which is how a client that
    takes nothing is cut) it tells the client nothing, who then waits for ever, in one of its
    streams. The last message of an answer waits for a client to take it, also for one that is gone:
    see `gone`.
    """

    app: Any  # a `GuardedApp`

    unread = False
    idle_is_silent = False  # pings and settings come between requests
    in_head = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # What is not offered, clients do not ask for.
        del self.connection.local_settings[SettingCodes.ENABLE_CONNECT_PROTOCOL]

    async def stream_send(self, event: Any) -> None:
        if isinstance(event, StreamClosed):
            await self._reset_unfinished(event.stream_id)
        await super().stream_send(event)
        if isinstance(event, EndBody) and (self.closed or event.stream_id not in self.streams):
            raise trio.BrokenResourceError("the client has left, or reset the stream")

    async def gone(self) -> None:
        """Have nobody wait any longer for the client to take data."""
        self.closed = True
        for buffer in list(self.stream_buffers.values()):
            await buffer.close()

    async def _reset_unfinished(self, stream_id: int) -> None:
        """Reset a stream of which something is missing, and forget the rest of it."""
        buffer = self.stream_buffers.get(stream_id)
        if buffer is None or buffer.complete:  # complete: the writer is about to say so
            return
        with suppress(h2.exceptions.ProtocolError):  # the client has done it, or is gone
            self.connection.reset_stream(stream_id, ErrorCodes.CANCEL)
        await buffer.close()
        await self._window_updated(stream_id)  # the writer finds the stream closed, and drops it
        await self._flush()

    async def _send_data(self, stream_id: int) -> None:
        if self._must_wait(stream_id):
            self.priority.block(stream_id)  # until the window opens
        else:
            await super()._send_data(stream_id)

    def _must_wait(self, stream_id: int) -> bool:
        buffer = self.stream_buffers.get(stream_id)
        if buffer is None or not buffer.buffer:
            return False
        try:
            return self.connection.local_flow_control_window(stream_id) <= 0
        except h2.exceptions.ProtocolError:
            return False  # the stream is closed, which Hypercorn sees for itself

    async def _handle_events(self, events: list[h2.events.Event]) -> None:
        for event in events:
            if isinstance(event, h2.events.DataReceived) and event.stream_id not in self.streams:
                self.connection.acknowledge_received_data(
                    event.flow_controlled_length, event.stream_id
                )
            elif isinstance(event, h2.events.RequestReceived) and not _readable(event.headers):
                _tell_refused(self, 400)
                self.connection.reset_stream(event.stream_id)
            else:
                await super()._handle_events([event])
        await self._flush()


def _tell_refused(protocol: StockH11 | StockH2, status: int) -> None:
    client = protocol.client[0] if protocol.client else ""
    protocol.app.refused(client, status, "Malformed request")


def _readable(headers: Any) -> bool:
    """Tell whether a request is one of HTTP's whose head Hypercorn and Quart can read."""
    found: dict[bytes, bytes] = dict(headers)
    method, path = found.get(b":method", b""), found.get(b":path", b"")
    if method.upper() == b"CONNECT" or not (method.isascii() and path.isascii()):
        return False
    return path.startswith(b"/") or (method, path) == (b"OPTIONS", b"*")


class Link(Protocol):
    """A connection as its protocol sees it."""

    raw: socket.socket
    direct: bool  # whether `raw` may be written: there is no TLS in between

    @property
    def stopping(self) -> bool:
        """Whether the server wants to stop, so that no further request is taken."""
        ...

    async def receive(self) -> bytes:
        """Wait for bytes; none if the client will send no more."""
        ...

    async def send_all(self, data: memoryview) -> None:
        """Send bytes within the write deadline. Raises `trio.BrokenResourceError`."""
        ...

    async def protocol_send(self, event: Event) -> None:
        """Take bytes for the client, a change of state, or the end. Raises
        `trio.BrokenResourceError`."""
        ...

    def request_started(self) -> None:
        """Hear that the head of a request is complete."""
        ...

    def request_ended(self) -> None:
        """Hear that a request was answered and another one may come."""
        ...

    def expire(self, reason: str) -> None:
        """End the connection, cancelling whatever runs on it."""
        ...


class Peers(msgspec.Struct, frozen=True):
    """The two ends of a connection; None for Unix sockets."""

    scheme: str
    client: tuple[str, int] | None
    server: tuple[str, int] | None


class HttpProtocol(Protocol):
    """What a connection needs of the protocol that it speaks."""

    @property
    def in_head(self) -> bool:
        """Whether a request has begun whose head is not complete."""
        ...

    @property
    def unread(self) -> bool:
        """Whether the client may still be sending a request that nobody wants any more."""
        ...

    @property
    def idle_is_silent(self) -> bool:
        """Whether nothing comes between requests, so that the next byte begins one."""
        ...

    async def initiate(self) -> None:
        """Begin to speak."""
        ...

    async def handle(self, event: Event) -> None:
        """Take bytes, or the end."""
        ...

    async def gone(self) -> None:
        """Hear, with all tasks cancelled, that nothing more is sent: none may wait for that."""
        ...


class Protocols(ProtocolWrapper):
    """Which protocol speaks on a connection: chosen by ALPN, changed by HTTP/2's preface."""

    protocol: HttpProtocol  # type: ignore[assignment]  # Hypercorn knows only its own

    def __init__(
        self,
        app: Any,
        config: Config,
        context: WorkerContext,
        group: TaskGroup,
        link: Link,
        peers: Peers,
        alpn: str,
    ) -> None:
        self.link = link
        self.peers = peers
        self._arguments = (
            app,
            config,
            context,
            group,
            ConnectionState({}),
            peers.scheme == "https",
            peers.client,
            peers.server,
            link.protocol_send,
        )
        self.protocol = StockH2(*self._arguments) if alpn == "h2" else self.http1()

    def http1(self) -> HttpProtocol:
        """Return a protocol for HTTP/1.x."""
        return StockH11(*self._arguments)

    async def handle(self, event: Event) -> None:
        """Take bytes, or the end."""
        try:
            await self.protocol.handle(event)
        except Http2Assumed as error:
            self.protocol = StockH2(*self._arguments)
            self.link.request_ended()  # the preface was none
            await self.protocol.initiate()
            await self.protocol.handle(RawData(error.data))
