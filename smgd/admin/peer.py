"""Who is at the other end of a Unix socket, and whether that is somebody who may command us.

The kernel says so, at the time of connecting (SO_PEERCRED, SO_PEERGROUPS); nothing a client sends
has a say in it. The mode of the socket file already keeps others out; this holds even if somebody
changes the mode.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import Final

import msgspec
import trio

from smgd.files import credentials

# Not in Python's socket module (Linux 4.13; asm-generic/socket.h).
_SO_PEERGROUPS: Final = 59
# The most that Python's getsockopt gives: 256 groups.
_GROUPS_BYTES: Final = 1024


class Peer(msgspec.Struct, frozen=True):
    """The process that has connected."""

    pid: int
    uid: int
    gids: frozenset[int]


class Access(msgspec.Struct, frozen=True):
    """Who may use the socket: root, the user that the daemon runs as, and members of a group."""

    uid: int
    gid: int

    def allows(self, peer: Peer) -> bool:
        """Tell whether a peer may."""
        return peer.uid in (0, self.uid) or self.gid in peer.gids


def access_to(path: str) -> Access:
    """Return who may use a socket file: it is its group whose members may. Raises OSError."""
    return Access(os.geteuid(), Path(path).stat().st_gid)


def peer_of(connection: trio.socket.SocketType) -> Peer:
    """Return who has connected. Raises OSError."""
    pid, uid, gid = credentials(connection)
    return Peer(pid, uid, frozenset((gid, *_groups(connection))))


def _groups(connection: trio.socket.SocketType) -> tuple[int, ...]:
    """Return the supplementary groups; none if they are more than Python can be told."""
    try:
        data = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES)
    except OSError:
        return ()
    return struct.unpack(f"{len(data) // 4}I", data)
