"""The engine on real sockets and the real clock: a handful of scenes, each well below a second."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import pytest
import trio

from smgd.engine.transport import PeerGoneError
from smgd.errors import WorkerError
from smgd.sim.core import EngineCore
from smgd.sim.engine import EXIT_FAILED, EXIT_OK, Engine, Life, run
from smgd.sim.faults import InputThreadError, MainLoopError
from smgd.sim.flood import FloodCore
from smgd.sim.model import Model
from smgd.sim.pace import Pace
from smgd.sim.poison import Limits
from smgd.sim.replies import Reply
from smgd.sim.scheduler import Options, Scheduler
from smgd.sim.wire import LAYOUTS, encode_registration
from tests.sim.frontend import FrontEnd, wait_disconnected
from tests.support import PATIENCE

LAYOUT = LAYOUTS["0.32.0"]
PROMPT = [7, 8, 9]

Build: TypeAlias = Callable[..., Engine]


@pytest.fixture
def front_end(tmp_path: Path) -> Iterator[FrontEnd]:
    with FrontEnd(tmp_path) as front_end:
        yield front_end


@pytest.fixture
def build(model: Model, front_end: FrontEnd) -> Build:
    def build_engine(
        index: int = 0, *, life: dict[str, Any] | None = None, **options: Any
    ) -> Engine:
        scheduler = Scheduler(LAYOUT, model, Limits(500, model.vocab_size), Options(**options))
        registration = encode_registration(
            LAYOUT, engine_index=index, instance_id="1", max_model_len=500, max_num_seqs=256,
            num_gpu_blocks=100, block_size=16,
        )  # fmt: skip
        lived = Life(**{"handshake": front_end.address, "exit_delay": 0.15, **(life or {})})
        return Engine(EngineCore(LAYOUT, scheduler, index), lived, index, registration)

    return build_engine


class Lives:
    """Engines that run; `statuses` has the exit status of those that have ended."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self._changed = trio.Event()

    async def live(self, engine: Engine) -> None:
        """Run one."""
        self.statuses.append(await engine.run())
        self._changed.set()

    async def ended(self) -> list[int]:
        """Wait until one has ended; return the statuses."""
        await self._changed.wait()
        return self.statuses


@asynccontextmanager
async def running(*engines: Engine) -> AsyncIterator[Lives]:
    """Run engines as long as the block takes."""
    lives = Lives()
    async with trio.open_nursery() as nursery:
        for engine in engines:
            nursery.start_soon(lives.live, engine)
        with trio.fail_after(PATIENCE):
            yield lives
        nursery.cancel_scope.cancel()


async def test_a_request_from_hello_to_the_last_token(front_end: FrontEnd, build: Build) -> None:
    async with running(build()):
        registrations = await front_end.greet()
        await front_end.add("a", PROMPT, temperature=0.0, max_tokens=30)
        result = (await front_end.collect("a"))["a"]
        idle = await front_end.receive()

    assert registrations[b"\0\0"]["max_model_len"] == 500
    assert len(result.ids) == 30
    assert result.finish == 1
    assert [len(output) for output in result.outputs] == [18] * 30
    assert idle[1] == []


async def test_the_front_end_may_come_late(front_end: FrontEnd, build: Build) -> None:
    await front_end.close_handshake()
    async with running(build()):
        await trio.sleep(0.05)
        front_end.bind_handshake()

        assert await front_end.greet()


async def test_steps_keep_their_pace(front_end: FrontEnd, build: Build) -> None:
    async with running(build(pace=Pace(ttft=0.05, itl=0.02))):
        await front_end.greet()
        start = trio.current_time()
        await front_end.add("a", PROMPT, max_tokens=6)
        await front_end.collect("a")
        duration = trio.current_time() - start

    assert 0.15 <= duration < 2


async def test_an_abort_ends_a_stream(front_end: FrontEnd, build: Build) -> None:
    async with running(build(pace=Pace(itl=0.01))):
        await front_end.greet()
        await front_end.add("a", PROMPT, max_tokens=400)
        await front_end.receive()

        await front_end.abort("a")
        *_, stats = (await front_end.call("sim_stats"))[2]

    assert stats["abort_ids"] == ["a"]
    assert stats["running"] == 0


async def test_a_front_end_that_comes_back_gets_what_it_missed(
    front_end: FrontEnd, build: Build
) -> None:
    async with running(build(pace=Pace(itl=0.03))):
        await front_end.greet()
        await front_end.add("a", PROMPT, max_tokens=40)
        before = [token for o in (await front_end.receive())[1] for token in o[1]]
        front_end.close_data()
        await trio.sleep(0.1)

        front_end.bind()
        result = (await front_end.collect("a"))["a"]
        answer = await _call_when_connected(front_end, "is_sleeping")

    # libzmq may have taken a message off the old connection that nobody read.
    assert 30 < len(before + result.ids) <= 40
    assert result.finish == 1
    assert answer[2] == [None, False]


async def _call_when_connected(front_end: FrontEnd, method: str) -> list[Any]:
    while True:
        try:
            return await front_end.call(method)
        except PeerGoneError:
            await trio.sleep(0.01)


async def test_a_deadly_request(front_end: FrontEnd, build: Build) -> None:
    async with running(build(life={"exit_delay": 1.0})) as lives:
        await front_end.greet()
        await front_end.add("a", [])

        assert await front_end.receive_frames() == [b"ENGINE_CORE_DEAD"]
        output_ended = await wait_disconnected(front_end.output_monitor)
        await front_end.add("b", PROMPT)  # vanishes
        input_ended = await wait_disconnected(front_end.input_monitor)
        statuses = await lives.ended()

    assert statuses == [EXIT_FAILED]
    assert input_ended - output_ended > 0.5


async def add_for_ever(front_end: FrontEnd) -> None:
    while True:
        await front_end.add("c", PROMPT)


async def test_an_undecodable_request_ends_the_input_alone(
    front_end: FrontEnd, build: Build
) -> None:
    async with running(build(pace=Pace(itl=0.01))) as lives:
        await front_end.greet()
        await front_end.add("a", PROMPT, max_tokens=20)
        await front_end.receive()
        await front_end.add("b", PROMPT, temperature=3.0)
        await wait_disconnected(front_end.input_monitor)

        result = (await front_end.collect("a"))["a"]
        # The monitor hears of it from libzmq's thread, sometimes before the socket does.
        with trio.fail_after(PATIENCE), pytest.raises(PeerGoneError):
            await add_for_ever(front_end)

        assert result.finish == 1
        assert lives.statuses == []


async def test_a_client_that_is_not_there_ends_the_output_alone(
    front_end: FrontEnd, build: Build
) -> None:
    async with running(build()) as lives:
        await front_end.greet()
        await front_end.add("a", PROMPT, tail=(None, None, 5))
        await wait_disconnected(front_end.output_monitor)

        await front_end.add("b", PROMPT)  # taken, and never answered
        await trio.sleep(0.05)

        assert lives.statuses == []


async def test_leaving_with_a_request(front_end: FrontEnd, build: Build) -> None:
    engine = build(pace=Pace(itl=0.01))
    async with running(engine) as lives:
        await front_end.greet()
        await front_end.add("a", PROMPT, max_tokens=400)
        await front_end.receive()

        engine.leave()
        result = (await front_end.collect("a"))["a"]
        await front_end.add("b", PROMPT)  # vanishes
        await wait_disconnected(front_end.input_monitor)
        statuses = await lives.ended()

    assert result.finish == 2
    assert statuses == [EXIT_OK]


@pytest.mark.parametrize("times", [1, 2])
async def test_leaving_at_once(front_end: FrontEnd, build: Build, times: int) -> None:
    engine = build(life={"exit_delay": 60.0}, pace=Pace(ttft=60.0))
    async with running(engine) as lives:
        await front_end.greet()
        if times == 2:
            await front_end.add("a", PROMPT)
            await front_end.call("is_sleeping")
        for _ in range(times):
            engine.leave()
        statuses = await lives.ended()

    assert statuses == [EXIT_OK]


async def test_leaving_before_anybody_has_answered(build: Build) -> None:
    engine = build()
    async with running(engine) as lives:
        await trio.sleep(0.02)
        engine.leave()
        statuses = await lives.ended()

    assert statuses == [EXIT_OK]


async def test_no_init(front_end: FrontEnd, build: Build) -> None:
    with pytest.raises(MainLoopError, match=r"no INIT in 0\.05 s"):
        await build(life={"init_timeout": 0.05}).run()


async def test_an_init_that_cannot_be_read(front_end: FrontEnd, build: Build) -> None:
    async def answer() -> None:
        ((peer, _),) = await front_end.handshake.recv_batch(1)
        await front_end.handshake.send([peer, msgspec.msgpack.encode({"addresses": 5})])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer)
        with pytest.raises(InputThreadError):
            await build().run()


async def test_an_address_of_no_use(build: Build) -> None:
    with pytest.raises(WorkerError, match="cannot connect to tcp://nowhere"):
        await build(life={"handshake": "tcp://nowhere"}).run()


async def test_the_end_of_one_engine_is_the_end_of_all(front_end: FrontEnd, build: Build) -> None:
    async with trio.open_nursery() as nursery:
        status = await nursery.start(_run_all, [build(0), build(1)])
        with trio.fail_after(PATIENCE):
            registrations = await front_end.greet(2)
            await front_end.add("a", [], rank=1)

    assert {r["data_parallel_rank"] for r in registrations.values()} == {0, 1}
    assert status == [EXIT_FAILED]


async def _run_all(
    engines: list[Engine], task_status: trio.TaskStatus[list[int]] = trio.TASK_STATUS_IGNORED
) -> None:
    status: list[int] = []
    task_status.started(status)
    status.append(await run(engines))


async def test_two_front_end_processes(tmp_path: Path, model: Model, build: Build) -> None:
    directory = tmp_path / "two"
    directory.mkdir()
    with FrontEnd(directory, clients=2) as front_end:
        async with running(build(life={"handshake": front_end.address})):
            await front_end.greet()
            await front_end.add("a", PROMPT, tail=(None, None, 1), max_tokens=1)
            message = await front_end.receive(client=1)

    assert message[1][0][0] == "a"


async def test_a_reply_that_hangs_the_engine(front_end: FrontEnd, build: Build) -> None:
    engine = build(replies=[Reply(ids=(5,), finish=None, then="hang")])
    async with running(engine) as lives:
        await front_end.greet()
        await front_end.add("a", PROMPT)
        message = await front_end.receive()
        with trio.move_on_after(0.1):
            await front_end.call("is_sleeping")
            pytest.fail("a hung engine has answered")
        engine.leave()
        await lives.ended()

    assert message[1][0][1] == [5]


async def test_flooding(front_end: FrontEnd, model: Model) -> None:
    core = FloodCore(LAYOUT, model, 0.0, 0)
    async with running(Engine(core, Life(handshake=front_end.address), 0, b"\x80")):
        await front_end.greet()
        for name in "abc":
            await front_end.add(name, PROMPT, max_tokens=2000)
        results = await front_end.collect(*"abc")

    assert [len(result.ids) for result in results.values()] == [2000] * 3
