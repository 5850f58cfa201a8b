"""Who may own addresses, and what is left of them: real files, sockets and a second process."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from smgd.engine import paths
from smgd.engine.claim import Claim
from smgd.errors import WorkerError
from tests.support import full_queue

OTHER_OWNER = """
import sys
from smgd.engine import claim, paths
with claim.Claim(paths.derive(sys.argv[1])):
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


def test_a_claim_makes_a_private_directory_and_leaves_nothing(addresses: paths.Addresses) -> None:
    with Claim(addresses):
        directory = addresses.lock.parent
        assert directory.stat().st_mode & 0o777 == 0o700
        assert addresses.lock.read_text() == str(os.getpid())
        listener(addresses.sockets[0]).close()
    assert list(directory.iterdir()) == []


def test_an_owner_that_exists_is_named(addresses: paths.Addresses) -> None:
    with other_process(addresses.url) as owner:
        with pytest.raises(WorkerError, match=f"in use by the process with pid {owner.pid}: give"):
            Claim(addresses).__enter__()
        assert addresses.lock.exists()
        owner.kill()
        owner.wait()
        with Claim(addresses):  # the kernel has let go of the lock
            assert addresses.lock.read_text() == str(os.getpid())


def test_the_same_process_cannot_claim_twice(addresses: paths.Addresses) -> None:
    with Claim(addresses):
        with pytest.raises(WorkerError, match=f"pid {os.getpid()}"):
            Claim(addresses).__enter__()
        assert addresses.lock.exists()
    with Claim(addresses):
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
    with Claim(addresses):
        assert removed
        assert addresses.lock.read_text() == str(os.getpid())


def test_stale_sockets_are_removed(addresses: paths.Addresses) -> None:
    for path in addresses.sockets:
        listener(path).close()
    with Claim(addresses):
        assert not any(path.exists() for path in addresses.sockets)


@pytest.mark.parametrize("index", [0, 1])
def test_sockets_of_programs_that_know_no_lock_are_left_alone(
    addresses: paths.Addresses, index: int
) -> None:
    path = addresses.sockets[index]
    with listener(path):
        text = f"ipc socket path {path} is in use by the process with pid {os.getpid()}"
        with pytest.raises(WorkerError, match=text):
            Claim(addresses).__enter__()
        assert path.exists()
    assert not addresses.lock.exists()


def test_a_listener_with_a_full_queue_is_found_as_well(addresses: paths.Addresses) -> None:
    path = addresses.sockets[0]
    with listener(path) as server, full_queue(server):
        text = "is in use by the process with pid unknown: give"
        with pytest.raises(WorkerError, match=text):
            Claim(addresses).__enter__()


def test_other_files_are_not_removed(addresses: paths.Addresses) -> None:
    path = addresses.sockets[1]
    path.parent.mkdir()
    path.write_text("precious")
    text = f"ipc socket path {path} exists but is not a socket; refusing to unlink"
    with pytest.raises(WorkerError, match=text):
        Claim(addresses).__enter__()
    assert path.read_text() == "precious"


def test_a_link_is_no_lock(addresses: paths.Addresses) -> None:
    """It would be another file's, and could be exchanged while it is held."""
    addresses.lock.parent.mkdir()
    elsewhere = addresses.lock.with_name("elsewhere")
    elsewhere.write_text("precious")
    addresses.lock.symlink_to(elsewhere)
    with pytest.raises(WorkerError, match=r"cannot use socket path of ipc:.*symbolic links"):
        Claim(addresses).__enter__()
    assert elsewhere.read_text() == "precious"
    assert addresses.lock.is_symlink()


def test_the_directory_must_be_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("file", "link"):
        with pytest.raises(WorkerError, match=f"{name} exists but is not a directory"):
            Claim(paths.derive(f"ipc://{tmp_path}/{name}/engine-0")).__enter__()
    with pytest.raises(WorkerError, match=r"cannot use socket path of ipc:.*Not a directory"):
        Claim(paths.derive(f"ipc://{tmp_path}/file/deeper/engine-0")).__enter__()


def test_the_directory_must_be_our_own(
    addresses: paths.Addresses, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    text = f"ipc socket dir {addresses.lock.parent} is owned by uid {uid}, not by uid {uid + 1}"
    with pytest.raises(WorkerError, match=text):
        Claim(addresses).__enter__()


# ------------------------------------------------------------------------- files that are lost


@contextmanager
def bound(addresses: paths.Addresses) -> Iterator[Claim]:
    """A claim whose socket files are bound."""
    first, second = addresses.sockets
    with Claim(addresses) as claim, listener(first), listener(second):
        claim.bound(first)
        claim.bound(second)
        assert claim.lost() == []
        yield claim


def test_a_file_that_is_removed_or_replaced_is_lost(addresses: paths.Addresses) -> None:
    first, second = addresses.sockets
    with bound(addresses) as claim:
        first.unlink()
        assert claim.lost() == [first]
        second.rename(second.with_name("elsewhere"))
        with listener(second):
            assert claim.lost() == [first, second]
        second.unlink()
        second.with_name("elsewhere").rename(second)
        assert claim.lost() == [first]
        with listener(first):
            claim.bound(first)
            assert claim.lost() == []


def test_a_link_to_a_file_of_ours_is_not_ours(addresses: paths.Addresses) -> None:
    first, _ = addresses.sockets
    with bound(addresses) as claim:
        moved = first.rename(first.with_name("elsewhere"))
        first.symlink_to(moved)
        assert claim.lost() == [first]
    assert first.is_symlink()


def test_a_file_that_is_gone_when_it_is_looked_at_first_is_lost(addresses: paths.Addresses) -> None:
    with Claim(addresses) as claim:
        claim.bound(addresses.sockets[0])
        assert claim.lost() == [addresses.sockets[0]]


def test_a_directory_that_is_removed_is_made_anew_with_the_lock(addresses: paths.Addresses) -> None:
    with bound(addresses) as claim:
        shutil.rmtree(addresses.lock.parent)
        assert claim.lost() == [addresses.lock, *addresses.sockets]
        claim.prepare()
        assert claim.lost() == [*addresses.sockets]
        assert addresses.lock.read_text() == str(os.getpid())
        assert addresses.lock.parent.stat().st_mode & 0o777 == 0o700
        with pytest.raises(WorkerError, match=f"in use by the process with pid {os.getpid()}"):
            Claim(addresses).__enter__()
    assert list(addresses.lock.parent.iterdir()) == []


def test_what_is_ours_is_left_alone_when_the_rest_is_prepared(addresses: paths.Addresses) -> None:
    first, second = addresses.sockets
    with bound(addresses) as claim:
        first.unlink()
        listener(first).close()  # a stale one
        claim.prepare()
        assert not first.exists()
        assert claim.lost() == [first]
        assert second.exists()


@pytest.mark.parametrize("taken", ["lock", "socket", "file"])
def test_what_others_have_taken_meanwhile_is_theirs(addresses: paths.Addresses, taken: str) -> None:
    first, _ = addresses.sockets
    with bound(addresses) as claim:
        if taken == "lock":
            shutil.rmtree(addresses.lock.parent)
            owner = other_process(addresses.url)
            theirs = addresses.lock
        else:
            first.unlink()
            owner = listener(first) if taken == "socket" else first.open("w")  # type: ignore[assignment]
            theirs = first
        with owner:
            for _ in range(2):
                with pytest.raises(WorkerError, match=r"is in use by the process|is not a socket"):
                    claim.prepare()
            assert theirs in claim.lost()
            claim.__exit__(None, None, None)
            assert theirs.exists()


def test_a_directory_that_cannot_be_entered_is_told(
    addresses: paths.Addresses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root may enter all, the kernel's answer is played."""

    def refuse(path: Path) -> os.stat_result:
        raise PermissionError(13, "Permission denied", str(path))

    with bound(addresses) as claim:
        with monkeypatch.context() as patched:
            patched.setattr(Path, "stat", refuse)
            patched.setattr(Path, "lstat", refuse)
            assert claim.lost() == [addresses.lock, *addresses.sockets]
            with pytest.raises(WorkerError, match=r"cannot use socket path of ipc:.*denied"):
                claim.prepare()
        assert claim.lost() == []
