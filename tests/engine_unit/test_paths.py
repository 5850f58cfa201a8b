"""Addresses, and who may own them: real files, real sockets, a real second process."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from smgd.engine import paths
from smgd.errors import WorkerError

OTHER_OWNER = """
import sys
from smgd.engine import paths
with paths.claimed(paths.derive(sys.argv[1])):
    print("claimed", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def addresses(tmp_path: Path) -> paths.Addresses:
    return paths.derive(f"ipc://{tmp_path}/dir/engine-0")


@contextmanager
def other_process(url: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that owns a worker's addresses."""
    command = [sys.executable, "-c", OTHER_OWNER, url]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "claimed\n"
        yield process
        process.kill()


def listener(path: Path) -> socket.socket:
    path.parent.mkdir(exist_ok=True)
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    made.listen()
    return made


def test_addresses_are_derived() -> None:
    addresses = paths.derive("ipc:///tmp/smg-zmq/engine-0")
    assert addresses.handshake == "tcp://127.0.0.1:22670"
    assert addresses.input == "ipc:///tmp/smg-zmq/engine-0-in.sock"
    assert addresses.output == "ipc:///tmp/smg-zmq/engine-0-out.sock"
    assert addresses.lock == Path("/tmp/smg-zmq/engine-0.lock")
    assert paths.derive("ipc:///x", "tcp://127.0.0.1:30500").handshake == "tcp://127.0.0.1:30500"


@pytest.mark.parametrize("url", ["", "ipc://", "/tmp/x", "tcp://127.0.0.1:1", "IPC:///x"])
def test_other_urls_are_refused(url: str) -> None:
    text = f"ZMQ worker URL must be ipc://<path>, not {url!r}"
    with pytest.raises(WorkerError, match=re.escape(text)):
        paths.derive(url)


@pytest.mark.parametrize("address", ["ipc:///x", "127.0.0.1:1", "tcp://host", "tcp://host:port"])
def test_other_handshake_addresses_are_refused(address: str) -> None:
    with pytest.raises(WorkerError, match="zmq_handshake_address must be a tcp:// address"):
        paths.derive("ipc:///x", address)


def test_the_limit_of_the_kernel_is_checked_up_front() -> None:
    room = 107 - len("/-out.sock")
    assert paths.derive("ipc:///" + "x" * room)
    with pytest.raises(WorkerError, match=r"x-out\.sock has 108 bytes; Linux allows 107"):
        paths.derive("ipc:///" + "x" * (room + 1))
    with pytest.raises(WorkerError, match="bytes"):
        paths.derive("ipc:///" + "é" * (room // 2 + 1))


def test_two_workers_must_not_share_a_handshake_address() -> None:
    first, second = paths.derive("ipc:///a"), paths.derive("ipc:///b")
    paths.check_collisions([first, second])
    same = paths.derive("ipc:///b", first.handshake)
    text = (
        f"worker ipc:///b would bind handshake address {first.handshake}, already claimed by "
        f"worker ipc:///a"
    )
    with pytest.raises(WorkerError, match=re.escape(text)):
        paths.check_collisions([first, same])


@pytest.mark.parametrize("own", ["0.0.0.0:30000", "127.0.0.1:30000", "[::]:30000"])
def test_a_worker_must_not_take_a_port_of_ours(own: str) -> None:
    worker = paths.derive("ipc:///a", "tcp://127.0.0.1:30000")
    with pytest.raises(WorkerError, match="already claimed by this daemon itself"):
        paths.check_collisions([worker], ["127.0.0.1:1", own])
    paths.check_collisions([worker], ["127.0.0.2:30000", "127.0.0.1:30001"])


def test_a_claim_makes_a_private_directory_and_leaves_nothing(addresses: paths.Addresses) -> None:
    with paths.claimed(addresses):
        directory = addresses.lock.parent
        assert directory.stat().st_mode & 0o777 == 0o700
        assert addresses.lock.read_text() == str(os.getpid())
        listener(addresses.sockets[0]).close()
    assert list(directory.iterdir()) == []


def test_an_owner_that_exists_is_named(addresses: paths.Addresses) -> None:
    with other_process(addresses.url) as owner:
        with pytest.raises(WorkerError, match=f"in use by the process with pid {owner.pid}: give"):
            paths.claimed(addresses).__enter__()
        assert addresses.lock.exists()
        owner.kill()
        owner.wait()
        with paths.claimed(addresses):  # the kernel has let go of the lock
            assert addresses.lock.read_text() == str(os.getpid())


def test_the_same_process_cannot_claim_twice(addresses: paths.Addresses) -> None:
    with paths.claimed(addresses):
        with pytest.raises(WorkerError, match=f"pid {os.getpid()}"):
            paths.claimed(addresses).__enter__()
        assert addresses.lock.exists()
    with paths.claimed(addresses):
        pass


def test_a_lock_file_that_was_removed_meanwhile_is_not_trusted(
    addresses: paths.Addresses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last owner removes it after we have opened it and before we have the lock."""
    lock = fcntl.flock
    removed: list[int] = []

    def remove_first(descriptor: int, operation: int) -> None:
        if not removed:
            removed.append(descriptor)
            addresses.lock.unlink()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with paths.claimed(addresses):
        assert removed
        assert addresses.lock.read_text() == str(os.getpid())


def test_stale_sockets_are_removed(addresses: paths.Addresses) -> None:
    for path in addresses.sockets:
        listener(path).close()
    with paths.claimed(addresses):
        assert not any(path.exists() for path in addresses.sockets)


@pytest.mark.parametrize("index", [0, 1])
def test_sockets_of_programs_that_know_no_lock_are_left_alone(
    addresses: paths.Addresses, index: int
) -> None:
    path = addresses.sockets[index]
    with listener(path):
        text = f"ipc socket path {path} is in use by the process with pid {os.getpid()}"
        with pytest.raises(WorkerError, match=text):
            paths.claimed(addresses).__enter__()
        assert path.exists()
    assert not addresses.lock.exists()


def test_a_listener_with_a_full_queue_is_found_as_well(addresses: paths.Addresses) -> None:
    path = addresses.sockets[0]
    with listener(path) as server:
        server.listen(0)
        with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as two:
            for client in (one, two):
                client.setblocking(False)
                with suppress(BlockingIOError):
                    client.connect(str(path))
            with pytest.raises(WorkerError, match="is in use by"):
                paths.claimed(addresses).__enter__()


def test_other_files_are_not_removed(addresses: paths.Addresses) -> None:
    path = addresses.sockets[1]
    path.parent.mkdir()
    path.write_text("precious")
    text = f"ipc socket path {path} exists but is not a socket; refusing to unlink"
    with pytest.raises(WorkerError, match=text):
        paths.claimed(addresses).__enter__()
    assert path.read_text() == "precious"


def test_the_directory_must_be_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("file", "link"):
        with pytest.raises(WorkerError, match=f"{name} exists but is not a directory"):
            paths.claimed(paths.derive(f"ipc://{tmp_path}/{name}/engine-0")).__enter__()
    with pytest.raises(WorkerError, match=r"cannot use socket path of ipc:.*Not a directory"):
        paths.claimed(paths.derive(f"ipc://{tmp_path}/file/deeper/engine-0")).__enter__()


def test_the_directory_must_be_our_own(
    addresses: paths.Addresses, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    text = f"ipc socket dir {addresses.lock.parent} is owned by uid {uid}, not by uid {uid + 1}"
    with pytest.raises(WorkerError, match=text):
        paths.claimed(addresses).__enter__()
