"""Who is chosen, and how ties and turns rotate."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smgd.core import EngineLoad, GenerationRequest, Sampling, Worker
from smgd.errors import ConfigError
from smgd.workers.policies import POLICIES, policy_for
from smgd.workers.policies.least_load import WINDOW
from smgd.workers.policies.round_robin import MAX_MODELS, RoundRobin
from tests.workers.fakes import FakeWorker


def request(model: str = "m") -> GenerationRequest:
    return GenerationRequest(id="r", model=model, prompt_ids=[1], sampling=Sampling(max_tokens=1))


def picks(name: str, candidates: list[FakeWorker], count: int, model: str = "m") -> list[str]:
    policy = policy_for(name)
    return [policy.pick(candidates, request(model)).id for _ in range(count)]


A, B, C = FakeWorker("a"), FakeWorker("b"), FakeWorker("c")


@pytest.mark.parametrize("name", ["least_load", "round_robin"])
def test_equal_workers_take_turns(name: str) -> None:
    assert picks(name, [A, B, C], 5) == ["a", "b", "c", "a", "b"]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_has_its_name_and_takes_the_only_one(name: str) -> None:
    assert policy_for(name).name == name
    assert picks(name, [B], 2) == ["b", "b"]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_the_first_burst_makes_no_hot_spot(name: str) -> None:
    """Nobody has reported anything yet, and nothing ends."""
    workers = [FakeWorker(str(i)) for i in range(8)]
    policy = policy_for(name)
    for _ in range(512):
        chosen = cast("FakeWorker", policy.pick(cast("list[Worker]", workers), request()))
        chosen.requests_active += 1
    counts = [worker.requests_active for worker in workers]
    # By lot, a worker gets 64 +- 7.5; one with 100 comes up once in 100,000 runs.
    spread = {"random": 100, "power_of_two": 10}.get(name, 1)
    assert max(counts) - min(counts) <= spread
    assert min(counts) > 0


def test_least_load_fills_a_large_fleet_in_turn_and_looks_at_a_window_of_it() -> None:
    class Counted(FakeWorker):
        looks = 0

        @property
        def load(self) -> EngineLoad:
            Counted.looks += 1
            return EngineLoad()

        @load.setter
        def load(self, _: EngineLoad) -> None: ...

    workers = [Counted(str(i)) for i in range(100)]
    policy = policy_for("least_load")
    Counted.looks = 0
    for _ in range(1000):
        cast("FakeWorker", policy.pick(workers, request())).requests_active += 1
    assert Counted.looks == 1000 * WINDOW
    assert {worker.requests_active for worker in workers} == {10}


def test_power_of_two_never_takes_the_most_loaded() -> None:
    loads = [
        FakeWorker("0"),
        FakeWorker("1", requests_active=1),
        FakeWorker("2", requests_active=2),
    ]
    chosen = picks("power_of_two", loads, 300)
    assert {*chosen} == {"0", "1"}
    assert 150 < chosen.count("0") < 250  # two of three pairs


def test_choosing_by_lot_does_not_look_at_everybody() -> None:
    class Counting(list[FakeWorker]):
        looked = 0

        def __getitem__(self, index: Any) -> Any:
            Counting.looked += 1
            return super().__getitem__(index)

    many = Counting(FakeWorker(str(i)) for i in range(1000))
    for name in ("random", "power_of_two", "round_robin"):
        Counting.looked = 0
        policy_for(name).pick(cast("list[Worker]", many), request())
        assert Counting.looked <= 2


def test_an_unknown_policy_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="'best': choose one of least_load, power_of_two"):
        policy_for("best")


def test_round_robin_counts_turns_per_model() -> None:
    policy = policy_for("round_robin")
    order = [policy.pick([A, B], request(model)).id for model in ("m", "n", "m", "n", "m")]
    assert order == ["a", "a", "b", "b", "a"]


def test_round_robin_keeps_the_turns_of_so_many_models() -> None:
    policy = RoundRobin()
    for model in range(MAX_MODELS + 5):
        policy.pick([A, B], request(str(model)))
    assert len(policy._turns) == MAX_MODELS
    last = request(str(MAX_MODELS + 4))
    assert [policy.pick([A, B], last).id for _ in range(3)] == ["b", "a", "b"]
    assert policy.pick([A, B], request("0")).id == "a"  # forgotten: its turns begin again


def test_least_load_takes_the_lowest_score() -> None:
    reported = FakeWorker("reported", load=EngineLoad(running=2))
    in_flight = FakeWorker("in_flight", requests_active=3)
    queued = FakeWorker("queued", load=EngineLoad(running=1, waiting=1, kv_usage=0.9))
    assert picks("least_load", [reported, in_flight, queued], 3) == ["reported"] * 3
    in_flight.requests_active = 1
    assert picks("least_load", [reported, in_flight, queued], 2) == ["in_flight"] * 2


@given(st.lists(st.integers(0, 50), min_size=1, max_size=5), st.integers(1, 60))
def test_least_load_evens_out_what_is_in_flight(active: list[int], requests: int) -> None:
    workers = [FakeWorker(str(i), requests_active=n) for i, n in enumerate(active)]
    policy = policy_for("least_load")
    for _ in range(requests):
        chosen: Worker = policy.pick(workers, request())
        lowest = min(worker.requests_active for worker in workers)
        assert chosen.requests_active == lowest
        workers[int(chosen.id)].requests_active += 1
        policy.started(chosen, request())
    policy.ended(workers[0], request())
