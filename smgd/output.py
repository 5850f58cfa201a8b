"""Where log lines go: a stream that is written by the event loop, and so must never wait.

A pipe, a terminal or a socket takes nothing more once its reader has stalled, and a write that
waits for it would stop every request of the daemon. So these are asked for room before each write,
a microsecond; a line that finds none is lost and counted. A plain file is not asked.

A pipe with room takes `PIPE_BUF` bytes without waiting, so longer lines are written in pieces. A
terminal may have less room than that: we open it anew, for ourselves and so as not to wait for it.
"""

from __future__ import annotations

import os
import select
import stat
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import BinaryIO

PIPE_BUF = select.PIPE_BUF


class Output:
    """One stream for the lines of all loggers. `lost` lines were not written, in all."""

    def __init__(self, stream: BinaryIO) -> None:
        self.lost = 0
        self._failing = False  # the last line could not be written at all
        self._stream = stream
        self._lock = threading.Lock()  # a poll object is for one thread, and lines do not mix
        self._room: select.poll | None = None
        self._torn = False  # the last line that was written lacks its end
        self._told = 0
        self._fd = _descriptor(stream)
        self._own = None if self._fd is None else _own_terminal(self._fd)
        if self._own is not None:
            self._fd = self._own
        if self._fd is not None and not stat.S_ISREG(os.fstat(self._fd).st_mode):
            self._room = select.poll()
            self._room.register(self._fd, select.POLLOUT)

    def write(self, line: bytes) -> None:
        """Write a line if there is room for it, else count it.

        That a line cannot be written at all (its reader is gone, the disk is full, the stream is
        closed) is counted as well, and must not end the request that had something to say.
        """
        with self._lock:
            try:
                if self._room is None or self._fd is None:
                    self._stream.write(line)
                    self._stream.flush()
                else:
                    self._write_pieces(self._room, self._fd, line)
            except (OSError, ValueError):
                self.lost += 1
                self._failing = True
            else:
                self._failing = False

    def newly_lost(self) -> int:
        """Return how many lines were lost since the last time, once there is room to say it."""
        with self._lock:
            if self.lost == self._told or self._failing:
                return 0
            if self._room is not None and not self._room.poll(0):
                return 0
            new, self._told = self.lost - self._told, self.lost
            return new

    def _write_pieces(self, room: select.poll, fd: int, line: bytes) -> None:
        if self._torn:
            line = b"\n" + line
        written = 0
        with suppress(BlockingIOError):
            while written < len(line) and room.poll(0):
                written += os.write(fd, line[written : written + PIPE_BUF])
        is_whole = written == len(line)
        self.lost += not is_whole
        self._torn = not is_whole and (self._torn or written > 0)

    def close(self) -> None:
        """Let go of what was opened here."""
        if self._own is not None:
            os.close(self._own)
            self._own = None


def is_journal(stream: BinaryIO, environ: Mapping[str, str]) -> bool:
    """Tell whether a stream leads to systemd's journal, which reads priorities from lines.

    By `JOURNAL_STREAM`, device and inode of what systemd gave us; see systemd.exec(5).
    """
    fd = _descriptor(stream)
    if fd is None:
        return False
    status = os.fstat(fd)
    return environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def _own_terminal(fd: int) -> int | None:
    """Open the terminal of a descriptor, if it is one; others may want theirs to wait."""
    try:
        path = os.ttyname(fd)
        return os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None


def _descriptor(stream: BinaryIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError):  # a stream in memory, or a closed one
        return None
