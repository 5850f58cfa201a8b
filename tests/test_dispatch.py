"""A generation's life: who gets its requests, what comes of them, and what is left behind."""

from __future__ import annotations

from typing import Any, cast

import pytest
import trio
import trio.testing

from smgd.core import Policy, Worker
from smgd.dispatch import Dispatcher, Generation, Sequence
from smgd.errors import ApiError, EngineLostError, invalid_request
from tests.support import FirstPolicy, MemoryWorker, request


class House:
    """A dispatcher over memory workers."""

    def __init__(self, *workers: MemoryWorker) -> None:
        self.workers = list(workers) or [MemoryWorker()]
        self.policy = FirstPolicy()
        self.dispatcher = Dispatcher(self._candidates, cast("Policy", self.policy))

    @property
    def worker(self) -> MemoryWorker:
        return self.workers[0]

    def _candidates(self, model: str) -> list[Worker]:
        return [w for w in self.workers if w.state == "ready" and w.model_id == model]

    def nothing_left(self) -> bool:
        return not self.policy.active and not any(w.running for w in self.workers)


async def test_news_merge_until_they_are_taken() -> None:
    house = House()
    async with house.dispatcher.generation([request()]) as generation:
        house.worker.send("r1", 5, cached=2)
        house.worker.send("r1", 6, 7)
        [sequence] = await generation.wait()
        delta = sequence.take()
        assert (delta.ids, delta.finish) == ([5, 6, 7], None)
        assert sequence.cached_tokens == 2
        house.worker.send("r1", 8, finish="stop", stop_reason=8)
        [sequence] = await generation.wait()
        delta = sequence.take()
        assert (delta.ids, delta.finish, delta.stop_reason) == ([8], "stop", 8)
    assert house.nothing_left()
    assert house.worker.aborted == []


async def test_the_waiter_is_woken_by_news() -> None:
    house = House()
    async with house.dispatcher.generation([request()]) as generation, trio.open_nursery() as n:

        async def engine() -> None:
            await trio.testing.wait_all_tasks_blocked()
            house.worker.send("r1", 5)

        n.start_soon(engine)
        assert [s.index for s in await generation.wait()] == [0]


async def test_leaving_early_aborts_every_unfinished_sequence_once() -> None:
    house = House()
    async with house.dispatcher.generation([request("a"), request("b"), request("c")]):
        house.worker.send("b", 1, finish="stop")
    assert house.worker.aborted == ["a", "c"]
    assert house.nothing_left()


async def test_cancelling_the_waiter_aborts_once(autojump_clock: trio.testing.MockClock) -> None:
    house = House()
    with trio.move_on_after(5) as scope:
        async with house.dispatcher.generation([request()]) as generation:
            await generation.wait()
    assert scope.cancelled_caught
    assert house.worker.aborted == ["r1"]
    assert house.nothing_left()


async def test_a_cancel_before_entering_submits_nothing() -> None:
    house = House()
    with trio.CancelScope() as scope:
        scope.cancel()
        async with house.dispatcher.generation([request()]):
            pytest.fail("entered")
    assert house.worker.submitted == []


async def test_stopping_from_our_side_aborts_at_once_and_only_once() -> None:
    house = House()
    async with house.dispatcher.generation([request()]) as generation:
        generation.sequences[0].stop()
        assert house.worker.aborted == ["r1"]
    assert house.worker.aborted == ["r1"]
    assert house.nothing_left()


async def test_a_lost_engine_fails_the_generation_and_aborts_its_siblings_elsewhere() -> None:
    class Alternate(FirstPolicy):
        def pick(self, candidates: list[MemoryWorker], request: Any) -> MemoryWorker:
            return candidates[len(self.active) % len(candidates)]

    house = House(MemoryWorker("ipc:///m/a"), MemoryWorker("ipc:///m/b"))
    house.policy = Alternate()
    house.dispatcher.policy = cast("Policy", house.policy)
    async with house.dispatcher.generation([request("a"), request("b")]) as generation:
        house.workers[0].lose()
        await generation.wait()
        assert generation.error is not None
        assert (generation.error.status, generation.error.code) == (503, "engine_lost")
        assert "ipc:///m/a" in generation.error.message
        assert isinstance(generation.error.__cause__, EngineLostError)
    assert house.workers[1].aborted == ["b"]
    assert house.workers[0].aborted == []
    assert house.nothing_left()


@pytest.mark.parametrize(
    ("finish", "status", "code"), [("abort", 503, "engine_lost"), ("error", 500, "engine_error")]
)
async def test_finishes_that_are_no_answer(finish: Any, status: int, code: str) -> None:
    house = House()
    async with house.dispatcher.generation([request()]) as generation:
        house.worker.send("r1", 5)
        house.worker.send("r1", finish=finish)
        [sequence] = await generation.wait()
        assert sequence.take().ids == [5], "what came before the end can still be taken"
        assert generation.error is not None
        assert (generation.error.status, generation.error.code) == (status, code)
    assert house.worker.aborted == []
    assert house.nothing_left()


async def test_an_unknown_exception_becomes_a_500_that_keeps_its_cause() -> None:
    house = House()
    async with house.dispatcher.generation([request()]) as generation:
        cause = RuntimeError("a bug")
        generation.sequences[0].fail(cause)
        await generation.wait()
        assert generation.error is not None
        assert (generation.error.status, generation.error.__cause__) == (500, cause)
        assert "a bug" not in generation.error.message


async def test_a_worker_lost_between_choice_and_submit_is_passed_over() -> None:
    house = House(MemoryWorker("ipc:///m/a"), MemoryWorker("ipc:///m/b"))

    def lost(*_: Any) -> None:
        raise EngineLostError("ipc:///m/a", "gone")

    house.workers[0].submit_nowait = lost  # type: ignore[method-assign]
    async with house.dispatcher.generation([request()]) as generation:
        assert generation.sequences[0].worker is house.workers[1]


async def test_no_ready_worker_is_a_503_at_once() -> None:
    house = House()
    house.worker.state = "pending"
    with pytest.raises(ApiError, match="No ready worker for model 'm'") as caught:
        await house.dispatcher.generation([request()]).__aenter__()
    assert (caught.value.status, caught.value.retry_after) == (503, 1)


async def test_a_refused_sibling_takes_the_others_back() -> None:
    house = House()
    submit = house.worker.submit_nowait

    def guarded(req: Any, receiver: Any) -> None:
        if req.id == "bad":
            raise invalid_request("invalid_value", "no", "top_p")
        submit(req, receiver)

    house.worker.submit_nowait = guarded  # type: ignore[method-assign]
    with pytest.raises(ApiError, match="no"):
        await house.dispatcher.generation([request("good"), request("bad")]).__aenter__()
    assert house.worker.aborted == ["good"]
    assert house.nothing_left()


async def test_the_hook_decides_whether_the_task_wakes() -> None:
    house = House()
    seen: list[list[int]] = []

    def hook(sequence: Sequence) -> bool:
        seen.append(sequence.take().ids)
        return sequence.finish is not None

    async with house.dispatcher.generation([request()]) as generation:
        generation.hook = hook
        async with trio.open_nursery() as nursery:
            done = trio.Event()

            async def waiter(generation: Generation) -> None:
                await generation.wait()
                done.set()

            nursery.start_soon(waiter, generation)
            await trio.testing.wait_all_tasks_blocked()
            house.worker.send("r1", 1)
            house.worker.send("r1", 2)
            await trio.testing.wait_all_tasks_blocked()
            assert not done.is_set()
            house.worker.send("r1", 3, finish="length")
    assert seen == [[1], [2], [3]]


async def test_waiting_with_news_is_still_a_checkpoint_for_cancels() -> None:
    house = House()
    async with house.dispatcher.generation([request()]) as generation:
        house.worker.send("r1", 1)
        with trio.CancelScope() as scope:
            scope.cancel()
            await generation.wait()
        assert scope.cancelled_caught
        assert [s.take().ids for s in await generation.wait()] == [[1]]
