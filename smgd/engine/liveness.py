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

from collections.abc import Callable, Iterable

import msgspec

from smgd.config import TimeoutsConfig
from smgd.engine.events import SessionEvent
from smgd.engine.handshake import Rank
from smgd.engine.roster import Roster
from smgd.engine.transport import PeerEvent

DEFAULT_TIMEOUTS = TimeoutsConfig()

# Of `heartbeat`: the silence after which an engine is asked. Early, so that nearly all of
# `heartbeat` is left for the step that it is in.
_ASK_AFTER = 0.1
# Seconds; what is left of a deadline may be less than the clock can tell, but is never none.
_TICK = 0.001


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


class Silence:
    """How long the engines of a roster have been silent, by the clock of whoever calls `note`.

    `heard` are those that have said something since, and `worked` those for which that was about
    requests: whoever reads from them adds to both. `unread` counts the tokens of the prompts that
    an engine has still to read.
    """

    def __init__(self, roster: Roster, unread: Callable[[Rank], int]) -> None:
        self.heard: set[Rank] = set()
        self.worked: set[Rank] = set()
        self._roster = roster
        self._unread = unread

    def note(self, now: float) -> None:
        """Note the time for the engines that have said something since the last call."""
        for rank in self.heard:
            rank.heard_at = now
            rank.called = False
        for rank in self.worked:
            rank.worked_at = now
        self.heard.clear()
        self.worked.clear()

    def check(self, now: float, patience: Patience) -> tuple[list[SessionEvent], float]:
        """Look whether engines that have requests of ours are silent for too long.

        Returns what follows, and for how many seconds there is no need to look again.
        """
        events: list[SessionEvent] = []
        left = patience.ask_after
        for rank in list(self._roster.serving):
            if not (rank.in_flight and rank.ready):  # it may have gone with another
                continue
            wait, reason = self._patience_left(rank, now, patience)
            if wait <= 0:
                events += self._roster.lose(reason, rank.identity)
                continue
            left = min(left, wait)
            if not rank.called and now - rank.heard_at >= patience.ask_after:
                rank.called = True
                events += self._roster.call([rank])
        return events, max(left, _TICK)

    def _patience_left(self, rank: Rank, now: float, patience: Patience) -> tuple[float, str]:
        """Return for how many seconds more an engine may be silent, and of what it dies then."""
        beat = patience.heartbeat - (now - rank.heard_at)
        if self._roster.answers and beat <= 0:
            return beat, f"no sign of life for {patience.heartbeat:g}s with requests in flight"
        limit = patience.silence_with(self._unread(rank))
        silence = limit - (now - rank.worked_at)
        reason = f"no output for {limit:.3g}s with requests in flight"
        return (min(beat, silence) if self._roster.answers else silence), reason
