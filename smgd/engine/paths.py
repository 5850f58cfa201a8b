"""Where a ZMQ worker's sockets lie; whose they are, `claim` knows.

Addresses are derived, not configured, so that an engine can be started before or after the gateway
and by hand: `ipc://<path>` gives `<path>-in.sock`, `<path>-out.sock` and a loopback port that is a
hash of the path. The path is absolute: engine and gateway need not have one working directory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from posixpath import normpath

import msgspec

from smgd.errors import WorkerError
from smgd.wire.fnv import handshake_port

SCHEME = "ipc://"
MAX_PATH = 107  # bytes in sockaddr_un on Linux: 108 with the terminating NUL
_HANDSHAKE = re.compile(r"tcp://[A-Za-z0-9._*-]+:(?P<port>[1-9][0-9]{0,4})")
_ANY_HOST = {"0.0.0.0", "*", "[::]", "::"}
_LOOPBACK = "127.0.0.1"


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
    if not path.startswith("/"):
        raise WorkerError(
            f"ZMQ worker URL must have an absolute path, not {url!r}: did you mean "
            f"{SCHEME}{_absolute(path)}?"
        )
    if not path.isprintable():
        raise WorkerError(f"ZMQ worker URL has a character that cannot be shown: {url!r}")
    if path != (plain := normpath(f"/{path.lstrip('/')}")) or plain == "/":
        hint = f": did you mean {SCHEME}{plain}?" if plain != "/" else ""
        raise WorkerError(f"ZMQ worker URL must name a file by its plain path, not {url!r}{hint}")
    if handshake is None:
        handshake = f"tcp://{_LOOPBACK}:{handshake_port(path)}"
    else:
        check_handshake(handshake)
    addresses = Addresses(url, handshake, f"{url}-in.sock", f"{url}-out.sock")
    length = len(os.fsencode(addresses.sockets[1]))
    if length > MAX_PATH:
        raise WorkerError(
            f"ipc socket path {addresses.sockets[1]} has {length} bytes; Linux allows {MAX_PATH}"
        )
    return addresses


def dialled(handshake: str) -> tuple[str, int]:
    """Return host and port by which an engine of this machine reaches a handshake address."""
    host = _host(handshake)
    return _LOOPBACK if host in _ANY_HOST else host, int(_port(handshake))


def check_handshake(address: str) -> None:
    """Refuse what cannot be bound as a handshake address. Raises `WorkerError`.

    Sockets are IPv4 (libzmq's default), and engines have to be told the port beforehand, so that it
    cannot be left to the kernel.
    """
    found = _HANDSHAKE.fullmatch(address)
    if not found or int(found["port"]) > 65535:
        raise WorkerError(
            "zmq_handshake_address must be a tcp:// address with a port, such as "
            f"tcp://127.0.0.1:29500 (IPv4, port 1 to 65535), not {address!r}"
        )


def check_collisions(workers: Sequence[Addresses], own: Iterable[str] = ()) -> None:
    """Refuse workers that would bind the same address, or one of our `own` (`host:port`).

    Raises `WorkerError`, naming both sides.
    """
    for _, error in collisions(workers, own):
        raise error


def collisions(
    workers: Sequence[Addresses], own: Iterable[str] = ()
) -> Iterator[tuple[int, WorkerError]]:
    """Give the number of each worker that would bind what another, or we ourselves, bind."""
    claimed = {f"tcp://{address}": "this daemon itself" for address in own}
    for number, worker in enumerate(workers):
        for address, owner in claimed.items():
            if _same_address(address, worker.handshake):
                error = WorkerError(
                    f"worker {worker.url} would bind handshake address {worker.handshake}, already "
                    f"claimed by {owner}: rename its socket path or set zmq_handshake_address"
                )
                yield number, error
                break
        else:
            claimed[worker.handshake] = f"worker {worker.url}"


def _file(address: str) -> Path:
    return Path(address.removeprefix(SCHEME))


def _port(address: str) -> str:
    return address.rpartition(":")[2]


def _host(address: str) -> str:
    host = address.removeprefix("tcp://").rpartition(":")[0]
    return _LOOPBACK if host == "localhost" else host


def _same_address(one: str, other: str) -> bool:
    hosts = {_host(address) for address in (one, other)}
    return _port(one) == _port(other) and (len(hosts) == 1 or bool(hosts & _ANY_HOST))


def _absolute(path: str) -> str:
    """Return what somebody has probably meant who wrote a path, or the name of an abstract socket.

    Mostly a slash was forgotten, unless the path begins like one that shells or libzmq expand.
    """
    return "/run/smgd/engine-0" if path[0] in "~.@*" else f"/{path.lstrip(' /')}"
