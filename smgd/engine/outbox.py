"""What is sent to one engine: at once where that is possible, else in order from a queue.

Whoever submits or aborts sends synchronously, from its own task, unless the queue has something to
send first; so order is kept, and no task has to wake for a request. One engine that has stopped
reading holds up nobody else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import trio

from smgd.engine.transport import MessageSocket, PeerGoneError


class Outbox:
    """The messages that one engine would not take at once.

    `on_lost` hears that it is gone, or that a send was blocked for `timeout` seconds; what is in
    the queue stays there, to be sent should the engine go on reading.
    """

    def __init__(self, timeout: float, on_lost: Callable[[str], None]) -> None:
        self._timeout = timeout
        self._on_lost = on_lost
        self._queue: deque[list[bytes]] = deque()
        self._filled = trio.lowlevel.ParkingLot()
        self._sending = trio.CancelScope()  # around the first of the queue

    def send(self, socket: MessageSocket, message: list[bytes]) -> None:
        """Send now, or after what waits already. Raises `TransportError`."""
        if not self._queue:
            try:
                socket.send_nowait(message)
                return
            except trio.WouldBlock:
                pass
        self._queue.append(message)
        self._filled.unpark()

    def send_now(self, socket: MessageSocket, message: list[bytes]) -> bool:
        """Send if that is possible at once, and tell whether it was. Raises `TransportError`."""
        if self._queue:
            return False
        try:
            socket.send_nowait(message)
        except trio.WouldBlock:
            return False
        return True

    def withdraw(self) -> None:
        """Drop what waits: it was meant for a former life of the engine."""
        self._queue.clear()
        self._sending.cancel()

    async def run(self, socket: MessageSocket) -> None:
        """Send what waits, for ever. Raises `TransportError`."""
        while True:
            while self._queue:
                await self._send_first(socket)
            await self._filled.park()

    async def _send_first(self, socket: MessageSocket) -> None:
        message = self._queue[0]
        reason = ""
        with trio.move_on_after(self._timeout) as self._sending:
            try:
                await socket.send(message)
            except PeerGoneError as error:
                reason = str(error)
        if not self._queue or self._queue[0] is not message:
            return  # it was withdrawn
        if self._sending.cancelled_caught:
            self._on_lost(f"a send was blocked for {self._timeout:g}s")
            return
        self._queue.popleft()
        if reason:
            self._on_lost(reason)
