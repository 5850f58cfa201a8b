"""The seam between the engine link and its sockets: what a message socket can do, and its errors.

`zmqio` implements it on ZMQ. Tests implement it in memory, so that deadlines of minutes run on a
fake clock in milliseconds (with real descriptors a jumping clock overtakes messages).

A message is a list of frames. Whatever is called `*_nowait` never blocks and is no checkpoint; it
raises `trio.WouldBlock` if it cannot be done at once. A closed socket raises
`trio.ClosedResourceError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from smgd.errors import SmgdError

# Messages that one drain takes before it lets other tasks run: at 1 to 2 us each this keeps the
# pause well below a millisecond, while an engine rarely has more than a handful waiting.
DRAIN_LIMIT = 128


class TransportError(SmgdError):
    """A socket failed below us; it has to be closed and made anew."""


class PeerGoneError(TransportError):
    """No connection has the routing identity that a message was for. The socket itself is fine."""


class PeerEvent(msgspec.Struct, frozen=True):
    """A connection of a socket began or ended.

    `connection` tells the connections of one socket apart; a number may be used again after its
    connection has ended.
    """

    kind: Literal["connected", "disconnected"]
    connection: int


class Monitor(Protocol):
    """Reports the connections of one socket, in order."""

    async def recv(self) -> list[PeerEvent]:
        """Wait until something has happened and return it."""
        ...


class MessageSocket(Protocol):
    """One end of a message channel; at most one task may wait in `recv_batch` at a time."""

    def bind(self, address: str) -> str:
        """Listen on an address, beside those that it has, and return it. Raises `WorkerError`."""
        ...

    def send_nowait(self, frames: Sequence[bytes]) -> None:
        """Send one message. Raises `trio.WouldBlock`, `PeerGoneError` or `TransportError`."""
        ...

    async def send(self, frames: Sequence[bytes]) -> None:
        """Send one message, waiting for room. Raises `PeerGoneError` or `TransportError`."""
        ...

    async def recv_batch(self, limit: int = DRAIN_LIMIT) -> list[list[bytes]]:
        """Wait for a message, then return all that are there, at most `limit`."""
        ...

    def monitor(self) -> Monitor:
        """Return the one monitor of this socket's connections; it is closed with the socket."""
        ...

    def close(self, linger: float = 0) -> None:
        """Close; whoever waits gets `trio.ClosedResourceError`.

        What is unsent is still sent in the background for `linger` seconds.
        """
        ...


class WorkerSockets(NamedTuple):
    """The three bound sockets of a worker. Data sockets have their monitors from the beginning."""

    handshake: MessageSocket
    input: MessageSocket
    output: MessageSocket

    def close(self, linger: float = 0) -> None:
        """Close all three; what was sent to engines last may still leave for `linger` seconds."""
        self.handshake.close()
        self.input.close(linger)
        self.output.close()
