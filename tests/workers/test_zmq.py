"""A worker and scripted engines on real ZMQ sockets and the real clock."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from structlog.testing import capture_logs

from smgd.core import RequestIds, Sampling, WorkerState
from smgd.engine import paths
from smgd.engine.dialects.vllm import VllmDialect
from smgd.engine.link import LinkSettings
from smgd.engine.zmqio import ZmqContext
from smgd.errors import ApiError, EngineLostError, WorkerError
from smgd.wire import vllm as wire
from smgd.workers.registry import Registry
from smgd.workers.zmq import ZmqWorker, binder
from tests.engine_unit.scripted import Inbox, ScriptedEngine, outputs, registration, request
from tests.support import PATIENCE


class Bench:
    """One worker in a registry, and the contexts of both sides."""

    def __init__(self, directory: Path, context: ZmqContext, engines: ZmqContext) -> None:
        self.addresses = paths.derive(f"ipc://{directory}/engine-0")
        self.registry = Registry()
        self.ids = RequestIds()
        self._context = context
        self._engines = engines
        self._changed = trio.Event()
        self.registry.on_change(lambda _: self._wake())
        self.worker = self.new_worker()
        self.registry.add(self.worker)

    def new_worker(self, engines: int = 1, **settings: float) -> ZmqWorker:
        return ZmqWorker(
            self.addresses,
            "m",
            VllmDialect(),
            self.ids,
            binder(self._context),
            engines=engines,
            vocab_size=100,
            settings=LinkSettings(**settings),  # type: ignore[arg-type]
            on_change=self.registry.changed,
        )

    def engine(self, index: int = 0) -> ScriptedEngine:
        return ScriptedEngine(self._engines, index)

    @asynccontextmanager
    async def running(self, worker: ZmqWorker | None = None) -> AsyncIterator[trio.Nursery]:
        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                await nursery.start((worker or self.worker).run)
                yield nursery
                nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[ScriptedEngine]:
        """A running worker with one engine that is ready."""
        async with self.running():
            engine = self.engine()
            await engine.start(self.addresses.handshake)
            await self.until("ready")
            yield engine

    async def until(self, state: WorkerState, worker: ZmqWorker | None = None) -> None:
        while (worker or self.worker).state != state:
            await self._changed.wait()

    def submit(self, worker: ZmqWorker | None = None) -> tuple[str, Inbox]:
        inbox, request_id = Inbox(), self.ids.next()
        (worker or self.worker).submit_nowait(request(request_id), inbox)
        return request_id, inbox

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with ZmqContext() as context, ZmqContext() as engines:
        yield Bench(tmp_path, context, engines)


async def test_a_request_and_its_answer(bench: Bench) -> None:
    async with bench.serving() as engine:
        assert bench.registry.candidates("m") == [bench.worker]
        request_id, inbox = bench.submit()
        assert bench.worker.requests_active == 1
        assert await engine.take_ids() == [request_id]
        stats = {"num_running_reqs": 1, "num_waiting_reqs": 0, "kv_cache_usage": 0.25}
        await engine.say(outputs((request_id, [5], None), stats=stats))
        await inbox.heard.wait()
        assert bench.worker.load.running == 1
        await engine.say(outputs((request_id, [6], 1)))
        await inbox.ended()
        assert inbox.ids == [5, 6]
        assert bench.worker.requests_active == 0
        assert bench.worker.rank_loads[0].kv_usage == 0.25
        assert bench.worker.info is not None
        assert bench.worker.info.version == "0.32.0"


async def test_the_guard_stands_before_the_engine(bench: Bench) -> None:
    async with bench.serving() as engine:
        for bad in (
            request(bench.ids.next(), prompt_ids=[]),
            request(bench.ids.next(), prompt_ids=[100]),
            request(bench.ids.next(), sampling=Sampling(max_tokens=1, temperature=3.0)),
        ):
            with pytest.raises(ApiError) as caught:
                bench.worker.submit_nowait(bad, Inbox())
            assert caught.value.status == 400
        request_id, _ = bench.submit()
        assert await engine.take_ids() == [request_id]
        assert bench.worker.requests_active == 1


@pytest.mark.parametrize("order", ["register, ready", "ready, register", "no hello"])
async def test_every_order_of_the_handshake(bench: Bench, order: str) -> None:
    async with bench.running():
        assert bench.worker.state == "pending"
        with pytest.raises(EngineLostError, match="the worker is pending"):
            bench.submit()
        engine = bench.engine()
        if order == "no hello":  # it was answered by a former life of the daemon
            engine.dial(bench.addresses.handshake)
            engine.connect(bench.addresses.input, bench.addresses.output)
        else:
            addresses = await engine.hello(bench.addresses.handshake)
            engine.connect(addresses["inputs"][0], addresses["outputs"][0])
        assert bench.worker.loading == (order != "no hello")
        steps = [engine.ready, engine.register]
        for step in steps if order == "ready, register" else reversed(steps):
            await step()
            await trio.sleep(0.05)
        await bench.until("ready")
        assert not bench.worker.loading
        request_id, _ = bench.submit()
        while not (ids := await engine.take_ids()):
            pass  # a call: an engine whose HELLO was not heard may be asked whether it is there
        assert ids == [request_id]


async def test_an_engine_may_dial_before_anybody_listens(bench: Bench) -> None:
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            engine = bench.engine()
            nursery.start_soon(engine.start, bench.addresses.handshake)
            await trio.sleep(0.1)
            async with bench.running():
                await bench.until("ready")


async def test_a_killed_engine_fails_requests_at_once_and_its_successor_is_served(
    bench: Bench,
) -> None:
    async with bench.serving() as engine:
        request_id, inbox = bench.submit()
        assert await engine.take_ids() == [request_id]
        with trio.fail_after(PATIENCE):
            engine.die()
            await inbox.ended()
            await bench.until("not_ready")
        assert isinstance(inbox.errors[0], EngineLostError)
        assert bench.registry.candidates("m") == []
        assert bench.registry.known_max_model_len("m") == 2048  # what it has told stays
        successor = bench.engine()
        await successor.start(bench.addresses.handshake)
        with trio.fail_after(PATIENCE):
            await bench.until("ready")
        request_id, inbox = bench.submit()
        assert await successor.take_ids() == [request_id]
        await successor.say(outputs((request_id, [5], 1)))
        await inbox.ended()


async def test_a_frozen_engine_is_replaced_by_one_with_the_same_identity(bench: Bench) -> None:
    """The old connections stay open, as those of a stopped process do."""
    async with bench.serving() as frozen:
        old_id, old = bench.submit()
        successor = bench.engine()
        await successor.start(bench.addresses.handshake)
        await bench.until("ready")
        assert isinstance(old.errors[0], EngineLostError)
        new_id, inbox = bench.submit()
        assert await successor.take_ids() == [new_id]
        await frozen.say(outputs((old_id, [9], 1)))  # it thaws
        await successor.say(outputs((new_id, [5], 1)))
        await inbox.ended()
        assert (inbox.ids, old.ids) == ([5], [])
        frozen.die()
        await trio.sleep(0.1)
        questions = await successor.take()  # one connection has ended: was it this one's?
        assert {kind for kind, _ in questions} == {wire.UTILITY}
        (_, (_, call_id, *_)) = questions[-1]
        await successor.say(outputs(reply=[call_id, None, [None, False]]))
        await trio.sleep(0.1)
        assert bench.worker.state == "ready"
        again, _ = bench.submit()
        taken = [payload[0] for kind, payload in await successor.take() if kind == wire.ADD]
        assert taken == [again]


@pytest.mark.parametrize("removed", ["sockets", "input", "output", "directory"])
async def test_an_engine_is_served_although_somebody_has_removed_files(
    bench: Bench, removed: str
) -> None:
    files = {"input": bench.addresses.sockets[:1], "output": bench.addresses.sockets[1:]}
    async with bench.serving() as engine:
        if removed == "directory":
            shutil.rmtree(bench.addresses.lock.parent)
        else:
            for path in files.get(removed, bench.addresses.sockets):
                path.unlink()
        request_id, inbox = bench.submit()
        assert await engine.take_ids() == [request_id]  # the connections have lost nothing
        await engine.say(outputs((request_id, [5], 1)))
        await inbox.ended()
        engine.die()
        await bench.until("not_ready")
        successor = bench.engine()
        with trio.fail_after(PATIENCE):
            await successor.start(bench.addresses.handshake)
            await bench.until("ready")
        request_id, inbox = bench.submit()
        assert await successor.take_ids() == [request_id]
        await successor.say(outputs((request_id, [6], 1)))
        await inbox.ended()
        assert inbox.ids == [6]
    assert [path.name for path in bench.addresses.lock.parent.iterdir()] == ["engine-0.engine.json"]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await trio.sleep(0.01)


async def start(engine: ScriptedEngine, handshake: str, process: int) -> None:
    """Start an engine as one of those that do not stand and fall together."""
    addresses = await engine.hello(handshake)
    engine.connect(addresses["inputs"][0], addresses["outputs"][0])
    await engine.register(registration(instance_id=f"process {process}"))
    await engine.ready()


async def test_files_are_made_anew_while_an_engine_works(bench: Bench) -> None:
    """Its request, its connections and the worker's state live on; an engine more finds its way."""
    bench.registry.remove(bench.worker.id)
    worker = bench.worker = bench.new_worker(engines=2, look_interval=0.05)
    bench.registry.add(worker)
    async with bench.running():
        engines = [bench.engine(0), bench.engine(1)]
        for index, engine in enumerate(engines):
            await start(engine, bench.addresses.handshake, index)
        await bench.until("ready")
        submitted = [bench.submit() for _ in engines]
        for _ in range(3):
            for path in bench.addresses.sockets:
                path.unlink()
            await until(lambda: all(path.exists() for path in bench.addresses.sockets))
        engines[1].die()
        await submitted[1][1].ended()
        again = bench.engine(1)
        await start(again, bench.addresses.handshake, 1)
        await until(lambda: worker.usable == [0, 1])
        request_id, inbox = submitted[0]
        assert (await engines[0].take_ids())[0] == request_id
        await engines[0].say(outputs((request_id, [5], 1)))
        await inbox.ended()
        assert (inbox.ids, inbox.errors) == ([5], [])
        assert worker.counts.losses == 1


@pytest.mark.parametrize("half", ["input", "output"])
async def test_half_a_connection_is_no_connection(bench: Bench, half: str) -> None:
    """An engine whose input or output thread has died looks alive from outside."""
    async with bench.serving() as engine:
        _, inbox = bench.submit()
        getattr(engine, half).close()
        with trio.fail_after(PATIENCE):
            await inbox.ended()
        assert str(inbox.errors[0]).endswith(f"the {half} connection was closed")


async def test_the_sentinel_ends_the_session(bench: Bench) -> None:
    async with bench.serving() as engine:
        _, inbox = bench.submit()
        await engine.say(wire.ENGINE_CORE_DEAD)
        await inbox.ended()
        assert "ENGINE_CORE_DEAD" in str(inbox.errors[0])
        assert bench.worker.state == "not_ready"


async def test_an_abort_reaches_the_engine_also_when_the_worker_stops(bench: Bench) -> None:
    async with bench.serving() as engine:
        first, _ = bench.submit()
        second, inbox = bench.submit()
        bench.worker.abort_nowait(first)
        got: list[str] = []
        while first not in got:
            got += await engine.take_ids(wire.ABORT)
        assert got == [first]
    with trio.fail_after(PATIENCE):
        assert await engine.take_ids(wire.ABORT) == [second]
    assert len(inbox.errors) == 1


async def test_a_second_daemon_on_the_same_path_is_refused(bench: Bench) -> None:
    async with bench.serving() as engine:
        second = bench.new_worker()
        with pytest.raises(WorkerError, match=f"in use by the process with pid {os.getpid()}"):
            await second.run()
        request_id, _ = bench.submit()  # and the first one has lost nothing
        assert await engine.take_ids() == [request_id]


async def test_a_handshake_port_in_use_is_named(bench: Bench, tmp_path: Path) -> None:
    with bench.engine().context.socket("router") as squatter:
        squatter.bind(bench.addresses.handshake)
        with pytest.raises(WorkerError, match=f"cannot bind {bench.addresses.handshake}: Address"):
            await bench.worker.run()
    assert list(await trio.Path(tmp_path).iterdir()) == []


async def test_two_ranks_share_the_work(bench: Bench) -> None:
    worker = bench.new_worker(engines=2)
    async with bench.running(worker):
        engines = [bench.engine(0), bench.engine(1)]
        for engine in engines:
            await engine.start(bench.addresses.handshake)
        await bench.until("ready", worker)
        submitted = [bench.submit(worker) for _ in range(4)]
        for index, engine in enumerate(engines):
            expected = [request_id for request_id, _ in submitted[index::2]]
            got: list[str] = []
            while len(got) < 2:
                got += await engine.take_ids()
            assert got == expected
            await engine.say(outputs(*((i, [index], 1) for i in got), engine=index))
        for number, (_, inbox) in enumerate(submitted):
            await inbox.ended()
            assert inbox.ids == [number % 2]


async def test_what_a_former_life_left_running_is_aborted(bench: Bench) -> None:
    async with bench.serving() as engine:
        old, _ = bench.submit()
        assert await engine.take_ids() == [old]
    await engine.take_ids(wire.ABORT)  # the first life has said good-bye; a crash would not have
    bench.ids = RequestIds()
    async with bench.running(bench.new_worker()):
        aborted: list[str] = []
        async with trio.open_nursery() as nursery:

            async def generate() -> None:
                while True:
                    await engine.say(outputs((old, [5], None)))
                    await trio.sleep(0.01)

            nursery.start_soon(generate)
            while not aborted:
                aborted += await engine.take_ids(wire.ABORT)
            await trio.sleep(0.1)
            nursery.cancel_scope.cancel()
        assert aborted == [old]


async def test_a_storm_loses_no_wake_up(bench: Bench) -> None:
    """Both directions of the input socket are busy while outputs come back."""
    async with bench.serving() as engine:
        total, answered = 400, 0
        inboxes: list[Inbox] = []
        async with trio.open_nursery() as nursery:

            async def answer() -> None:
                nonlocal answered
                while answered < total:
                    for request_id in await engine.take_ids():
                        await engine.say(outputs((request_id, [5], 1)))
                        answered += 1

            async def disturb() -> None:
                while answered < total:
                    await engine.register()
                    await trio.sleep(0.001)

            nursery.start_soon(answer)
            nursery.start_soon(disturb)
            for _ in range(total):
                inboxes.append(bench.submit()[1])
                await trio.lowlevel.checkpoint()
        for inbox in inboxes:
            await inbox.ended()
        assert {tuple(inbox.ids) for inbox in inboxes} == {(5,)}
        assert bench.worker.requests_active == 0


async def test_draining_refuses_new_requests_only(bench: Bench) -> None:
    async with bench.serving() as engine:
        request_id, inbox = bench.submit()
        bench.worker.drain()
        assert bench.worker.state == "draining"
        with pytest.raises(EngineLostError, match="the worker is draining"):
            bench.submit()
        await engine.say(outputs((request_id, [5], 1)))
        await inbox.ended()
        engine.die()
        await trio.sleep(0.1)
        assert bench.worker.state == "draining"


async def test_fifty_starts_and_stops_leave_nothing_behind(tmp_path: Path) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = 0
    with capture_logs():
        for number in range(50):
            with ZmqContext() as context, ZmqContext() as engines:
                bench = Bench(tmp_path / "dir", context, engines)
                async with bench.serving() as engine:
                    request_id, inbox = bench.submit()
                    await engine.say(outputs((request_id, [5], 1)))
                    await inbox.ended()
            if number == 0:
                before = open_files()
    assert open_files() == before
    assert [path.name for path in (tmp_path / "dir").iterdir()] == ["engine-0.engine.json"]
