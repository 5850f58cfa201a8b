"""The API contract as the official OpenAI client sees it."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from smgd.sim.model import Model as SimModel
from smgd.sim.model import Rules
from smgd.sim.model import Sequence as SimSequence
from smgd.text.model import load_model
from tests.flows.client import sdk
from tests.flows.conftest import Build, Start
from tests.flows.house import until

MODEL = "smgd-sim"
PROMPT = "Tell me something about the sea."

# Grapheme clusters of many code points, whose bytes are spread over many tokens.
SCRIPTS = "👩‍👩‍👧‍👦 가족 家族がいます。🏳️‍🌈 Ωμέγα — שלום नमस्ते 🇩🇪 é ẞ 𐍈𐌰 "


def messages(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def whole(client: OpenAI, text: str = PROMPT, **fields: Any) -> ChatCompletion:
    answer: ChatCompletion = client.chat.completions.create(
        model=MODEL, messages=messages(text), **fields
    )
    return answer


def streamed(client: OpenAI, text: str = PROMPT, **fields: Any) -> list[ChatCompletionChunk]:
    with client.chat.completions.create(
        model=MODEL, messages=messages(text), stream=True, **fields
    ) as stream:
        return list(stream)


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def generated(text: str, tokens: int, **rules: Any) -> tuple[list[int], str]:
    """Return what the simulated model says to a prompt: ids, and their text decoded at once."""
    model = load_model(MODEL)
    prompt = model.template.render(
        messages(text),
        documents=None,
        add_generation_prompt=True,
        continue_final_message=False,
        kwargs={},
    )
    sim = SimModel(
        model.tokenizer,
        vocab_size=model.files.vocab_size,
        eos_token_id=model.tokenizer.eos_token_id,
    )
    prompt_ids = model.tokenizer.encode(prompt)
    sequence = SimSequence(sim, list(prompt_ids), Rules(**rules))
    for _ in range(tokens):
        sequence.append(sequence.propose())
    ids = sequence.ids[len(prompt_ids) :]
    return ids, model.tokenizer.decode(ids)


async def test_streamed_whole_and_decoded_ids_are_the_same_text(start: Start) -> None:
    house = await start()
    seeds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 1.7, "seed": 8},
    ]

    def use(client: OpenAI) -> None:
        texts = set()
        for fields in seeds:
            options: dict[str, Any] = {
                **fields,
                "max_tokens": 90,
                "extra_body": {"ignore_eos": True},
            }
            answer = whole(client, **options)
            chunks = streamed(client, **options)
            _, expected = generated(PROMPT, 90, **fields)
            assert answer.choices[0].message.content == text_of(chunks) == expected
            assert answer.choices[0].finish_reason == "length"
            assert chunks[-1].choices[0].finish_reason == "length"
            texts.add(expected)
        assert len(texts) == len(seeds)

    await sdk(house.port, use)


async def test_usage_is_counted_in_tokens(start: Start) -> None:
    house = await start()

    def use(client: OpenAI) -> None:
        usage = whole(client, max_tokens=12).usage
        assert usage is not None
        assert usage.prompt_tokens > 5
        assert usage.completion_tokens == 12
        assert usage.total_tokens == usage.prompt_tokens + 12
        again = whole(client, max_tokens=12).usage
        assert again is not None
        assert again.prompt_tokens_details is not None
        assert again.prompt_tokens_details.cached_tokens == usage.prompt_tokens // 16 * 16

        chunks = streamed(client, max_tokens=12, stream_options={"include_usage": True})
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 12
        assert chunks[-1].usage.prompt_tokens == usage.prompt_tokens
        assert chunks[-1].choices == []
        assert all(chunk.usage is None for chunk in chunks[:-1])
        assert all(chunk.usage is None for chunk in streamed(client, max_tokens=3))

        options = {"include_usage": True, "continuous_usage_stats": True}
        counts = [
            chunk.usage.completion_tokens
            for chunk in streamed(client, max_tokens=12, stream_options=options)
            if chunk.usage is not None
        ]
        assert counts == sorted(counts)
        assert counts[-1] == 12

    await sdk(house.port, use)


async def test_frames_of_a_stream(start: Start) -> None:
    house = await start()

    def use(client: OpenAI) -> None:
        chunks = streamed(client, max_tokens=8)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [c.choices[0].delta.role for c in chunks[1:]] == [None] * (len(chunks) - 1)
        assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert len({(c.id, c.created, c.model, c.object) for c in chunks}) == 1
        assert chunks[0].id.startswith("chatcmpl-")
        assert (chunks[0].model, chunks[0].object) == (MODEL, "chat.completion.chunk")

    await sdk(house.port, use)


async def test_models_are_listed_with_their_context(start: Start) -> None:
    house = await start("--max-model-len", "777")

    def use(client: OpenAI) -> None:
        [model] = client.models.list().data
        assert (model.id, model.object, model.owned_by) == (MODEL, "model", "self_hosted")
        for found in (model, client.models.retrieve(MODEL)):
            assert found.model_extra is not None
            assert found.model_extra["max_model_len"] == 777
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("nobody/knows")
        assert caught.value.code == "model_not_found"

    await sdk(house.port, use)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"top_p": 1.5}, "decimal_above_max_value", "top_p"),
        ({"max_tokens": 0}, "integer_below_min_value", "max_tokens"),
        ({"max_completion_tokens": 10**6}, "integer_above_max_value", "max_completion_tokens"),
        ({"stop": ["a", ""]}, "invalid_value", "stop"),
        ({"tools": [{"type": "function"}]}, "unsupported_parameter", "tools"),
        ({"seed": "one"}, "invalid_type", "seed"),
        (
            {"extra_body": {"stop_token_ids": [4096]}},
            "token_id_out_of_vocabulary",
            "stop_token_ids",
        ),
        (
            {"stream_options": {"include_usage": True}},
            "stream_options_requires_stream",
            "stream_options",
        ),
    ],
)
async def test_a_bad_request_names_the_field(
    start: Start, fields: dict[str, Any], code: str, param: str
) -> None:
    house = await start()

    def use(client: OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            whole(client, **fields)
        error = caught.value
        assert (error.code, error.param, error.type) == (code, param, "invalid_request_error")
        assert error.response.headers["x-smg-error-code"] == code
        assert param in error.message

    await sdk(house.port, use)
    assert house.tally.adds == []


async def test_error_classes_of_the_sdk(build: Build) -> None:
    house = build()
    await house.open()

    def without_engine(client: OpenAI) -> None:
        with pytest.raises(openai.NotFoundError) as unknown:
            client.chat.completions.create(model="gpt-9", messages=messages(PROMPT))
        assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.InternalServerError) as nobody:
            whole(client)
        assert nobody.value.status_code == 503
        assert nobody.value.code == "no_available_workers"
        assert nobody.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.InternalServerError) as stream:
            streamed(client)
        assert stream.value.status_code == 503

    def too_long(client: OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            whole(client, "word " * 100)
        assert caught.value.code == "context_length_exceeded"
        assert "64" in caught.value.message

    await until(lambda: not house.daemon.catalog.missing)
    await sdk(house.port, without_engine)
    house.start_engine("--max-model-len", "64")
    await house.ready()
    await sdk(house.port, too_long)
    assert house.tally.adds == []


async def test_extensions_in_extra_body(start: Start) -> None:
    house = await start()
    greedy, _ = generated(PROMPT, 40, temperature=0.0)

    def use(client: OpenAI) -> None:
        def content(**fields: Any) -> str | None:
            return whole(client, **fields).choices[0].message.content

        # top_k=1 leaves nothing to chance.
        top = [content(seed=s, max_tokens=24, extra_body={"top_k": 1}) for s in (1, 2)]
        assert top[0] == top[1] == content(temperature=0.0, max_tokens=24)
        assert content(seed=1, max_tokens=24) != content(seed=2, max_tokens=24)

        # The model ends by itself; ignore_eos and min_tokens make it go on.
        ended = whole(client, temperature=0.0)
        assert ended.choices[0].finish_reason == "stop"
        assert ended.usage is not None
        tokens = ended.usage.completion_tokens
        on = whole(client, temperature=0.0, max_tokens=tokens + 9, extra_body={"ignore_eos": True})
        assert on.usage is not None
        assert (on.choices[0].finish_reason, on.usage.completion_tokens) == ("length", tokens + 9)
        later = whole(client, temperature=0.0, extra_body={"min_tokens": tokens + 5})
        assert later.usage is not None
        assert later.usage.completion_tokens > tokens + 5

        # The stop token is counted, named and not shown.
        stop = greedy[10]
        first = greedy.index(stop)
        answer = whole(client, temperature=0.0, extra_body={"stop_token_ids": [stop]})
        assert answer.usage is not None
        assert answer.usage.completion_tokens == first + 1
        choice = answer.choices[0]
        assert (choice.finish_reason, choice.model_extra) == ("stop", {"stop_reason": stop})
        assert choice.message.content == content(temperature=0.0, max_tokens=first)

    await sdk(house.port, use)
    assert house.tally.aborts == []


async def test_stop_strings(start: Start) -> None:
    house = await start("--itl-ms", "1")
    _, text = generated(PROMPT, 60, temperature=0.0)
    # Two words, from the middle of one to the middle of the next: never a single token.
    cut = text.index(" ", 50)
    stop = text[cut - 2 : cut + 3]
    before = text[: text.index(stop)]

    def use(client: OpenAI) -> None:
        for shown, fields in ((before, {}), (before + stop, {"include_stop_str_in_output": True})):
            options: dict[str, Any] = {
                "temperature": 0.0,
                "stop": ["never said", stop],
                "extra_body": {"ignore_eos": True, **fields},
            }
            choice = whole(client, **options).choices[0]
            assert choice.message.content == shown
            assert (choice.finish_reason, choice.model_extra) == ("stop", {"stop_reason": stop})
            chunks = streamed(client, **options)
            assert text_of(chunks) == shown
            assert chunks[-1].choices[0].finish_reason == "stop"

    await sdk(house.port, use)
    await house.barrier()
    # The engine does not know the strings: each of the four was told to stop, once.
    assert sorted(house.tally.aborts) == sorted(house.tally.adds[:4])


async def test_several_choices(start: Start) -> None:
    house = await start()

    def use(client: OpenAI) -> None:
        options: dict[str, Any] = {"seed": 5, "max_tokens": 20}
        singles = [
            whole(client, **{**options, "seed": seed}).choices[0].message.content
            for seed in (5, 6, 7)
        ]
        assert len(set(singles)) == 3
        answer = whole(client, n=3, **options)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert [choice.message.content for choice in answer.choices] == singles
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 60
        chunks = streamed(client, n=3, stream_options={"include_usage": True}, **options)
        assert [text_of(chunks, index) for index in range(3)] == singles
        ends = [c.index for chunk in chunks for c in chunk.choices if c.finish_reason is not None]
        assert sorted(ends) == [0, 1, 2]
        assert chunks[-1].usage == answer.usage.model_copy(
            update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}  # type: ignore[union-attr]
        )

    await sdk(house.port, use)


async def test_request_ids_are_echoed(start: Start) -> None:
    house = await start()

    def use(client: OpenAI) -> None:
        raw = client.chat.completions.with_raw_response
        answer = raw.create(
            model=MODEL,
            messages=messages(PROMPT),
            max_tokens=1,
            extra_headers={"x-request-id": "mine-42"},
        )
        assert answer.headers["x-request-id"] == "mine-42"
        assert answer.parse().id.startswith("chatcmpl-")
        own = raw.create(model=MODEL, messages=messages(PROMPT), max_tokens=1)
        assert own.headers["x-request-id"] == own.parse().id
        with pytest.raises(openai.BadRequestError) as caught:
            whole(client, max_tokens=0, extra_headers={"x-correlation-id": "theirs"})
        assert caught.value.request_id == "theirs"
        listed = client.models.with_raw_response.list(extra_headers={"x-request-id": "list-1"})
        assert listed.headers["x-request-id"] == "list-1"

    await sdk(house.port, use)
    assert [line["request_id"] for line in await house.requests()][:1] == ["mine-42"]


@pytest.mark.parametrize("chunks", [[1], [1, 3, 0, 2], [7], [10_000]])
async def test_characters_of_many_tokens_are_never_torn(start: Start, chunks: list[int]) -> None:
    text = SCRIPTS * 12
    house = await start(replies=[{"contains": "scripts", "text": text, "chunks": chunks}])

    def use(client: OpenAI) -> None:
        options: dict[str, Any] = {"stream_options": {"include_usage": True}}
        got = streamed(client, "all scripts", **options)
        assert text_of(got) == text
        assert not any("\ufffd" in (c.delta.content or "") for x in got for c in x.choices)
        assert got[-2].choices[0].finish_reason == "stop"
        answer = whole(client, "all scripts")
        assert answer.choices[0].message.content == text
        assert answer.usage is not None
        assert got[-1].usage is not None
        assert answer.usage.completion_tokens == got[-1].usage.completion_tokens

    await sdk(house.port, use)


async def test_text_completions(start: Start) -> None:
    house = await start()
    prompt = "The sea is"
    options: dict[str, Any] = {"model": MODEL, "temperature": 0.0, "max_tokens": 30}

    def use(client: OpenAI) -> None:
        answer = client.completions.create(prompt=prompt, **options)
        assert answer.id.startswith("cmpl-")
        assert answer.choices[0].text
        with client.completions.create(prompt=prompt, stream=True, **options) as stream:
            chunks = list(stream)
        assert "".join(c.text for chunk in chunks for c in chunk.choices) == answer.choices[0].text
        assert chunks[-1].choices[0].finish_reason == answer.choices[0].finish_reason
        several = client.completions.create(prompt=[prompt, "A ship"], n=1, **options)
        assert [choice.index for choice in several.choices] == [0, 1]
        assert several.choices[0].text == answer.choices[0].text
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(prompt=prompt, suffix="end", **options)
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "suffix")

    await sdk(house.port, use)


async def test_logprobs_belong_to_the_text(start: Start) -> None:
    house = await start(replies=[{"contains": "scripts", "text": SCRIPTS, "chunks": [1, 3]}])

    def use(client: OpenAI) -> None:
        options: dict[str, Any] = {"logprobs": True, "top_logprobs": 3}
        answer = whole(client, "all scripts", **options)
        chunks = streamed(client, "all scripts", **options)
        assert answer.choices[0].logprobs is not None
        rows = answer.choices[0].logprobs.content
        assert rows is not None
        assert answer.usage is not None
        assert len(rows) == answer.usage.completion_tokens
        said = b"".join(bytes(row.bytes or b"") for row in rows[:-1])  # the last ends the text
        assert said.decode() == answer.choices[0].message.content == SCRIPTS
        assert {len(row.top_logprobs) for row in rows} == {3}
        in_frames = [
            row
            for chunk in chunks
            for choice in chunk.choices
            if choice.logprobs is not None
            for row in choice.logprobs.content or ()
        ]
        assert [row.token for row in in_frames] == [row.token for row in rows]

    await sdk(house.port, use)
