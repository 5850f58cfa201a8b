"""What an engine prints, as lines for the log: cut, cleaned, and not too many of them.

No I/O and no clock: bytes and a time go in, lines come out. An engine that prints in a loop must
not fill the disk or hold up the event loop, but its last words say why it died. So lines above the
rate are counted, and the latest of them are kept until it has ended.
"""

from __future__ import annotations

import re
from collections import deque

LINES_PER_SECOND = 20.0
# vLLM prints about 150 lines while it starts, and as many again when it fails.
BURST_LINES = 400
LAST_WORDS = 20
LONGEST_LINE = 4096

_ENDS = re.compile(rb"\r\n|\n|\r")  # a progress bar is a line for each of its states
# Colours and cursor movements, then whatever else a terminal would obey.
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


class Output:
    """The output of one process. Times are in seconds, on one clock."""

    def __init__(self) -> None:
        self._rest = b""
        self._budget = float(BURST_LINES)
        self._at = 0.0
        self._held: deque[str] = deque(maxlen=LAST_WORDS)
        self._suppressed = 0

    def feed(self, data: bytes, now: float) -> list[str]:
        """Take what was read; return the lines to show."""
        *lines, self._rest = _ENDS.split(self._rest + data)
        if len(self._rest) > LONGEST_LINE:
            lines.append(self._rest)
            self._rest = b""
        shown: list[str] = []
        for line in filter(None, map(_clean, lines)):
            shown += self._limit(line, now)
        return shown

    def finish(self) -> list[str]:
        """Return what was held back; the process has ended."""
        if line := _clean(self._rest):
            self._hold(line)
        self._rest = b""
        lost = self._suppressed - len(self._held)
        shown = [*([_lost(lost)] if lost else []), *self._held]
        self._held.clear()
        self._suppressed = 0
        return shown

    def _limit(self, line: str, now: float) -> list[str]:
        """Return the line, with a word about those before it that were not shown; or nothing."""
        self._budget = min(BURST_LINES, self._budget + (now - self._at) * LINES_PER_SECOND)
        self._at = now
        if self._budget < 1:
            self._hold(line)
            return []
        self._budget -= 1
        lost, self._suppressed = self._suppressed, 0
        self._held.clear()
        return [_lost(lost), line] if lost else [line]

    def _hold(self, line: str) -> None:
        self._held.append(line)
        self._suppressed += 1


def _lost(count: int) -> str:
    return f"... {count} lines suppressed"


def _clean(line: bytes) -> str:
    text = _CONTROL.sub("", line[:LONGEST_LINE].decode(errors="replace")).rstrip()
    return f"{text}..." if len(line) > LONGEST_LINE else text
