"""Admission: how many requests may run at the same time, and who is next.

A plain object without a clock and without tasks. A request takes a permit at once if one is free
(`admit`), else it stands in a queue (`park`), first come, first served: permits that come back go
to the head of the queue directly, so that no newcomer can overtake and nobody is woken for nothing.
Both are kept by request, not counted, so that leaving twice, or from the queue, or after having
been woken and cancelled, does no harm (`leave`).

All of it is synchronous: nothing can be cancelled in between.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final

from smgd.errors import ApiError, shutting_down

Wake = Callable[[], None]

# Seconds that a refused client is asked to stay away. Permits come back all the time, so not long;
# SDKs add their own back-off.
RETRY_AFTER: Final = 1


def queue_full(running: int, waiting: int) -> ApiError:
    """Return the 429 for a request that finds no place in the queue."""
    text = f"The server is busy: {running} requests are running and {waiting} are waiting"
    return ApiError(429, "admission_queue_full", text, retry_after=RETRY_AFTER)


def queue_timeout(seconds: float) -> ApiError:
    """Return the 503 for a request that has waited for too long."""
    text = f"The server is busy: the request has waited for {seconds:g} seconds to be started"
    return ApiError(503, "admission_queue_timeout", text, retry_after=RETRY_AFTER)


class Admission:
    """Permits, and the queue for them.

    `timeout` is for those who wait, in seconds; who waits looks at it, there is no clock here.
    `allowed`, `full` and `timeouts` count how requests have fared.
    """

    __slots__ = (
        "_closed", "_limit", "_queue", "_queue_size", "_running", "allowed", "full", "timeout",
        "timeouts",
    )  # fmt: skip

    def __init__(self, limit: int = 0, queue_size: int = 0, timeout: float = 60.0) -> None:
        self._running: set[Hashable] = set()
        self._queue: OrderedDict[Hashable, Wake] = OrderedDict()
        self._closed = False
        self.allowed = self.full = self.timeouts = 0
        self.configure(limit, queue_size, timeout)

    @property
    def running(self) -> int:
        """Requests that have a permit."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    def configure(self, limit: int, queue_size: int, timeout: float) -> None:
        """Set the limits; `limit` 0 is none. Who runs or waits already goes on."""
        self._limit = limit or sys.maxsize
        self._queue_size = queue_size
        self.timeout = timeout
        self._advance()

    def admit(self, who: Hashable) -> bool:
        """Give a permit if one is free."""
        # Nobody waits then: whoever gives a permit back hands it on.
        if len(self._running) >= self._limit or self._closed:
            return False
        self._running.add(who)
        self.allowed += 1
        return True

    def park(self, who: Hashable, wake: Wake) -> None:
        """Let a request wait that got no permit; `wake` is called when there is something to see.

        Raises `ApiError` 429 if the queue is full, 503 at the end of a stop.
        """
        if self._closed:
            raise shutting_down()
        if len(self._queue) >= self._queue_size:
            self.full += 1
            raise queue_full(len(self._running), len(self._queue))
        self._queue[who] = wake

    def settle(self, who: Hashable) -> None:
        """End the waiting: return if `who` has a permit by now.

        Else it leaves the queue, and `ApiError` 503 says why.
        """
        if who in self._running:
            return
        if self._queue.pop(who, None) is None:
            raise shutting_down()
        self.timeouts += 1
        raise queue_timeout(self.timeout)

    def leave(self, who: Hashable) -> None:
        """Give a permit back, or a place in the queue; nothing happens without either."""
        self._running.discard(who)
        if self._queue:
            self._queue.pop(who, None)
            self._advance()

    def close(self) -> None:
        """Send everybody in the queue away, and who comes later: the daemon stops."""
        self._closed = True
        queue, self._queue = self._queue, OrderedDict()
        for wake in queue.values():
            wake()

    def _advance(self) -> None:
        while self._queue and len(self._running) < self._limit:
            who, wake = self._queue.popitem(last=False)
            self._running.add(who)
            self.allowed += 1
            wake()
