"""Chat completions without HTTP and without an engine: bodies in, plans and frames out."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import trio
from tokenizers import Tokenizer as Backend
from tokenizers.normalizers import Lowercase

from smgd.api.base import Plan
from smgd.api.chat import REASONING_EFFORTS, RULES, ChatRequest, decode_chat, plan_chat
from smgd.errors import ApiError
from smgd.text.model import Model
from smgd.text.stage import TextStage
from smgd.text.template import ChatTemplate
from smgd.text.tokenizer import Tokenizer
from tests.api.support import Run, context, frames

HELLO = [{"role": "user", "content": "Hello"}]


def body(**fields: Any) -> bytes:
    return msgspec.json.encode({"model": "smgd-sim", "messages": HELLO, **fields})


async def plan(model: Model, max_model_len: int = 256, **fields: Any) -> Plan:
    request, _ = decode_chat(body(**fields))
    return await plan_chat(request, context(model, max_model_len))


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decode_chat(body(**fields))
    assert caught.value.status == 400
    return caught.value


# ------------------------------------------------------------------------------ the request


async def test_the_prompt_is_the_rendered_template(model: Model) -> None:
    [request] = (await plan(model)).requests
    text = model.template.render(HELLO)
    assert model.tokenizer.decode(request.prompt_ids, skip_special_tokens=False) == text


async def test_parts_and_strings_make_the_same_prompt(model: Model) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    whole, split = await plan(model), await plan(model, messages=parts)
    assert whole.requests[0].prompt_ids == split.requests[0].prompt_ids


async def test_every_sampling_field_arrives(model: Model) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 0.2,
        "frequency_penalty": -0.3, "repetition_penalty": 1.1, "seed": 11, "min_tokens": 2,
        "max_tokens": 9, "logit_bias": {"5": 1.5}, "allowed_token_ids": [5, 6],
        "stop_token_ids": [9], "priority": 3, "cache_salt": "salt", "skip_special_tokens": False,
        "stop": ["x y z"], "include_stop_str_in_output": True,
    }  # fmt: skip
    [request] = (await plan(model, **fields)).requests
    sampling = request.sampling
    for name in set(sampling.__struct_fields__) & set(fields) - {"logit_bias"}:
        assert getattr(sampling, name) == fields[name], name
    assert sampling.logit_bias == {5: 1.5}
    assert sampling.allowed_token_ids == [5, 6]
    assert sampling.stop_token_ids == [9]
    assert (request.routing.priority, request.routing.cache_salt) == (3, "salt")
    assert request.output.skip_special_tokens is False
    assert request.stop.strings == ("x y z",)
    assert request.stop.include_in_output


async def test_eos_goes_to_the_engine_and_ignore_eos_keeps_it_masked(model: Model) -> None:
    eos = model.files.eos_token_id
    [request] = (await plan(model)).requests
    assert request.sampling.eos_token_id == eos
    assert set(model.files.eos_token_ids) <= set(request.sampling.all_stop_token_ids)
    [request] = (await plan(model, ignore_eos=True)).requests
    assert request.sampling.eos_token_id is None
    assert request.sampling.stop_token_ids == []
    assert eos in request.sampling.all_stop_token_ids


async def test_a_stop_of_one_token_is_also_a_stop_id_that_min_tokens_does_not_mask(
    model: Model,
) -> None:
    (single,) = model.tokenizer.encode(".")
    [request] = (await plan(model, stop=".")).requests
    assert single in request.sampling.stop_token_ids
    assert single not in request.sampling.all_stop_token_ids
    [request] = (await plan(model, stop=".", min_tokens=3)).requests
    assert single not in request.sampling.stop_token_ids
    run = Run(await plan(model, stop="."))
    run.send(finish="stop", stop_reason=single)
    assert msgspec.json.decode(run.plan.end())["choices"][0]["stop_reason"] == "."


async def test_choices_get_seeds_of_their_own(model: Model) -> None:
    requests = (await plan(model, n=3, seed=7)).requests
    assert [r.sampling.seed for r in requests] == [7, 8, 9]
    assert len({r.id for r in requests}) == 3
    assert [r.sampling.seed for r in (await plan(model, n=2)).requests] == [None, None]


async def test_seeds_of_choices_stay_within_64_bits(model: Model) -> None:
    requests = (await plan(model, n=3, seed=2**63 - 2)).requests
    assert [r.sampling.seed for r in requests] == [2**63 - 2, 2**63 - 1, -(2**63)]
    # What the client itself has sent is not changed: the guard names it.
    assert (await plan(model, n=2, seed=2**63)).requests[0].sampling.seed == 2**63


async def test_length_rules(model: Model) -> None:
    prompt = len((await plan(model)).requests[0].prompt_ids)
    room = 64 - prompt

    async def tokens(**fields: Any) -> int:
        return (await plan(model, 64, **fields)).requests[0].sampling.max_tokens

    assert await tokens() == room
    assert await tokens(max_tokens=None) == room
    assert await tokens(max_tokens=1) == 1
    assert await tokens(max_tokens=room) == room
    assert await tokens(max_tokens=room + 1) == room
    assert await tokens(max_tokens=64) == room
    assert await tokens(max_tokens=5, max_completion_tokens=6) == 6
    with pytest.raises(ApiError, match=f"max_tokens=65.*64 tokens.*{prompt} tokens.*{room}") as e:
        await tokens(max_tokens=65)
    assert (e.value.status, e.value.param) == (400, "max_tokens")
    with pytest.raises(ApiError, match="max_completion_tokens must be at least 1, got 0") as e:
        await tokens(max_completion_tokens=0)
    assert (e.value.code, e.value.param) == ("integer_below_min_value", "max_completion_tokens")
    for context_len in (prompt, prompt - 1):
        with pytest.raises(ApiError, match=f"length is {context_len} tokens.* has {prompt} t") as e:
            await plan(model, context_len)
        assert (e.value.status, e.value.code) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"messages": []}, "empty_array", "messages"),
        ({"messages": [{"content": "x"}]}, "missing_required_parameter", "messages[0].role"),
        ({"messages": [{"role": "x", "content": ""}]}, "invalid_value", "messages[0].role"),
        ({"messages": [{"role": ["user"]}]}, "invalid_value", "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "invalid_type", "messages[0].content"),
        (
            {"messages": [*HELLO, {"role": "user", "content": [{"type": "image_url"}]}]},
            "unsupported_parameter",
            "messages[1].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "invalid_type",
            "messages[0].content[0].text",
        ),
        ({"n": 0}, "integer_below_min_value", "n"),
        ({"n": 129}, "integer_above_max_value", "n"),
        ({"n": 2, "temperature": 0}, "invalid_value", "n"),
        ({"stop": ["a", ""]}, "invalid_value", "stop"),
        (
            {"stream_options": {"include_usage": False}},
            "stream_options_requires_stream",
            "stream_options",
        ),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "mutually_exclusive_parameters",
            "continue_final_message",
        ),
        ({"tools": [{"type": "function"}]}, "unsupported_parameter", "tools"),
        ({"watermarking": True}, "unsupported_parameter", "watermarking"),
        ({"response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
        ({"temperature": "hot"}, "invalid_type", "temperature"),
        ({"reasoning_effort": "banana"}, "invalid_value", "reasoning_effort"),
        ({"reasoning_effort": ""}, "invalid_value", "reasoning_effort"),
        ({"reasoning_effort": 0.5}, "invalid_type", "reasoning_effort"),
        (
            {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
            "unsupported_parameter",
            "chat_template_kwargs.chat_template",
        ),
        ({"prompt": "x"}, "unsupported_parameter", "prompt"),
        ({"prompt_embeds": "x"}, "unsupported_parameter", "prompt_embeds"),
        ({"cache_salt": ""}, "invalid_value", "cache_salt"),
        ({"cache_salt": "x" * 129}, "string_above_max_length", "cache_salt"),
        *[({"cache_salt": f"a{c}b"}, "invalid_value", "cache_salt") for c in "@/\\\0"],
    ],
)
def test_refusals(fields: dict[str, Any], code: str, param: str) -> None:
    error = refusal(**fields)
    assert (error.code, error.param) == (code, param)


async def test_a_template_error_is_the_clients_with_the_templates_words(model: Model) -> None:
    request, _ = decode_chat(body(chat_template_kwargs={"messages": []}))
    with pytest.raises(ApiError, match="The model's chat template refused the messages:") as e:
        await plan_chat(request, context(model))
    assert (e.value.status, e.value.code) == (400, "process_messages_failed")


async def prompt_of(model: Model, **fields: Any) -> str:
    [request] = (await plan(model, **fields)).requests
    return model.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)


def with_template(model: Model, source: str) -> Model:
    template = ChatTemplate(source, model.tokenizer.special_tokens)
    return msgspec.structs.replace(model, template=template)


@pytest.mark.parametrize(
    ("fields", "effort", "thinks"),
    [
        ({}, "unset", "unset"),
        ({"reasoning_effort": None}, "unset", "unset"),
        *[({"reasoning_effort": e}, e, str(e != "none")) for e in REASONING_EFFORTS],
        ({"chat_template_kwargs": {"reasoning_effort": "low"}}, "low", "unset"),
        ({"chat_template_kwargs": {"reasoning_effort": "any word"}}, "any word", "unset"),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}},
            "high",
            "True",
        ),
        (
            {"reasoning_effort": None, "chat_template_kwargs": {"reasoning_effort": "low"}},
            "low",
            "unset",
        ),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "none",
            "True",
        ),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": None}},
            "low",
            "None",
        ),
    ],
)
async def test_the_effort_of_reasoning_is_told_to_the_template_as_vllm_tells_it(
    model: Model, fields: dict[str, Any], effort: str, thinks: str
) -> None:
    source = "{{ reasoning_effort | default('unset') }}, {{ enable_thinking | default('unset') }}"
    assert await prompt_of(with_template(model, source), **fields) == f"{effort}, {thinks}"


def test_an_effort_that_is_none_is_answered_with_those_that_are() -> None:
    assert "none, minimal, low, medium, high, xhigh, max" in refusal(reasoning_effort="x").message


async def test_template_arguments_do_not_change_the_generation_prompt(model: Model) -> None:
    usual = await prompt_of(model)
    names = ("add_generation_prompt", "continue_final_message")
    for value in (True, False, None):
        kwargs = dict.fromkeys(names, value)
        assert await prompt_of(model, chat_template_kwargs=kwargs) == usual
    without = await prompt_of(
        model, add_generation_prompt=False, chat_template_kwargs={"add_generation_prompt": True}
    )
    assert usual.startswith(without)
    assert usual != without


async def test_stream_options_that_ask_for_nothing_need_no_stream(model: Model) -> None:
    for options in ({}, {"include_usage": None}, None):
        assert not (await plan(model, stream_options=options)).stream


async def test_unknown_stream_options_are_counted(model: Model) -> None:
    _, unknown = decode_chat(body(stream=True, stream_options={"zzz": 1, "include_usage": True}))
    assert unknown == ["stream_options.zzz"]


async def test_all_optional_fields_may_be_null(model: Model) -> None:
    names = (set(ChatRequest.__struct_fields__) | set(RULES.refused)) - {"messages", "model"}
    nulls: dict[str, Any] = dict.fromkeys(names)
    given = await plan(model, **nulls)
    bare = await plan(model)
    [a], [b] = given.requests, bare.requests
    assert msgspec.structs.replace(a, id="") == msgspec.structs.replace(b, id="")


# ------------------------------------------------------------------------------- the answer


async def test_a_whole_answer(model: Model) -> None:
    ids = model.tokenizer.encode("The sea is wide.")
    run = Run(await plan(model))
    assert run.send(*ids[:2], cached=16) == b""
    assert not run.done()
    run.send(*ids[2:], model.files.eos_token_id or 0, finish="stop")
    assert run.done()
    prompt = len(run.plan.requests[0].prompt_ids)
    assert msgspec.json.decode(run.plan.end()) == {
        "id": "id-1",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "smgd-sim",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "The sea is wide.", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": len(ids) + 1,
            "total_tokens": prompt + len(ids) + 1,
            "prompt_tokens_details": {"cached_tokens": 16},
        },
    }


async def test_a_stream_has_a_role_text_one_finish_and_done(model: Model) -> None:
    ids = model.tokenizer.encode("The sea is wide.")
    run = Run(await plan(model, stream=True))
    data = b"".join([run.send(i) for i in ids]) + run.send(finish="length") + run.plan.end()
    read = frames(data)
    assert read.pop() == "[DONE]"
    first, *texts, last = read
    assert {k: v for k, v in first.items() if k != "choices"} == {
        "id": "id-1",
        "object": "chat.completion.chunk",
        "created": 1700000000,
        "model": "smgd-sim",
    }
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(f["choices"][0]["delta"]["content"] for f in texts) == "The sea is wide."
    assert last["choices"] == [
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert all(f["choices"][0]["finish_reason"] is None for f in [first, *texts])
    assert all("usage" not in f for f in read)


async def test_an_empty_answer_still_has_role_and_finish(model: Model) -> None:
    run = Run(await plan(model, stream=True))
    data = run.send(model.files.eos_token_id or 0, finish="stop") + run.plan.end()
    role, finish, done = frames(data)
    assert role["choices"][0]["delta"]["role"] == "assistant"
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert done == "[DONE]"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["absent", "absent"]),
        ({"include_usage": False, "continuous_usage_stats": True}, ["absent", "absent"]),
        ({"include_usage": True}, [None, 3]),
        ({"include_usage": True, "continuous_usage_stats": True}, ["counts", 3]),
    ],
)
async def test_usage_in_streams(model: Model, options: Any, expected: list[Any]) -> None:
    run = Run(await plan(model, stream=True, stream_options=options))
    read = frames(run.send(5) + run.send(6, 7) + run.send(finish="length") + run.plan.end())
    assert read.pop() == "[DONE]"
    prompt = len(run.plan.requests[0].prompt_ids)
    if expected[1] != "absent":
        last = read.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == expected[1]
        assert last["usage"]["prompt_tokens"] == prompt
    for frame in read:
        if expected[0] == "absent":
            assert "usage" not in frame
        elif expected[0] is None:
            assert frame["usage"] is None
    if expected[0] == "counts":
        counts = [frame["usage"]["completion_tokens"] for frame in read]
        assert counts == sorted(counts)
        assert {frame["usage"]["prompt_tokens"] for frame in read} == {prompt}


async def test_choices_are_told_apart_and_finish_once_each(model: Model) -> None:
    run = Run(await plan(model, stream=True, n=2))
    a, b = model.tokenizer.encode("a"), model.tokenizer.encode("b")
    data = run.send(*a, index=0) + run.send(*b, index=1) + run.send(*b, index=1, finish="stop")
    assert not run.done()
    data += run.send(*a, index=0, finish="length") + run.plan.end()
    assert run.done()
    text = {0: "", 1: ""}
    finishes: list[tuple[int, str]] = []
    for frame in frames(data)[:-1]:
        [choice] = frame["choices"]
        text[choice["index"]] += choice["delta"].get("content", "")
        if choice["finish_reason"]:
            finishes.append((choice["index"], choice["finish_reason"]))
    assert text == {0: "aa", 1: "bb"}
    assert finishes == [(1, "stop"), (0, "length")]


async def test_a_matched_stop_string_aborts_the_engine_at_once(model: Model) -> None:
    ids = model.tokenizer.encode("one two three four")
    run = Run(await plan(model, stop=["two three"]))
    used = 0
    while not run.done():
        run.send(ids[used])
        used += 1
    assert run.worker.aborted == [run.plan.requests[0].id]
    answer = msgspec.json.decode(run.plan.end())
    assert answer["choices"][0]["message"]["content"] == "one "
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] == "two three"
    assert answer["usage"]["completion_tokens"] == used < len(ids)


async def test_nothing_follows_a_finish_however_often_the_plan_is_fed(model: Model) -> None:
    ids = model.tokenizer.encode("one two three four")
    run = Run(await plan(model, stop=["two three"], stream=True))
    data = b"".join(run.send(token) for token in ids if not run.done())
    [sequence] = run.generation.sequences
    assert run.plan.feed(sequence) == b"", "the reader wrote it, and the task looks once more"
    finishes = [f for f in frames(data) if f["choices"][0]["finish_reason"]]
    assert [f["choices"][0]["stop_reason"] for f in finishes] == ["two three"]


async def test_what_cannot_fit_is_refused_before_it_is_tokenized(model: Model) -> None:
    longest = model.tokenizer.longest_token
    huge = [{"role": "user", "content": "x" * (256 * longest)}]
    with pytest.raises(ApiError, match=r"256 tokens, but the prompt has .* at least 25") as caught:
        await plan(model, messages=huge)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    many = [{"role": "user", "content": ""}] * 257
    with pytest.raises(ApiError, match="257 messages cannot fit") as caught:
        await plan(model, messages=many)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("pieces", [1, 2, 3])
async def test_a_choice_that_has_ended_by_a_stop_says_nothing_more(
    model: Model, pieces: int
) -> None:
    """The reader feeds the plan, and then the task once more, which was woken by the end."""
    run = Run(await plan(model, stop=["three"], stream=True, n=2))
    ids = model.tokenizer.encode("one two three four")
    cut = [ids[: pieces - 1], ids[pieces - 1 :]] if pieces > 1 else [ids]
    for index in (0, 1):
        data = b"".join(run.send(*piece, index=index) for piece in cut)
        finishes = [f for f in frames(data) if f["choices"][0]["finish_reason"]]
        assert [f["choices"][0]["index"] for f in finishes] == [index]
        assert run.done() == (index == 1)
    for sequence in run.generation.sequences:
        assert run.plan.feed(sequence) == b""
    assert run.done()
    assert run.plan.finish_reasons() == "stop,stop"


async def test_a_stop_whose_token_stands_for_something_else_is_no_stop_id(model: Model) -> None:
    backend = Backend.from_str(model.tokenizer.backend.to_str())
    backend.normalizer = Lowercase()
    tokenizer = Tokenizer(backend, model.tokenizer.special_tokens)
    lowercasing = msgspec.structs.replace(model, tokenizer=tokenizer)
    request, _ = decode_chat(body(stop=["A", "a"]))
    [planned] = (await plan_chat(request, context(lowercasing))).requests
    assert planned.stop.strings == ("A", "a")
    assert list(planned.stop.token_strings.values()) == ["a"]


async def test_cancelling_a_plan_while_a_long_text_is_tokenized(model: Model) -> None:
    stage = TextStage(threshold_bytes=0)
    request, _ = decode_chat(body(messages=[{"role": "user", "content": "word " * 200_000}]))
    ctx = msgspec.structs.replace(context(model, 10**7), stage=stage)
    with trio.move_on_after(0.01) as scope:
        await plan_chat(request, ctx)
    assert scope.cancelled_caught
