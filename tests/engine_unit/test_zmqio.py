"""Real sockets on the real clock: every wait is bounded by the `slow` scope."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from smgd.engine import zmqio
from smgd.engine.transport import PeerEvent, PeerGoneError
from smgd.engine.zmqio import ZmqContext, ZmqSocket
from smgd.errors import WorkerError
from tests.support import PATIENCE


@pytest.fixture
def context() -> Iterator[ZmqContext]:
    with ZmqContext() as context:
        yield context


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/socket"


def pipe(context: ZmqContext, address: str) -> tuple[ZmqSocket, ZmqSocket]:
    pull, push = context.socket("pull"), context.socket("push")
    pull.bind(address)
    push.connect(address)
    return push, pull


def dialogue(context: ZmqContext, address: str) -> tuple[ZmqSocket, ZmqSocket]:
    router, dealer = context.socket("router"), context.socket("dealer", identity=b"\x00\x00")
    router.bind(address)
    dealer.connect(address)
    return router, dealer


async def met(router: ZmqSocket, dealer: ZmqSocket) -> None:
    """Wait until the router knows the dealer's identity."""
    await dealer.send([b"hello"])
    assert await router.recv_batch() == [[b"\x00\x00", b"hello"]]


async def test_messages_keep_their_frames(context: ZmqContext, address: str) -> None:
    push, pull = pipe(context, address)
    sent = [[b"one"], [b"two", b""], [b"three", b"3" * 100_000, b"x"]]
    got: list[list[bytes]] = []
    with trio.fail_after(PATIENCE):
        for frames in sent:
            await push.send(frames)
        while len(got) < 3:
            got += await pull.recv_batch()
    assert got == sent


async def test_a_drain_is_bounded_and_then_lets_others_run(context: ZmqContext) -> None:
    push, pull = pipe(context, "inproc://here")  # what is sent has arrived
    for number in range(10):
        push.send_nowait([b"%d" % number])
    with trio.fail_after(PATIENCE):
        assert len(await pull.recv_batch(4)) == 4
        with trio.testing.assert_checkpoints():
            assert len(await pull.recv_batch(4)) == 4
        with trio.testing.assert_checkpoints():
            assert len(await pull.recv_batch(4)) == 2
        push.send_nowait([b"more"])
        with trio.testing.assert_checkpoints():  # it waits, since the last look found nothing
            assert await pull.recv_batch(4) == [[b"more"]]


async def test_a_reader_that_has_sent_looks_before_it_waits(
    context: ZmqContext, address: str
) -> None:
    """Its own send may have consumed the edge that told of a message."""
    router, dealer = dialogue(context, address)
    with trio.fail_after(PATIENCE):
        await met(router, dealer)
        for number in range(50):
            await dealer.send([b"ask %d" % number])
            [[identity, question]] = await router.recv_batch()
            await dealer.send([b"and %d" % number])
            await trio.sleep(0.001)  # it has arrived when the answer is sent
            await router.send([identity, question])
            assert await router.recv_batch() == [[identity, b"and %d" % number]]
            assert await dealer.recv_batch() == [[question]]


async def test_a_cancelled_reader_loses_nothing(context: ZmqContext, address: str) -> None:
    push, pull = pipe(context, address)
    got: list[bytes] = []
    with trio.fail_after(PATIENCE):
        for number in range(20):
            push.send_nowait([b"%d" % number])
            with trio.move_on_after(0):
                got += [frames[0] for frames in await pull.recv_batch(2)]
        while len(got) < 20:
            got += [frames[0] for frames in await pull.recv_batch(2)]
    assert got == [b"%d" % number for number in range(20)]


async def test_a_waiting_reader_is_woken_although_others_send(
    context: ZmqContext, address: str
) -> None:
    """The edge of the descriptor is consumed by the sender in nearly every round."""
    router, dealer = dialogue(context, address)
    rounds = 200
    with trio.fail_after(PATIENCE):
        await met(router, dealer)
        async with trio.open_nursery() as nursery:

            async def read() -> None:
                for _ in range(rounds):
                    got.append(await router.recv_batch())
                    answered.set()

            got: list[list[list[bytes]]] = []
            answered = trio.Event()
            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            for _ in range(rounds):
                answered = trio.Event()
                dealer.send_nowait([b"ping"])
                while not answered.is_set():
                    router.send_nowait([b"\x00\x00", b"busy"])
                    if sum(map(len, got)) < rounds:
                        await trio.lowlevel.checkpoint()
                await dealer.recv_batch()
    assert sum(map(len, got)) == rounds


async def test_a_message_for_nobody_raises(context: ZmqContext, address: str) -> None:
    router, dealer = dialogue(context, address)
    with trio.fail_after(PATIENCE):
        await met(router, dealer)
        router.send_nowait([b"\x00\x00", b"to you"])
        assert await dealer.recv_batch() == [[b"to you"]]
        with pytest.raises(PeerGoneError, match="no connection with that identity"):
            router.send_nowait([b"\x01\x00", b"to nobody"])
        dealer.close()
        with pytest.raises(PeerGoneError):  # noqa: PT012 - libzmq needs a moment to notice
            while True:
                await router.send([b"\x00\x00", b"too late"])


async def test_a_full_queue_holds_the_sender_until_there_is_room(
    context: ZmqContext, address: str
) -> None:
    push = context.socket("push", send_limit=1)
    push.connect(address)  # nobody listens yet, so one message waits and no more
    push.send_nowait([b"first"])
    with pytest.raises(trio.WouldBlock):
        push.send_nowait([b"second"])
    sent: list[float] = []

    async def send() -> None:
        await push.send([b"second"])
        sent.append(trio.current_time())

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            await trio.sleep(0.1)
            assert sent == []
            pull = context.socket("pull")
            pull.bind(address)
            got = await pull.recv_batch()
            while len(got) < 2:
                got += await pull.recv_batch()
    assert len(sent) == 1
    assert got == [[b"first"], [b"second"]]


async def test_a_peer_that_comes_back_takes_over_its_identity(
    context: ZmqContext, address: str
) -> None:
    router, old = dialogue(context, address)
    with trio.fail_after(PATIENCE):
        await met(router, old)
        new = context.socket("dealer", identity=b"\x00\x00")
        new.connect(address)
        await met(router, new)
        router.send_nowait([b"\x00\x00", b"for the new one"])
        assert await new.recv_batch() == [[b"for the new one"]]


async def test_the_monitor_sees_connections_come_and_go(context: ZmqContext, address: str) -> None:
    router = context.socket("router")
    monitor = router.monitor()
    router.bind(address)
    dealers = [context.socket("dealer", identity=bytes([i, 0])) for i in range(2)]
    events: list[PeerEvent] = []
    with trio.fail_after(PATIENCE):
        for dealer in dealers:
            dealer.connect(address)
            while sum(e.kind == "connected" for e in events) <= dealers.index(dealer):
                events += await monitor.recv()
        first, second = [e.connection for e in events]
        dealers[0].close()
        assert await monitor.recv() == [PeerEvent("disconnected", first)]
        dealers[1].close()
        assert await monitor.recv() == [PeerEvent("disconnected", second)]
        with trio.move_on_after(0.05) as nothing_more:
            await monitor.recv()
        assert nothing_more.cancelled_caught


async def test_closing_wakes_the_reader_and_the_monitor(context: ZmqContext, address: str) -> None:
    router = context.socket("router")
    router.bind(address)
    monitor = router.monitor()
    closed: list[str] = []

    async def read() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await router.recv_batch()
        closed.append("reader")

    async def watch() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await monitor.recv()
        closed.append("monitor")

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            nursery.start_soon(watch)
            await trio.testing.wait_all_tasks_blocked()
            router.close()
            router.close()
    assert sorted(closed) == ["monitor", "reader"]
    with pytest.raises(trio.ClosedResourceError):
        router.send_nowait([b"\x00\x00", b"x"])
    with pytest.raises(trio.ClosedResourceError):
        await router.recv_batch()


@pytest.mark.parametrize("limit", [1, 2])
async def test_a_reader_that_has_closed_its_socket_does_not_wait_for_it(
    context: ZmqContext, address: str, limit: int
) -> None:
    push, pull = pipe(context, address)
    with trio.fail_after(PATIENCE):
        await push.send([b"last"])
        assert await pull.recv_batch(limit) == [[b"last"]]
        pull.close()
        with pytest.raises(trio.ClosedResourceError):
            await pull.recv_batch(limit)


async def test_only_one_task_may_read(context: ZmqContext, address: str) -> None:
    _, pull = pipe(context, address)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pull.recv_batch)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError, match="already reading"):
            await pull.recv_batch()
        nursery.cancel_scope.cancel()


async def test_an_address_in_use_is_named(context: ZmqContext) -> None:
    first = context.socket("router")
    address = first.bind("tcp://127.0.0.1:*")
    assert not address.endswith("*")
    with pytest.raises(WorkerError, match=f"cannot bind {address}: Address already in use"):
        context.socket("router").bind(address)
    with pytest.raises(WorkerError, match="cannot connect to nonsense"):
        first.connect("nonsense")


async def test_too_many_sockets_are_told_and_none_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    addresses = [f"ipc://{tmp_path}/{name}" for name in ("handshake", "in", "out")]
    for limit in range(1, 7):  # of the seven that a worker takes
        monkeypatch.setattr(zmqio, "_MAX_SOCKETS", limit)
        with ZmqContext() as context:
            with pytest.raises(WorkerError, match="cannot open sockets: Too many open files"):
                zmqio.bind_worker(context, *addresses)
            assert context._open == set()
