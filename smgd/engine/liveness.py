"""Whether engines are still there: by their connections, and by how long they have been silent.

A monitor tells the connections of a socket apart, but not whose they are, and it reports late: when
an engine restarts, its new connection may be there before the end of the old one is heard of. So
connections are counted, and an end is a loss at once only if it leaves fewer than there are
engines. What this misses (an engine that was replaced, but is frozen or lives on, still counts) the
question finds that follows each end (`Asking`).

An engine whose connections stand may still be frozen or stuck, so one that has requests of ours
must speak. Three deadlines, each for what the one before cannot see:

    heartbeat / 10      it has said nothing: it is asked for a sign of life
    heartbeat           it has neither answered nor said anything else: its process does not run
    silence (+ prefill) it answers, but nothing becomes of its requests: its scheduler is stuck

Engines answer between two steps, so `heartbeat` has to be above the longest step.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from smgd.config import TimeoutsConfig
from smgd.engine.transport import PeerEvent

DEFAULT_TIMEOUTS = TimeoutsConfig()

# Of `heartbeat`: the silence after which an engine is asked. Early, so that nearly all of
# `heartbeat` is left for the step that it is in.
_ASK_AFTER = 0.1


class Connections:
    """The connections of one socket."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._open)

    def ended(self, events: Iterable[PeerEvent]) -> bool:
        """Take what has happened and tell whether a connection has ended with it."""
        ended = False
        for event in events:
            if event.kind == "connected":
                self._open.add(event.connection)
            elif event.connection in self._open:
                self._open.remove(event.connection)
                ended = True
        return ended


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How long an engine with requests in flight may be silent, in seconds.

    `prefill_rate`: prompt tokens a second; what an engine still has to read extends `silence`.
    """

    heartbeat: float = DEFAULT_TIMEOUTS.heartbeat
    silence: float = DEFAULT_TIMEOUTS.silence
    prefill_rate: float = DEFAULT_TIMEOUTS.prefill_rate

    @property
    def ask_after(self) -> float:
        """The silence after which an engine is asked for a sign of life."""
        return self.heartbeat * _ASK_AFTER

    def silence_with(self, prompt_tokens: int) -> float:
        """Return how long nothing may come of requests whose prompts are still to be read."""
        return self.silence + prompt_tokens / self.prefill_rate
