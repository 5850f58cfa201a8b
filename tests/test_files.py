"""Files that are whole, and files that are told from those that took their names."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from smgd.files import credentials, hold, is_at, listener_of, write_whole
from tests.support import full_queue


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.json"


def test_a_file_is_written_for_its_owner_alone(path: Path) -> None:
    umask = os.umask(0)
    try:
        write_whole(path, b"one")
    finally:
        os.umask(umask)
    assert path.read_bytes() == b"one"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    write_whole(path, b"2")
    assert path.read_bytes() == b"2"
    assert [*path.parent.iterdir()] == [path]


def test_readers_keep_what_they_have_opened(path: Path) -> None:
    write_whole(path, b"one")
    with path.open("rb") as reader:
        write_whole(path, b"two")
        assert reader.read() == b"one"


def test_what_an_interrupted_write_has_left_is_in_nobodys_way(path: Path) -> None:
    path.with_name("a.json.new").write_bytes(b"half")
    write_whole(path, b"whole")
    assert path.read_bytes() == b"whole"


@pytest.mark.parametrize("name", ["a.json", "a.json.new"])
def test_a_link_is_replaced_and_not_followed(path: Path, name: str) -> None:
    other = path.with_name("precious")
    other.write_bytes(b"precious")
    path.with_name(name).symlink_to(other)
    write_whole(path, b"data")
    assert (path.read_bytes(), path.is_symlink()) == (b"data", False)
    assert other.read_bytes() == b"precious"


def test_what_cannot_be_written_is_an_oserror_and_changes_nothing(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_whole(path / "none", b"")
    path.with_name("a.json.new").mkdir()
    path.write_bytes(b"old")
    with pytest.raises(OSError, match=r"a\.json\.new"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"


def test_a_file_is_told_from_its_successor(path: Path) -> None:
    path.touch()
    held = hold(path)
    try:
        assert is_at(path, held)
        path.unlink()
        assert not is_at(path, held)
        path.touch()  # on most file systems it would get the same inode
        assert not is_at(path, held)
    finally:
        os.close(held)


def test_a_link_is_not_what_it_leads_to(path: Path) -> None:
    path.touch()
    held = hold(path)
    link = path.with_name("link")
    link.symlink_to(path)
    held_link = hold(link)
    try:
        assert (is_at(link, held), is_at(link, held_link)) == (False, True)
        assert (is_at(path, held), is_at(path, held_link)) == (True, False)
    finally:
        os.close(held)
        os.close(held_link)


def test_who_listens_on_a_socket(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        listener_of(path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        assert listener_of(path) is None
        server.listen()
        assert listener_of(path) == os.getpid()
    assert listener_of(path) is None


def test_a_listener_with_a_full_queue_is_one_whose_pid_cannot_be_told(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        with full_queue(server):
            assert listener_of(path) == 0


def test_who_is_at_the_other_end() -> None:
    one, two = socket.socketpair()
    with one, two:
        assert credentials(one) == (os.getpid(), os.getuid(), os.getgid())
