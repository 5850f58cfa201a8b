"""Whether the connections of a socket still carry the engines.

A monitor tells the connections of a socket apart, but not whose they are, and it reports late: when
an engine restarts, its new connection may be there before the end of the old one is heard of. So
connections are counted, and an end is a loss only if it leaves fewer than there are engines. What
this misses (a frozen engine that was replaced still counts) is found by the next message to it.
"""

from __future__ import annotations

from collections.abc import Iterable

from smgd.engine.transport import PeerEvent


class Connections:
    """The connections of one socket that `engines` engines use, one each."""

    def __init__(self, engines: int) -> None:
        self._engines = engines
        self._open: set[int] = set()

    def lost(self, events: Iterable[PeerEvent]) -> bool:
        """Take what has happened and tell whether an engine's connection has gone with it."""
        ended = False
        for event in events:
            if event.kind == "connected":
                self._open.add(event.connection)
            elif event.connection in self._open:
                self._open.remove(event.connection)
                ended = True
        return ended and len(self._open) < self._engines
