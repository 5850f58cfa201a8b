from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smgd.sim.model import Model
from smgd.sim.replies import Reply
from smgd.sim.scheduler import Message
from tests.sim.bench import UTILITY, Bench

PROMPT = [7, 8, 9]


def test_every_request_is_logged_in_a_form_to_be_parsed(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(model)
    with caplog.at_level(logging.INFO):
        bench.add("a", PROMPT)
        bench.add("b", PROMPT, max_tokens=None)
        bench.abort("a")

    assert caplog.messages[0] == "sim add id=a prompt=3 max_tokens=16"
    assert caplog.messages[1] == "sim add id=b prompt=3 max_tokens=None"
    assert caplog.messages[-1] == "sim abort id=a"


def test_answers_go_to_the_client_that_asked(model: Model) -> None:
    bench = Bench(model, clients=2)
    tail = (None, None, 1)
    bench.add("a", PROMPT, max_tokens=2)
    bench.add("b", PROMPT, tail, max_tokens=2)

    first, second = (e for e in bench.core.step(bench.now) if isinstance(e, Message))

    assert (first.client, second.client) == (0, 1)
    messages = [msgspec.msgpack.decode(m.frames[0]) for m in (first, second)]
    assert [message[1][0][0] for message in messages] == ["a", "b"]
    assert messages[0][2] is not None
    assert messages[1][2] is None


def test_statistics_go_to_the_only_client_that_has_outputs(model: Model) -> None:
    bench = Bench(model, clients=2)
    bench.add("b", PROMPT, (None, None, 1), max_tokens=2)

    (message,) = (e for e in bench.core.step(bench.now) if isinstance(e, Message))

    assert message.client == 1
    assert msgspec.msgpack.decode(message.frames[0])[2]["num_running_reqs"] == 1


def test_a_utility_call_for_a_client_that_is_not_there(model: Model) -> None:
    bench = Bench(model)

    assert bench.receive(UTILITY, msgspec.msgpack.encode([3, 1, "is_sleeping", []])) == []

    assert [breakdown.kind for breakdown in bench.breakdowns] == ["output"]


@pytest.mark.parametrize("frames", [[], [b"\x00"], [b"\x04", b"\x90"], [b"", b"\x90"]])
def test_messages_that_are_none(model: Model, frames: list[bytes]) -> None:
    bench = Bench(model)

    assert bench.receive(*frames) == []

    assert [breakdown.kind for breakdown in bench.breakdowns] == ["input"]


def test_what_runs_goes_on_after_the_input_has_ended(model: Model) -> None:
    bench = Bench(model)
    bench.add("a", PROMPT, max_tokens=3)
    bench.receive(b"\x09", b"\x90")

    assert bench.run("a")[-1][5] == 1


def test_garbage_comes_before_the_end(model: Model) -> None:
    bench = Bench(model, replies=[Reply(ids=(5,), then="garbage")])
    bench.add("a", PROMPT, max_tokens=9)

    effects = [*bench.core.step(bench.now), *bench.core.step(bench.now)]

    frames = [effect.frames for effect in effects if isinstance(effect, Message)]
    garbage = [frame for (frame,) in frames if frame[0] == 0xC1]
    assert len(garbage) == 3
    with pytest.raises(msgspec.DecodeError):
        msgspec.msgpack.decode(garbage[0])
    assert bench.breakdowns == []


def test_leaving_ends_running_and_waiting_requests_of_every_client(model: Model) -> None:
    bench = Bench(model, max_num_seqs=1, clients=2)
    bench.add("a", PROMPT)
    bench.add("b", PROMPT)
    bench.add("c", PROMPT, (None, None, 1))

    messages = bench.decoded(bench.core.shutdown(bench.now))

    assert [(message[5], [o[5] for o in message[1]]) for message in messages] == [
        (["a", "b"], [2, 2]),
        (["c"], [2]),
        (None, []),
    ]
    assert bench.core.is_idle


def test_leaving_with_nothing_to_do(model: Model) -> None:
    assert Bench(model).core.shutdown(0.0) == []


numbers = st.integers(-2, 5000) | st.floats(-3, 3) | st.none() | st.booleans()
odd_sampling = st.dictionaries(
    st.sampled_from([
        "temperature", "top_p", "top_k", "max_tokens", "min_tokens", "logprobs", "seed", "n",
        "prompt_logprobs", "_eos_token_id",
    ]),
    numbers,
    max_size=3,
)  # fmt: skip
even_sampling = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 20)},
    optional={
        "temperature": st.sampled_from([0.0, 1.0]),
        "logprobs": st.integers(0, 3),
        "prompt_logprobs": st.integers(0, 3),
        "stop_token_ids": st.lists(st.integers(0, 4095), max_size=3),
        "logit_bias": st.dictionaries(st.integers(0, 4095), st.floats(-100, 100), max_size=3),
        "_bad_words_token_ids": st.lists(st.lists(st.integers(0, 4095), max_size=2), max_size=2),
    },
)
ids = st.sampled_from("abcdef")
adds = st.tuples(
    st.just("add"), ids, st.lists(st.integers(0, 4095), min_size=1, max_size=40), even_sampling
)
odd_adds = st.tuples(
    st.just("add"), ids, st.lists(st.integers(-1, 5000), max_size=40), odd_sampling
)
aborts = st.tuples(st.just("abort"), ids)
calls = st.tuples(
    st.just("call"),
    st.sampled_from(["pause_scheduler", "resume_scheduler", "sim_stats", "nothing"]),
    st.lists(numbers | st.sampled_from(["abort", "keep", "wait"]), max_size=3),
)
raw = st.tuples(st.just("raw"), st.lists(st.binary(max_size=20), max_size=3))
steps = st.just(("step",))


@settings(deadline=None, max_examples=150)
@given(st.lists(st.one_of(adds, odd_adds, aborts, calls, raw, steps, steps, steps), max_size=25))
def test_whatever_comes_ends_in_messages_or_breakdowns(
    model: Model, actions: list[tuple[Any, ...]]
) -> None:
    bench = Bench(model, max_model_len=60, max_num_seqs=3)
    for kind, *arguments in actions:
        if kind == "add":
            bench.add(arguments[0], arguments[1], **arguments[2])
        elif kind == "abort":
            bench.abort(*arguments)
        elif kind == "call":
            bench.receive(UTILITY, msgspec.msgpack.encode([0, 1, arguments[0], arguments[1]]))
        elif kind == "raw":
            bench.receive(*arguments[0])
        elif bench.core.next_step_at() is not None:
            bench.step()


@settings(deadline=None, max_examples=80)
@given(st.lists(st.one_of(adds, aborts, steps), max_size=30))
def test_every_request_ends_exactly_once(model: Model, actions: list[tuple[Any, ...]]) -> None:
    bench = Bench(model, max_model_len=60, max_num_seqs=3)
    alive: set[str] = set()

    def step() -> None:
        for message in bench.step():
            for output in message[1]:
                assert output[0] in alive
                if output[5] is not None:
                    alive.discard(output[0])

    for kind, *arguments in actions:
        if kind == "add" and arguments[0] not in alive:
            alive.add(arguments[0])
            bench.add(arguments[0], arguments[1], **arguments[2])
        elif kind == "abort":
            alive.discard(arguments[0])
            bench.abort(*arguments)
        elif bench.core.next_step_at() is not None:
            step()
    while bench.core.next_step_at() is not None:
        step()

    assert alive == set()
    assert bench.core.is_idle
    assert bench.breakdowns == []
