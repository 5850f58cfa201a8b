"""Who may use a worker's addresses, and the files by which that is known.

A path belongs to the process that holds a lock on `<path>.lock`; the kernel lets go of it when the
process dies, however it dies. Whoever can write to the directory can impersonate an engine, so it
must be a real directory of our own. Socket files are removed only if they are sockets and nobody
listens on them, so that not even another program, which does not know the lock, is robbed of them.

A socket goes on when its file is removed, and so do its connections, but nobody finds it any more.
So a claim knows which files are its own (`lost`), by a descriptor of each.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from smgd.engine.paths import Addresses
from smgd.errors import WorkerError
from smgd.files import hold, is_at, listener_of

_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class Claim:
    """The files of one worker's addresses, which are ours from entering it to leaving it.

    On entering, they are locked and free to be bound; on leaving, those that are ours are removed.
    Entering raises `WorkerError` if they cannot be ours.
    """

    def __init__(self, addresses: Addresses) -> None:
        self._addresses = addresses
        self._lock: int | None = None  # a descriptor, as are those of what is bound
        self._bound: dict[Path, int | None] = {}

    def __enter__(self) -> Self:
        try:
            self.prepare()
        except WorkerError:
            self._unlock()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            for path in self._addresses.sockets:
                if path not in self._bound or self._is_ours(path):
                    path.unlink(missing_ok=True)
        finally:
            for path in self._addresses.sockets:
                self._forget(path)
            self._unlock()

    def prepare(self) -> None:
        """Make the addresses free to be bound, except for what is ours. Raises `WorkerError`.

        The directory is made, and the lock is taken, unless that is done; stale files are removed.
        """
        with _named(self._addresses):
            if not self._is_locked():
                _own_directory(self._addresses.lock.parent)
                taken = _lock(self._addresses.lock)
                if self._lock is not None:
                    os.close(self._lock)
                self._lock = taken
            for path in self._addresses.sockets:
                if not self._is_ours(path):
                    _remove_stale(path)

    def bound(self, path: Path) -> None:
        """Hear that a socket of ours has just been bound to a file. Raises `WorkerError`."""
        self._forget(path)
        with _named(self._addresses):
            try:
                self._bound[path] = hold(path)
            except FileNotFoundError:  # so it is lost already
                self._bound[path] = None

    def lost(self) -> list[Path]:
        """Return which files of ours are not there any more, or are somebody else's."""
        lock = [] if self._is_locked() else [self._addresses.lock]
        return lock + [path for path in self._bound if not self._is_ours(path)]

    def _is_locked(self) -> bool:
        return _is_visible_at(self._addresses.lock, self._lock)

    def _is_ours(self, path: Path) -> bool:
        return _is_visible_at(path, self._bound.get(path))

    def _forget(self, path: Path) -> None:
        descriptor = self._bound.pop(path, None)
        if descriptor is not None:
            os.close(descriptor)

    def _unlock(self) -> None:
        if self._lock is None:
            return
        if self._is_locked():
            self._addresses.lock.unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = None


@contextmanager
def _named(addresses: Addresses) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WorkerError(f"cannot use socket path of {addresses.url}: {error}") from error


def _own_directory(path: Path) -> None:
    with suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    check_directory(path)


def check_directory(path: Path) -> None:
    """Refuse a directory that is not one of our own. Raises `WorkerError`, OSError."""
    seen = path.lstat()
    if not stat.S_ISDIR(seen.st_mode):
        raise WorkerError(
            f"ipc socket dir {path} exists but is not a directory (nor may it be a link)"
        )
    if seen.st_uid != os.geteuid():
        raise WorkerError(
            f"ipc socket dir {path} is owned by uid {seen.st_uid}, not by uid {os.geteuid()} which "
            f"this daemon runs as: use a directory of its own"
        )


def _lock(path: Path) -> int:
    """Return the descriptor that holds the lock. Raises `WorkerError`, naming the owner."""
    while True:
        descriptor = os.open(path, _LOCK, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(descriptor, 20).decode().strip() or "unknown"
            os.close(descriptor)
            raise WorkerError(
                f"{path.with_suffix('')} is in use by the process with pid {owner}: "
                f"give each gateway its own socket path"
            ) from error
        if is_at(path, descriptor):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
            return descriptor
        os.close(descriptor)  # its last owner removed it while we were waiting: take the new one


def _is_visible_at(path: Path, descriptor: int | None) -> bool:
    try:
        return descriptor is not None and is_at(path, descriptor)
    except OSError:  # why it cannot be seen, `prepare` tells
        return False


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise WorkerError(f"ipc socket path {path} exists but is not a socket; refusing to unlink")
    owner = listener_of(path)
    if owner is not None:
        raise WorkerError(
            f"ipc socket path {path} is in use by the process with pid {owner or 'unknown'}: "
            f"give each gateway its own socket path"
        )
    path.unlink()
