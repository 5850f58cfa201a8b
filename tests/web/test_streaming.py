"""The engine's reader writes to clients: when it may, what goes in one write, who is woken when."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from smgd.api.envelope import Usage
from smgd.core import Delta, GenerationRequest
from smgd.dispatch import Generation, Sequence
from smgd.web.exchange import Exchange, Routes
from smgd.web.streaming import Direct
from tests.support import PATIENCE
from tests.support import request as generation_request
from tests.web.servers import read_until, request, running_server


class Numbers:
    """A plan that renders every token as its number, `width` digits long."""

    stream = True
    eager = True
    done = False

    def __init__(self, requests: list[GenerationRequest], width: int) -> None:
        self.requests = requests
        self.width = width

    def feed(self, sequence: Sequence) -> bytes:
        return b"".join(b"%0*d " % (self.width, number) for number in sequence.take_ids())

    def end(self) -> bytes:
        return b""

    def usage(self) -> Usage:
        return Usage()

    def finish_reasons(self) -> str:
        return ""


class Stage:
    """A stream to one client on the fast path, whose engine is the test."""

    def __init__(self, choices: int, width: int) -> None:
        self.requests = [generation_request(f"r{number}") for number in range(choices)]
        self.plan = Numbers(self.requests, width)
        self.begun = trio.Event()
        self.over = trio.Event()
        self.news: list[Sequence] | None = None
        self.woken: trio.Event
        self.generation: Generation
        self.direct: Direct
        self.exchange: Any

    async def __call__(self, exchange: Exchange) -> None:
        nobody: Any = None  # nothing is submitted
        self.exchange = exchange
        self.generation = Generation(nobody, self.requests, "request")
        self.direct = Direct(exchange, self.plan, self.generation)
        await exchange.read_body(100)
        await exchange.start(200, [])
        self.begun.set()
        await self.over.wait()
        await exchange.end(self.direct.rest)

    async def wait_for_news(self, nursery: trio.Nursery) -> None:
        """Begin to wait as a stream's task does; `woken` is set with its end."""
        self.woken = trio.Event()
        nursery.start_soon(self._wait)
        await wait_all_tasks_blocked()

    async def _wait(self) -> None:
        self.news = await self.direct.news(60.0)
        self.woken.set()

    def tokens(self, *ids: int) -> None:
        """Deliver one token to each choice, and write as the engine's reader does."""
        sequences = self.generation.sequences[: len(ids)]
        for sequence, number in zip(sequences, ids, strict=True):
            sequence.deliver(Delta([number]))
        for write in [sequence.flush() for sequence in sequences]:
            if write is not None:
                write()

    def count_writes(self) -> list[bytes]:
        """Return a list that gets whatever is written to the socket directly from now on."""
        written: list[bytes] = []
        send = self.exchange._send_raw

        def counted(data: bytes) -> Any:
            written.append(data)
            return send(data)

        self.exchange._send_raw = counted
        return written


@asynccontextmanager
async def staged(
    choices: int = 1, width: int = 1
) -> AsyncIterator[tuple[Stage, trio.SocketStream]]:
    async def nobody(scope: object, receive: object, send: object) -> None:
        raise AssertionError("only one route is asked for here")

    stage = Stage(choices, width)
    app = Routes({("POST", "/"): stage}, nobody)
    async with (
        running_server(app, http_path="fast") as server,
        await server.connect(4096) as client,
        trio.open_nursery() as nursery,
    ):
        await client.send_all(request("/"))
        await stage.begun.wait()
        await stage.wait_for_news(nursery)
        yield stage, client
        nursery.cancel_scope.cancel()
        stage.over.set()


async def test_a_token_is_written_without_waking_the_task() -> None:
    async with staged() as (stage, client):
        for number in range(1, 4):
            stage.tokens(number)
            assert (await read_until(client, b"%d \r\n" % number)).endswith(
                b"2\r\n%d \r\n" % number
            )
        assert not stage.woken.is_set()


async def test_choices_of_one_drain_are_one_write() -> None:
    async with staged(choices=4) as (stage, client):
        written = stage.count_writes()
        stage.tokens(1, 2, 3, 4)
        stage.tokens(5, 6)
        assert [data.split(b"\r\n")[-2] for data in written] == [b"1 2 3 4 ", b"5 6 "]
        assert (await read_until(client, b"5 6 \r\n")).endswith(b"8\r\n1 2 3 4 \r\n4\r\n5 6 \r\n")


async def test_a_full_socket_wakes_the_task_at_once() -> None:
    async with staged(width=65536) as (stage, client):
        number = 0
        while not stage.direct.stuck:
            number += 1
            stage.tokens(number)
        with trio.fail_after(PATIENCE):  # no other token has to come for that
            await stage.woken.wait()
        assert stage.news == []
        stage.over.set()
        data = await read_until(client, b"0\r\n\r\n")
        assert data.count(b" \r\n") == number


async def test_a_client_that_is_gone_wakes_the_task_at_once() -> None:
    async with staged() as (stage, client):
        raw = stage.exchange._h1.link.raw
        raw.shutdown(socket.SHUT_WR)  # as after a reset: what is written fails
        stage.tokens(1)
        await wait_all_tasks_blocked()
        assert (stage.direct.stuck, stage.news) == (True, [])
        await client.aclose()


@pytest.mark.parametrize("may", [False, True])
async def test_the_reader_writes_only_where_it_may(may: bool) -> None:
    async with staged() as (stage, _), trio.open_nursery() as nursery:
        stage.generation.wake()
        await stage.woken.wait()
        [sequence] = stage.generation.sequences
        assert sequence.hook is None, "while the task writes"
        written = stage.count_writes()
        stage.exchange.can_write_nowait = may
        await stage.wait_for_news(nursery)
        stage.tokens(7)
        await wait_all_tasks_blocked()
        assert len(written) == may
        assert stage.woken.is_set() is not may
        nursery.cancel_scope.cancel()
