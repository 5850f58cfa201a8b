"""A generation's life: who gets its requests, what comes of them, and what is left behind."""

from __future__ import annotations

import weakref
from typing import Any, cast

import pytest
import trio
import trio.testing
from msgspec import structs

from smgd.core import (
    Constraint,
    Delta,
    EngineInfo,
    GenerationRequest,
    Policy,
    RequestIds,
    Timings,
    Worker,
)
from smgd.dispatch import BEST_EFFORT, Dispatcher, Generation, Migration, Sequence
from smgd.errors import ApiError, EngineLostError, invalid_request
from smgd.migration import Mode
from tests.support import FirstPolicy, MemoryWorker, no_collector, request


class House:
    """A dispatcher over memory workers."""

    def __init__(self, *workers: MemoryWorker, migration: Migration = BEST_EFFORT) -> None:
        self.workers = list(workers) or [MemoryWorker()]
        self.policy = FirstPolicy()
        self.ids = RequestIds("new")
        self.moves: list[tuple[str, str]] = []
        self.dispatcher = Dispatcher(
            self._candidates,
            cast("Policy", self.policy),
            self.ids,
            migration=migration,
            on_migration=lambda *move: self.moves.append(move),
        )

    @property
    def worker(self) -> MemoryWorker:
        return self.workers[0]

    def _candidates(self, model: str) -> list[Worker]:
        return [w for w in self.workers if w.state == "ready" and w.model_id == model]

    def nothing_left(self) -> bool:
        return not self.policy.active and not any(w.running for w in self.workers)


async def test_news_merge_until_they_are_taken() -> None:
    house = House()
    async with house.dispatcher.generation([request()], "mine") as generation:
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
    async with (
        house.dispatcher.generation([request()], "mine") as generation,
        trio.open_nursery() as n,
    ):

        async def engine() -> None:
            await trio.testing.wait_all_tasks_blocked()
            house.worker.send("r1", 5)

        n.start_soon(engine)
        assert [s.index for s in await generation.wait()] == [0]


async def test_leaving_early_aborts_every_unfinished_sequence_once() -> None:
    house = House()
    async with house.dispatcher.generation([request("a"), request("b"), request("c")], "mine"):
        house.worker.send("b", 1, finish="stop")
    assert house.worker.aborted == ["a", "c"]
    assert house.nothing_left()


async def test_cancelling_the_waiter_aborts_once(autojump_clock: trio.testing.MockClock) -> None:
    house = House()
    with trio.move_on_after(5) as scope:
        async with house.dispatcher.generation([request()], "mine") as generation:
            await generation.wait()
    assert scope.cancelled_caught
    assert house.worker.aborted == ["r1"]
    assert house.nothing_left()


async def test_a_cancel_before_entering_submits_nothing() -> None:
    house = House()
    with trio.CancelScope() as scope:
        scope.cancel()
        async with house.dispatcher.generation([request()], "mine"):
            pytest.fail("entered")
    assert house.worker.submitted == []


async def test_stopping_from_our_side_aborts_at_once_and_only_once() -> None:
    house = House()
    async with house.dispatcher.generation([request()], "mine") as generation:
        generation.sequences[0].stop()
        assert house.worker.aborted == ["r1"]
    assert house.worker.aborted == ["r1"]
    assert house.nothing_left()


async def test_a_lost_engine_fails_the_generation_and_aborts_its_siblings_elsewhere() -> None:
    class Alternate(FirstPolicy):
        def pick(self, candidates: list[MemoryWorker], request: Any) -> MemoryWorker:
            return candidates[len(self.active) % len(candidates)]

    off = Migration("off")
    house = House(MemoryWorker("ipc:///m/a"), MemoryWorker("ipc:///m/b"), migration=off)
    house.policy = Alternate()
    house.dispatcher.policy = cast("Policy", house.policy)
    async with house.dispatcher.generation([request("a"), request("b")], "mine") as generation:
        house.workers[0].lose()
        await generation.wait()
        assert generation.error is not None
        assert (generation.error.status, generation.error.code) == (503, "engine_lost")
        assert "was lost: connection lost" in generation.error.message
        assert "ipc:" not in generation.error.message, "clients need not know our workers"
        assert isinstance(generation.error.__cause__, EngineLostError)
    assert house.workers[1].aborted == ["b"]
    assert house.workers[0].aborted == []
    assert house.nothing_left()


async def test_what_a_generation_holds_is_freed_at_its_end() -> None:
    class Hook:
        def __call__(self, _sequence: Sequence) -> None: ...

    house, hook = House(), Hook()
    ref = weakref.ref(hook)
    with no_collector():
        async with house.dispatcher.generation([request()], "mine") as generation:
            generation.set_hook(hook)
        del hook
        assert ref() is None
    assert generation.sequences == []


@pytest.mark.parametrize(
    ("finish", "status", "code"), [("abort", 503, "engine_lost"), ("error", 500, "engine_error")]
)
async def test_finishes_that_are_no_answer(finish: Any, status: int, code: str) -> None:
    house = House()
    async with house.dispatcher.generation([request()], "mine") as generation:
        house.worker.send("r1", 5)
        house.worker.send("r1", finish=finish)
        [sequence] = await generation.wait()
        assert sequence.take().ids == [5], "what came before the end can still be taken"
        assert generation.error is not None
        assert (generation.error.status, generation.error.code) == (status, code)
    assert house.worker.aborted == []
    assert house.nothing_left()


async def test_the_engine_that_began_times_what_it_finishes() -> None:
    for lost, last in ((False, 5.5), (True, None)):
        house = House(MemoryWorker("ipc:///m/a"), MemoryWorker("ipc:///m/b"))
        async with house.dispatcher.generation([request()], "mine") as generation:
            [sequence] = generation.sequences
            sequence.deliver(Delta([5], timings=Timings(1.0, 2.0, 3.0)))
            if lost:
                house.worker.lose()
            finish = Delta([6], finish="stop", timings=Timings(last_token=5.5))
            ended = [sequence.ended_at]
            sequence.deliver(finish)
            ended.append(sequence.ended_at)
            assert [at is None for at in ended] == [True, False]
            assert sequence.timings == Timings(1.0, 2.0, 3.0, last)


async def test_an_unknown_exception_becomes_a_500_that_keeps_its_cause() -> None:
    house = House()
    async with house.dispatcher.generation([request()], "mine") as generation:
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

    house.workers[0].submit_nowait = lost  # type: ignore[method-assign, assignment]
    async with house.dispatcher.generation([request()], "mine") as generation:
        assert generation.sequences[0].worker is house.workers[1]


async def test_no_ready_worker_is_a_503_at_once() -> None:
    house = House()
    house.worker.state = "pending"
    with pytest.raises(ApiError, match="No ready worker for model 'm'") as caught:
        await house.dispatcher.generation([request()], "mine").__aenter__()
    assert (caught.value.status, caught.value.retry_after) == (503, 1)


async def test_a_refused_sibling_takes_the_others_back() -> None:
    house = House()
    submit = house.worker.submit_nowait

    def guarded(req: Any, receiver: Any) -> None:
        if req.id == "bad":
            raise invalid_request("invalid_value", "no", "top_p")
        submit(req, receiver)

    house.worker.submit_nowait = guarded  # type: ignore[method-assign, assignment]
    with pytest.raises(ApiError, match="no"):
        await house.dispatcher.generation([request("good"), request("bad")], "mine").__aenter__()
    assert house.worker.aborted == ["good"]
    assert house.nothing_left()


async def test_of_several_sequences_all_are_checked_before_one_is_sent() -> None:
    house = House()
    submitted: list[int] = []
    check = house.worker.check

    def guard(req: GenerationRequest) -> None:
        submitted.append(len(house.worker.submitted))
        check(req)

    house.worker.check = guard  # type: ignore[method-assign, assignment]
    async with house.dispatcher.generation([request("a"), request("b")], "mine"):
        assert (house.worker.checked, submitted) == (["a", "b"], [0, 0])


async def test_the_hook_decides_whether_the_task_wakes() -> None:
    house = House()
    seen: list[list[int]] = []

    def hook(sequence: Sequence) -> None:
        seen.append(sequence.take().ids)
        if sequence.finish is not None:
            sequence.touch()

    async with house.dispatcher.generation([request()], "mine") as generation:
        generation.set_hook(hook)
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
    async with house.dispatcher.generation([request()], "mine") as generation:
        house.worker.send("r1", 1)
        with trio.CancelScope() as scope:
            scope.cancel()
            await generation.wait()
        assert scope.cancelled_caught
        assert [s.take().ids for s in await generation.wait()] == [[1]]


# ----------------------------------------------------------------------------- migration


def two(**options: Any) -> House:
    return House(MemoryWorker("ipc:///m/a"), MemoryWorker("ipc:///m/b"), **options)


async def test_a_stream_goes_on_elsewhere_from_its_own_ids() -> None:
    house = two()
    a, b = house.workers
    asked = request(max_tokens=10)
    asked.sampling.min_tokens = 3
    async with house.dispatcher.generation([asked], "mine") as generation:
        a.send("r1", 7, 8, cached=2)
        a.lose()
        [moved] = b.submitted
        assert moved.prompt_ids == [1, 2, 3, 7, 8]
        assert (moved.sampling.max_tokens, moved.sampling.min_tokens) == (8, 1)
        assert moved.id != "r1"
        b.send(moved.id, 9, finish="stop", cached=5)
        [sequence] = await generation.wait()
        delta = sequence.take()
        assert (delta.ids, delta.finish) == ([7, 8, 9], "stop"), "the taker notices nothing"
        assert sequence.cached_tokens == 2, "the first attempt's"
        assert sequence.request.prompt_ids == [1, 2, 3], "what the client asked for is unchanged"
    assert generation.error is None
    assert (a.aborted, b.aborted) == ([], [])
    assert house.moves == [("m", "migrated")]
    assert house.nothing_left()


async def test_an_engine_that_aborts_unasked_is_left_for_another() -> None:
    house = two()
    a, b = house.workers
    async with house.dispatcher.generation([request()], "mine") as generation:
        a.send("r1", 7)
        a.send("r1", finish="abort")
        [moved] = b.submitted
        b.send(moved.id, 8, finish="length")
        [sequence] = await generation.wait()
        assert (sequence.take().ids, sequence.finish) == ([7, 8], "length")
    assert house.nothing_left()


async def test_leaving_after_a_migration_aborts_the_new_request_only() -> None:
    house = two()
    a, b = house.workers
    async with house.dispatcher.generation([request()], "mine"):
        a.lose()
    assert (a.aborted, b.aborted) == ([], [b.submitted[0].id])
    assert house.nothing_left()


async def test_at_most_so_many_times() -> None:
    house = House(*(MemoryWorker(f"ipc:///m/{i}") for i in range(4)))
    async with house.dispatcher.generation([request()], "mine") as generation:
        for worker in house.workers[:2]:
            worker.lose()
            assert generation.error is None
        house.workers[2].lose()
        await generation.wait()
        assert generation.error is not None
        assert generation.error.code == "engine_lost"
    assert house.workers[3].submitted == []
    assert house.moves == [("m", "migrated"), ("m", "migrated"), ("m", "failed")]
    assert house.nothing_left()


async def test_with_no_other_worker_it_fails_at_once() -> None:
    house = House()
    async with house.dispatcher.generation([request()], "mine") as generation:
        house.worker.lose()
        await generation.wait()
        assert generation.error is not None
        assert generation.error.status == 503


@pytest.mark.parametrize("generated", [1, 4])
async def test_a_full_context_ends_with_length(generated: int) -> None:
    house = two()
    a, b = house.workers
    b.info = EngineInfo(max_model_len=4)
    async with house.dispatcher.generation([request(max_tokens=4)], "mine") as generation:
        a.send("r1", *range(generated))
        a.lose()
        [sequence] = await generation.wait()
        assert (sequence.take().finish, generation.error) == ("length", None)
    assert b.submitted == []
    assert house.nothing_left()


def changed(**sampling: Any) -> GenerationRequest:
    asked = request()
    for name, value in sampling.items():
        setattr(asked.sampling, name, value)
    return asked


CONSTRAINED = structs.replace(request(), constraint=Constraint("regex", "a+"))


@pytest.mark.parametrize(
    ("asked", "modes"),
    [
        (changed(), {"best-effort", "exact"}),
        (changed(temperature=0.0, seed=5), {"best-effort", "exact"}),
        (changed(repetition_penalty=1.2), {"best-effort", "exact"}),
        (changed(seed=5), {"best-effort"}),
        (changed(presence_penalty=0.5), {"best-effort"}),
        (changed(temperature=0.0, frequency_penalty=0.5), {"best-effort"}),
        (changed(prompt_logprobs=1), set()),
        (CONSTRAINED, set()),
    ],
)
@pytest.mark.parametrize("mode", ["best-effort", "exact", "off"])
@pytest.mark.parametrize("begun", [True, False])
async def test_which_requests_go_on(
    asked: GenerationRequest, modes: set[Mode], mode: Mode, begun: bool
) -> None:
    house = two(migration=Migration(mode))
    a, b = house.workers
    async with house.dispatcher.generation([asked], "mine") as generation:
        if begun:
            a.send("r1", 7)
        a.lose()
        goes_on = mode != "off" and (mode in modes or not begun)
        assert len(b.submitted) == goes_on
        assert (generation.error is None) == goes_on
    assert house.nothing_left()


async def test_why_it_could_not_go_on_is_told() -> None:
    house = two()
    async with house.dispatcher.generation([CONSTRAINED], "mine") as generation:
        house.workers[0].send("r1", 7)
        house.workers[0].lose()
        await generation.wait()
        assert generation.error is not None
        assert "a structured output cannot be continued in the middle" in generation.error.message
