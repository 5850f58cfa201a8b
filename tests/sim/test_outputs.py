"""The same requests, as bytes, to the simulator and to a real engine: the answers look the same."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from smgd.sim.model import Model
from smgd.sim.outputs import FINISH_ABORT
from smgd.sim.wire import LAYOUTS, encode_handshake, encode_registration
from tests.sim.bench import Bench, shape

Recorded = dict[str, dict[str, Any]]
VERSIONS = sorted(LAYOUTS)

# One request, which ends after a number of tokens that the request itself demands.
STREAMS = [
    "greedy_length", "logprobs_2", "logprobs_100_aux", "logprob_token_ids", "prompt_logprobs_1",
    "prompt_logprobs_0", "prompt_logprobs_long_aux", "priority_trace", "repetition_detection",
]  # fmt: skip
# Answered at once, by the input thread.
REFUSALS = ["max_tokens_null", "so_first_no_backend", "so_bad_backend_name"]
# Answered by the scheduler, with an error.
FAILURES = ["so_regex_invalid", "so_choice"]


def decode(frames: list[bytes]) -> Any:
    """Return a message as types, and the lengths of its auxiliary frames."""
    return shape(msgspec.msgpack.decode(frames[0])), [len(frame) for frame in frames[1:]]


def exchange(bench: Bench, sent: list[list[bytes]]) -> list[Any]:
    """Give the core what was sent, and return the shapes of all that it sends."""
    answers: list[list[bytes]] = []
    for frames in sent:
        answers += [e.frames for e in bench.core.receive(frames, bench.now) if hasattr(e, "frames")]
    while (due := bench.core.next_step_at()) is not None:
        bench.now = max(bench.now, due)
        answers += [e.frames for e in bench.core.step(bench.now) if hasattr(e, "frames")]
    return [decode(frames) for frames in answers]


def cases(names: list[str], recorded: Recorded) -> list[str]:
    return [name for name in names if name in recorded]


@pytest.mark.parametrize("version", VERSIONS)
def test_streams(version: str, big_model: Model, recorded: dict[str, Recorded]) -> None:
    for name in cases(STREAMS, recorded[version]):
        case = recorded[version][name]

        answers = exchange(Bench(big_model, version), case["sent"])

        *stream, idle = answers
        assert stream == [decode(frames) for frames in case["received"]], name
        assert idle[0][1] == []


def test_prefill_statistics(big_model: Model, recorded: dict[str, Recorded]) -> None:
    case = recorded["0.32.0"]["prefix_cached"]
    bench = Bench(big_model)

    first = exchange(bench, case["sent"])
    (message,) = [msgspec.msgpack.decode(frames[0]) for frames in case["received"][:1]]

    assert first[0] == decode(case["received"][0])
    bench.receive(*case["sent"][0])
    (again, *_) = bench.step()
    keys = list(message[1][0][11])
    assert list(again[1][0][11].values()) == [148, 4, 144, 144, 0, 0]
    assert list(again[1][0][11]) == keys
    assert again[2]["prefix_cache_stats"]["queries"] == 148
    assert again[2]["prefix_cache_stats"]["hits"] == 144


def test_several_requests_in_one_message(big_model: Model, recorded: dict[str, Recorded]) -> None:
    case = recorded["0.32.0"]["four_concurrent"]

    answers = exchange(Bench(big_model), case["sent"])

    # The real engine scheduled the first step after two of the requests had come.
    sizes = [len(message[1]) for message, _ in answers]
    assert sizes == [4, 4, 4, 3, 2, 1, 0]
    last = decode(case["received"][-1])
    assert answers[5] == last


@pytest.mark.parametrize("version", VERSIONS)
def test_refusals(version: str, big_model: Model, recorded: dict[str, Recorded]) -> None:
    expected = decode(recorded[version]["max_tokens_null"]["received"][0])
    for name in cases(REFUSALS, recorded[version]):
        (answer,) = exchange(Bench(big_model, version), recorded[version][name]["sent"][:1])

        assert answer == expected, name


@pytest.mark.parametrize("version", VERSIONS)
def test_rules_that_do_not_compile(
    version: str, big_model: Model, recorded: dict[str, Recorded]
) -> None:
    for name in cases(FAILURES, recorded[version]):
        case = recorded[version][name]

        answer, *_ = exchange(Bench(big_model, version), case["sent"])

        assert answer == decode(case["received"][-1]), name


@pytest.mark.parametrize("version", VERSIONS)
def test_utility_calls(version: str, big_model: Model, recorded: dict[str, Recorded]) -> None:
    names = [name for name in recorded[version] if name.startswith("utility_")]
    assert names
    for name in names:
        case = recorded[version][name]
        if name == "utility_bad_shape":
            continue
        bench = Bench(big_model, version)
        if name == "utility_is_scheduler_paused":
            bench.call("pause_scheduler", "keep", False)

        (answer,) = bench.receive(*case["sent"][0])

        expected = msgspec.msgpack.decode(case["received"][-1][0])
        if name == "utility_get_kv_cache_group_metadata":
            expected[4][2][1][0]["block_size"] = 16
        assert answer[4] == expected[4], name
        assert shape(answer) == shape(expected)


@pytest.mark.parametrize("version", VERSIONS)
def test_leaving_with_a_request(
    version: str, big_model: Model, recorded: dict[str, Recorded]
) -> None:
    case = recorded[version]["sigterm_core"]
    bench = Bench(big_model, version)
    bench.receive(*case["sent"][0])
    bench.step()

    goodbye, *idle = bench.decoded(bench.core.shutdown(bench.now))

    expected = [msgspec.msgpack.decode(frames[0]) for frames in case["received"]]
    with_abort = next(m for m in expected if m[1] and m[1][0][5] == FINISH_ABORT)
    assert shape(goodbye) == shape(with_abort)
    assert goodbye[1] == with_abort[1]
    assert [len(message[1]) for message in idle] == [0]
    assert bench.core.is_idle


def test_an_abort_is_silent(big_model: Model, recorded: dict[str, Recorded]) -> None:
    case = recorded["0.32.0"]["abort"]
    add, abort = case["sent"]
    bench = Bench(big_model)
    bench.receive(*add)
    bench.step()

    (idle,) = bench.receive(*abort)

    assert shape(idle) == decode(case["received"][-1])[0]
    assert bench.core.next_step_at() is None


@pytest.mark.parametrize("version", VERSIONS)
def test_registration_and_handshake(version: str, recorded: dict[str, Recorded]) -> None:
    case = recorded[version]["disable_log_stats" if version == "0.32.0" else "handshake"]

    payload = encode_registration(
        LAYOUTS[version],
        engine_index=0,
        instance_id="1795969648479571339",
        max_model_len=2048,
        max_num_seqs=16,
        num_gpu_blocks=364,
        block_size=128,
    )

    registration = msgspec.msgpack.decode(payload)
    kv_events = registration.pop("kv_events_config")
    types = [[key, type(value).__name__] for key, value in registration.items()]
    assert types == case["registration"]
    assert kv_events is None
    assert len(registration) == (24 if version == "0.32.0" else 17)
    assert registration["kv_cache_size_tokens"] == 46592
    hello, ready = case["handshake"]
    assert encode_handshake("HELLO").hex() == hello
    assert encode_handshake("READY").hex() == ready


def test_without_statistics(big_model: Model, recorded: dict[str, Recorded]) -> None:
    case = recorded["0.32.0"]["disable_log_stats"]
    answers = exchange(Bench(big_model, with_stats=False), case["sent"])

    assert answers == [decode(frames) for frames in case["received"]]


def test_message_times_are_in_order(big_model: Model) -> None:
    bench = Bench(big_model)
    bench.add("r", [5, 6, 7], temperature=0.0, max_tokens=5)

    times = [message[3] for _ in range(5) for message in bench.step()]

    assert all(first <= second for first, second in pairwise(times))


DEADLY = [
    "oov_prompt_id", "oov_stop_token_min_tokens", "oov_logit_bias", "oov_allowed",
    "pooling_on_generate", "prompt_eq_max_len", "prompt_over_max_len", "empty_prompt",
    "logprobs_over_max", "duplicate_request_id",
]  # fmt: skip
INPUT_ENDS = [
    "bad_temperature", "not_msgpack", "unknown_type_byte", "so_two_kinds", "utility_bad_shape",
]  # fmt: skip
HARMLESS = ["abort_payload_string", "start_dp_wave_dense"]
SERVED = ["empty_allowed", "lora_not_enabled"]


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        *((name, ["dead"]) for name in DEADLY),
        *((name, ["input"]) for name in INPUT_ENDS),
        *((name, []) for name in HARMLESS),
    ],
)
def test_poison(
    name: str, kinds: list[str], big_model: Model, recorded: dict[str, Recorded]
) -> None:
    bench = Bench(big_model, max_model_len=512)

    for frames in recorded["0.32.0"][name]["sent"]:
        assert bench.receive(*frames) == []

    assert [breakdown.kind for breakdown in bench.breakdowns] == kinds


@pytest.mark.parametrize("name", SERVED)
def test_odd_requests_are_served(
    name: str, big_model: Model, recorded: dict[str, Recorded]
) -> None:
    bench = Bench(big_model, max_model_len=512)
    (frames,) = recorded["0.32.0"][name]["sent"]
    bench.receive(*frames)

    outputs = [output for _ in range(2) for message in bench.step() for output in message[1]]

    assert [output[5] for output in outputs] == [None, 1]


def test_an_output_socket_that_is_not_there(
    big_model: Model, recorded: dict[str, Recorded]
) -> None:
    bench = Bench(big_model, max_model_len=512)
    (frames,) = recorded["0.32.0"]["client_index_5"]["sent"]

    assert bench.receive(*frames) == []
    assert bench.breakdowns == []
    assert bench.step() == []

    assert [breakdown.kind for breakdown in bench.breakdowns] == ["output"]
