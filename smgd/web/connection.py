"""One connection: its life, its deadlines and its end.

All of a connection runs in one cancel scope. Whatever ends it early (an idle timeout, a client that
hung up, a stop) cancels that scope, synchronously and from anywhere; the connection's own task then
closes the socket. So nobody else ever closes a connection, except `abort`, when its time is over.

There is no timer per request: `expires_at` is an attribute that a sweeper looks at.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import structlog
import trio

from smgd.web.hangups import HangupWatch
from smgd.web.hyper import (
    Closed,
    Config,
    Event,
    RawData,
    TaskGroup,
    TCPServer,
    Updated,
    WorkerContext,
    parse_socket_addr,
)
from smgd.web.protocols import Peers, Protocols
from smgd.web.settings import ServerSettings
from smgd.web.streams import RECEIVE_STEP, DeadlineStream, close_politely
from smgd.web.turns import Turnstile

log = structlog.get_logger("smgd.web")

# Busy: our side of the connection is being closed at this very moment.
_CANNOT_SEND = (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError)

TlsStream = trio.SSLStream[DeadlineStream]


@dataclass(slots=True)
class Shared:
    """What all connections of a server share."""

    app: Any
    settings: ServerSettings
    config: Config
    hangups: HangupWatch
    protocols: Callable[..., Protocols]
    turns: Turnstile = field(default_factory=Turnstile)
    context: WorkerContext = field(default_factory=lambda: WorkerContext(None))
    connections: set[Connection] = field(default_factory=set)
    _empty: trio.Event = field(default_factory=trio.Event)

    def remove(self, connection: Connection) -> None:
        """Forget a connection that has ended."""
        self.connections.discard(connection)
        if not self.connections:
            self._empty.set()

    async def all_closed(self) -> None:
        """Wait until no connection is left."""
        self._empty = trio.Event()
        if self.connections:
            await self._empty.wait()


class Connection(TCPServer):
    """A client's connection, whatever protocol it speaks.

    `busy` is true from the head of a request to the end of its answer; `expires_at` is on trio's
    clock, in seconds.
    """

    def __init__(self, shared: Shared, lowest: DeadlineStream, tls: TlsStream | None) -> None:
        # Hypercorn's annotation knows only TLS; it takes any stream.
        stream = cast("Any", tls or lowest)
        super().__init__(shared.app, shared.config, shared.context, {}, stream)
        self.raw = lowest.raw
        self.direct = tls is None
        self.busy = False
        self.expires_at = math.inf
        self.protocol: Protocols
        self._shared = shared
        self._lowest = lowest
        self._tls = tls
        self._scope = trio.CancelScope()
        self._half_closed = False
        self._in_head = False
        self._ending = False
        self._idle_again = trio.Event()

    async def run(self) -> None:
        """Serve the connection to its end. Raises what is a fault of ours."""
        shared = self._shared
        key = shared.hangups.add(self._lowest.raw, self)
        shared.connections.add(self)
        try:
            with self._scope:
                await self._serve()
        except* (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as lost:
            log.debug("connection lost", reason=str(lost.exceptions[0]))
        finally:
            shared.hangups.remove(key, self)
            await close_politely(self.stream)
            shared.remove(self)

    # ------------------------------------------------------------- called from outside, never wait

    def hung_up(self, gone: bool) -> None:
        """The client closed its sending side (`gone`: all of it): what runs may end soon."""
        self._half_closed = True
        if self.busy:
            self._end_soon(0 if gone else self._shared.settings.half_close_grace)

    def expire(self, reason: str) -> None:
        """End the connection."""
        self._scope.cancel(reason=reason)

    def abort(self) -> None:
        """End the connection at once, even in the middle of a shielded send."""
        self._lowest.abort()
        self._scope.cancel(reason="aborted")

    # ------------------------------------------------------------------------------------- its life

    async def _serve(self) -> None:
        alpn = await self._handshake()
        if alpn is None:
            return
        raw = self.raw
        peers = Peers(
            scheme="http" if self.direct else "https",
            client=parse_socket_addr(raw.family, raw.getpeername()),
            server=parse_socket_addr(raw.family, raw.getsockname()),
        )
        async with TaskGroup() as group:
            self.protocol = self._shared.protocols(
                self.app, self.config, self.context, group, self, peers, alpn
            )
            self.request_ended()
            await self.protocol.initiate()
            try:
                await self._read_data()
            finally:
                with trio.CancelScope(shield=True):
                    await self.protocol.protocol.gone()

    async def _handshake(self) -> str | None:
        """Return the protocol that TLS agreed on, or None if it could not agree."""
        if self._tls is None:
            return "http/1.1"
        seconds = self._shared.settings.header_timeout
        try:
            with trio.fail_after(seconds):
                await self._tls.do_handshake()
        except trio.BrokenResourceError as error:
            # Among others of who speaks plain HTTP here: OpenSSL says so.
            log.debug("TLS handshake failed", reason=str(error.__cause__ or error))
            return None
        except trio.TooSlowError:
            log.debug("TLS handshake failed", reason=f"it took longer than {seconds:g} s")
            return None
        return self._tls.selected_alpn_protocol() or "http/1.1"

    async def _read_data(self) -> None:
        while True:
            data = await self.receive()
            if not data:
                await self._finish_answering()
                break
            if self._ending:
                continue
            self._expect_head()
            await self.protocol.handle(RawData(data))
            if self.protocol.protocol.in_head and not self._ending:
                self._expect_head()  # it came together with a request that is answered now
        await self.protocol.handle(Closed())

    def _expect_head(self) -> None:
        """Limit how long a request's head takes, from its first byte."""
        if not self.busy and not self._in_head and self.protocol.protocol.idle_is_silent:
            self._in_head = True
            self.expires_at = trio.current_time() + self._shared.settings.header_timeout

    async def _finish_answering(self) -> None:
        """After the client's end of file, let a running request come to its end, but not long."""
        self.hung_up(gone=False)
        if self.busy:
            self._idle_again = trio.Event()
            await self._idle_again.wait()

    async def protocol_send(self, event: Event) -> None:
        """Take what the protocol says: bytes for the client, a change of state, or the end.

        Raises `trio.BrokenResourceError` if the client is gone; the connection ends then.
        """
        if isinstance(event, RawData):
            await self._send(event.data)
        elif isinstance(event, Updated):
            self.request_ended() if event.idle else self.request_started()
        elif isinstance(event, Closed):
            await self._hang_up()

    async def _send(self, data: bytes) -> None:
        """Send bytes for Hypercorn: not together with others, nor half of them for a cancel.

        Nor none: they are of all streams of HTTP/2, and the connection could not go on without.
        """
        if self._scope.cancel_called:  # it does not go on: no last words of a handler that is cut
            await trio.lowlevel.checkpoint_if_cancelled()
        with trio.CancelScope(shield=True):
            async with self.send_lock:
                try:
                    await self.stream.send_all(data)
                except _CANNOT_SEND as error:
                    self.expire("the client is gone")
                    raise trio.BrokenResourceError("the client is gone") from error

    # ------------------------------------------------------------------------- for the protocol

    @property
    def stopping(self) -> bool:
        """Whether no further request is to be taken."""
        return bool(self.context.terminated.is_set())

    async def receive(self) -> bytes:
        """Wait for bytes; none when the client sends no more or is gone."""
        try:
            return bytes(await self.stream.receive_some(RECEIVE_STEP))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return b""

    async def send_all(self, data: memoryview) -> None:
        """Send bytes within the write deadline. Raises `trio.BrokenResourceError`."""
        await self.stream.send_all(data)

    def request_started(self) -> None:
        """Hear that the head of a request is complete."""
        self.busy = True
        self._in_head = False
        self.expires_at = math.inf
        if self._half_closed:
            self._end_soon(self._shared.settings.half_close_grace)

    def request_ended(self) -> None:
        """Hear that a request was answered and another one may come."""
        self.busy = False
        self._idle_again.set()
        self.expires_at = trio.current_time() + self._shared.settings.keep_alive_timeout
        if self.stopping:
            self.expire("the server stops")

    def _end_soon(self, seconds: float) -> None:
        self._scope.deadline = min(self._scope.deadline, trio.current_time() + seconds)

    async def _hang_up(self) -> None:
        """End from our side: nothing more will be sent.

        Closing a socket that has unread input resets the connection, and the client may lose the
        answer to the reset. So what it still sends is read and thrown away, for a while.
        """
        if self._ending:
            return  # h11 says so twice when there is garbage behind the last request
        self._ending = True
        if self._tls is None:
            # Busy: a response is being sent to a client that broke the protocol meanwhile.
            with suppress(
                trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError
            ):
                await self._lowest.send_eof()
        self.busy = False
        self._idle_again.set()
        if self.protocol.protocol.unread or self._input_waits():
            self.expires_at = trio.current_time() + self._shared.settings.linger_timeout
            await self.protocol.handle(Closed())
        else:
            await self.protocol.handle(Closed())
            self.expire("complete")

    def _input_waits(self) -> bool:
        try:
            return self.raw.recv(1, socket.MSG_PEEK) != b""
        except OSError:
            return False


def sweep(connections: set[Connection]) -> None:
    """End the connections whose time is over."""
    now = trio.current_time()
    for connection in connections:
        if connection.expires_at < now:
            connection.expire("timeout")


def close_idle(connections: set[Connection]) -> None:
    """End the connections that wait for a request."""
    for connection in connections:
        if not connection.busy:
            connection.expire("the server stops")
