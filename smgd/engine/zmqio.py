"""ZMQ sockets under trio: the only module that knows pyzmq.

libzmq gives one descriptor per socket, for both directions, and it is edge-triggered: it becomes
readable once when *something* has changed, and every call into the socket, by whatever task, may
consume that edge. Three rules follow, and this module is where they are kept:

1. Wait only after a look that found nothing, a failed receive or `EVENTS`, with no call since: that
   look has consumed the edge that belongs to what is there, so that what comes makes a new one. So
   the last look has found "all" that was there; or "some" of it, and what is left makes no edge; or
   it does not count ("none"), as somebody has called since.
2. One task reads, and only the reader waits on the descriptor. A send by another task may consume
   the edge that announces a message, so every send looks at `EVENTS` and wakes a waiting reader.
3. A sender that finds no room does not wait on the descriptor: that would need a second waiter, and
   a ROUTER cannot report room for one peer anyway. It tries again at short intervals; the outgoing
   queue is long, so this happens only when an engine has stopped reading.

Errors of libzmq become those of `transport` here and nowhere else.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Literal, Self, TypeAlias

import trio
import zmq
from zmq.utils.monitor import parse_monitor_message

from smgd.engine.transport import (
    DRAIN_LIMIT,
    PeerEvent,
    PeerGoneError,
    TransportError,
    WorkerSockets,
)
from smgd.errors import WorkerError

SocketKind: TypeAlias = Literal["router", "dealer", "push", "pull"]

_KINDS = {"router": zmq.ROUTER, "dealer": zmq.DEALER, "push": zmq.PUSH, "pull": zmq.PULL}
# Plain numbers: arithmetic of pyzmq's flags costs more than the call.
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_POLLIN = int(zmq.POLLIN)
# Messages that may wait for one engine before a send blocks. An engine reads all the time, so a
# full queue means that it is stuck; without a limit no send deadline would ever be reached.
_INPUT_SEND_LIMIT = 1000
# A worker takes 7, with those of its monitors; libzmq's own limit ends at 146 workers.
_MAX_SOCKETS = 16384
_RETRY_MIN = 0.001  # seconds between two tries to send to a full peer
_RETRY_MAX = 0.05
_CONNECTED = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED
_CLOSED_ERRNOS = {zmq.ENOTSOCK, zmq.ETERM, errno.EBADF}


class ZmqContext:
    """Owns libzmq's I/O thread; use it as a context manager, or call `destroy`."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._open: set[ZmqSocket] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.destroy()

    def socket(
        self,
        kind: SocketKind,
        *,
        identity: bytes | None = None,
        send_limit: int = 0,
        mandatory: bool = True,
        handover: bool = True,
    ) -> ZmqSocket:
        """Return a socket that is neither bound nor connected.

        `identity` is what a ROUTER knows a DEALER by. `send_limit` is the number of messages that
        may wait for one peer, 0 for any number; reading is never limited. A ROUTER is `mandatory`
        (a message to an unknown peer raises) and takes a `handover` (a peer that comes back with
        the same identity replaces its old connection, even if that is still open).
        """
        raw = self._context.socket(_KINDS[kind])
        raw.set(zmq.LINGER, 0)
        raw.set(zmq.SNDHWM, send_limit)
        raw.set(zmq.RCVHWM, 0)
        if identity is not None:
            raw.set(zmq.IDENTITY, identity)
        if kind == "router":
            raw.set(zmq.ROUTER_MANDATORY, int(mandatory))
            raw.set(zmq.ROUTER_HANDOVER, int(handover))
        socket = ZmqSocket(raw, self._open.discard)
        self._open.add(socket)
        return socket

    def destroy(self) -> None:
        """Close what is still open, without waiting for unsent messages, and end the I/O thread."""
        for socket in list(self._open):
            socket.close()
        self._context.destroy(linger=0)


class ZmqSocket:
    """A socket for one reading task and any number of sending ones; see `transport`."""

    def __init__(self, raw: zmq.Socket[bytes], on_close: Callable[[ZmqSocket], None]) -> None:
        self._raw = raw
        self._on_close = on_close
        self._fd = int(raw.get(zmq.FD))  # asking costs more than a receive
        self._reader_waits = False
        self._look: Literal["all", "some", "none"] = "none"
        self._monitor: ZmqMonitor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def bind(self, address: str) -> str:
        """Listen on a `tcp://` or `ipc://` address and return it, with the port if it was `*`.

        To bind an `ipc://` address once more makes its file anew; the connections stay. libzmq
        takes away whatever is at the path. Raises `WorkerError`.
        """
        try:
            self._raw.bind(address)
        except zmq.ZMQError as error:
            raise WorkerError(f"cannot bind {address}: {error.strerror}") from error
        return self._raw.get_string(zmq.LAST_ENDPOINT)

    def connect(self, address: str) -> None:
        """Dial an address; libzmq retries in the background for ever. Raises `WorkerError`."""
        try:
            self._raw.connect(address)
        except zmq.ZMQError as error:
            raise WorkerError(f"cannot connect to {address}: {error.strerror}") from error

    def send_nowait(self, frames: Sequence[bytes]) -> None:
        """Send one message. Raises `trio.WouldBlock`, `PeerGoneError` or `TransportError`."""
        try:
            # As send_multipart does, which works out the flags of every frame anew.
            for frame in frames[:-1]:
                self._raw.send(frame, _NOBLOCK_MORE)
            self._raw.send(frames[-1], _NOBLOCK)
        except zmq.Again:
            raise trio.WouldBlock from None
        except zmq.ZMQError as error:
            raise _translated(error) from error
        finally:
            if self._look == "all":
                self._look = "none"
            self._wake_reader()

    async def send(self, frames: Sequence[bytes]) -> None:
        """Send one message, waiting for room. Raises `PeerGoneError` or `TransportError`."""
        await trio.lowlevel.checkpoint()
        pause = _RETRY_MIN
        while True:
            try:
                return self.send_nowait(frames)
            except trio.WouldBlock:
                await trio.sleep(pause)
                pause = min(2 * pause, _RETRY_MAX)

    def recv_nowait(self) -> list[bytes]:
        """Return one message. Raises `trio.WouldBlock` or `TransportError`."""
        try:
            # A frame object tells whether more follow; asking the socket costs more, and so does
            # recv_multipart.
            frame = self._raw.recv(_NOBLOCK, copy=False)
            frames = [frame.bytes]
            while frame.more:
                frame = self._raw.recv(_NOBLOCK, copy=False)
                frames.append(frame.bytes)
        except zmq.Again:
            raise trio.WouldBlock from None
        except zmq.ZMQError as error:
            raise _translated(error) from error
        return frames

    def drain_nowait(self, limit: int = DRAIN_LIMIT) -> list[list[bytes]]:
        """Return the messages that are there, at most `limit`. Raises `TransportError`."""
        messages: list[list[bytes]] = []
        try:
            while len(messages) < limit:
                messages.append(self.recv_nowait())
                # Most times there is one message. To ask costs less than half of a failed receive,
                # and consumes the edge as well.
                if not self._has_messages():
                    break
        except trio.WouldBlock:
            pass
        self._look = "all" if len(messages) < limit else "some"
        return messages

    async def recv_batch(self, limit: int = DRAIN_LIMIT) -> list[list[bytes]]:
        """Wait for a message, then return all that are there, at most `limit`.

        Checkpoints come before anything is received, so nothing is lost to a cancellation: if the
        call before this one has hit its limit, or if it must wait. Raises `TransportError`.
        """
        if self._look == "all":
            await self._wait_readable()
        elif self._look == "some":
            await trio.lowlevel.checkpoint()
        while not (messages := self.drain_nowait(limit)):
            await self._wait_readable()
        return messages

    def monitor(self) -> ZmqMonitor:
        """Return the monitor of this socket's connections; it is closed with the socket."""
        if self._monitor is None:
            pair = self._raw.get_monitor_socket(_CONNECTED | zmq.EVENT_DISCONNECTED)
            self._monitor = ZmqMonitor(ZmqSocket(pair, self._on_close))
        return self._monitor

    def close(self, linger: float = 0) -> None:
        """Close; whoever waits gets `trio.ClosedResourceError`.

        What is unsent is still sent in the background for `linger` seconds.
        """
        if self._raw.closed:
            return
        if self._monitor is not None:
            self._raw.disable_monitor()
            self._monitor.close()
        if self._reader_waits:
            trio.lowlevel.notify_closing(self._fd)
        self._look = "none"  # whoever reads next must not wait: the descriptor is gone
        self._raw.close(linger=round(linger * 1000))
        self._on_close(self)

    async def _wait_readable(self) -> None:
        if self._reader_waits:
            raise trio.BusyResourceError("another task is already reading from this socket")
        self._reader_waits = True
        try:
            # A wake by `_wake_reader` looks like a close; a real one shows when we read again.
            with suppress(trio.ClosedResourceError):
                await trio.lowlevel.wait_readable(self._fd)
        finally:
            self._reader_waits = False

    def _wake_reader(self) -> None:
        # To wake the waiter this way costs nothing until it is done; a cancel scope around every
        # wait costs more than the receive that follows.
        if self._reader_waits and not self._raw.closed and self._has_messages():
            trio.lowlevel.notify_closing(self._fd)

    def _has_messages(self) -> bool:
        try:
            return bool(int(self._raw.get(zmq.EVENTS)) & _POLLIN)
        except zmq.ZMQError as error:
            raise _translated(error) from error


class ZmqMonitor:
    """Reports the connections of one socket, by the numbers of their descriptors."""

    def __init__(self, pair: ZmqSocket) -> None:
        self._pair = pair

    async def recv(self) -> list[PeerEvent]:
        """Wait until something has happened and return it."""
        return [_peer_event(frames) for frames in await self._pair.recv_batch()]

    def close(self) -> None:
        """Stop reporting; `ZmqSocket.close` does it."""
        self._pair.close()


def _peer_event(frames: list[bytes]) -> PeerEvent:
    report = parse_monitor_message(frames)
    kind: Literal["connected", "disconnected"] = (
        "connected" if report["event"] & _CONNECTED else "disconnected"
    )
    return PeerEvent(kind, int(report["value"]))


def _translated(error: zmq.ZMQError) -> Exception:
    if error.errno == errno.EHOSTUNREACH:
        return PeerGoneError("no connection with that identity")
    if error.errno in _CLOSED_ERRNOS:
        return trio.ClosedResourceError("this socket was closed")
    return TransportError(f"socket failed: {error.strerror}")


def bind_worker(
    context: ZmqContext, handshake: str, input_address: str, output_address: str
) -> WorkerSockets:
    """Return a worker's sockets, bound to their addresses. Raises `WorkerError`."""
    with ExitStack() as opened:
        try:
            sockets = (
                opened.enter_context(context.socket("router")),
                opened.enter_context(context.socket("router", send_limit=_INPUT_SEND_LIMIT)),
                opened.enter_context(context.socket("pull")),
            )
            for socket in sockets[1:]:
                socket.monitor()  # before the first engine can connect
        except zmq.ZMQError as error:
            raise WorkerError(f"cannot open sockets: {error.strerror}") from error
        for socket, address in zip(
            sockets, (handshake, input_address, output_address), strict=True
        ):
            socket.bind(address)
        opened.pop_all()
    return WorkerSockets(*sockets)
