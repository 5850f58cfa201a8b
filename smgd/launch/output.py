"""What an engine prints, as lines for the log: cut, cleaned, and not too many of them.

No I/O and no clock: bytes and a time go in, lines come out. An engine that prints in a loop must
not fill the disk or hold up the event loop, but its last words say why it died. So lines above the
rate are counted, and the latest of them are kept: until there is room for them (`idle`), or until
the engine has ended (`finish`). A line that is not shown costs no more than being counted.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable

LINES_PER_SECOND = 20.0
# vLLM prints about 150 lines while it starts, and as many again when it fails.
BURST_LINES = 400
LAST_WORDS = 20
LONGEST_LINE = 4096

_END = re.compile(rb"\r\n|\n|\r")  # a progress bar is a line for each of its states
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
        self._held: deque[bytes] = deque(maxlen=LAST_WORDS)
        self._suppressed = 0
        self._latest: deque[bytes] = deque(maxlen=LAST_WORDS)  # whether shown or not

    @property
    def holds_back(self) -> bool:
        """Whether lines come faster than they are shown: the latest was not."""
        return bool(self._held)

    @property
    def last_words(self) -> list[str]:
        """The latest lines, whether they were shown or not."""
        return _readable(self._latest)

    def feed(self, data: bytes, now: float) -> list[str]:
        """Take what was read; return the lines to show."""
        self._earn(now)
        data = self._rest + data
        shown: list[str] = []
        begin = 0
        while self._budget >= 1 and (end := _END.search(data, begin)):
            shown += self._show(data[begin : end.start()])
            begin = end.end()
        if self._budget < 1:
            self._rest = self._hold(data[begin:])
        elif len(data) - begin > LONGEST_LINE:
            shown += self._show(data[begin:])
            self._rest = b""
        else:
            self._rest = data[begin:]
        return shown

    def idle(self, now: float) -> list[str]:
        """Return what was held back, if there is room for it by now: nothing was read meanwhile."""
        self._earn(now)
        if not self._held or self._budget < len(self._held):
            return []
        self._budget -= len(self._held)
        return self._release()

    def finish(self) -> list[str]:
        """Return what was held back; the process has ended."""
        self._keep([self._rest])
        self._rest = b""
        return self._release()

    def _earn(self, now: float) -> None:
        self._budget = min(BURST_LINES, self._budget + (now - self._at) * LINES_PER_SECOND)
        self._at = now

    def _show(self, line: bytes) -> list[str]:
        """Return the line, with a word about those before it that were not shown."""
        text = _clean(line)
        if not text:
            return []
        self._budget -= 1
        self._latest.append(line[: LONGEST_LINE + 1])
        lost, self._suppressed = self._suppressed, 0
        self._held.clear()
        return [_lost(lost), text] if lost else [text]

    def _hold(self, data: bytes) -> bytes:
        """Count the lines of `data`, keep the latest, and return what is behind the last end."""
        *lines, rest = data.splitlines(keepends=True) or [b""]
        if rest.endswith((b"\n", b"\r")) or len(rest) > LONGEST_LINE:
            lines.append(rest)
            rest = b""
        self._keep(lines)
        return rest

    def _keep(self, lines: Iterable[bytes]) -> None:
        """Count lines that are not shown, and keep the latest; blank ones do not count."""
        full = [line for line in lines if line and not line.isspace()]
        latest = [line[: LONGEST_LINE + 1] for line in full[-LAST_WORDS:]]
        self._suppressed += len(full)
        self._held += latest
        self._latest += latest

    def _release(self) -> list[str]:
        lost, held = self._suppressed - len(self._held), _readable(self._held)
        self._held.clear()
        self._suppressed = 0
        return [_lost(lost), *held] if lost else held


def _readable(lines: Iterable[bytes]) -> list[str]:
    return [text for text in map(_clean, lines) if text]


def _lost(count: int) -> str:
    return f"... {count} lines suppressed"


def _clean(line: bytes) -> str:
    line = line.rstrip(b"\r\n")
    text = _CONTROL.sub("", line[:LONGEST_LINE].decode(errors="replace")).rstrip()
    return f"{text}..." if len(line) > LONGEST_LINE else text
