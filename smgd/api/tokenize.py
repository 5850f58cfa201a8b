"""`/tokenize` and `/detokenize`: a prompt's ids as an engine would get them, and back.

Answers have vLLM's keys and smg's: `{count, max_model_len, tokens, token_strs}` and `char_count`;
`{prompt}` and `text`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from smgd.api.base import Query, QueryContext
from smgd.api.chat import check_conversation, render
from smgd.api.fields import FieldRules, decode
from smgd.errors import invalid_request
from smgd.text.tokenizer import Tokenizer

_json = msgspec.json.Encoder().encode


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of POST /tokenize: `prompt`, or `messages` with what belongs to a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool | None = None


_TOKENIZE_RULES = FieldRules.of(TokenizeRequest, {"tools": ([],), "chat_template": ()})
_DETOKENIZE_RULES = FieldRules.of(DetokenizeRequest, {})
_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


def decode_tokenize(body: bytes) -> tuple[TokenizeRequest, list[str]]:
    """Decode and check a body. Raises `ApiError` 400."""
    request, unknown = decode(_tokenize_decoder, body, _TOKENIZE_RULES)
    if (request.prompt is None) == (request.messages is None):
        text = "Give either 'prompt' or 'messages'."
        raise invalid_request("mutually_exclusive_parameters", text, "prompt")
    if request.messages is not None:
        check_conversation(request.messages, request)
    return request, unknown


async def tokenize(request: TokenizeRequest, context: QueryContext) -> bytes:
    """Return the answer of POST /tokenize. Raises `ApiError` 400."""
    tokenizer = context.model.tokenizer
    if request.prompt is not None:
        special = request.add_special_tokens is not False
        ids = await context.stage.encode(tokenizer, request.prompt, add_special_tokens=special)
    else:
        text = render(request.messages or [], request, context.model)
        special = bool(request.add_special_tokens)
        ids = await context.stage.encode(tokenizer, text, add_special_tokens=special)
    return _json(
        {
            "count": len(ids),
            "max_model_len": context.max_model_len or context.model.files.context_length,
            "tokens": ids,
            "token_strs": _strings(tokenizer, ids) if request.return_token_strs else None,
            "char_count": None if request.prompt is None else len(request.prompt),
        }
    )


def _strings(tokenizer: Tokenizer, ids: list[int]) -> list[str | None]:
    """Return the tokens as the vocabulary spells them, as vLLM does."""
    return [tokenizer.vocabulary.token(token_id) for token_id in ids]


def decode_detokenize(body: bytes) -> tuple[DetokenizeRequest, list[str]]:
    """Decode a body. Raises `ApiError` 400."""
    return decode(_detokenize_decoder, body, _DETOKENIZE_RULES)


async def detokenize(request: DetokenizeRequest, context: QueryContext) -> bytes:
    """Return the answer of POST /detokenize. Raises `ApiError` 400 for ids that no token has."""
    size = context.model.files.vocab_size
    wrong = next((i for i in request.tokens if not 0 <= i < size), None)
    if wrong is not None:
        text = f"Token id {wrong} is outside the vocabulary of {size} tokens."
        raise invalid_request("invalid_value", text, "tokens")
    # vLLM shows special tokens here unless asked not to.
    skip = request.skip_special_tokens is True
    tokenizer = context.model.tokenizer
    text = await context.stage.decode(tokenizer, request.tokens, skip_special_tokens=skip)
    return _json({"prompt": text, "text": text})


QUERIES = (
    Query(("/tokenize", "/v1/tokenize"), "tokenize", decode_tokenize, tokenize),
    Query(("/detokenize", "/v1/detokenize"), "detokenize", decode_detokenize, detokenize),
)
