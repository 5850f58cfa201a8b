"""Engines in memory: the test is the process, and says what it prints and how it ends."""

from __future__ import annotations

import math
from pathlib import Path

import trio

from smgd.launch.plan import EngineSpec
from smgd.launch.process import EngineProcess, Found


class MemoryProcess:
    """A process that lives until `end`, or until it is terminated, unless it is stubborn."""

    def __init__(
        self,
        pid: int,
        *,
        stubborn: bool = False,
        log: Path | None = None,
        grace: float = 0.0,
        served: bool = False,
    ) -> None:
        self.pid = pid
        self.log = log
        self.grace = grace
        self.served = served
        self.record_error: OSError | None = None
        self.record_is_removed = False
        self.terminated = 0
        self.closed = False
        self._stubborn = stubborn
        self._status: int | None = None
        self._ended = trio.Event()
        self._output, self._read = trio.open_memory_channel[bytes](math.inf)

    # What the test does.

    def print(self, data: bytes) -> None:
        """Print something."""
        self._output.send_nowait(data)

    @property
    def unread(self) -> int:
        """How many prints have not been read."""
        return self._read.statistics().current_buffer_used

    def end(self, status: int | None, *, output_stays_open: bool = False) -> None:
        """End."""
        self._status = status
        self._ended.set()
        if not output_stays_open:
            self._output.close()

    # What the supervisor sees.

    async def read(self) -> bytes:
        try:
            return await self._read.receive()
        except trio.EndOfChannel:
            return b""

    def note_served(self) -> None:
        self.served = True
        if self.record_error is not None:
            raise self.record_error

    def keep_record(self) -> bool:
        was_removed = self.record_is_removed
        if was_removed and self.record_error is not None:
            raise self.record_error
        self.record_is_removed = False
        return was_removed

    async def wait(self) -> int | None:
        await self._ended.wait()
        return self._status

    def terminate(self) -> None:
        self.terminated += 1
        if not self._stubborn:
            self.end(143)

    def close(self) -> None:
        self.closed = True


class MemoryPrograms:
    """Starts processes in memory, as many as are asked for; the latest is `process`."""

    def __init__(
        self, *, failures: int = 0, stubborn: bool = False, error: Exception | None = None
    ) -> None:
        self.started: list[MemoryProcess] = []
        self.started_at: list[float] = []
        self.left: Found | None = None
        self.find_errors: list[OSError] = []
        self.cleared = 0
        self._failures = failures
        self._error = error or OSError(11, "Resource temporarily unavailable")
        self._stubborn = stubborn

    @property
    def process(self) -> MemoryProcess:
        return self.started[-1]

    def find(self, spec: EngineSpec) -> Found | None:
        if self.find_errors:
            raise self.find_errors.pop()
        return self.left

    async def clear(self, spec: EngineSpec) -> None:
        self.cleared += 1

    def start(self, spec: EngineSpec) -> EngineProcess:
        if self._failures:
            self._failures -= 1
            raise self._error
        self.started.append(MemoryProcess(100 + len(self.started), stubborn=self._stubborn))
        self.started_at.append(trio.current_time())
        return self.process
