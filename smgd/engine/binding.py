"""Binding a worker's sockets, and keeping the files in place by which engines find them.

A socket whose file is removed goes on, and so do its connections; running requests come to no harm,
but no engine can dial in any more, and the kernel says nothing. So the files are looked at, every
few seconds and before an engine is told where to dial. A lost one is made anew by binding the same
socket to the same address once more, which leaves the connections that there are alone. Until the
socket is closed, each time costs the descriptor of a listener that nobody can find any more.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import trio
from structlog.typing import FilteringBoundLogger

from smgd.engine.claim import Claim
from smgd.engine.paths import Addresses
from smgd.engine.transport import WorkerSockets
from smgd.errors import WorkerError
from smgd.once import Once

# libzmq lets go of an address only a moment after its socket was closed, so that a worker which
# follows another on the same path may have to try more than once.
_RETRIES = 5
_PAUSE = 0.1  # seconds


class Binding:
    """Makes the sockets of one worker by `bind`, and makes their files anew, under a `claim`.

    `interval` is the pause between two tries to bind again, in seconds.
    """

    def __init__(
        self,
        addresses: Addresses,
        bind: Callable[[Addresses], WorkerSockets],
        interval: float,
        log: FilteringBoundLogger,
    ) -> None:
        self.claim = Claim(addresses)
        self._addresses = addresses
        self._bind = bind
        self._interval = interval
        self._log = log
        self._loss = Once()  # of files
        self._obstacle = Once()  # to make them anew

    async def first(self) -> WorkerSockets:
        """Return the sockets. Raises `WorkerError`."""
        for _ in range(_RETRIES):
            try:
                return self._bind_now()
            except WorkerError:
                await trio.sleep(_PAUSE)
        return self._bind_now()

    async def again(self) -> WorkerSockets:
        """Return new sockets in place of those that have failed and are closed."""
        while True:
            await trio.sleep(self._interval)
            try:
                return self._bind_now()
            except WorkerError as error:
                self._log.error("cannot bind again; will retry", reason=str(error))

    def _bind_now(self) -> WorkerSockets:
        self.claim.prepare()
        sockets = self._bind(self._addresses)
        try:
            for path in self._addresses.sockets:
                self.claim.bound(path)
        except WorkerError:
            sockets.close()
            raise
        return sockets

    def look(self, sockets: WorkerSockets) -> None:
        """Make anew what is lost of the files; tell of it, and of what is in the way, once."""
        lost = self.claim.lost()
        if lost and self._loss.is_news(lost):
            self._log.error(
                "files of this worker were removed or replaced; making them anew",
                files=[str(path) for path in lost],
            )
        if not lost or self._restored(lost, sockets):
            self._loss.over()

    def _restored(self, lost: list[Path], sockets: WorkerSockets) -> bool:
        addresses = self._addresses
        data = (sockets.input, addresses.input), (sockets.output, addresses.output)
        try:
            self.claim.prepare()
            for path, (socket, address) in zip(addresses.sockets, data, strict=True):
                if path in lost:
                    socket.bind(address)
                    self.claim.bound(path)
        except WorkerError as error:
            if self._obstacle.is_news(str(error)):
                self._log.error("cannot bind again; will retry", reason=str(error))
            return False
        self._obstacle.over()
        self._log.info("files of this worker are in place again")
        return True
