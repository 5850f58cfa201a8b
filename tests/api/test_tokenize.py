"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from smgd.api.base import QueryContext
from smgd.api.tokenize import decode_detokenize, decode_tokenize, detokenize, tokenize
from smgd.errors import ApiError
from smgd.text.model import Model
from smgd.text.stage import DECODE_SLICE, TextStage
from tests.api.test_chat import HELLO


async def ask_tokens(loaded: Model, /, **fields: Any) -> Any:
    request, _ = decode_tokenize(msgspec.json.encode(fields))
    context = QueryContext(loaded, 100, TextStage())
    return msgspec.json.decode(await tokenize(request, context))


async def ask_text(model: Model, **fields: Any) -> Any:
    request, _ = decode_detokenize(msgspec.json.encode(fields))
    context = QueryContext(model, None, TextStage())
    return msgspec.json.decode(await detokenize(request, context))


async def test_text(model: Model) -> None:
    ids = model.tokenizer.encode("The sea, é")
    assert await ask_tokens(model, prompt="The sea, é") == {
        "count": len(ids),
        "max_model_len": 100,
        "tokens": ids,
        "token_strs": None,
        "char_count": 10,
    }


async def test_token_strs_are_the_vocabularys_spelling(model: Model) -> None:
    answer = await ask_tokens(model, prompt="The sea", return_token_strs=True)
    assert answer["token_strs"] == [
        model.tokenizer.backend.id_to_token(i) for i in answer["tokens"]
    ]


async def test_messages_are_rendered_as_chat_renders_them(model: Model) -> None:
    answer = await ask_tokens(model, messages=HELLO)
    text = model.template.render(HELLO)
    assert model.tokenizer.decode(answer["tokens"], skip_special_tokens=False) == text
    shorter = await ask_tokens(model, messages=HELLO, add_generation_prompt=False)
    assert answer["tokens"][: shorter["count"]] == shorter["tokens"]
    assert shorter["count"] < answer["count"]


async def test_an_empty_text_has_no_tokens(model: Model) -> None:
    assert (await ask_tokens(model, prompt=""))["count"] == 0


async def test_there_and_back(model: Model) -> None:
    text = "Over the hills — 漢字, 🙂 and away. " * 400
    tokens = (await ask_tokens(model, prompt=text))["tokens"]
    assert len(tokens) > DECODE_SLICE
    assert await ask_text(model, tokens=tokens) == {"prompt": text, "text": text}


async def test_special_tokens_are_shown_unless_skipped(model: Model) -> None:
    eos = model.files.eos_token_id
    assert (await ask_text(model, tokens=[eos]))["prompt"] == "<|im_end|>"
    assert (await ask_text(model, tokens=[eos], skip_special_tokens=True))["prompt"] == ""


@pytest.mark.parametrize("token", [-1, 4096, 2**40])
async def test_ids_outside_the_vocabulary_are_refused(model: Model, token: int) -> None:
    with pytest.raises(ApiError, match=f"Token id {token} is outside the vocabulary of 4096") as e:
        await ask_text(model, tokens=[5, token])
    assert (e.value.status, e.value.param) == (400, "tokens")


async def test_null_is_absent(model: Model) -> None:
    assert (await ask_tokens(model, prompt="x", messages=None, model=None))["count"] == 1
    assert (await ask_tokens(model, messages=HELLO, prompt=None))["count"] > 1


def test_an_empty_conversation_is_refused() -> None:
    with pytest.raises(ApiError, match="empty array") as caught:
        decode_tokenize(b'{"messages": []}')
    assert caught.value.code == "empty_array"


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decode_tokenize(msgspec.json.encode(fields))
    assert caught.value.status == 400
    return caught.value


def test_prompt_and_messages_do_not_go_together() -> None:
    error = refusal(prompt="x", messages=HELLO)
    assert (error.code, error.param) == ("mutually_exclusive_parameters", "prompt")
    assert error.message == "Give either 'prompt' or 'messages', not both."


@pytest.mark.parametrize("fields", [{}, {"prompt": None}, {"prompt": None, "messages": None}])
def test_one_of_prompt_and_messages_is_needed(fields: Any) -> None:
    error = refusal(**fields)
    assert (error.code, error.param) == ("missing_required_parameter", "prompt")
    assert "one of 'prompt' and 'messages'" in error.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("documents", [{"title": "x"}]),
        ("reasoning_effort", "low"),
        ("continue_final_message", True),
    ],
)
async def test_what_belongs_to_messages_is_refused_with_a_prompt(
    model: Model, name: str, value: Any
) -> None:
    error = refusal(prompt="x", **{name: value})
    assert (error.code, error.param) == ("mutually_exclusive_parameters", name)
    assert error.message.startswith(f"'{name}' belongs to 'messages'")


async def test_what_asks_for_nothing_passes_with_a_prompt(model: Model) -> None:
    fields: dict[str, Any] = {
        "chat_template_kwargs": {}, "documents": [], "reasoning_effort": None,
        "continue_final_message": False,
    }  # fmt: skip
    for added in (True, False, None):
        answer = await ask_tokens(model, prompt="x", add_generation_prompt=added, **fields)
        assert answer["count"] == 1


async def test_the_tokens_of_a_request_to_come_can_be_counted(model: Model) -> None:
    request, unknown = decode_tokenize(
        msgspec.json.encode({"messages": HELLO, "max_tokens": 5, "temperature": 1, "stream": True})
    )
    assert (unknown, request.messages) == ([], HELLO)
