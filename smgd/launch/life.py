"""One managed engine's life as a state machine without I/O: what its end means, and what is next.

| from     | to       | when                                             |
|----------|----------|--------------------------------------------------|
| waiting  | running  | its process was started, or found                |
| running  | waiting  | it has ended, for whatever reason                |
| waiting  | waiting  | it could not even be started                     |
| any      | stopped  | it is not wanted, as long as that lasts          |
| stopped  | running  | it is wanted again                               |

An engine that ends is started again, always: vLLM ends with status 0 when its core has died. The
wait doubles with each start in a row after which it did not live for `STABLE_SECONDS`, up to
`LONGEST_WAIT`; there is no last attempt, since what stands in the way (a GPU that another program
holds, a model hub that cannot be reached) may go away by itself.
"""

from __future__ import annotations

import signal
from typing import Literal

import msgspec

FIRST_WAIT = 1.0
LONGEST_WAIT = 60.0
STABLE_SECONDS = 60.0
# Starts in a row that count as a crash loop: 15 s of waiting lie between the first and the last.
CRASH_LOOP = 5

State = Literal["waiting", "running", "stopped"]


class End(msgspec.Struct, frozen=True):
    """What the end of a process means: a text for the log, and seconds until the next start."""

    text: str
    wait: float
    is_crash_loop: bool


class EngineLife:
    """The state of one managed engine; times are seconds on one clock.

    `pid` is that of its process while there is one; `starts` counts them all. `restarts` are the
    times that it had to be started again; `last_end` says why the latest of them.
    """

    def __init__(self) -> None:
        self.state: State = "waiting"
        self.pid: int | None = None
        self.starts = 0
        self.restarts = 0
        self.last_end = ""
        self._began = 0.0
        self._short = 0  # lives in a row

    def started(self, now: float, pid: int) -> None:
        """Take the start of a process, or that one was found which is alive."""
        self.state = "running"
        self.pid = pid
        self.starts += 1
        self._began = now

    def ended(self, now: float, status: int | None) -> End:
        """Take the end of the process; `status` is None where nobody can tell it."""
        lived = now - self._began
        self.pid = None
        if lived >= STABLE_SECONDS:
            self._short = 0
        return self._next(f"{describe(status)} after {lived:.1f} s")

    def not_started(self, reason: str) -> End:
        """Take that there is no process to be had."""
        return self._next(f"cannot be started: {reason}")

    def stopped(self) -> None:
        """Take that the engine is not wanted, and that its process has ended."""
        self.pid = None
        self.state = "stopped"

    def _next(self, text: str) -> End:
        self.state = "waiting"
        self.restarts += 1
        self.last_end = text
        self._short += 1
        wait = min(FIRST_WAIT * 2.0 ** min(self._short - 1, 10), LONGEST_WAIT)
        if self._short >= CRASH_LOOP:
            text += f", the {self._short}th time in a row that it did not last {STABLE_SECONDS:g} s"
        return End(f"engine {text}; next start in {wait:g} s", wait, self._short >= CRASH_LOOP)


def describe(status: int | None) -> str:
    """Say how a process has ended; above 128 is a signal, as shells have it."""
    if status is None:
        return "ended"
    if status <= 128:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(status - 128).name}"
    except ValueError:
        return f"ended with status {status}"
