"""Addresses: where they lie, and which cannot be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from smgd.engine import paths
from smgd.errors import WorkerError


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


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("ipc://tmp/smgd/engine-0", "ipc:///tmp/smgd/engine-0"),
        ("ipc://engine-0", "ipc:///engine-0"),
        ("ipc://./engine-0", "ipc:///run/smgd/engine-0"),
        ("ipc://~/engine-0", "ipc:///run/smgd/engine-0"),
        ("ipc://@engine-0", "ipc:///run/smgd/engine-0"),  # abstract: without a file
        ("ipc://*", "ipc:///run/smgd/engine-0"),  # for libzmq, a name that it makes up
        ("ipc:// /tmp/x", "ipc:///tmp/x"),
    ],
)
def test_a_path_is_absolute(url: str, meant: str) -> None:
    text = f"ZMQ worker URL must have an absolute path, not {url!r}: did you mean {meant}?"
    with pytest.raises(WorkerError, match=re.escape(text)):
        paths.derive(url)


@pytest.mark.parametrize("character", ["\0", "\n", "\x1b", "\x7f", "\u202e", "\ud800"])
def test_a_path_can_be_shown_to_an_operator(character: str) -> None:
    url = f"ipc:///tmp/a{character}b"
    text = f"ZMQ worker URL has a character that cannot be shown: {url!r}"
    with pytest.raises(WorkerError, match=re.escape(text)):
        paths.derive(url)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("//tmp/a", ": did you mean ipc:///tmp/a?"),
        ("/tmp//a", ": did you mean ipc:///tmp/a?"),
        ("/tmp/./a", ": did you mean ipc:///tmp/a?"),
        ("/tmp/b/../a", ": did you mean ipc:///tmp/a?"),
        ("/tmp/a/", ": did you mean ipc:///tmp/a?"),
        ("/", ""),
        ("///", ""),
        ("/..", ""),
    ],
)
def test_a_path_is_written_in_one_way(path: str, meant: str) -> None:
    """Else two workers, or two gateways, could have one file under two names and two ports."""
    text = f"ZMQ worker URL must name a file by its plain path, not 'ipc://{path}'{meant}"
    with pytest.raises(WorkerError, match=f"{re.escape(text)}$"):
        paths.derive(f"ipc://{path}")


@pytest.mark.parametrize(
    "address",
    [
        *("ipc:///x", "127.0.0.1:1", "tcp://host", "tcp://host:port", "tcp://:1", "tcp://[::1]:1"),
        *("tcp://host:0", "tcp://host:65536", "tcp://host:022221", "tcp://host:١٢٣٤"),
        *("tcp://user@host:1", "tcp://u:p@host:1", "tcp://host:1/x", "tcp://ho st:1"),
    ],
)
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


@pytest.mark.parametrize(
    ("handshake", "host"),
    [
        ("tcp://127.0.0.1:29500", "127.0.0.1"),
        ("tcp://10.0.0.7:29500", "10.0.0.7"),
        ("tcp://box.example:29500", "box.example"),
        ("tcp://0.0.0.0:29500", "127.0.0.1"),
        ("tcp://*:29500", "127.0.0.1"),
    ],
)
def test_engines_dial_a_host_though_any_is_bound(handshake: str, host: str) -> None:
    assert paths.dialled(handshake) == (host, 29500)


def test_the_names_of_the_loopback_address_are_one() -> None:
    first = paths.derive("ipc:///a", "tcp://localhost:22221")
    second = paths.derive("ipc:///b", "tcp://127.0.0.1:22221")
    with pytest.raises(WorkerError, match="already claimed by worker ipc:///a"):
        paths.check_collisions([first, second])


@pytest.mark.parametrize("own", ["0.0.0.0:30000", "127.0.0.1:30000", "[::]:30000"])
def test_a_worker_must_not_take_a_port_of_ours(own: str) -> None:
    worker = paths.derive("ipc:///a", "tcp://127.0.0.1:30000")
    with pytest.raises(WorkerError, match="already claimed by this daemon itself"):
        paths.check_collisions([worker], ["127.0.0.1:1", own])
    paths.check_collisions([worker], ["127.0.0.2:30000", "127.0.0.1:30001"])
