"""Asking engines whether they are there: whoever of the lost answers is used again.

Engines do not repeat their handshake when the daemon is started anew, nor when they were only slow.
So they are asked: right after the sockets are bound, whenever something has changed (`soon`), and
at growing intervals in between. Those in use are asked, too, after a connection has ended that may
have been theirs: the first question may still find it, but not the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import trio

from smgd.engine.events import Send, SessionEvent
from smgd.engine.outbox import Outbox
from smgd.engine.roster import Roster
from smgd.engine.transport import MessageSocket, PeerGoneError

# An engine reconnects within about 0.1 s; the first questions are as close together as that.
_FIRST_PAUSE = 0.05


class Asking:
    """The questions to the engines of a roster, by way of their outboxes.

    `interval` is the longest pause between two of them, in seconds. `handle` is given what follows
    from one that was sent.
    """

    def __init__(
        self,
        roster: Roster,
        outboxes: Mapping[bytes, Outbox],
        interval: float,
        handle: Callable[[Iterable[SessionEvent]], None],
    ) -> None:
        self._roster = roster
        self._outboxes = outboxes
        self._interval = interval
        self._handle = handle
        self._changed = trio.lowlevel.ParkingLot()
        self._pause = _FIRST_PAUSE  # until the next question

    async def run(self, socket: MessageSocket) -> None:
        """Ask, for ever. Raises `TransportError`."""
        while True:
            asks = self._roster.asks()
            for ask in asks:
                self._ask(socket, ask)
            pause = self._pause if asks else math.inf
            self._pause = min(2 * self._pause, self._interval)
            with trio.move_on_after(pause):
                await self._changed.park()

    def soon(self) -> None:
        """Ask at once, and soon again: an engine may have been lost or have come back."""
        self._pause = _FIRST_PAUSE
        self._changed.unpark()

    def _ask(self, socket: MessageSocket, ask: Send) -> None:
        message = [ask.identity, *ask.frames]
        try:
            sent = self._outboxes[ask.identity].send_now(socket, message)
        except PeerGoneError:  # not there, or not yet
            self._handle(self._roster.undelivered(ask.identity))
            return
        if sent:
            self._handle(self._roster.delivered(ask.identity))
