"""Sockets as the server uses them: how they are opened, accepted, written with a deadline, closed.

A write deadline cannot be set from outside: Hypercorn shields its sends from cancellation, since
half a frame on the wire helps nobody. So the deadline sits below it, in the stream itself.
"""

from __future__ import annotations

import errno
import math
import socket
from contextlib import suppress

import structlog
import trio

from smgd.web.turns import Turnstile

log = structlog.get_logger("smgd.web")

# What one write deadline covers. A client is cut when it takes none of this much for so long, not
# when a large answer takes long as a whole.
WRITE_STEP = 64 * 1024

# The most that is read at once. Fewer, larger reads make large bodies cheaper; this is enough.
RECEIVE_STEP = 64 * 1024

# Milliseconds: the most that the socket option takes, also for a write deadline of `inf`.
_LONGEST_USER_TIMEOUT = 2**31 - 1

# Out of descriptors or memory: it passes when connections close, so accepting goes on.
CAPACITY_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
CAPACITY_PAUSE = 0.1
CAPACITY_QUIET = 60.0

# A connection may be dead before it is accepted, and Linux reports its error from accept().
DEAD_ON_ARRIVAL_ERRNOS = frozenset(
    {
        errno.ECONNABORTED,
        errno.EPERM,
        errno.EPROTO,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENOPROTOOPT,
        errno.EOPNOTSUPP,
        errno.ETIMEDOUT,
    }
)


class DeadlineStream(trio.abc.HalfCloseableStream):
    """A TCP (or Unix) stream whose writes fail when the other side does not read.

    `raw` is the socket itself, for writes that must not wait. `send_all` raises
    `trio.BrokenResourceError` after `write_timeout` seconds without progress; the socket is closed
    by then. What there is to read is read in this stream's turn.
    """

    def __init__(self, raw: socket.socket, write_timeout: float, turns: Turnstile) -> None:
        self.raw = raw
        self._turns = turns
        self.socket = trio.socket.from_stdlib_socket(raw)
        self._stream = trio.SocketStream(self.socket)
        self._write_timeout = write_timeout

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, len(view), WRITE_STEP):
            with trio.move_on_after(self._write_timeout) as scope:
                await self._stream.send_all(view[start : start + WRITE_STEP])
            if scope.cancelled_caught:
                self.abort()
                raise trio.BrokenResourceError(
                    f"the client read nothing for {self._write_timeout:g} s"
                )

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        raw = self.raw
        while True:
            if raw.fileno() < 0:
                raise trio.ClosedResourceError("this socket was closed")
            await trio.lowlevel.wait_readable(raw)
            await self._turns.enter()
            try:
                return raw.recv(max_bytes or RECEIVE_STEP)
            except BlockingIOError:
                continue
            except OSError as error:
                if raw.fileno() < 0:
                    raise trio.ClosedResourceError("this socket was closed") from error
                raise trio.BrokenResourceError(f"socket failed: {error}") from error

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()

    def abort(self) -> None:
        """Close at once; whoever waits for the socket gets `trio.ClosedResourceError`."""
        self.socket.close()


async def open_listeners(host: str, port: int, backlog: int) -> list[trio.SocketListener]:
    """Listen on every address of `host` (a name, an IPv4 or IPv6 address); port 0 takes a free one.

    Raises OSError if an address cannot be bound.
    """
    return list(await trio.open_tcp_listeners(port, host=host, backlog=backlog))


def prepare_listener(listener: trio.SocketListener, write_timeout: float) -> None:
    """Set what accepted TCP sockets inherit.

    TCP_USER_TIMEOUT is a belt for `DeadlineStream`: the kernel gives up as well, a little later.
    Keep-alive probes find clients that vanished without a word while they wait for their answer.
    """
    sock = listener.socket
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    timeout = round(min((write_timeout + 5) * 1000, _LONGEST_USER_TIMEOUT))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15)


class Shortage:
    """What the log is told of missing descriptors: the first time at once, then once a minute."""

    def __init__(self) -> None:
        self._waits = 0
        self._quiet_until = -math.inf

    def waits(self, error: OSError) -> None:
        """Note that accepting has to wait; `waits` in the line counts since the line before."""
        self._waits += 1
        now = trio.current_time()
        if now >= self._quiet_until:
            reason = str(error)
            log.warning("cannot accept connections; retrying", reason=reason, waits=self._waits)
            self._waits, self._quiet_until = 0, now + CAPACITY_QUIET


async def accept(listener: trio.SocketListener, shortage: Shortage) -> socket.socket:
    """Wait for a connection. Errors that pass are noted and waited out; others are raised."""
    while True:
        try:
            accepted, _ = await listener.socket.accept()
        except OSError as error:
            if error.errno in CAPACITY_ERRNOS:
                shortage.waits(error)
                await trio.sleep(CAPACITY_PAUSE)
            elif error.errno not in DEAD_ON_ARRIVAL_ERRNOS:
                raise
            continue
        family, kind, proto = accepted.family, accepted.type, accepted.proto
        return socket.socket(family, kind, proto, fileno=accepted.detach())


async def close_politely(stream: trio.abc.Stream) -> None:
    """Close a stream; under TLS say so first, but wait for nobody."""
    with trio.move_on_after(1, shield=True), suppress(trio.BrokenResourceError):
        await stream.aclose()
