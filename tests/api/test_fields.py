"""The field rule: honoured, refused by name, harmless, or unknown and counted."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import completion_create_params as openai_completion
from openai.types.chat import completion_create_params as openai_chat

from smgd.api import QUERIES, SURFACES
from smgd.api.chat import RULES as CHAT_RULES
from smgd.api.completions import RULES as COMPLETION_RULES
from smgd.api.fields import HARMLESS, KNOWN, FieldRules, decode
from smgd.api.tokenize import DETOKENIZE_RULES, TOKENIZE_RULES
from smgd.errors import ApiError


class Options(msgspec.Struct):
    usage: bool | None = None
    padding: bool | None = None


class Body(msgspec.Struct, kw_only=True):
    prompt: str
    options: Options | None = None
    top_k: int | None = None
    ratio: float | None = None
    stop: list[str] | None = None
    bias: dict[int, float] | None = None


RULES = FieldRules.of(Body, frozenset({"temperature"}))
DECODER = msgspec.json.Decoder(Body)


def read(**fields: Any) -> tuple[Body, list[str]]:
    return decode(DECODER, msgspec.json.encode({"prompt": "x", **fields}), RULES)


def refusal(body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decode(DECODER, body, RULES)
    assert caught.value.status == 400
    return caught.value


def test_honoured_fields_are_read_and_null_is_absent() -> None:
    assert read(top_k=3)[0] == Body(prompt="x", top_k=3)
    assert read(top_k=None, ratio=None, stop=None, bias=None)[0] == Body(prompt="x")


def test_a_refused_field_is_named() -> None:
    error = refusal(b'{"prompt": "x", "tools": [{"type": "function"}]}')
    assert (error.code, error.param) == ("unsupported_parameter", "tools")
    assert "'tools' is not supported" in error.message


@pytest.mark.parametrize("name", sorted(RULES.refused))
def test_every_refused_field_is_refused_and_its_neutral_values_pass(name: str) -> None:
    error = refusal(msgspec.json.encode({"prompt": "x", name: {"something": "else"}}))
    assert (error.code, error.param) == ("unsupported_parameter", name)
    for neutral in (None, *RULES.refused[name]):
        assert read(**{name: neutral}) == (Body(prompt="x"), [])


@pytest.mark.parametrize("name", sorted(HARMLESS | {"temperature"}))
def test_harmless_fields_are_ignored_and_not_counted(name: str) -> None:
    assert read(**{name: {"any": "thing"}}) == (Body(prompt="x"), [])


def test_unknown_fields_are_ignored_and_named_for_the_count() -> None:
    body, unknown = read(frobnicate=1, foo=None)
    assert body == Body(prompt="x")
    assert sorted(unknown) == ["foo", "frobnicate"]


@pytest.mark.parametrize(
    ("options", "unknown"),
    [
        (None, []),
        ({}, []),
        ({"usage": True, "padding": None}, []),
        ({"zzz": 1, "usage": True, "yyy": None}, ["options.zzz", "options.yyy"]),
    ],
)
def test_unknown_names_inside_an_object_are_named_with_it(
    options: dict[str, Any] | None, unknown: list[str]
) -> None:
    assert read(options=options)[1] == unknown
    assert read(options=options, foo=1)[1] == ["foo", *unknown]


@pytest.mark.parametrize("options", [1, "x", [], {"usage": 1}])
def test_an_object_of_another_type_blames_its_field(options: Any) -> None:
    error = refusal(msgspec.json.encode({"prompt": "x", "options": options}))
    assert error.code == "invalid_type"
    assert error.param in ("options", "options.usage")


@pytest.mark.parametrize("value", ["9" * 5000, "1e400", "[1e400]", '{"a":1e400}'])
@pytest.mark.parametrize("name", ["best_of", "tools"])
def test_a_refused_field_is_named_whatever_its_value_is(name: str, value: str) -> None:
    error = refusal(f'{{"prompt":"x","{name}":{value}}}'.encode())
    assert (error.code, error.param) == ("unsupported_parameter", name)


@pytest.mark.parametrize(
    ("name", "neutral", "other"),
    [("best_of", 1, True), ("return_token_ids", False, -0.0), ("return_token_ids", False, 0)],
)
def test_a_truth_value_is_no_number(name: str, neutral: Any, other: Any) -> None:
    assert read(**{name: neutral}) == (Body(prompt="x"), [])
    assert refusal(msgspec.json.encode({"prompt": "x", name: other})).param == name


def test_what_a_surface_honours_or_ignores_is_not_refused() -> None:
    class Own(msgspec.Struct):
        bad_words: list[str] | None = None

    assert {"bad_words", "echo"} <= KNOWN.keys()
    rules = FieldRules.of(Own, frozenset({"echo"}))
    assert {"bad_words", "echo"}.isdisjoint(rules.refused)


# --------------------------------------------------------------- what every surface knows

# The request fields of vLLM 0.32: chat, completions, tokenize and detokenize.
VLLM = frozenset(
    {
        "messages", "model", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs",
        "max_tokens", "max_completion_tokens", "n", "presence_penalty", "response_format", "seed",
        "stop", "stream", "stream_options", "temperature", "top_p", "tools", "tool_choice",
        "reasoning_effort", "thinking_token_budget", "include_reasoning", "parallel_tool_calls",
        "user", "use_beam_search", "top_k", "min_p", "repetition_penalty", "watermarking",
        "length_penalty", "early_stopping", "stop_token_ids", "include_stop_str_in_output",
        "ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens",
        "truncate_prompt_tokens", "truncation_side", "prompt_logprobs", "logprob_token_ids",
        "allowed_token_ids", "bad_words", "echo", "add_generation_prompt",
        "continue_final_message", "add_special_tokens", "documents", "chat_template",
        "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "structured_outputs",
        "priority", "request_id", "session_id", "return_tokens_as_token_ids", "return_token_ids",
        "routed_experts_prompt_start", "return_token_offsets", "return_prompt_text", "mm_payload",
        "return_mm_kwargs", "cache_salt", "kv_transfer_params", "ec_transfer_params", "vllm_xargs",
        "repetition_detection", "stream_interval", "prompt", "suffix", "best_of", "prompt_embeds",
        "return_token_strs", "tokens", "guided_json", "guided_regex", "guided_choice",
        "guided_grammar", "guided_decoding_backend", "guided_whitespace_pattern",
    }
)  # fmt: skip
OPENAI = frozenset(
    openai_chat.CompletionCreateParamsNonStreaming.__annotations__
    | openai_chat.CompletionCreateParamsBase.__annotations__
    | openai_completion.CompletionCreateParamsBase.__annotations__
)
SURFACE_RULES = {
    "chat": CHAT_RULES,
    "completions": COMPLETION_RULES,
    "tokenize": TOKENIZE_RULES,
    "detokenize": DETOKENIZE_RULES,
}
LEAST: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "x"}]},
    "completions": {"prompt": "x"},
    "tokenize": {"messages": [{"role": "user", "content": "x"}]},
    "detokenize": {"tokens": [1]},
}
DECODERS = {surface.endpoint: surface.decode for surface in SURFACES} | {
    query.endpoint: query.decode for query in QUERIES
}
ALL_REFUSED = [
    (surface, name) for surface, rules in SURFACE_RULES.items() for name in sorted(rules.refused)
]


@pytest.mark.parametrize("surface", SURFACE_RULES)
def test_no_name_of_openai_of_vllm_or_of_another_surface_is_unknown(surface: str) -> None:
    assert len(OPENAI) > 30
    rules = SURFACE_RULES[surface]
    known = {*rules.honoured, *rules.harmless, *rules.refused}
    others = {name for other in SURFACE_RULES.values() for name in other.honoured}
    assert sorted({*VLLM, *OPENAI, *KNOWN, *others} - known) == []


def test_every_surface_has_its_rules_here() -> None:
    assert DECODERS.keys() == SURFACE_RULES.keys() == LEAST.keys()


@pytest.mark.parametrize(("surface", "name"), ALL_REFUSED)
def test_every_surface_names_what_it_refuses_and_lets_defaults_pass(
    surface: str, name: str
) -> None:
    def ask(value: Any) -> list[str]:
        body = msgspec.json.encode({**LEAST[surface], name: value})
        unknown: list[str] = DECODERS[surface](body)[1]
        return unknown

    with pytest.raises(ApiError) as caught:
        ask({"something": "else"})
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", name)
    assert f"'{name}' is not supported by this endpoint" in error.message
    for neutral in (None, *SURFACE_RULES[surface].refused[name]):
        assert ask(neutral) == []


@pytest.mark.parametrize("surface", SURFACE_RULES)
def test_what_generates_is_no_matter_to_a_query(surface: str) -> None:
    fields: dict[str, Any] = {"temperature": 0.5, "max_tokens": 3, "stream": False, "n": 1}
    body = msgspec.json.encode({**LEAST[surface], **fields})
    assert DECODERS[surface](body)[1] == []


@pytest.mark.parametrize("body", [b"", b"{", b"nope", b'{"prompt": NaN}', b"\xff\xfe"])
def test_a_body_that_is_no_json(body: bytes) -> None:
    assert refusal(body).code == "invalid_json"


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"{}", "missing_required_parameter", "prompt"),
        (b'{"prompt": null}', "missing_required_parameter", "prompt"),
        (b'{"prompt": 1}', "invalid_type", "prompt"),
        (b'{"prompt": "x", "top_k": "3"}', "invalid_type", "top_k"),
        (b'{"prompt": "x", "top_k": true}', "invalid_type", "top_k"),
        (b'{"prompt": "x", "stop": ["a", 1]}', "invalid_type", "stop[1]"),
        (b'{"prompt": "x", "bias": {"a": 1}}', "invalid_type", "bias"),
        (b"[]", "invalid_type", None),
        (b"null", "invalid_type", None),
    ],
)
def test_a_wrong_type_blames_its_field(body: bytes, code: str, param: str | None) -> None:
    error = refusal(body)
    assert (error.code, error.param) == (code, param)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
names = st.sampled_from([*Body.__struct_fields__, *RULES.refused, *HARMLESS]) | st.text()


def status_of(body: bytes) -> int:
    try:
        decode(DECODER, body, RULES)
    except ApiError as error:
        return error.status
    return 200


@given(st.dictionaries(names, json_values))
def test_any_object_is_read_or_refused_with_a_400(fields: dict[str, Any]) -> None:
    assert status_of(msgspec.json.encode(fields)) in (200, 400)


@given(st.binary())
def test_any_bytes_are_read_or_refused_with_a_400(body: bytes) -> None:
    assert status_of(body) in (200, 400)
