"""The log's two forms, its live level, and that no line is lost or raises."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import structlog

from smgd import log as log_module
from smgd.config import LogConfig
from smgd.log import LEVELS, configure, set_level
from tests.support import PATIENCE


class Stream(io.TextIOWrapper):
    """A text stream in memory that may call itself a terminal."""

    def __init__(self, *, terminal: bool = False) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8")
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal

    def text(self) -> str:
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue().decode()

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text().splitlines()]


@pytest.fixture(autouse=True)
def _leave_no_trace() -> Iterator[None]:
    yield
    configure(stream=sys.__stderr__)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    logging.getLogger().removeHandler(log_module._from_libraries)


@pytest.fixture
def stream() -> Stream:
    stream = Stream()
    configure(stream=stream)
    return stream


def test_a_line_of_json(stream: Stream) -> None:
    structlog.get_logger("smgd.request").info("request", status=200, ttft_ms=1.5, error=None)
    (line,) = stream.lines()
    assert datetime.fromisoformat(line.pop("timestamp")).utcoffset() is not None
    assert line == {
        "level": "info",
        "logger": "smgd.request",
        "event": "request",
        "status": 200,
        "ttft_ms": 1.5,
        "error": None,
    }
    assert stream.text().startswith('{"timestamp":"20')
    assert "Z" in stream.text()


def test_text_on_a_terminal() -> None:
    stream = Stream(terminal=True)
    configure(stream=stream)
    structlog.get_logger("smgd").warning("slow engine", worker="w0")
    assert "\x1b[" in stream.text()
    assert "slow engine" in stream.text()


@pytest.mark.parametrize("terminal", [True, False])
def test_the_form_can_be_fixed(terminal: bool) -> None:
    stream = Stream(terminal=terminal)
    configure(json=True, stream=stream)
    structlog.get_logger("smgd").info("one")
    assert stream.lines()[0]["event"] == "one"
    configure(json=False, stream=stream)
    structlog.get_logger("smgd").info("two")
    assert "two" in stream.text().splitlines()[1]
    with pytest.raises(json.JSONDecodeError):
        stream.lines()


def test_no_colors_elsewhere_or_where_they_are_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    for stream in (Stream(), Stream(terminal=True)):
        configure(json=False, stream=stream)
        structlog.get_logger("smgd").info("plain", n=1)
        assert "[info     ] plain" in stream.text()
        assert "\x1b" not in stream.text()


def test_an_exception_is_in_both_forms(stream: Stream) -> None:
    error = ExceptionGroup("two", [ValueError("bad"), KeyError("worse")])
    structlog.get_logger("smgd").error("crashed", exc_info=error)
    (line,) = stream.lines()
    assert "ValueError: bad" in line["exception"]
    configure(json=False, stream=stream)
    structlog.get_logger("smgd").error("crashed", exc_info=error)
    assert stream.text().count("KeyError: 'worse'") == 2


def test_the_exception_that_is_handled_is_logged(stream: Stream) -> None:
    try:
        int("x")
    except ValueError:
        structlog.get_logger("smgd").exception("crashed")
    (line,) = stream.lines()
    assert line["level"] == "error"
    assert line["exception"].startswith("Traceback")
    assert "invalid literal" in line["exception"]


def test_the_level_changes_under_loggers_in_use(stream: Stream) -> None:
    cached = structlog.get_logger("smgd")
    bound = cached.bind(worker="w0")
    bound.debug("no")
    set_level("debug")
    bound.debug("yes")
    cached.debug("yes")
    set_level("error")
    bound.warning("no")
    bound.error("yes")
    assert [line["event"] for line in stream.lines()] == ["yes"] * 3


def test_loggers_in_use_follow_a_new_output(stream: Stream) -> None:
    log = structlog.get_logger("smgd").bind(worker="w0")
    log.info("one")
    other = Stream(terminal=True)
    configure(stream=other)
    log.info("two")
    assert [line["event"] for line in stream.lines()] == ["one"]
    assert "two" in other.text()


def test_levels_are_those_of_the_configuration() -> None:
    annotation = msgspec.structs.fields(LogConfig)[0].type
    assert set(get_args(get_args(annotation)[0])) == set(LEVELS)
    with pytest.raises(KeyError):
        set_level("loud")


def test_what_a_task_binds_is_in_its_lines(stream: Stream) -> None:
    structlog.contextvars.bind_contextvars(worker="w0")
    structlog.get_logger("smgd").info("ready")
    assert stream.lines()[0]["worker"] == "w0"


class Odd:
    """A value that JSON does not know."""

    def __repr__(self) -> str:
        return "<odd>"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (Odd(), "<odd>"),
        (b"\xff", "/w=="),
        (float("nan"), None),
        (1 << 80, 1 << 80),
        ("caf\udce9", r"'caf\udce9'"),
        ({(1, 2): 3}, {"(1, 2)": 3}),
        ("two\nlines", "two\nlines"),
    ],
)
def test_no_value_loses_the_line(stream: Stream, value: object, shown: object) -> None:
    structlog.get_logger("smgd").info("odd", value=value)
    (line,) = stream.lines()
    assert line["value"] == shown
    assert line["event"] in ("odd", "'odd'")
    assert line["timestamp"].startswith("20")


def test_lone_surrogates_are_written_as_text_too() -> None:
    stream = Stream(terminal=True)
    configure(stream=stream)
    structlog.get_logger("smgd").info("caf\udce9")
    assert r"caf\udce9" in stream.text()


def test_a_log_that_cannot_be_written_stops_nobody(stream: Stream) -> None:
    log = structlog.get_logger("smgd")
    log.info("one")
    stream.close()
    log.info("two")

    with Path("/dev/full").open("w") as full:
        configure(stream=full)
        log.info("three")


class Pipe:
    """A pipe for the log; `read` returns what is in it."""

    def __init__(self) -> None:
        self.reader, writer = os.pipe()
        os.set_blocking(self.reader, False)
        self.stream = os.fdopen(writer, "w")

    def read(self) -> str:
        data = b""
        with contextlib.suppress(BlockingIOError):
            while more := os.read(self.reader, 65536):
                data += more
        return data.decode()

    def close(self) -> None:
        os.close(self.reader)
        self.stream.close()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


@pytest.mark.parametrize("size", [10, 3000, 5000, 20_000])
def test_a_reader_that_stalls_stops_nobody_and_hears_what_it_has_missed(
    pipe: Pipe, size: int
) -> None:
    configure(stream=pipe.stream)
    log = structlog.get_logger("smgd")
    written = 0
    while not log_module.lost_lines():
        log.info("stalled", text="x" * size)
        written += 1
    for _ in range(4):
        log.info("nobody reads")
    assert log_module.lost_lines() == 5
    before = pipe.read().splitlines()
    whole = [line for line in before if line.endswith("}")]
    assert len(whole) == written - 1
    assert [json.loads(line)["event"] for line in whole] == ["stalled"] * len(whole)
    log.info("read again")
    told, again = [json.loads(line) for line in pipe.read().splitlines() if line]
    assert (told["event"], told["level"], told["count"]) == ("log lines lost", "warning", 5)
    assert again["event"] == "read again"
    log.info("and again")
    assert len(pipe.read().splitlines()) == 1


def test_a_reader_that_is_gone_stops_nobody(pipe: Pipe) -> None:
    configure(stream=pipe.stream)
    os.close(pipe.reader)
    for _ in range(3):
        structlog.get_logger("smgd").info("one")
    assert log_module.lost_lines() == 3
    pipe.reader = os.open("/dev/null", os.O_RDONLY)


@pytest.mark.parametrize("size", [10, 300, 3000])
def test_a_terminal_that_nobody_reads_stops_nobody(size: int) -> None:
    reader, writer = os.openpty()
    with os.fdopen(writer, "w") as terminal:
        configure(json=True, stream=terminal)
        log = structlog.get_logger("smgd")
        while log_module.lost_lines() < 3:
            log.info("stalled", text="x" * size)
        os.set_blocking(reader, False)
        read, events = b"", list[str]()
        deadline = time.monotonic() + PATIENCE
        while "read again" not in events:  # the kernel moves what is written when it likes
            assert time.monotonic() < deadline
            with contextlib.suppress(BlockingIOError):
                read += os.read(reader, 65536)
            log.info("read again")
            whole = re.findall(rb"^{.*}(?=\r\n)", read, re.MULTILINE)
            events = [json.loads(line)["event"] for line in whole]
        assert events[events.index("log lines lost") :][:2] == ["log lines lost", "read again"]
        configure(stream=sys.__stderr__)
    os.close(reader)


def test_without_an_output_the_daemon_runs_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)  # as where it was closed
    configure()
    structlog.get_logger("smgd").info("nobody hears it")


CONTROLS = "a\x1b[31mb\x07\nc\r\x7f\x9b\u2028"
SHOWN = r"a\x1b[31mb\x07\nc\r\x7f\x9b\u2028"


def test_what_a_client_has_chosen_cannot_command_a_terminal_or_begin_a_line() -> None:
    stream = Stream()
    configure(json=False, stream=stream)
    structlog.get_logger("smgd").info(CONTROLS, path=CONTROLS, other=[CONTROLS])
    text = stream.text()
    assert text.count("\n") == 1
    assert text.isprintable() or text[:-1].isprintable()
    assert text.count(SHOWN) >= 2


@pytest.mark.parametrize("json_lines", [True, False])
def test_the_journal_is_told_the_level_of_every_line(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch, json_lines: bool
) -> None:
    status = os.fstat(pipe.stream.fileno())
    monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
    configure("debug", json_lines, pipe.stream)
    log = structlog.get_logger("smgd")
    for method, number in (("debug", 7), ("info", 6), ("warning", 4), ("error", 3)):
        getattr(log, method)("hello")
        (line,) = pipe.read().splitlines()
        assert line.startswith(f"<{number}>")
    log.error("failed", exc_info=ValueError("bad"))
    assert all(line.startswith("<3>") for line in pipe.read().splitlines())


def test_another_output_than_the_journal_has_no_priorities(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where smgd's output is a pipe, and the journal that of the shell around it."""
    monkeypatch.setenv("JOURNAL_STREAM", "8:12345")
    configure(stream=pipe.stream)
    structlog.get_logger("smgd").info("hello")
    assert pipe.read().startswith("{")


def test_libraries_are_heard_from_warnings_up(stream: Stream) -> None:
    library = logging.getLogger("hypercorn.error")
    library.info("no")
    library.warning("%d connections", 3)
    library.error("failed", exc_info=ValueError("bad"))
    first, second = stream.lines()
    assert (first["logger"], first["level"], first["event"]) == (
        "hypercorn.error",
        "warning",
        "3 connections",
    )
    assert second["level"] == "error"
    assert "ValueError: bad" in second["exception"]


def test_libraries_are_heard_once_however_often_it_is_configured(stream: Stream) -> None:
    configure(stream=stream)
    logging.getLogger("x").warning("once")
    assert len(stream.lines()) == 1


def test_a_library_that_formats_wrongly_is_still_heard(stream: Stream) -> None:
    record = logging.LogRecord("x", logging.WARNING, "x.py", 1, "%d connections", ("many",), None)
    log_module._from_libraries.handle(record)
    assert stream.lines()[0]["event"] == "%d connections ('many',)"
