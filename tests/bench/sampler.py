"""Runs a module as a program and notes where its main thread uses CPU, every few milliseconds.

`python -m tests.bench.sampler FILE MODULE ARGUMENTS`: SIGUSR2 begins it, a second one ends it and
writes FILE, a JSON list of `[ns, stack]`; a stack is a list of `[file, function, line]` from the
inside out. It looks at most at every tick of the kernel's clock, 250 or 1000 a second, and each
look weighs what was used since the one before. A look comes as soon as the interpreter gets to it:
a C function's time counts for the line that calls it. Linux only.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

INTERVAL_NS = 1_000_000

_libc = ctypes.CDLL(None, use_errno=True)
_SIGEV_THREAD_ID = 4


class _Event(ctypes.Structure):
    """`struct sigevent` of Linux: 64 bytes, of which a signal to one thread takes these."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("thread", ctypes.c_int),
        ("rest", ctypes.c_char * 44),
    )


class _Times(ctypes.Structure):
    """`struct itimerspec`."""

    _fields_ = tuple(
        (name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns")
    )


class ThreadTimer:
    """Sends SIGPROF to this thread whenever it has used some CPU time.

    An interval timer would count the CPU of all threads and interrupt this one while it waits.
    """

    def __init__(self) -> None:
        event = _Event(
            signal=signal.SIGPROF, notify=_SIGEV_THREAD_ID, thread=threading.get_native_id()
        )
        self._timer = ctypes.c_void_p()
        clock = time.CLOCK_THREAD_CPUTIME_ID
        if _libc.timer_create(clock, ctypes.byref(event), ctypes.byref(self._timer)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def set(self, interval_ns: int) -> None:
        """Start it, or with 0 stop it."""
        times = _Times(every_ns=interval_ns, first_ns=interval_ns)
        _libc.timer_settime(self._timer, 0, ctypes.byref(times), None)


class Sampler:
    """Adds up the main thread's CPU nanoseconds by stack."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._timer = ThreadTimer()
        self._stacks: Counter[tuple[tuple[CodeType, int], ...]] = Counter()
        self._running = False
        self._last = 0

    def look(self, _signal: int, frame: FrameType | None) -> None:
        """Note where the program is."""
        now = time.thread_time_ns()
        stack = []
        while frame is not None:
            stack.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        self._stacks[tuple(stack)] += now - self._last
        self._last = now

    def toggle(self, _signal: int, _frame: FrameType | None) -> None:
        """Begin, or end and write what was seen."""
        self._running = not self._running
        self._last = time.thread_time_ns()
        self._timer.set(INTERVAL_NS if self._running else 0)
        if self._running:
            return
        found = [
            [used, [(code.co_filename, code.co_qualname, line) for code, line in stack]]
            for stack, used in self._stacks.items()
        ]
        self._path.write_text(json.dumps(found))


def main() -> None:
    """Run `sys.argv[2]` as a program."""
    sampler = Sampler(Path(sys.argv[1]))
    signal.signal(signal.SIGPROF, sampler.look)
    signal.signal(signal.SIGUSR2, sampler.toggle)
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
