from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smgd.sim.faults import InputThreadError
from smgd.sim.wire import (
    AddRequest,
    decode_abort,
    decode_add,
    decode_init,
    decode_other,
    decode_utility,
    identity,
)
from smgd.wire import vllm

_pack = msgspec.msgpack.encode


def add(sampling: dict[str, Any], **changes: Any) -> AddRequest:
    fields = {
        "id": "r", "ids": [1, 2], "mm": None, "sampling": sampling, "pooling": None,
        "arrival": 1.5, "lora": None, "salt": None, "rank": None, **changes,
    }  # fmt: skip
    return decode_add(_pack(list(fields.values())))


def sampling(**fields: Any) -> Any:
    return add(fields).sampling_params


def test_defaults_are_vllms() -> None:
    params = sampling()

    assert (params.temperature, params.max_tokens, params.n) == (1.0, 16, 1)
    assert params.eos_token_id is None
    assert params.all_stop_token_ids == []


def test_values_are_changed_as_vllm_changes_them() -> None:
    assert sampling(temperature=1e-6).temperature == 0.0
    assert sampling(temperature=0.001).temperature == 0.01
    assert sampling(seed=-1).seed is None
    assert sampling(max_tokens=None).max_tokens is None


def test_the_daemons_own_encoding_is_understood() -> None:
    params = {"temperature": 0.0, "_eos_token_id": 2, "logit_bias": {5: 1.5}, "seed": 3}

    kind, payload = vllm.encode_add("r", [1, 2], params, arrival_time=1.0, priority=4)
    request = decode_add(payload)

    assert kind == vllm.ADD
    assert (request.request_id, request.prompt_token_ids, request.priority) == ("r", [1, 2], 4)
    assert request.sampling_params is not None
    assert request.sampling_params.logit_bias == {5: 1.5}
    assert decode_abort(vllm.encode_abort(["a", "b"])[1]) == ["a", "b"]
    call = decode_utility(vllm.encode_utility(2**64 - 1, "is_sleeping", [])[1])
    assert (call.call_id, call.method, call.args) == (2**64 - 1, "is_sleeping", [])
    init = decode_init(vllm.encode_init(["ipc:///in"], ["ipc:///out"]))
    assert (init.addresses.inputs, init.addresses.outputs) == (["ipc:///in"], ["ipc:///out"])


@pytest.mark.parametrize("length", [9, 12, 15, 20, 22, 23])
def test_requests_of_every_length_are_accepted(length: int) -> None:
    fields = ["r", [1], None, {}, None, 1.0, None, "salt", 0,
              None, None, 1, 0, 5, {"traceparent": "x"}, False, None, None, None, False,
              None, None, "later"]  # fmt: skip

    request = decode_add(_pack(fields[:length]))

    assert request.cache_salt == "salt"
    assert request.client_index == (1 if length > 11 else 0)


def test_unknown_parameters_are_ignored() -> None:
    assert sampling(no_such_parameter={"a": [1]}).max_tokens == 16


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 2.01}, {"temperature": -0.1}, {"temperature": "1"},
        {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -2}, {"top_k": 1.5}, {"min_p": -0.1},
        {"min_p": 1.1}, {"presence_penalty": 2.1}, {"frequency_penalty": -2.1},
        {"repetition_penalty": 0.0}, {"repetition_penalty": float("inf")},
        {"max_tokens": 0}, {"min_tokens": -1}, {"min_tokens": 17}, {"logprobs": -2},
        {"prompt_logprobs": -2}, {"n": 0}, {"n": 2, "temperature": 0.0}, {"stop": [""]},
        {"stop": ""}, {"stop": "a", "detokenize": False}, {"logprob_token_ids": [1] * 129},
        {"logprob_token_ids": [1, 2], "logprobs": 3}, {"logit_bias": {"5": 1.0}},
        {"stop_token_ids": ["a"]}, {"temperature": float("nan")},
        {"structured_outputs": {}}, {"structured_outputs": {"regex": "a", "grammar": "b"}},
        {"repetition_detection": {"max_pattern_size": 2, "min_count": 1}},
    ],
    ids=str,
)  # fmt: skip
def test_values_out_of_range_cannot_be_decoded(fields: dict[str, Any]) -> None:
    with pytest.raises(InputThreadError, match="ValidationError"):
        sampling(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 2.0}, {"top_p": 1.0}, {"top_k": -1}, {"min_p": 1.0},
        {"presence_penalty": -2}, {"max_tokens": 1}, {"min_tokens": 16}, {"logprobs": -1},
        {"n": 2}, {"stop": ["a"]}, {"logprob_token_ids": [1] * 128}, {"logit_bias": {5: 1}},
        {"structured_outputs": {"json_object": False, "_backend": "x"}}, {"seed": 2**63 - 1},
    ],
    ids=str,
)  # fmt: skip
def test_values_at_the_edge_of_their_range(fields: dict[str, Any]) -> None:
    assert sampling(**fields)


@pytest.mark.parametrize(
    "changes", [{"id": 5}, {"ids": "text"}, {"arrival": None}, {"salt": 3}, {"rank": "0"}], ids=str
)
def test_fields_of_the_wrong_type(changes: dict[str, Any]) -> None:
    with pytest.raises(InputThreadError):
        add({}, **changes)


def test_a_request_that_is_too_short() -> None:
    with pytest.raises(InputThreadError):
        decode_add(_pack(["r", [1], None, {}, None, 1.0, None, None]))


@pytest.mark.parametrize("value", ["text", 5, None, {"a": 1}, [5, None]])
def test_an_abort_of_another_shape_names_nothing(value: Any) -> None:
    assert decode_abort(_pack(value)) == []


@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_end_the_input_thread(payload: bytes) -> None:
    for decode in (decode_add, decode_abort, decode_utility, decode_init, decode_other):
        with suppress(InputThreadError):
            decode(payload)


def test_identities_are_two_bytes_little_endian() -> None:
    assert [identity(0), identity(1), identity(258)] == [b"\0\0", b"\1\0", b"\2\1"]
