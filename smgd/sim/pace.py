"""When steps are due: at a steady rate, whatever a single one of them is late by."""

from __future__ import annotations

import msgspec

# Seconds by which a step may be late and the next one still be on time: after more than that (the
# machine slept, or is overloaded) the rate starts anew instead of making up with a burst.
_MAX_LATE = 0.05


class Pace(msgspec.Struct, frozen=True):
    """Seconds to a request's first token, and between steps."""

    ttft: float = 0.0
    itl: float = 0.0


class Cadence:
    """The clock of the steps; times are monotonic seconds."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._last = float("-inf")

    def next(self, due: float) -> float:
        """Return when a step shall be that has something to do from `due` on."""
        return max(due, self._last + self._interval)

    def stepped(self, due: float, now: float) -> None:
        """Note that the step due at `due` is made now."""
        self._last = due if now - due < _MAX_LATE else now
