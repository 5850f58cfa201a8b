"""Hang-ups as the kernel tells them, on socket pairs."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest
import trio

from smgd.web.hangups import HangupWatch
from tests.web.servers import until


class Heard:
    def __init__(self) -> None:
        self.calls: list[bool] = []

    def hung_up(self, gone: bool) -> None:
        self.calls.append(gone)


@pytest.fixture
async def watch() -> AsyncIterator[HangupWatch]:
    with HangupWatch() as made:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.run)
            yield made
            nursery.cancel_scope.cancel()


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


async def settle() -> None:
    await trio.sleep(0.01)


async def test_data_is_no_hang_up(watch: HangupWatch) -> None:
    heard = Heard()
    with pair() as (ours, theirs):
        watch.add(ours, heard)
        theirs.send(b"data")
        await settle()
        assert heard.calls == []


@pytest.mark.parametrize("unread", [b"", b"pipelined"])
async def test_half_closing_is_told_once_even_behind_unread_data(
    watch: HangupWatch, unread: bytes
) -> None:
    heard = Heard()
    with pair() as (ours, theirs):
        watch.add(ours, heard)
        theirs.send(unread)
        theirs.shutdown(socket.SHUT_WR)
        await until(lambda: heard.calls)
        await settle()
        assert heard.calls == [False]


async def test_closing_is_told(watch: HangupWatch) -> None:
    heard = Heard()
    with pair() as (ours, theirs):
        watch.add(ours, heard)
        theirs.close()
        await until(lambda: heard.calls)
        assert heard.calls == [True]


async def test_a_hang_up_before_the_watch_is_told(watch: HangupWatch) -> None:
    heard = Heard()
    with pair() as (ours, theirs):
        theirs.close()
        watch.add(ours, heard)
        await until(lambda: heard.calls)
        assert heard.calls == [True]


async def test_a_number_that_is_used_again_belongs_to_the_new_one(watch: HangupWatch) -> None:
    old, new = Heard(), Heard()
    with pair() as (ours, _):
        key = watch.add(ours, old)
    with pair() as (ours, theirs):
        assert watch.add(ours, new) == key
        watch.remove(key, old)
        theirs.close()
        await until(lambda: new.calls)
        assert (old.calls, new.calls) == ([], [True])
        watch.remove(key, new)


async def test_what_is_removed_hears_nothing(watch: HangupWatch) -> None:
    heard = Heard()
    with pair() as (ours, theirs):
        watch.remove(watch.add(ours, heard), heard)
        theirs.close()
        await settle()
        assert heard.calls == []
