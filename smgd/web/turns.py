"""Turns: a burst of arrivals shares the loop with the streams that run.

trio runs every task that is ready before it looks at its sockets again. After a thousand requests
at once that would be a third of a second in which no engine is read and no stream written. So only
so many tasks read from their connections, and go on from there, in one turn of the loop.
"""

from __future__ import annotations

import trio

# A request takes 0.2 to 0.5 ms from its bytes to its engine: together far less than a token's time.
WIDTH = 16


class Turnstile:
    """Lets `width` tasks through in a turn of the loop, the others wait in order of arrival.

    As long as nobody is held up there is no task switch: a turn is over once `width` have passed,
    however long that takes, and then the next one begins in the loop's next turn.
    """

    def __init__(self, width: int = WIDTH) -> None:
        self._width = width
        self._left = width
        self._waiting = trio.lowlevel.ParkingLot()
        self._usher = trio.lowlevel.ParkingLot()

    async def enter(self) -> None:
        """Wait for this task's turn. A checkpoint only if it has to wait."""
        if self._left:
            self._left -= 1
            return
        self._usher.unpark()
        await self._waiting.park()

    async def run(self) -> None:
        """Begin turns, as long as tasks are waiting for one."""
        while True:
            if self._waiting:
                await trio.lowlevel.checkpoint()
            else:
                await self._usher.park()
            entering = min(len(self._waiting), self._width)
            self._left = self._width - entering
            self._waiting.unpark(count=entering)
