"""Where a ZMQ worker's sockets lie, and who may use them.

Addresses are derived, not configured, so that an engine can be started before or after the gateway
and by hand: `ipc://<path>` gives `<path>-in.sock`, `<path>-out.sock` and a loopback port that is a
hash of the path. Whoever can write to the directory can impersonate an engine, so it must be a real
directory of our own.

A path belongs to the process that holds a lock on `<path>.lock`; the kernel lets go of it when the
process dies, however it dies. Socket files are removed only if they are sockets and nobody listens
on them, so that not even another program, which does not know the lock, is robbed of them.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from smgd.errors import WorkerError
from smgd.wire.fnv import handshake_port

SCHEME = "ipc://"
_MAX_PATH = 107  # bytes in sockaddr_un on Linux: 108 with the terminating NUL
_ANY_HOST = {"0.0.0.0", "*", "[::]", "::"}
_SUN_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Addresses(msgspec.Struct, frozen=True):
    """All addresses of one worker. `handshake` is tcp, `input` and `output` are ipc."""

    url: str
    handshake: str
    input: str
    output: str

    @property
    def lock(self) -> Path:
        """The file whose lock means that the addresses are ours."""
        return Path(self.url.removeprefix(SCHEME) + ".lock")

    @property
    def record(self) -> Path:
        """The file that says which engines dialled in here last; see `record`."""
        return Path(self.url.removeprefix(SCHEME) + ".engine.json")

    @property
    def sockets(self) -> tuple[Path, Path]:
        """The two socket files."""
        return _file(self.input), _file(self.output)


def derive(url: str, handshake: str | None = None) -> Addresses:
    """Return the addresses of a worker URL; `handshake` overrides the derived one.

    Raises `WorkerError`.
    """
    path = url.removeprefix(SCHEME)
    if path == url or not path:
        raise WorkerError(f"ZMQ worker URL must be {SCHEME}<path>, not {url!r}")
    if handshake is None:
        handshake = f"tcp://127.0.0.1:{handshake_port(path)}"
    elif not handshake.startswith("tcp://") or not _port(handshake).isdecimal():
        raise WorkerError(
            f"zmq_handshake_address must be a tcp:// address with a port, not {handshake!r}"
        )
    addresses = Addresses(url, handshake, f"{url}-in.sock", f"{url}-out.sock")
    length = len(os.fsencode(addresses.sockets[1]))
    if length > _MAX_PATH:
        raise WorkerError(
            f"ipc socket path {addresses.sockets[1]} has {length} bytes; Linux allows {_MAX_PATH}"
        )
    return addresses


def check_collisions(workers: Sequence[Addresses], own: Iterable[str] = ()) -> None:
    """Refuse workers that would bind the same address, or one of our `own` (`host:port`).

    Raises `WorkerError`, naming both sides.
    """
    claimed = {f"tcp://{address}": "this daemon itself" for address in own}
    for worker in workers:
        for address, owner in claimed.items():
            if _same_address(address, worker.handshake):
                raise WorkerError(
                    f"worker {worker.url} would bind handshake address {worker.handshake}, already "
                    f"claimed by {owner}: rename its socket path or set zmq_handshake_address"
                )
        claimed[worker.handshake] = f"worker {worker.url}"


@contextmanager
def claimed(addresses: Addresses) -> Iterator[None]:
    """Own the addresses of a worker: lock them, make the directory, remove stale socket files.

    On leaving, the files are gone. Raises `WorkerError` if they cannot be ours.
    """
    with _named(addresses):
        _own_directory(addresses.lock.parent)
        lock = _lock(addresses.lock)
    try:
        with _named(addresses):
            for path in addresses.sockets:
                _remove_stale(path)
        try:
            yield
        finally:
            for path in addresses.sockets:
                path.unlink(missing_ok=True)
    finally:
        addresses.lock.unlink(missing_ok=True)
        os.close(lock)


@contextmanager
def _named(addresses: Addresses) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WorkerError(f"cannot use socket path of {addresses.url}: {error}") from error


def _file(address: str) -> Path:
    return Path(address.removeprefix(SCHEME))


def _port(address: str) -> str:
    return address.rpartition(":")[2]


def _same_address(one: str, other: str) -> bool:
    hosts = {address.removeprefix("tcp://").rpartition(":")[0] for address in (one, other)}
    return _port(one) == _port(other) and (len(hosts) == 1 or bool(hosts & _ANY_HOST))


def _own_directory(path: Path) -> None:
    with suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
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
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(descriptor, 20).decode().strip() or "unknown"
            os.close(descriptor)
            raise WorkerError(
                f"{path.with_suffix('')} is in use by the process with pid {owner}: "
                f"give each gateway its own socket path"
            ) from error
        if _is_still_at(path, descriptor):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
            return descriptor
        os.close(descriptor)  # its last owner removed it while we were waiting: take the new one


def _is_still_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise WorkerError(f"ipc socket path {path} exists but is not a socket; refusing to unlink")
    owner = _listener(path)
    if owner is not None:
        raise WorkerError(
            f"ipc socket path {path} is in use by the process with pid {owner}: "
            f"give each gateway its own socket path"
        )
    path.unlink()


def _listener(path: Path) -> int | None:
    """Return the pid of the process that listens on a socket file, if one does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return None
        except BlockingIOError:  # its backlog is full, so somebody owns it
            pass
        size = _SUN_CREDENTIALS.size
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        pid, _, _ = _SUN_CREDENTIALS.unpack(credentials)
        return int(pid)
