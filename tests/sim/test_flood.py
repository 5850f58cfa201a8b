from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from smgd.sim.flood import Control, FloodCore
from smgd.sim.model import Model
from smgd.sim.scheduler import Message
from smgd.sim.wire import LAYOUTS
from smgd.wire.vllm import decode_outputs
from tests.sim.bench import ABORT, ADD, UTILITY, Bench, shape

PROMPT = [7, 8, 300]


def add(request_id: str, max_tokens: int) -> list[bytes]:
    fields = [request_id, PROMPT, None, {"max_tokens": max_tokens}, None, 1.7e9, None, None, None]
    return [ADD, msgspec.msgpack.encode(fields)]


def frames_of(effects: list[Any]) -> list[bytes]:
    return [effect.frames[0] for effect in effects if isinstance(effect, Message)]


@pytest.mark.parametrize("version", sorted(LAYOUTS))
def test_the_bytes_are_those_of_the_real_thing(version: str, model: Model) -> None:
    flood = FloodCore(LAYOUTS[version], model, 0.0, 0)
    bench = Bench(model, version)
    for message in (add("a" * 16, 4), add("b" * 16, 20)):
        flood.receive(message, 1000.0)
        bench.receive(*message)

    for _ in range(20):
        flooded = frames_of(flood.step(1000.5))
        usual = frames_of(bench.core.step(1000.5))

        decoded = [msgspec.msgpack.decode(frame) for frame in flooded]
        assert shape(decoded) == [shape(msgspec.msgpack.decode(frame)) for frame in usual]
        # An id takes 1 to 3 bytes; all else takes the same.
        for ours, theirs in zip(flooded, usual, strict=True):
            assert abs(len(ours) - len(theirs)) <= 4
    assert flood.next_step_at() is None
    assert flood.is_idle


def test_many_requests_in_one_message(model: Model) -> None:
    flood = FloodCore(LAYOUTS["0.32.0"], model, 0.0, 3)
    for number in range(70_000):
        flood.receive(add(f"{number:016x}", 3), 0.0)

    flood.step(1.0)
    (frame,) = frames_of(flood.step(2.0))

    message = decode_outputs(frame)
    assert message.engine_index == 3
    assert message.timestamp == 2.0
    assert len(message.outputs) == 70_000
    assert message.outputs[69_999].request_id == f"{69_999:016x}"
    assert {len(output.new_token_ids) for output in message.outputs} == {1}
    assert len({output.new_token_ids[0] for output in message.outputs}) > 100


def test_it_says_the_prose(model: Model) -> None:
    flood = FloodCore(LAYOUTS["0.32.0"], model, 0.0, 0)
    flood.receive(add("a", 5000), 0.0)
    ids = []
    while not flood.is_idle:
        for frame in frames_of(flood.step(0.0)):
            ids += [i for output in decode_outputs(frame).outputs for i in output.new_token_ids]

    assert len(ids) == 5000
    text = model.codec.decode(ids)
    assert "The lighthouse keeper counts the ships" in text
    assert "\ufffd" not in text


def test_steps_have_a_pace(model: Model) -> None:
    flood = FloodCore(LAYOUTS["0.32.0"], model, 0.25, 0)
    assert flood.next_step_at() is None
    flood.receive(add("a", 9), 10.0)
    flood.step(10.0)

    assert flood.next_step_at() == 10.25


def test_aborts_and_counters(model: Model) -> None:
    flood = FloodCore(LAYOUTS["0.32.0"], model, 0.0, 0)
    flood.receive(add("a", 9), 0.0)
    flood.receive(add("b", 1), 0.0)
    flood.step(0.0)

    flood.receive([ABORT, msgspec.msgpack.encode(["a", "x"])], 0.0)
    call = msgspec.msgpack.encode([0, 5, "sim_counters", []])
    (answer,) = frames_of(flood.receive([UTILITY, call], 0.0))

    assert flood.is_idle
    call_id, failure, (_, counters) = msgspec.msgpack.decode(answer)[4]
    assert (call_id, failure) == (5, None)
    assert counters == {
        "adds": 2, "aborts": 2, "finished": 1, "tokens": 2, "prompt_tokens": 6, "steps": 1,
        "running": 0, "waiting": 0,
    }  # fmt: skip


def test_leaving(model: Model) -> None:
    flood = FloodCore(LAYOUTS["0.32.0"], model, 0.0, 0)
    flood.receive(add("a", 9), 0.0)

    (frame,) = frames_of(flood.shutdown(0.0))

    assert [output.finish_reason for output in decode_outputs(frame).outputs] == [2]
    assert flood.is_idle


def test_a_benchmark_reads_the_counters_and_sets_the_pace(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "control"
    flood = FloodCore(LAYOUTS["0.32.0"], model, 0.25, 0, Control(path))
    control = Control(path)
    flood.receive(add("a", 9), 10.0)
    flood.receive(add("b", 1), 10.0)
    flood.step(10.0)

    assert control.interval == 0.25
    assert control.read() == {
        "interval_ns": 250_000_000, "running": 1, "adds": 2, "aborts": 0, "finished": 1,
        "tokens": 2, "steps": 1,
    }  # fmt: skip
    control.interval = 2.0
    flood.step(10.25)
    flood.step(12.25)
    assert flood.next_step_at() == 14.25
