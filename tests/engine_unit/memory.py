"""A worker's three sockets in memory, so that minutes pass in no time on a jumping clock.

Their files are real: those of sockets that nobody listens on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from socket import AF_UNIX
from socket import socket as system_socket

import trio
import trio.testing

from smgd.engine.paths import SCHEME, Addresses
from smgd.engine.transport import (
    DRAIN_LIMIT,
    PeerEvent,
    PeerGoneError,
    TransportError,
    WorkerSockets,
)
from smgd.errors import WorkerError
from smgd.wire import vllm as wire
from tests.engine_unit.scripted import HELLO, READY, outputs, registration, unpack


class MemoryMonitor:
    """What a test says has happened."""

    def __init__(self) -> None:
        self._events: deque[PeerEvent] = deque()
        self._lot = trio.lowlevel.ParkingLot()

    def happen(self, *events: PeerEvent) -> None:
        self._events.extend(events)
        self._lot.unpark_all()

    async def recv(self) -> list[PeerEvent]:
        while not self._events:
            await self._lot.park()
        events = list(self._events)
        self._events.clear()
        return events


class MemorySocket:
    """Takes messages for the identities in `peers` while it is not `full`."""

    def __init__(self) -> None:
        self.sent: list[list[bytes]] = []
        self.peers: set[bytes] = set()
        self.closed = False
        self.bind_errors: list[WorkerError] = []
        self._full = False
        self._failure: TransportError | None = None
        self._inbox: deque[list[bytes]] = deque()
        self._lot = trio.lowlevel.ParkingLot()
        self._monitor = MemoryMonitor()
        self.on_send: Callable[[list[bytes]], None] = lambda _: None

    def feed(self, *messages: list[bytes]) -> None:
        self._inbox.extend(messages)
        self._lot.unpark_all()

    def fill(self, full: bool = True) -> None:
        self._full = full
        self._lot.unpark_all()

    def fail(self) -> None:
        self._failure = TransportError("socket failed: test")
        self._lot.unpark_all()

    def bind(self, address: str) -> str:
        if self.bind_errors:
            raise self.bind_errors.pop()
        path = Path(address.removeprefix(SCHEME))
        path.unlink(missing_ok=True)
        with system_socket(AF_UNIX) as made:
            made.bind(str(path))
        return address

    def send_nowait(self, frames: Sequence[bytes]) -> None:
        assert not self.closed
        if frames[0] not in self.peers:
            raise PeerGoneError("no connection with that identity")
        if self._full:
            raise trio.WouldBlock
        self.sent.append(list(frames))
        self.on_send(self.sent[-1])

    async def send(self, frames: Sequence[bytes]) -> None:
        await trio.lowlevel.checkpoint()
        while self._full:
            await self._lot.park()
        self.send_nowait(frames)

    async def recv_batch(self, limit: int = DRAIN_LIMIT) -> list[list[bytes]]:
        while not self._inbox:
            await self._lot.park()
            if self._failure is not None:
                raise self._failure
        return [self._inbox.popleft() for _ in range(min(limit, len(self._inbox)))]

    def monitor(self) -> MemoryMonitor:
        return self._monitor

    def close(self, linger: float = 0) -> None:
        self.closed = True


class MemoryWorker:
    """The engine's side of a worker's sockets; `bind` is what a link is given.

    While it is `answering`, it answers every call at once.
    """

    def __init__(self) -> None:
        self.answering = False
        self.binds = 0
        self.bind_errors: list[Exception] = []

    def bind(self, addresses: Addresses) -> WorkerSockets:
        if self.bind_errors:
            raise self.bind_errors.pop()
        self.binds += 1
        self.handshake, self.input, self.output = MemorySocket(), MemorySocket(), MemorySocket()
        self.input.bind(addresses.input)
        self.output.bind(addresses.output)
        self.input.on_send = self._heard
        return WorkerSockets(self.handshake, self.input, self.output)

    def _heard(self, message: list[bytes]) -> None:
        if self.answering and message[1] == wire.UTILITY:
            self.answer()

    def answer(self) -> None:
        """Answer the call that was sent last."""
        identity, _, payload = next(m for m in reversed(self.input.sent) if m[1] == wire.UTILITY)
        reply = [unpack(payload)[1], None, [None, False]]
        self.say(outputs(reply=reply, engine=identity[0]))

    @property
    def calls(self) -> int:
        """How many utility calls were sent."""
        return sum(message[1] == wire.UTILITY for message in self.input.sent)

    def hello(self, identity: bytes = b"\x00\x00") -> None:
        self.handshake.peers.add(identity)
        self.handshake.feed([identity, HELLO])

    def register(self, identity: bytes = b"\x00\x00") -> None:
        """Connect the data sockets, register and say READY."""
        self.input.peers.add(identity)
        for socket in (self.input, self.output):
            socket.monitor().happen(PeerEvent("connected", identity[0]))
        self.input.feed([identity, registration()])
        self.handshake.feed([identity, READY])

    async def start(self) -> None:
        """Go through a whole handshake: an engine registers only after it was answered."""
        self.hello()
        await trio.testing.wait_all_tasks_blocked()
        self.register()
        await trio.testing.wait_all_tasks_blocked()

    def vanish(self, identity: bytes = b"\x00\x00") -> None:
        """Drop the data connections."""
        self.input.peers.discard(identity)
        for socket in (self.input, self.output):
            socket.monitor().happen(PeerEvent("disconnected", identity[0]))

    def say(self, *payloads: bytes) -> None:
        self.output.feed(*([payload] for payload in payloads))

    def ids_of(self, kind: bytes) -> list[str]:
        """Return the ids of all ADDs or ABORTs that were sent."""
        payloads = [unpack(frames[2]) for frames in self.input.sent if frames[1] == kind]
        if kind == wire.ADD:
            return [payload[0] for payload in payloads]
        return [request_id for payload in payloads for request_id in payload]
