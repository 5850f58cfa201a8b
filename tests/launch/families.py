"""Families of real processes for the tests: found by a word of their command line."""

from __future__ import annotations

import os
import re
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support import PATIENCE


@contextmanager
def marked() -> Iterator[str]:
    """Give a word for command lines; at the end, whoever still has it in its own is killed."""
    mark = f"mark-{uuid.uuid4().hex}"
    try:
        yield mark
    finally:
        for pid in members(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def members(mark: str) -> list[int]:
    """Return the living processes that have a word in their command line."""
    return [pid for pid, line in _command_lines() if mark in line]


def heeds_sigterm(pid: int) -> bool:
    """Tell whether a process lives and does not ignore SIGTERM (yet)."""
    with suppress(FileNotFoundError, ProcessLookupError):
        status = Path(f"/proc/{pid}/status").read_text()
        [ignored] = re.findall(r"^SigIgn:\s+(\w+)$", status, re.MULTILINE)
        return not int(ignored, 16) & 1 << (signal.SIGTERM - 1)
    return False


def _command_lines() -> Iterator[tuple[int, str]]:
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            yield int(file.parent.name), file.read_bytes().decode(errors="replace")


def until(condition: Callable[[], object]) -> None:
    """Wait until something is true; sync."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
