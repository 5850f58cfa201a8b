"""Text completions without HTTP and without an engine."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smgd.api.base import Plan
from smgd.api.completions import (
    RULES,
    CompletionRequest,
    decode_completion,
    plan_completion,
    read_prompts,
)
from smgd.api.params import MAX_SEQUENCES, MAX_STOP_CHARS
from smgd.errors import ApiError
from smgd.text.model import Model
from smgd.text.stops import automaton
from tests.api.support import Run, context, frames


def body(**fields: Any) -> bytes:
    return msgspec.json.encode({"prompt": "Once", **fields})


async def plan(model: Model, max_model_len: int = 256, **fields: Any) -> Plan:
    request, _ = decode_completion(body(**fields))
    return await plan_completion(request, context(model, max_model_len))


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decode_completion(body(**fields))
    assert caught.value.status == 400
    return caught.value


async def test_the_four_forms_of_a_prompt(model: Model) -> None:
    a, b = model.tokenizer.encode("Once"), model.tokenizer.encode("upon a time")
    for prompt, expected in [
        ("Once", [a]),
        (["Once"], [a]),
        (["Once", "upon a time"], [a, b]),
        (a, [a]),
        ([a, b], [a, b]),
        (["Once", b], [a, b]),
    ]:
        requests = (await plan(model, prompt=prompt)).requests
        assert [r.prompt_ids for r in requests] == expected


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ("", "prompt_empty"),
        ([], "prompt_empty"),
        ([""], "prompt_empty"),
        (["a", ""], "prompt_empty"),
        ([[]], "prompt_empty"),
        ([[1], []], "prompt_empty"),
        (None, "missing_required_parameter"),
        (1, "invalid_type"),
        ({}, "invalid_type"),
        ([True, False], "invalid_type"),
        ([1.5], "invalid_type"),
        ([None], "invalid_type"),
        ([[1, "a"]], "invalid_type"),
        (["x"] * (MAX_SEQUENCES + 1), "array_above_max_length"),
    ],
)
def test_prompts_that_are_none(prompt: Any, code: str) -> None:
    error = refusal(prompt=prompt)
    assert (error.code, error.param) == (code, "prompt")


def status_of(value: Any) -> int:
    try:
        read_prompts(value)
    except ApiError as error:
        return error.status
    return 200


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    )
)
def test_any_prompt_is_read_or_refused(value: Any) -> None:
    assert status_of(value) in (200, 400)


async def test_all_sequences_share_one_set_of_stops(model: Model) -> None:
    run = await plan(model, prompt=["a", "b"], n=2, stop=["x" * 500, "y" * 500, "z."])
    first, *others = [request.stop for request in run.requests]
    assert all(stop is first for stop in others)
    assert automaton(first.strings) is automaton(others[0].strings)


async def test_max_tokens_is_16_by_default_and_clamped_to_the_room(model: Model) -> None:
    length = len(model.tokenizer.encode("Once"))
    assert (await plan(model)).requests[0].sampling.max_tokens == 16
    assert (await plan(model, length + 5)).requests[0].sampling.max_tokens == 5
    with pytest.raises(ApiError, match="length is 1 tokens") as caught:
        await plan(model, 1, prompt=[5])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(ApiError, match="max_tokens must be at least 1, got 0"):
        await plan(model, max_tokens=0)


async def test_max_completion_tokens_may_repeat_max_tokens(model: Model) -> None:
    both = await plan(model, max_tokens=5, max_completion_tokens=5)
    assert both.requests[0].sampling.max_tokens == 5


async def test_choices_are_numbered_by_prompt_then_choice(model: Model) -> None:
    run = Run(await plan(model, prompt=["Once", "upon"], n=2, seed=5))
    assert [r.sampling.seed for r in run.plan.requests] == [5, 6, 5, 6]
    for index in range(4):
        token = model.tokenizer.encode("abcd"[index])[0]
        run.send(token, index=index, finish="length", cached=3)
    answer = run.whole()
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in answer["choices"]] == ["a", "b", "c", "d"]
    prompts = sum(len(model.tokenizer.encode(p)) for p in ("Once", "upon"))
    assert answer["usage"]["prompt_tokens"] == prompts
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}


async def test_a_whole_answer(model: Model) -> None:
    ids = model.tokenizer.encode(" upon a time")
    run = Run(await plan(model))
    run.send(*ids, finish="length")
    prompt = len(model.tokenizer.encode("Once"))
    assert run.whole() == {
        "id": "id-1",
        "object": "text_completion",
        "created": 1700000000,
        "model": "smgd-sim",
        "choices": [
            {
                "index": 0,
                "text": " upon a time",
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": len(ids),
            "total_tokens": prompt + len(ids),
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def test_a_stream_has_no_role_and_one_finish(model: Model) -> None:
    ids = model.tokenizer.encode(" upon a time")
    run = Run(await plan(model, stream=True))
    data = b"".join([run.send(i) for i in ids]) + run.send(finish="length") + run.plan.end()
    *texts, last, done = frames(data)
    assert done == "[DONE]"
    assert {f["object"] for f in [*texts, last]} == {"text_completion"}
    assert "".join(f["choices"][0]["text"] for f in texts) == " upon a time"
    assert last["choices"] == [
        {"index": 0, "text": "", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"suffix": "x"}, "unsupported_parameter", "suffix"),
        ({"echo": True}, "unsupported_parameter", "echo"),
        ({"best_of": 3}, "unsupported_parameter", "best_of"),
        ({"tools": [{"type": "function"}]}, "unsupported_parameter", "tools"),
        ({"reasoning_effort": "low"}, "unsupported_parameter", "reasoning_effort"),
        ({"max_completion_tokens": 5}, "unsupported_parameter", "max_completion_tokens"),
        (
            {"max_completion_tokens": 5, "max_tokens": 6},
            "unsupported_parameter",
            "max_completion_tokens",
        ),
        ({"cache_salt": "a/b"}, "invalid_value", "cache_salt"),
        ({"logprobs": True}, "invalid_type", "logprobs"),
        ({"stop": ["a" * (MAX_STOP_CHARS + 1)]}, "string_above_max_length", "stop"),
        ({"n": 2, "temperature": 0}, "invalid_value", "n"),
        ({"n": 2, "prompt": ["x"] * (MAX_SEQUENCES // 2 + 1)}, "array_above_max_length", "prompt"),
    ],
)
def test_refusals(fields: dict[str, Any], code: str, param: str) -> None:
    error = refusal(**fields)
    assert (error.code, error.param) == (code, param)


@pytest.mark.parametrize(
    ("wanted", "code"), [(-1, "integer_below_min_value"), (21, "integer_above_max_value")]
)
async def test_too_many_logprobs_are_refused_with_the_limit(
    model: Model, wanted: int, code: str
) -> None:
    with pytest.raises(ApiError, match=f"logprobs must be at .* (0|20), got {wanted}") as caught:
        await plan(model, logprobs=wanted)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, code, "logprobs")


async def test_all_optional_fields_may_be_null(model: Model) -> None:
    names = (set(CompletionRequest.__struct_fields__) | set(RULES.refused)) - {"prompt", "model"}
    nulls: dict[str, Any] = dict.fromkeys(names)
    [a], [b] = (await plan(model, **nulls)).requests, (await plan(model)).requests
    assert msgspec.structs.replace(a, id="") == msgspec.structs.replace(b, id="")
