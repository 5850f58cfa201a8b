"""Hypercorn as smgd embeds it: configuration, fixes by subclassing, and a check of its version.

Hypercorn has no public interface below `serve`, so what is used here is its inside, by name and
with what is relied upon; nothing is assigned into its modules.

- `TCPServer.protocol_send`: sends `RawData` under a lock and a shield, and turns a broken stream
  into `protocol.handle(Closed())`.
- `H11Protocol`, `H2Protocol`: `handle` takes `RawData` and `Closed`; `send` is given `RawData`,
  `Closed` and `Updated(idle)`. Of the first also `connection`, `_create_stream`, `_check_protocol`,
  `_send_h11_event`, `_send_error_response`; of the second `connection`, `streams`,
  `stream_buffers`, `priority`, `_handle_events`, `_send_data`, `_flush`.
- `ProtocolWrapper`: `protocol` is the protocol in use; `handle` switches it to HTTP/2.
- `TaskGroup`, `WorkerContext`: a nursery for each connection; `terminated` makes protocols close.
- `Config`: the attributes that `make_config` sets.
"""

from __future__ import annotations

import inspect
import socket
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any, Protocol

import h2.events
import h2.exceptions
import h11
import msgspec
import structlog
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData
from hypercorn.logging import Logger
from hypercorn.protocol import ProtocolWrapper
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.protocol.h11 import H2ProtocolAssumedError, H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState

from smgd.errors import ConfigError
from smgd.web.settings import ServerSettings

log = structlog.get_logger("smgd.web")

KNOWN_VERSION = "0.18."

Message = dict[str, Any]
Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Any, Any, Any], Awaitable[None]]


def check_hypercorn() -> None:
    """Raise `ConfigError` if the installed Hypercorn is not one whose inside we know."""
    found = version("hypercorn")
    missing = [name for name, known in _seams() if not known]
    if not found.startswith(KNOWN_VERSION) or missing:
        detail = f" (without {', '.join(missing)})" if missing else ""
        raise ConfigError(
            f"smgd's HTTP server is built on Hypercorn {KNOWN_VERSION}x, but {found}{detail} is"
            f" installed; install 'hypercorn>=0.18,<0.19'"
        )


def _seams() -> list[tuple[str, bool]]:
    protocol = ["app", "config", "context", "task_group", "connection_state", "ssl", "client"]
    parameters = list(inspect.signature(H11Protocol.__init__).parameters)[1:]
    return [
        ("TCPServer.protocol_send", inspect.iscoroutinefunction(TCPServer.protocol_send)),
        ("H11Protocol(...)", parameters == [*protocol, "server", "send"]),
        ("H11Protocol._send_h11_event", hasattr(H11Protocol, "_send_h11_event")),
        ("H11Protocol._check_protocol", hasattr(H11Protocol, "_check_protocol")),
        ("H2Protocol._handle_events", hasattr(H2Protocol, "_handle_events")),
        ("H2Protocol._send_data", hasattr(H2Protocol, "_send_data")),
        ("H11Protocol._create_stream", hasattr(H11Protocol, "_create_stream")),
    ]


class HypercornLog(Logger):
    """Hypercorn's log lines as ours. Requests are logged by the gate, so no access log here."""

    async def access(self, *args: Any) -> None:
        return

    async def exception(self, message: str, *args: Any, **kwargs: Any) -> None:
        log.exception("http server", reason=message)


def make_config(settings: ServerSettings) -> Config:
    """Return Hypercorn's configuration: its defaults are for web sites, not for long streams."""
    config = Config()
    config.errorlog = None
    config.accesslog = None
    config.logger_class = HypercornLog
    config.include_server_header = False
    config.h11_max_incomplete_size = settings.max_header_bytes
    config.h2_max_header_list_size = settings.max_header_bytes
    # A balancer's connection lives for days; closing it after 1000 requests costs a retry.
    config.keep_alive_max_requests = 2**63
    # One connection of a proxy may carry all our streams.
    config.h2_max_concurrent_streams = 1000
    # Messages of an unread body, 64 KiB each, before the client's socket is left to fill up.
    config.max_app_queue_size = 4
    # Idle connections and slow heads are ended by our sweeper (connection.py), for all paths.
    config.read_timeout = None
    return config


class StockH11(H11Protocol):
    """HTTP/1.x by h11. The head goes with what follows it; of upgrades only HTTP/2's preface."""

    idle_is_silent = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._head = b""

    @property
    def unread(self) -> bool:
        """Whether the client may still be sending a request that nobody wants any more."""
        return self.connection.their_state in (h11.SEND_BODY, h11.ERROR)

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
        refusal = _refusal(request)
        if refusal is None:
            await super()._create_stream(request)
        else:
            await self._send_error_response(refusal)
            await self.send(Closed())

    async def _check_protocol(self, event: h11.Request) -> None:
        # h2c by upgrade is obsolete (RFC 9113, 3.1) and a way around proxies: answered as HTTP/1.1.
        if event.method == b"PRI" and event.target == b"*" and event.http_version == b"2.0":
            raise H2ProtocolAssumedError(
                b"PRI * HTTP/2.0\r\n\r\n" + self.connection.trailing_data[0]
            )


def _refusal(request: h11.Request) -> int | None:
    """Return the status for a request that h11 reads and we had better not (RFC 9112, 6.1)."""
    names = {name for name, _ in request.headers}
    if request.method == b"CONNECT":
        return 405
    if request.http_version not in (b"1.0", b"1.1"):
        return 505
    if b"transfer-encoding" in names and (
        b"content-length" in names or request.http_version == b"1.0"
    ):
        return 400
    return None


class StockH2(H2Protocol):
    """HTTP/2, with three faults of Hypercorn's mended.

    What a client sends late, to a stream that is answered, and a path that is not ASCII raise in
    it, which would end the connection and all the other streams on it: such data is thrown away,
    such a stream reset. And while a client opens no window, its empty reads of a stream's buffer
    wake the writer as if something had been sent, so that the buffer grows without end.
    """

    unread = False
    idle_is_silent = False  # pings and settings come between requests

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
                self.connection.reset_stream(event.stream_id)
            else:
                await super()._handle_events([event])
        await self._flush()


def _readable(headers: Any) -> bool:
    """Tell whether Hypercorn can decode a request's pseudo-headers; others would raise in it."""
    return all(value.isascii() for name, value in headers if name in (b":method", b":path"))


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
        """Take bytes for the client, a change of state, or the end."""
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


class Protocols(ProtocolWrapper):
    """Which protocol speaks on a connection: chosen by ALPN, changed by HTTP/2's preface."""

    protocol: Any

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

    def http1(self) -> Any:
        """Return a protocol for HTTP/1.x."""
        return StockH11(*self._arguments)

    async def handle(self, event: Event) -> None:
        try:
            await self.protocol.handle(event)
        except H2ProtocolAssumedError as error:
            self.protocol = StockH2(*self._arguments)
            self.link.request_ended()  # the preface was none
            await self.protocol.initiate()
            await self.protocol.handle(RawData(error.data))
