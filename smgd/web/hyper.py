"""Hypercorn as smgd embeds it: what is used of it, its configuration, and a check of its version.

Hypercorn has no public interface below `serve`, so what is used here is its inside; nothing is
assigned into its modules, and no other module of ours imports it (what it does wrong is mended in
`protocols.py`, by subclassing). All that is relied upon is listed in `_SEAMS` and `_SIGNATURES`,
and checked at start:

- `H11Protocol`, `H2Protocol`: `handle` takes `RawData` and `Closed`; `send` is given `RawData`,
  `Closed` and `Updated(idle)`, and may raise `trio.BrokenResourceError`; `stream_send` takes what a
  stream says, at last `EndBody` and `StreamClosed`.
- `StreamBuffer`: what HTTP/2 has not sent of a stream.
- `TCPServer`, `ProtocolWrapper`: a connection, and which protocol it speaks; of the former only the
  attributes and `send_lock`, which keeps sends apart, of the latter `initiate`.
- `TaskGroup`, `WorkerContext`: a nursery for each connection; `terminated` makes protocols close.
- `Config`: the attributes that `make_config` sets.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator
from importlib.metadata import version
from typing import Any

import structlog

from smgd.errors import ConfigError
from smgd.web.settings import ServerSettings

KNOWN_VERSION = "0.18."


def unknown_hypercorn(detail: str = "") -> ConfigError:
    """Return the error for a Hypercorn whose inside we do not know."""
    return ConfigError(
        f"smgd's HTTP server is built on Hypercorn {KNOWN_VERSION}x, but {version('hypercorn')}"
        f"{detail} is installed; install 'hypercorn>=0.18,<0.19'"
    )


try:
    from hypercorn.config import Config
    from hypercorn.events import Closed, Event, RawData, Updated
    from hypercorn.logging import Logger
    from hypercorn.protocol import ProtocolWrapper
    from hypercorn.protocol.events import EndBody, StreamClosed
    from hypercorn.protocol.h2 import H2Protocol, StreamBuffer
    from hypercorn.protocol.h11 import H2ProtocolAssumedError as Http2Assumed
    from hypercorn.protocol.h11 import H11Protocol
    from hypercorn.trio.task_group import TaskGroup
    from hypercorn.trio.tcp_server import TCPServer
    from hypercorn.trio.worker_context import WorkerContext
    from hypercorn.typing import ConnectionState
    from hypercorn.utils import parse_socket_addr
except ImportError as error:
    raise unknown_hypercorn(f" ({error})") from error

__all__ = [
    "AsgiApp",
    "Closed",
    "Config",
    "ConnectionState",
    "EndBody",
    "Event",
    "H2Protocol",
    "H11Protocol",
    "Http2Assumed",
    "Message",
    "ProtocolWrapper",
    "RawData",
    "Receive",
    "Scope",
    "Send",
    "StreamClosed",
    "TCPServer",
    "TaskGroup",
    "Updated",
    "WorkerContext",
    "check_hypercorn",
    "make_config",
    "parse_socket_addr",
]

log = structlog.get_logger("smgd.web")

Message = dict[str, Any]
Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Any, Any, Any], Awaitable[None]]


def check_hypercorn() -> None:
    """Raise `ConfigError` if the installed Hypercorn is not one whose inside we know."""
    missing = [name for name, known in _seams() if not known]
    if missing or not version("hypercorn").startswith(KNOWN_VERSION):
        raise unknown_hypercorn(f" (without {', '.join(missing)})" if missing else "")


# What we override or call, by class: methods, then what `__init__` assigns.
_SEAMS = {
    H11Protocol: (
        "initiate handle _create_stream _check_protocol _send_h11_event _send_error_response",
        "app client connection send stream",
    ),
    H2Protocol: (
        "initiate handle stream_send _handle_events _send_data _window_updated _flush",
        "app client closed connection priority stream_buffers streams",
    ),
    StreamBuffer: ("close complete", "buffer"),
    TCPServer: ("run protocol_send _read_data", "app config context send_lock stream"),
    ProtocolWrapper: ("initiate handle", "protocol"),
    TaskGroup: ("__aenter__ __aexit__ spawn spawn_app", ""),
    WorkerContext: ("event_class", "terminated"),
    Http2Assumed: ("", "data"),
    Logger: ("access exception", ""),
}
# What is called or constructed, and of events also what is read.
_SIGNATURES: dict[Callable[..., Any], str] = {
    H11Protocol: "app config context task_group connection_state ssl client server send",
    H2Protocol: "app config context task_group connection_state ssl client server send",
    TCPServer: "app config context state stream",
    TaskGroup: "",
    WorkerContext: "max_requests",
    Http2Assumed: "data",
    RawData: "data address",
    Closed: "",
    Updated: "idle",
    EndBody: "stream_id",
    StreamClosed: "stream_id",
    parse_socket_addr: "family address",
}


def _seams() -> Iterator[tuple[str, bool]]:
    """Give each thing of Hypercorn's that we rely on, and whether it is there."""
    for owner, (methods, attributes) in _SEAMS.items():
        code = getattr(owner.__init__, "__code__", None)  # type: ignore[misc]
        assigned = code.co_names if code else ()
        yield from ((f"{owner.__name__}.{n}", hasattr(owner, n)) for n in methods.split())
        yield from ((f"{owner.__name__}.{n}", n in assigned) for n in attributes.split())
    for called, parameters in _SIGNATURES.items():
        known = list(inspect.signature(called).parameters) == parameters.split()
        yield f"{called.__name__}({', '.join(parameters.split())})", known
    terminated = getattr(WorkerContext, "event_class", None)
    yield from (
        (f"WorkerContext.terminated.{n}", hasattr(terminated, n)) for n in ("set", "is_set")
    )
    # A dict by another name, which we make and Hypercorn hands on.
    yield "ConnectionState", getattr(ConnectionState, "__supertype__", None) is not None
    yield from ((f"Config.{name}", hasattr(Config, name)) for name in _CONFIG)


class HypercornLog(Logger):
    """Hypercorn's log lines as ours. Requests are logged by the gate, so no access log here."""

    async def access(self, *args: Any) -> None:
        return

    async def exception(self, message: str, *args: Any, **kwargs: Any) -> None:
        log.exception("http server", reason=message)


def make_config(settings: ServerSettings) -> Config:
    """Return Hypercorn's configuration: its defaults are for web sites, not for long streams."""
    config = Config()
    for name, value in _CONFIG.items():
        setattr(config, name, value)
    config.h11_max_incomplete_size = settings.max_header_bytes
    config.h2_max_header_list_size = settings.max_header_bytes
    return config


_CONFIG = {
    "errorlog": None,
    "accesslog": None,
    "logger_class": HypercornLog,
    "include_server_header": False,
    # Of `settings`, see below.
    "h11_max_incomplete_size": 0,
    "h2_max_header_list_size": 0,
    # A balancer's connection lives for days; closing it after 1000 requests costs a retry.
    "keep_alive_max_requests": 2**63,
    # One connection of a proxy may carry all our streams.
    "h2_max_concurrent_streams": 1000,
    # Messages of an unread body, 64 KiB each, before the client's socket is left to fill up.
    "max_app_queue_size": 4,
    # Idle connections and slow heads are ended by our sweeper (connection.py), for all paths.
    "read_timeout": None,
}
