"""Every edge of the list: the last value that passes and the first that does not."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smgd.core import Constraint, EngineInfo, RoutingHints, Sampling
from smgd.engine import guard
from smgd.errors import ApiError
from tests.engine_unit.scripted import request

VOCAB = 100
INFO = EngineInfo(max_model_len=16)
INT64 = 2**63


def check(vocab: int | None = VOCAB, max_logprobs: int = 20, **changes: Any) -> None:
    guard.check(request(**changes), INFO, vocab, max_logprobs)


def check_sampling(name: str, value: Any, vocab: int | None = VOCAB, **further: Any) -> None:
    check(vocab, sampling=Sampling(**({"max_tokens": 5} | further | {name: value})))


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("temperature", [0, 0.0, 1e-6, 0.005, 2.0, 2]),
        ("top_p", [1e-9, 0.5, 1.0]),
        ("min_p", [0.0, 1.0]),
        ("presence_penalty", [-2.0, 0.0, 2.0]),
        ("frequency_penalty", [-2.0, 0.0, 2.0]),
        ("repetition_penalty", [1e-9, 1.0, 1e9]),
        ("top_k", [-1, 0, 1, INT64 - 1]),
        ("seed", [None, -1, 0, -INT64, INT64 - 1]),
        ("max_tokens", [1, 10**9]),
        ("min_tokens", [0, 5]),
        ("logprobs", [None, 0, 20]),
        ("prompt_logprobs", [None, 0, 20]),
        ("stop_token_ids", [[], [0, VOCAB - 1]]),
        ("all_stop_token_ids", [[], [0, VOCAB - 1]]),
        ("logit_bias", [None, {}, {0: -100.0, VOCAB - 1: 1e9}]),
        ("allowed_token_ids", [None, [0], [VOCAB - 1]]),
        ("bad_words_token_ids", [None, [], [[0], [1, VOCAB - 1]]]),
    ],
)
def test_values_at_the_edges_pass(name: str, good: list[Any]) -> None:
    for value in good:
        check_sampling(name, value)


@pytest.mark.parametrize(
    ("name", "value", "code", "text"),
    [
        (
            "temperature",
            -1e-9,
            "decimal_below_min_value",
            "temperature must be at least 0, got -1",
        ),
        (
            "temperature",
            2.0001,
            "decimal_above_max_value",
            "temperature must be at most 2, got 2.",
        ),
        ("temperature", math.nan, "invalid_value", "temperature must be a finite number"),
        ("temperature", math.inf, "invalid_value", "temperature must be a finite number"),
        ("top_p", 0.0, "decimal_below_min_value", "top_p must be above 0, got 0.0"),
        ("top_p", 1.0001, "decimal_above_max_value", "top_p must be at most 1"),
        ("top_p", math.nan, "invalid_value", "finite"),
        ("min_p", -0.1, "decimal_below_min_value", "min_p must be at least 0"),
        ("min_p", 1.1, "decimal_above_max_value", "min_p must be at most 1"),
        ("presence_penalty", -2.1, "decimal_below_min_value", "must be at least -2"),
        ("presence_penalty", 2.1, "decimal_above_max_value", "must be at most 2"),
        ("frequency_penalty", -2.1, "decimal_below_min_value", "must be at least -2"),
        ("frequency_penalty", 2.1, "decimal_above_max_value", "must be at most 2"),
        ("repetition_penalty", 0.0, "decimal_below_min_value", "must be above 0"),
        ("repetition_penalty", -1.0, "decimal_below_min_value", "must be above 0"),
        ("repetition_penalty", math.inf, "invalid_value", "finite"),
        ("top_k", -2, "integer_below_min_value", "top_k must be at least -1, got -2"),
        ("top_k", INT64, "integer_above_max_value", "top_k must be at most"),
        ("seed", INT64, "integer_above_max_value", "seed must be at most 9223372036854775807"),
        ("seed", -INT64 - 1, "integer_below_min_value", "seed must be at least"),
        ("max_tokens", 0, "integer_below_min_value", "max_tokens must be at least 1, got 0"),
        ("max_tokens", INT64, "integer_above_max_value", "max_tokens must be at most"),
        ("min_tokens", -1, "integer_below_min_value", "min_tokens must be at least 0"),
        ("min_tokens", 6, "invalid_value", r"min_tokens \(6\) is above max_tokens \(5\)"),
        ("logprobs", -1, "integer_below_min_value", "logprobs must be at least 0"),
        ("logprobs", 21, "integer_above_max_value", "logprobs must be at most 20, got 21"),
        ("prompt_logprobs", -1, "integer_below_min_value", "prompt_logprobs must be at least 0"),
        ("prompt_logprobs", 21, "integer_above_max_value", "prompt_logprobs must be at most 20"),
        (
            "stop_token_ids",
            [VOCAB],
            "token_id_out_of_vocabulary",
            "stop_token_ids has token id 100",
        ),
        ("stop_token_ids", [-1], "token_id_out_of_vocabulary", "has token id -1.*are 0 to 99"),
        ("logit_bias", {VOCAB: 1.0}, "token_id_out_of_vocabulary", "logit_bias has token id 100"),
        ("logit_bias", {1: math.nan}, "invalid_value", "logit_bias must be finite numbers"),
        ("logit_bias", {1: -math.inf}, "invalid_value", "logit_bias must be finite numbers"),
        ("allowed_token_ids", [], "empty_array", "no token could be generated"),
        ("allowed_token_ids", [5, VOCAB], "token_id_out_of_vocabulary", "token id 100"),
        ("bad_words", [[1], [VOCAB]], "token_id_out_of_vocabulary", "bad_words has token id 100"),
        ("bad_words", [[1], []], "empty_array", "bad_words has a word without tokens"),
    ],
)
def test_values_past_the_edges_are_refused(name: str, value: Any, code: str, text: str) -> None:
    field = "bad_words_token_ids" if name == "bad_words" else name
    with pytest.raises(ApiError, match=text) as caught:
        check_sampling(field, value)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, code, name)


def test_masked_stop_ids_are_indices_only_with_min_tokens() -> None:
    check_sampling("all_stop_token_ids", [VOCAB])
    with pytest.raises(ApiError, match="stop_token_ids has token id 100"):
        check_sampling("all_stop_token_ids", [VOCAB], min_tokens=1)


@pytest.mark.parametrize("length", [1, 15])
def test_prompts_that_fit_pass(length: int) -> None:
    check(prompt_ids=[1] * length)


@pytest.mark.parametrize(
    ("prompt", "code", "text"),
    [
        ([], "prompt_empty", "no tokens"),
        ([1] * 16, "context_length_exceeded", "16 tokens.*maximum context length is 16"),
        ([1] * 17, "context_length_exceeded", "17 tokens.*maximum context length is 16"),
        ([1, VOCAB], "token_id_out_of_vocabulary", "prompt has token id 100.*are 0 to 99"),
        ([1, -5], "token_id_out_of_vocabulary", "prompt has token id -5"),
    ],
)
def test_prompts_that_kill_are_refused(prompt: list[int], code: str, text: str) -> None:
    with pytest.raises(ApiError, match=text) as caught:
        check(prompt_ids=prompt)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, code, "prompt")


def test_an_unknown_vocabulary_skips_only_what_needs_it() -> None:
    check(None, prompt_ids=[1, 10**6])
    check_sampling("logit_bias", {10**6: 1.0}, vocab=None)
    with pytest.raises(ApiError, match=r"prompt has token id -5$"):
        check(None, prompt_ids=[-5])
    with pytest.raises(ApiError, match="prompt has token id"):
        check(None, prompt_ids=[INT64])  # could not even be encoded
    with pytest.raises(ApiError, match="logprobs must be at most 20"):
        check_sampling("logprobs", 21, vocab=None)


def test_more_logprobs_than_the_vocabulary_has_are_refused() -> None:
    check(5, max_logprobs=20, sampling=Sampling(max_tokens=1, logprobs=5))
    with pytest.raises(ApiError, match="logprobs must be at most 5, got 6"):
        check(5, max_logprobs=20, sampling=Sampling(max_tokens=1, logprobs=6))


@pytest.mark.parametrize("priority", [-INT64, INT64 - 1])
def test_priorities_that_can_be_encoded_pass(priority: int) -> None:
    check(routing=RoutingHints(priority=priority))


def test_a_priority_that_cannot_be_encoded_is_refused() -> None:
    with pytest.raises(ApiError, match="priority must be at most"):
        check(routing=RoutingHints(priority=INT64))


def test_adapters_need_an_engine_that_serves_them() -> None:
    wanted = request(routing=RoutingHints(lora_name="ad"))
    guard.check(wanted, EngineInfo(max_model_len=16, supports_lora=True), VOCAB)
    with pytest.raises(ApiError, match="serves no adapters, so not 'ad'") as caught:
        guard.check(wanted, INFO, VOCAB)
    assert (caught.value.code, caught.value.param) == ("lora_not_supported", "model")


def chain(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("json", {"type": "object"}),
        Constraint("json", '{"type":"object"}'),
        Constraint("json", chain(64)),
        Constraint("json", True),
        Constraint("json_object", True),
        Constraint("json_object", None),
        Constraint("regex", "a|b"),
        Constraint("grammar", 'root ::= "a"'),
        Constraint("choice", ["a", ""]),
        Constraint("structural_tag", chain(80)),
        Constraint("structural_tag", '{"tags": []}'),
    ],
)
def test_constraints_that_engines_survive_pass(constraint: Constraint) -> None:
    check(constraint=constraint)


@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        (Constraint("json", ""), "is not valid JSON"),
        (Constraint("json", "{"), "is not valid JSON"),
        (Constraint("json", chain(65)), "is nested deeper than 64 levels"),
        (Constraint("json", "[" * 65 + "]" * 65), "is nested deeper than 64 levels"),
        (Constraint("json", "[" * 100_000 + "]" * 100_000), "json' is not valid JSON"),
        (Constraint("json_object", False), "must not be false"),
        (Constraint("regex", " "), "not blank"),
        (Constraint("regex", "a\0b"), "must not contain NUL"),
        (Constraint("regex", 5), "must be a text"),
        (Constraint("grammar", ""), "not blank"),
        (Constraint("choice", []), "at least one string"),
        (Constraint("choice", ["a", 1]), "at least one string"),
        (Constraint("choice", "ab"), "must be a list"),
        (Constraint("structural_tag", " "), "is not valid JSON"),
        (Constraint("structural_tag", chain(81)), "is nested deeper than 80 levels"),
    ],
)
def test_constraints_that_they_might_not_survive_are_refused(
    constraint: Constraint, text: str
) -> None:
    with pytest.raises(ApiError, match=text) as caught:
        check(constraint=constraint)
    assert (caught.value.status, caught.value.param) == (400, constraint.kind)


@given(
    st.lists(st.integers(-1, 101), max_size=17),
    st.builds(
        Sampling,
        max_tokens=st.integers(-1, 20),
        min_tokens=st.integers(-1, 20),
        temperature=st.floats(),
        top_p=st.floats(),
        top_k=st.integers(),
        min_p=st.floats(),
        repetition_penalty=st.floats(),
        seed=st.none() | st.integers(),
        logprobs=st.none() | st.integers(-2, 30),
        stop_token_ids=st.lists(st.integers(-1, 101), max_size=3),
        logit_bias=st.none() | st.dictionaries(st.integers(-1, 101), st.floats(), max_size=3),
    ),
)
def test_whatever_passes_is_harmless(prompt: list[int], sampling: Sampling) -> None:
    try:
        check(prompt_ids=prompt, sampling=sampling)
    except ApiError:
        return
    assert 0 < len(prompt) < INFO.max_model_len
    ids = {*prompt, *sampling.stop_token_ids, *(sampling.logit_bias or {})}
    assert ids <= set(range(VOCAB))
    assert 0 <= sampling.temperature <= 2
    assert 0 < sampling.top_p <= 1
    assert 0 <= sampling.min_p <= 1
    assert 0 < sampling.repetition_penalty < math.inf
    assert sampling.top_k >= -1
    assert sampling.max_tokens >= 1
    assert 0 <= sampling.min_tokens <= sampling.max_tokens
    assert sampling.logprobs is None or 0 <= sampling.logprobs <= 20
    assert sampling.seed is None or -INT64 <= sampling.seed < INT64
