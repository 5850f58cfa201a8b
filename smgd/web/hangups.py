"""Notices clients that hang up, for all connections in one task.

While a request runs nobody reads its connection: with a pipelined request in the kernel's buffer,
or with the reader waiting for something else, an end of file would go unseen and the engine would
work for nobody. The kernel tells it apart from data (EPOLLRDHUP), so one epoll for all connections,
itself watched by trio, is enough: no task, no timer and no system call per request.
"""

from __future__ import annotations

import select
import socket
from types import TracebackType
from typing import Protocol

import trio

# Edge-triggered: one report per hang-up. EPOLLHUP and EPOLLERR are always reported.
_EVENTS = select.EPOLLRDHUP | select.EPOLLET
_GONE = select.EPOLLHUP | select.EPOLLERR


class Watched(Protocol):
    """What wants to know that its client hung up."""

    def hung_up(self, gone: bool) -> None:
        """Hear that the client closed its sending side, or all of it (`gone`)."""
        ...


class HangupWatch:
    """The sockets that are watched. A context manager; `run` is its one task."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, Watched] = {}

    def __enter__(self) -> HangupWatch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._epoll.close()

    def add(self, raw: socket.socket, watched: Watched) -> int:
        """Watch a socket and return the key to remove it with."""
        fd = raw.fileno()
        self._watched[fd] = watched
        self._epoll.register(fd, _EVENTS)
        return fd

    def remove(self, key: int, watched: Watched) -> None:
        """Watch no longer. A closed socket has left the epoll by itself, and its key may have gone
        to another connection already."""
        if self._watched.get(key) is watched:
            del self._watched[key]

    async def run(self) -> None:
        """Report hang-ups until cancelled."""
        while True:
            await trio.lowlevel.wait_readable(self._epoll.fileno())
            for fd, events in self._epoll.poll(0):
                watched = self._watched.get(fd)
                if watched is not None:
                    watched.hung_up(bool(events & _GONE))
