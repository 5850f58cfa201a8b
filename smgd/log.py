"""The log: one line an event, text on a terminal and JSON elsewhere, on standard error.

The supervisor (systemd, a container runtime) does the rest: no files, no rotation, no sockets here.
systemd's journal is told the level of a line by a prefix that it takes off (sd-daemon(3)).
Three things are ours beside structlog's usual chain:

- `set_level` works on a running daemon. The filtering methods sit on one class of ours, `Logger`,
  that every bound logger is an instance of; changing the level exchanges the methods of the class,
  so a filtered line still costs one call of an empty function.
- `configure` may be called again. Loggers are cached on first use, but what they share (processors,
  output) is changed in place, so a cached one follows.
- What libraries say through `logging`, from warnings up, becomes lines of the same form.

A line costs a few microseconds: one for each request and each change of a worker, none per token.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import MutableMapping
from datetime import UTC, datetime
from io import BytesIO, TextIOWrapper
from typing import Any, Final, Literal, TextIO, cast

import msgspec
import structlog
from structlog.typing import EventDict, Processor

from smgd.output import Output, is_journal

LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

# syslog's numbers by structlog's names.
_PRIORITIES = {"debug": b"<7>", "info": b"<6>", "warning": b"<4>", "error": b"<3>"}


class Logger(structlog.make_filtering_bound_logger(logging.INFO)):  # type: ignore[misc]
    """The class of all bound loggers; `set_level` exchanges its methods."""


def configure(
    level: str = "info", json: Literal["auto"] | bool = "auto", stream: TextIO | None = None
) -> None:
    """Send all log lines to `stream` (default: standard error), from `level` up.

    `json` is True for one JSON object a line, False for text, "auto" for text on a terminal only.
    Raises KeyError for a level that is not in `LEVELS`.
    """
    global _output
    stream = stream or sys.stderr or TextIOWrapper(BytesIO())  # None: it was closed
    terminal = stream.isatty()
    _output.close()
    _output = Output(stream.buffer)
    as_text = terminal if json == "auto" else not json
    *prepare, render = _text_processors(colors=terminal) if as_text else _json_processors()
    if is_journal(stream.buffer, os.environ):
        render = _with_priority(render)
    _processors[:] = [structlog.contextvars.merge_contextvars, _add_origin, *prepare, render]
    structlog.configure(
        processors=_processors,
        wrapper_class=Logger,
        logger_factory=_Sink,
        cache_logger_on_first_use=True,
    )
    set_level(level)
    logging.getLogger().addHandler(_from_libraries)


def set_level(level: str) -> None:
    """Log from `level` up, in every logger that exists; KeyError if it is not in `LEVELS`."""
    global _level
    source = structlog.make_filtering_bound_logger(LEVELS[level])
    _level = level
    for name, method in vars(source).items():
        if not name.startswith("__"):
            setattr(Logger, name, method)


def current_level() -> str:
    """Return the level that was set last."""
    return _level


def lost_lines() -> int:
    """Return how many lines were not written, since `configure`."""
    return _output.lost


_level = "info"
_output = Output(BytesIO())  # until `configure`
_processors: list[Processor] = []


class _Sink:
    """The end of every logger: finished lines to the one output."""

    __slots__ = ("name",)

    def __init__(self, name: str = "smgd") -> None:
        self.name = name

    def msg(self, line: bytes) -> None:
        if lost := _output.newly_lost():
            structlog.get_logger("smgd.log").warning("log lines lost", count=lost)
        _output.write(line)

    debug = info = warning = error = critical = msg


def _add_origin(logger: _Sink, method: str, event: EventDict) -> EventDict:
    """Put time (UTC; ISO 8601 when rendered), level, logger and event before the rest."""
    origin: dict[str, Any] = {
        "timestamp": datetime.now(UTC),
        "level": method,
        "logger": logger.name,
        "event": event.pop("event", ""),
    }
    origin.update(event)
    return origin


def _with_priority(render: Processor) -> Processor:
    """Put a line's priority before it, and before every further line of a traceback."""

    def prioritized(logger: object, method: str, event: EventDict) -> bytes:
        prefix = _PRIORITIES.get(method, b"<3>")
        line = cast("bytes", render(logger, method, event))
        return b"".join([prefix + part for part in line.splitlines(keepends=True)])

    return prioritized


def _json_processors() -> list[Processor]:
    return [structlog.processors.format_exc_info, _render_json]


_encode_json = msgspec.json.Encoder(enc_hook=repr).encode


def _render_json(_logger: object, _method: str, event: MutableMapping[str, Any]) -> bytes:
    try:
        return _encode_json(event) + b"\n"
    except UnicodeEncodeError:  # a lone surrogate, as in a file name: the line has to appear
        origin = {"timestamp": event["timestamp"]}
        return _encode_json({key: repr(value) for key, value in event.items()} | origin) + b"\n"


def _text_processors(*, colors: bool) -> list[Processor]:
    render = structlog.dev.ConsoleRenderer(
        colors=colors and "NO_COLOR" not in os.environ,
        exception_formatter=structlog.dev.plain_traceback,
    )

    def to_bytes(logger: object, method: str, event: EventDict) -> bytes:
        for key, value in event.items():
            if isinstance(value, str):  # others are shown by their repr
                event[key] = _CONTROLS.sub(_escaped, value)
        event["timestamp"] = f"{event['timestamp']:%Y-%m-%dT%H:%M:%S.%fZ}"
        return f"{render(logger, method, event)}\n".encode(errors="backslashreplace")

    return [to_bytes]


# What a terminal obeys, and what begins another line; clients choose some of what is logged.
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def _escaped(found: re.Match[str]) -> str:
    return found.group().encode("unicode_escape").decode()


class _FromLibraries(logging.Handler):
    """Turns records of the standard library's logging into lines of ours."""

    def emit(self, record: logging.LogRecord) -> None:
        log = structlog.get_logger(record.name)
        say = log.error if record.levelno >= logging.ERROR else log.warning
        try:
            message = record.getMessage()
        except (TypeError, ValueError, KeyError):  # arguments that do not fit the library's text
            message = f"{record.msg} {record.args}"
        say(message, exc_info=record.exc_info)


_from_libraries = _FromLibraries(logging.WARNING)
