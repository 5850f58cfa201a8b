"""Small files that are whole or not there, and files that are still the ones that were made.

Whoever may write to a directory may exchange what is in it at any time. So a file is told from
another that has taken its name by a descriptor that is held of it: as long as that is open, no
other file can get its inode, which would otherwise be the next one to be used. Links are nowhere
followed. What is said here of a Unix socket is said by the kernel, not by whoever is at its end.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import Final, Protocol

_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid


class Connection(Protocol):
    """A socket, be it Python's or trio's."""

    def getsockopt(self, level: int, optname: int, buflen: int, /) -> bytes:
        """Return an option of at most so many bytes. Raises OSError."""
        ...


def write_whole(path: Path, data: bytes) -> None:
    """Write a file for its owner alone, at once: readers find the former one or all of this.

    It passes through `<path>.new`. Raises OSError.
    """
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(new, flags, 0o600), "wb") as file:
        file.write(data)
    new.replace(path)


def hold(path: Path) -> int:
    """Return a descriptor of a file, whatever its kind, that is good for `is_at` alone.

    Raises OSError.
    """
    return os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)


def is_at(path: Path, descriptor: int) -> bool:
    """Tell whether the file of a descriptor is (still) the one at a path. Raises OSError."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def listener_of(path: Path) -> int | None:
    """Return the pid of the process that listens on a Unix socket's file, None if nobody does.

    It is 0 if the listener's queue is full, so that it cannot be asked. Raises OSError.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return None
        except BlockingIOError:  # its queue is full, so somebody owns it
            return 0
        pid, _, _ = credentials(probe)
        return pid


def credentials(connection: Connection) -> tuple[int, int, int]:
    """Return pid, uid and gid of who is at the other end of a Unix socket (SO_PEERCRED).

    They are those at the time of connecting, or of listening. Raises OSError.
    """
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(data)
    return pid, uid, gid
