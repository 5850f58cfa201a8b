"""Recorded frames of both ends of the supported versions, and what may differ between them."""

from __future__ import annotations

import math
import struct
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smgd.core import (
    Batch,
    Constraint,
    EngineInfo,
    EngineLoad,
    GenerationRequest,
    RoutingHints,
    Sampling,
    Timings,
)
from smgd.engine.dialects import DIALECTS, dialect_for
from smgd.engine.dialects.vllm import VllmDialect, choice_grammar
from smgd.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from smgd.wire import vllm as wire
from tests.engine_unit import recorded
from tests.engine_unit.scripted import outputs, pack, request, unpack

dialect = VllmDialect()
INFO = EngineInfo(max_model_len=2048)
FINISH = {None: None, 0: "stop", 1: "length", 2: "abort", 3: "error", 4: "repetition"}

recorded_outputs = pytest.mark.parametrize(
    "message",
    [m for v in recorded.VERSIONS for m in recorded.messages(v, "output")],
    ids=str,
)


def sent(changed: GenerationRequest) -> list[Any]:
    """Return the ADD array that a request becomes."""
    kind, payload = dialect.encode_add(changed, INFO)
    assert kind == wire.ADD
    array: list[Any] = unpack(payload)
    return array


def params(**changes: Any) -> dict[str, Any]:
    sampling = Sampling(**({"max_tokens": 5} | changes))
    result: dict[str, Any] = sent(request(sampling=sampling))[3]
    return result


# --------------------------------------------------------------------------------- decoding


@recorded_outputs
def test_recorded_outputs_mean_what_was_recorded(message: recorded.Message) -> None:
    batch = dialect.decode(message.frames)
    if message.meaning is None:
        assert message.frames == [b"ENGINE_CORE_DEAD"]
        assert batch == Batch(0, [], dead=True)
        return
    meaning = message.meaning
    assert batch.engine_index == meaning[0]
    assert [request_id for request_id, _ in batch.deltas] == [row[0] for row in meaning[1]]
    for (_, delta), row in zip(batch.deltas, meaning[1], strict=True):
        assert (delta.ids, delta.finish, delta.stop_reason) == (row[1], FINISH[row[5]], row[6])
        assert delta.cached_tokens == (row[11] and row[11]["num_cached_tokens"])
        timings = delta.timings or Timings()
        assert (timings.first_token is None) == (row[7] is None)
        assert timings.last_token == (None if row[5] is None else meaning[3])
        assert (delta.logprobs is None) == (row[2] is None)
        assert (delta.prompt_logprobs is None) == (row[3] is None)
    assert batch.wave_complete == meaning[6]
    assert (batch.load is None) == (meaning[2] is None)
    assert batch.reply == (meaning[4] and meaning[4][0])


@recorded_outputs
def test_fewer_and_more_trailing_fields_change_nothing(message: recorded.Message) -> None:
    if message.meaning is None:
        return
    whole = dialect.decode(message.frames)
    array = unpack(message.frames[0])  # tensors stay extensions
    longer = [*array, {"new": 1}, "later"]
    longer[1] = [[*row, None, [7]] for row in array[1]]
    assert dialect.decode([pack(longer), *message.frames[1:]]) == whole
    shorter = array[:7]
    while shorter[-1] is None:
        shorter.pop()
    shorter[1] = [row[:12] for row in array[1]]
    assert dialect.decode([pack(shorter), *message.frames[1:]]) == whole


@pytest.mark.parametrize("version", recorded.VERSIONS)
def test_timings_and_load_have_their_numbers(version: str) -> None:
    message = recorded.message(version, "greedy_length", "output")
    batch = dialect.decode(message.frames)
    queued, scheduled = (event["timestamp"] for event in message.meaning[1][0][7])
    assert batch.deltas[0][1].timings == Timings(queued, scheduled, message.meaning[3])
    stats = message.meaning[2]
    assert batch.load == EngineLoad(
        stats["num_running_reqs"], stats["num_waiting_reqs"], stats["kv_cache_usage"]
    )


def test_the_message_that_finishes_has_the_last_token() -> None:
    events = [{"type": kind, "timestamp": float(kind)} for kind in (1, 2)]
    for events_of_it, timings in (
        (None, Timings(last_token=9.0)),
        (events, Timings(queued=1.0, scheduled=2.0, first_token=9.0, last_token=9.0)),
    ):
        payload = pack([0, [["r", [5], None, None, None, 0, None, events_of_it]], None, 9.0])
        [(_, delta)] = dialect.decode([payload]).deltas
        assert (delta.finish, delta.timings) == ("stop", timings)


def test_a_preemption_is_no_timing() -> None:
    events = [{"type": kind, "timestamp": float(kind)} for kind in (1, 2, 3)]
    payload = pack([0, [["r", [5], None, None, None, None, None, events]], None, 9.0])
    _, delta = dialect.decode([payload]).deltas[0]
    assert delta.timings == Timings(queued=1.0, scheduled=2.0, first_token=9.0)


def test_a_request_whose_grammar_is_compiled_counts_as_waiting() -> None:
    stats = {"num_running_reqs": 3, "num_waiting_reqs": 2, "num_skipped_waiting_reqs": 1}
    assert dialect.decode([outputs(stats=stats)]).load == EngineLoad(3, 3, 0.0)


@pytest.mark.parametrize("version", recorded.VERSIONS)
def test_logprobs_inline(version: str) -> None:
    _, delta = dialect.decode(recorded.message(version, "logprobs_2", "output").frames).deltas[0]
    assert delta.logprobs is not None
    (row,) = delta.logprobs
    assert row.ids == [7042, 7042, 260]  # the sampled one first, then the best two
    assert row.rank == 1
    assert row.logprobs == pytest.approx([-0.26925, -0.26925, -2.70675], abs=1e-5)


@pytest.mark.parametrize("version", recorded.VERSIONS)
def test_logprobs_in_auxiliary_frames(version: str) -> None:
    frames = recorded.message(version, "logprobs_100_aux", "output").frames
    assert len(frames) > 1
    _, delta = dialect.decode(frames).deltas[0]
    assert delta.logprobs is not None
    assert len(delta.logprobs[0].ids) == len(delta.logprobs[0].logprobs) == 101
    assert delta.logprobs[0].logprobs[1:] == sorted(delta.logprobs[0].logprobs[1:], reverse=True)
    with pytest.raises(RemoteProtocolError, match="malformed tensor"):
        dialect.decode(frames[:1])


@pytest.mark.parametrize("version", recorded.VERSIONS)
@pytest.mark.parametrize(
    ("case", "prompt", "columns"),
    [("prompt_logprobs_1", 5, 2), ("prompt_logprobs_long_aux", 37, 3)],
)
def test_prompt_logprobs_have_one_entry_per_prompt_token(
    version: str, case: str, prompt: int, columns: int
) -> None:
    message = recorded.message(version, case, "output")
    prompt_ids = recorded.message(version, case, "input", "F->E").meaning[1]
    _, delta = dialect.decode(message.frames).deltas[0]
    rows = delta.prompt_logprobs
    assert rows is not None
    assert len(rows) == len(prompt_ids) == prompt
    assert rows[0] is None
    following = [row for row in rows[1:] if row is not None]
    assert [row.ids[0] for row in following] == prompt_ids[1:]
    assert {len(row.ids) for row in following} == {columns}


def test_prompt_logprobs_without_statistics_are_found_as_well() -> None:
    tensor = ["int32", [1, 1], msgspec.msgpack.Ext(3, struct.pack("<i", 9))]
    floats = ["float32", [1, 1], msgspec.msgpack.Ext(3, struct.pack("<f", -1.5))]
    ranks = ["int32", [1], msgspec.msgpack.Ext(3, struct.pack("<i", 4))]
    row = ["r", [5], None, [tensor, floats, ranks, None]]
    _, delta = dialect.decode([pack([0, [row]])]).deltas[0]
    assert delta.prompt_logprobs is not None
    assert delta.prompt_logprobs[1] is not None
    assert (delta.prompt_logprobs[1].ids, delta.prompt_logprobs[1].rank) == ([9], 4)


@pytest.mark.parametrize("version", recorded.VERSIONS)
def test_utility_replies(version: str) -> None:
    def reply(case: str) -> Any:
        return dialect.decode(recorded.message(version, case, "output").frames).reply

    for case in ("is_sleeping", "get_supported_tasks", "no_such_method"):
        asked = recorded.message(version, f"utility_{case}", "input", "F->E")
        assert reply(f"utility_{case}") == asked.meaning[1]
    assert reply("greedy_length") is None


@pytest.mark.parametrize("rest", [[], ["failure"], [None], [None, 7], [None, [1, 2, 3], "later"]])
def test_any_answer_is_a_sign_of_life(rest: list[Any]) -> None:
    assert dialect.decode([outputs(reply=[12, *rest])]).reply == 12


@pytest.mark.parametrize("version", recorded.VERSIONS)
def test_the_heartbeat_is_the_call_that_was_recorded(version: str) -> None:
    message = recorded.message(version, "utility_is_sleeping", "input", "F->E")
    assert dialect.heartbeat(message.meaning[1]) == message.frames[1:]


def test_a_finish_code_of_a_later_version_ends_the_request() -> None:
    (_, delta) = dialect.decode([outputs(("r", [], 9))]).deltas[0]
    assert delta.finish == "error"


@pytest.mark.parametrize("version", recorded.VERSIONS)
def test_registrations(version: str) -> None:
    message = recorded.message(version, "handshake", "input")
    info = dialect.read_registration(message.frames[1])
    assert info.version.startswith(version)
    assert (info.max_model_len, info.data_parallel_size) == (2048, 1)
    assert info.instance_id == message.meaning["instance_id"]
    assert info.supports_lora is False


def test_moe_ranks_say_so() -> None:
    message = recorded.message("0.32", "moe_handshake", "input")
    assert dialect.read_registration(message.frames[1]).data_parallel_size == 2


@pytest.mark.parametrize(
    "payload", [b"", b"\x90", pack({}), pack({"max_model_len": 0}), pack({"max_model_len": "x"})]
)
def test_a_registration_without_a_context_length_is_refused(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="registration"):
        dialect.read_registration(payload)


def tensors(ids: Any, logprobs: Any, ranks: Any) -> bytes:
    return pack([0, [["r", [5], [ids, logprobs, ranks, None]]]])


IDS = ["<i4", [1, 2], msgspec.msgpack.Ext(3, struct.pack("<2i", 1, 2))]
FLOATS = ["<f4", [1, 2], msgspec.msgpack.Ext(3, struct.pack("<2f", -1, -2))]
RANKS = ["<i8", [1], msgspec.msgpack.Ext(3, struct.pack("<q", 1))]


def test_the_smallest_logprobs() -> None:
    _, delta = dialect.decode([tensors(IDS, FLOATS, RANKS)]).deltas[0]
    assert delta.logprobs is not None
    assert (delta.logprobs[0].ids, delta.logprobs[0].logprobs) == ([1, 2], [-1.0, -2.0])


@pytest.mark.parametrize(
    "payload",
    [
        tensors(IDS, FLOATS, None),
        tensors(FLOATS, FLOATS, RANKS),
        tensors(IDS, IDS, FLOATS),
        tensors(["<i4", [2, 1], IDS[2]], FLOATS, RANKS),
        tensors(["<i4", [2], IDS[2]], ["<f4", [2], FLOATS[2]], RANKS),
        tensors(["<i4", [1, 3], IDS[2]], FLOATS, RANKS),
        tensors(["<i4", [1, 2], 1], FLOATS, RANKS),
        tensors(["<i4", [1, 2], 0], FLOATS, RANKS),
        tensors(["<i4", [1, 2], "text"], FLOATS, RANKS),
        tensors(["bfloat16", [1, 2], IDS[2]], FLOATS, RANKS),
        tensors(["<i4", [0, 2], b""], ["<f4", [0, 2], b""], ["<i8", [0], b""]),
        pack([0, [["r", [5], [IDS, FLOATS]]]]),
        pack([0, [["r", [5, 6], [IDS, FLOATS, RANKS, None]]]]),
        pack([0, [["r", [5], "x"]]]),
        pack([0, [["r", [5], msgspec.msgpack.Ext(1, b"a pickle")]]]),
        pack([0, [], None, 0.0, []]),
        pack([0, [], None, 0.0, ["1", None, [None, 1]]]),
        b"",
        b"\xc1",
        b"\x91" * 10_000,
    ],
)
def test_what_no_engine_sends_is_refused(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        dialect.decode([payload])


def test_a_message_without_frames_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="without frames"):
        dialect.decode([])


@given(st.lists(st.binary(max_size=200), max_size=3))
def test_any_bytes_are_decoded_or_refused(frames: list[bytes]) -> None:
    with suppress(RemoteProtocolError):
        dialect.decode(frames)


ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=16)
    | st.builds(msgspec.msgpack.Ext, st.just(3), st.binary(max_size=16)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)
TENSOR = st.tuples(
    st.sampled_from(["<i4", "<i8", "<f4", "int32", "float32", "x"]) | ANY,
    st.lists(st.integers(-1, 3) | st.floats(0, 3), max_size=3) | ANY,
    st.integers(-2, 3) | st.binary(max_size=16) | ANY,
).map(list)
ROW = st.tuples(
    st.just("r"),
    st.just([5]) | ANY,
    st.none() | st.lists(TENSOR | ANY, min_size=2, max_size=4) | ANY,
    st.none() | st.lists(TENSOR | ANY, min_size=2, max_size=5) | ANY,
    ANY,
    st.none() | st.integers(-1, 9) | ANY,
    ANY,
    ANY,
).map(list)


@given(st.lists(ROW, max_size=3), ANY, ANY, st.lists(st.binary(max_size=16), max_size=2))
def test_any_structure_is_decoded_or_refused(
    rows: list[Any], stats: Any, reply: Any, aux: list[bytes]
) -> None:
    with suppress(RemoteProtocolError):
        dialect.decode([pack([0, rows, stats, 1.0, reply]), *aux])


@given(ANY | st.dictionaries(st.sampled_from(["max_model_len", "dtype", "x"]), ANY))
def test_any_registration_is_read_or_refused(payload: Any) -> None:
    with suppress(RemoteProtocolError):
        assert dialect.read_registration(pack(payload)).max_model_len > 0


# --------------------------------------------------------------------------------- encoding


def test_defaults_are_not_sent_but_what_the_engine_cannot_know_is() -> None:
    array = sent(request(sampling=Sampling(max_tokens=5)))
    assert array[0] == "0000000100000001"
    assert array[1] == [1, 2, 3]
    assert array[3] == {"max_tokens": 5, "_all_stop_token_ids": []}
    assert [array[i] for i in (2, 4, 6, 7, 8)] == [None] * 5
    assert math.isfinite(array[5])
    assert len(array) == 9  # no more than the versions share


@pytest.mark.parametrize("version", recorded.VERSIONS)
def test_the_shape_is_the_one_that_engines_have_accepted(version: str) -> None:
    message = recorded.message(version, "logprobs_2", "input", "F->E")
    sampling = Sampling(max_tokens=3, temperature=0.0, logprobs=2)
    ours = sent(request(message.meaning[0], prompt_ids=message.meaning[1], sampling=sampling))
    del ours[3]["_all_stop_token_ids"]
    ours[5] = message.meaning[5]
    assert ours == message.meaning
    assert message.frames[1] == wire.ADD


@pytest.mark.parametrize("version", recorded.VERSIONS)
def test_every_knob_as_it_was_recorded(version: str) -> None:
    for case in ("all_knobs", "allowed_token_ids", "bad_words", "logit_bias"):
        message = recorded.message(version, case, "input", "F->E")
        meaning = unpack(message.frames[2])[3]  # JSON has lost that the keys of a map are integers
        known = {
            name.lstrip("_"): value
            for name, value in meaning.items()
            if name.lstrip("_") in Sampling.__struct_fields__
        }
        ours = params(**known)
        for name, value in known.items():
            key = name if name in meaning else f"_{name}"
            assert ours.get(key, value) == value


def test_the_ids_that_end_a_text() -> None:
    ours = params(eos_token_id=0, stop_token_ids=[9], all_stop_token_ids=[0, 9], min_tokens=2)
    assert ours == {
        "max_tokens": 5,
        "min_tokens": 2,
        "_eos_token_id": 0,
        "stop_token_ids": [9],
        "_all_stop_token_ids": [0, 9],
    }


def test_biases_are_clamped_and_keep_integer_keys() -> None:
    ours = params(logit_bias={5: 1.5, 6: 1e9, 7: -1e9}, bad_words_token_ids=[[1, 2]], logprobs=0)
    assert ours["logit_bias"] == {5: 1.5, 6: 100.0, 7: -100.0}
    assert ours["_bad_words_token_ids"] == [[1, 2]]
    assert ours["logprobs"] == 0


def test_priority_extends_the_array_and_a_salt_does_not() -> None:
    array = sent(request(routing=RoutingHints(priority=-3, cache_salt="tenant")))
    assert (array[7], array[11], array[12], array[13]) == ("tenant", 0, 0, -3)
    assert len(array) == 14
    assert len(sent(request(routing=RoutingHints(cache_salt="tenant")))) == 9


def test_an_adapter_is_named_with_the_same_number_each_time() -> None:
    name, number, path = sent(request(routing=RoutingHints(lora_name="ad")))[6]
    assert (name, path) == ("ad", "ad")
    assert number >= 1
    assert sent(request(routing=RoutingHints(lora_name="ad")))[6][1] == number
    assert sent(request(routing=RoutingHints(lora_name="be")))[6][1] != number


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        (Constraint("json", {"type": "object"}), {"json": {"type": "object"}}),
        (Constraint("json", '{"type":"object"}'), {"json": '{"type":"object"}'}),
        (Constraint("json_object", None), {"json_object": True}),
        (Constraint("regex", "a|b"), {"regex": "a|b"}),
        (Constraint("grammar", 'root ::= "a"'), {"grammar": 'root ::= "a"'}),
        (Constraint("choice", ["a", "b"]), {"grammar": 'root ::= "a" | "b"'}),
        (Constraint("structural_tag", {"tags": []}), {"structural_tag": '{"tags": []}'}),
        (Constraint("structural_tag", '{"tags":[]}'), {"structural_tag": '{"tags":[]}'}),
    ],
)
def test_constraints(constraint: Constraint, expected: dict[str, Any]) -> None:
    ours = sent(request(constraint=constraint))[3]["structured_outputs"]
    assert ours == expected | {"_backend": "xgrammar", "_backend_was_auto": True}


def test_choices_are_quoted() -> None:
    assert choice_grammar(['say "x"', "a\\b", "one\ntwo", "né"]) == (
        r'root ::= "say \"x\"" | "a\\b" | "one\ntwo" | "né"'
    )


def test_an_abort_is_a_list() -> None:
    message = recorded.message("0.32", "abort", "input", "F->E")
    assert message.frames[1] == wire.ADD
    assert dialect.encode_abort(("a", "b")) == [wire.ABORT, pack(["a", "b"])]


def test_what_cannot_be_encoded_is_our_fault() -> None:
    with pytest.raises(LocalProtocolError, match="cannot encode request 0000000100000001"):
        dialect.encode_add(request(sampling=Sampling(max_tokens=2**70)), INFO)


def test_the_table_of_dialects() -> None:
    assert {name: make().name for name, make in DIALECTS.items()} == {"vllm": "vllm"}
    assert isinstance(dialect_for("vllm", "ipc:///x"), VllmDialect)
    with pytest.raises(ConfigError, match=r"ipc:///x has unsupported runtime sglang: only vllm"):
        dialect_for("sglang", "ipc:///x")
