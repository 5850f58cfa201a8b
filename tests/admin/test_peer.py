"""The kernel says who has connected; root, our own user and the socket's group may."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import trio

from smgd.admin.peer import Access, Peer, access_to, peer_of


@pytest.mark.parametrize(
    ("peer", "allowed"),
    [
        (Peer(1, 0, frozenset({0})), True),
        (Peer(1, 100, frozenset({5})), True),
        (Peer(1, 7, frozenset({5, 200})), True),
        (Peer(1, 7, frozenset({5, 6})), False),
        (Peer(1, 7, frozenset()), False),
    ],
)
def test_who_may(peer: Peer, allowed: bool) -> None:
    assert Access(uid=100, gid=200).allows(peer) is allowed


def test_the_group_is_that_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.touch()
    assert access_to(str(file)) == Access(os.geteuid(), file.stat().st_gid)


async def test_the_kernel_tells_pid_user_and_all_groups() -> None:
    ours, theirs = socket.socketpair()
    with theirs, trio.socket.from_stdlib_socket(ours) as connection:
        peer = peer_of(connection)
    assert (peer.pid, peer.uid) == (os.getpid(), os.getuid())
    assert peer.gids == {os.getgid(), *os.getgroups()}
