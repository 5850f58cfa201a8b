"""Log-probabilities as the two surfaces show them."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from smgd.api.chat import decode_chat, plan_chat
from smgd.api.completions import decode_completion, plan_completion
from smgd.core import TokenLogprobs
from smgd.errors import ApiError
from smgd.text.model import Model
from tests.api.support import Run, context, frames
from tests.api.test_chat import HELLO


async def chat(model: Model, **fields: Any) -> Run:
    request, _ = decode_chat(msgspec.json.encode({"messages": HELLO, **fields}))
    return Run(await plan_chat(request, context(model)))


async def completion(model: Model, **fields: Any) -> Run:
    request, _ = decode_completion(msgspec.json.encode({"prompt": "x", **fields}))
    return Run(await plan_completion(request, context(model)))


def row(token: int, *others: int, logprob: float = -0.5) -> TokenLogprobs:
    return TokenLogprobs([token, *others], [logprob - i for i in range(len(others) + 1)], 1)


async def test_the_engine_is_asked_for_what_is_shown(model: Model) -> None:
    assert (await chat(model)).plan.requests[0].sampling.logprobs is None
    assert (await chat(model, logprobs=True)).plan.requests[0].sampling.logprobs == 0
    run = await chat(model, logprobs=True, top_logprobs=3)
    assert run.plan.requests[0].sampling.logprobs == 3
    assert (await completion(model, logprobs=2)).plan.requests[0].sampling.logprobs == 2


async def test_chat(model: Model) -> None:
    the, sea, hill = (model.tokenizer.encode(t)[0] for t in ("The", " sea", " hill"))
    run = await chat(model, logprobs=True, top_logprobs=2)
    run.send(the, logprobs=[row(the, the, hill)])
    run.send(sea, finish="length", logprobs=[row(sea, sea, the, logprob=-math.inf)])
    content = run.whole()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["The", " sea"]
    assert content[0] == {
        "token": "The",
        "logprob": -0.5,
        "bytes": list(b"The"),
        "top_logprobs": [
            {"token": "The", "logprob": -1.5, "bytes": list(b"The")},
            {"token": " hill", "logprob": -2.5, "bytes": list(b" hill")},
        ],
    }
    assert content[1]["logprob"] == -9999.0


async def test_without_top_logprobs_the_list_is_empty(model: Model) -> None:
    run = await chat(model, logprobs=True)
    run.send(5, finish="length", logprobs=[row(5)])
    assert run.whole()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_bytes_are_the_tokens_own_so_that_characters_can_be_put_together(
    model: Model,
) -> None:
    ids = model.tokenizer.encode("🙂")
    assert len(ids) > 1, "the test needs a character of several tokens"
    run = await chat(model, logprobs=True)
    run.send(*ids, finish="length", logprobs=[row(i) for i in ids])
    content = run.whole()["choices"][0]["logprobs"]["content"]
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == "🙂"


@pytest.mark.parametrize("stops", [None, ["zzz"]])
async def test_streams_lose_no_logprobs_however_the_text_is_held_back(
    model: Model, stops: Any
) -> None:
    ids = [*model.tokenizer.encode("a 🙂 b"), *model.tokenizer.encode("zz")]
    run = await chat(model, logprobs=True, stream=True, stop=stops)
    data = b"".join(run.send(i, logprobs=[row(i)]) for i in ids)
    data += run.send(finish="length") + run.plan.end()
    content: list[Any] = []
    for frame in frames(data)[:-1]:
        logprobs = frame["choices"][0]["logprobs"]
        content += logprobs["content"] if logprobs else []
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "a 🙂 bzz"
    assert len(content) == len(ids)


async def test_completions_have_offsets_that_go_on_through_a_stream(model: Model) -> None:
    the, sea = (model.tokenizer.encode(t)[0] for t in ("The", " sea"))
    run = await completion(model, logprobs=1, stream=True)
    data = run.send(the, logprobs=[row(the, the)]) + run.send(sea, logprobs=[row(sea, the)])
    first, second = (frame["choices"][0]["logprobs"] for frame in frames(data))
    assert first == {
        "text_offset": [0],
        "token_logprobs": [-0.5],
        "tokens": ["The"],
        "top_logprobs": [{"The": -1.5}],
    }
    assert second["text_offset"] == [3]
    assert second["top_logprobs"] == [{" sea": -0.5, "The": -1.5}]


async def test_too_many_are_refused_by_the_name_of_the_field(model: Model) -> None:
    with pytest.raises(ApiError, match="top_logprobs must be at most 20, got 21") as caught:
        await chat(model, logprobs=True, top_logprobs=21)
    assert (caught.value.status, caught.value.param) == (400, "top_logprobs")
    await chat(model, top_logprobs=0)  # asks for nothing
    with pytest.raises(ApiError, match="'top_logprobs' is only allowed when") as caught:
        await chat(model, top_logprobs=1)
    assert caught.value.code == "top_logprobs_requires_logprobs"
