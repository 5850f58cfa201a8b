from __future__ import annotations

from typing import Any

import msgspec
import pytest

from smgd.sim.model import Model
from tests.sim.bench import UTILITY, Bench

PROMPT = [7, 8, 9]


def value_of(answer: list[Any]) -> Any:
    """Return what a call that succeeded gave."""
    call_id, failure, (type_info, value) = answer
    assert (call_id, failure, type_info) == (7, None, None)
    return value


def test_pausing_with_abort_ends_what_runs_and_holds_what_comes(model: Model) -> None:
    bench = Bench(model)
    bench.add("a", PROMPT, max_tokens=50)

    aborted, idle, answer = bench.receive(
        UTILITY, msgspec.msgpack.encode([0, 7, "pause_scheduler", ["abort", True]])
    )

    assert (aborted[1][0][0], aborted[1][0][5]) == ("a", 2)
    assert idle[1] == []
    assert value_of(answer[4]) is None
    bench.add("b", PROMPT, max_tokens=1)
    assert bench.core.next_step_at() is None
    bench.call("resume_scheduler")
    assert bench.run("b")[-1][5] == 1


def test_pausing_with_keep_freezes_what_runs(model: Model) -> None:
    bench = Bench(model)
    bench.add("a", PROMPT, max_tokens=3)
    bench.step()

    assert value_of(bench.call("pause_scheduler", "keep", False)) is None
    assert bench.core.next_step_at() is None
    assert value_of(bench.call("is_scheduler_paused")) is True
    bench.call("resume_scheduler")

    assert value_of(bench.call("is_scheduler_paused")) is False
    assert len(bench.run("a")) == 2


def test_pausing_with_wait_answers_when_all_is_done(model: Model) -> None:
    bench = Bench(model)
    bench.add("a", PROMPT, max_tokens=2)
    payload = msgspec.msgpack.encode([0, 7, "pause_scheduler", ["wait", False]])

    assert bench.receive(UTILITY, payload) == []
    bench.add("b", PROMPT, max_tokens=2)
    assert [message[4] for message in bench.step()] == [None]
    *_, answer = bench.step()

    assert value_of(answer[4]) is None
    assert bench.core.next_step_at() is None
    bench.call("resume_scheduler")
    assert bench.run("b")[-1][5] == 1


def test_pausing_with_wait_answers_when_the_last_request_is_aborted(model: Model) -> None:
    bench = Bench(model)
    bench.add("a", PROMPT, max_tokens=50)
    bench.receive(UTILITY, msgspec.msgpack.encode([0, 7, "pause_scheduler", ["wait", False]]))

    *_, answer = bench.abort("a")

    assert value_of(answer[4]) is None


def test_pausing_an_idle_engine_with_wait(model: Model) -> None:
    assert value_of(Bench(model).call("pause_scheduler", "wait", False)) is None


def test_an_unknown_way_to_pause(model: Model) -> None:
    _, failure, result = Bench(model).call("pause_scheduler", "never")

    assert failure == "Call to pause_scheduler method failed: Invalid pause mode: never"
    assert result is None


def test_a_method_of_the_worker_that_is_not_there(model: Model) -> None:
    _, failure, _ = Bench(model).call("collective_rpc", "explode")

    assert failure.endswith("the simulated worker has no method 'explode'")


def test_sleeping(model: Model) -> None:
    bench = Bench(model)

    states = []
    for method in ("sleep", "wake_up"):
        bench.call(method)
        states.append(value_of(bench.call("is_sleeping")))

    assert states == [True, False]


@pytest.mark.parametrize(
    ("method", "args"), [("is_sleeping", [1]), ("add_lora", []), ("profile", [1, 2])]
)
def test_a_wrong_number_of_arguments_fails_without_a_text(
    model: Model, method: str, args: list[Any]
) -> None:
    _, failure, _ = Bench(model).call(method, *args)

    assert failure == f"Call to {method} method failed: "


def test_the_engine_tells_what_it_was_asked_to_do(model: Model) -> None:
    bench = Bench(model, max_num_seqs=1)
    bench.add("a", PROMPT, max_tokens=2)
    bench.run("a")
    for request_id in "bcd":
        bench.add(request_id, PROMPT, max_tokens=9)
    bench.abort("c", "x")

    counters = value_of(bench.call("sim_counters"))
    stats = value_of(bench.call("sim_stats"))

    assert counters == {
        "adds": 4, "aborts": 2, "finished": 1, "tokens": 2, "prompt_tokens": 6, "steps": 2,
        "running": 1, "waiting": 1,
    }  # fmt: skip
    assert stats == {**counters, "abort_ids": ["c", "x"]}
