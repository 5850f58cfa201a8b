"""`/tokenize` and `/detokenize`: a prompt's ids as an engine would get them, and back.

Answers have vLLM's keys and smg's: `{count, max_model_len, tokens, token_strs}` and `char_count`;
`{prompt}` and `text`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from smgd.api.base import Query, QueryContext
from smgd.api.chat import Conversation, check_conversation, render
from smgd.api.fields import KNOWN, FieldRules, decode
from smgd.api.params import GenerationParams
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


# Clients count the tokens of a request that they are about to make: how much is generated, and how,
# does not change its prompt.
_GENERATING = frozenset(GenerationParams.__struct_fields__) | {
    "max_completion_tokens", "logprobs", "top_logprobs",
}  # fmt: skip

# What makes a prompt of messages, and has no meaning for one that is a text already.
_OF_MESSAGES = frozenset(Conversation.__annotations__) - {"add_special_tokens"}

TOKENIZE_RULES = FieldRules.of(TokenizeRequest, _GENERATING)
DETOKENIZE_RULES = FieldRules.of(DetokenizeRequest, _GENERATING)
_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


def decode_tokenize(body: bytes) -> tuple[TokenizeRequest, list[str]]:
    """Decode and check a body. Raises `ApiError` 400."""
    request, unknown = decode(_tokenize_decoder, body, TOKENIZE_RULES)
    if request.messages is not None:
        if request.prompt is not None:
            text = "Give either 'prompt' or 'messages', not both."
            raise invalid_request("mutually_exclusive_parameters", text, "prompt")
        check_conversation(request.messages, request)
    elif request.prompt is None:
        text = "Missing required parameter: one of 'prompt' and 'messages'."
        raise invalid_request("missing_required_parameter", text, "prompt")
    else:
        _check_of_messages(request)
    return request, unknown


def _check_of_messages(request: TokenizeRequest) -> None:
    """Refuse what would not be honoured, since there are no messages. Raises `ApiError` 400."""
    for name in sorted(_OF_MESSAGES):
        value = getattr(request, name)
        if value is not None and value not in KNOWN[name]:
            text = f"'{name}' belongs to 'messages'; with 'prompt' it has no meaning."
            raise invalid_request("mutually_exclusive_parameters", text, name)


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
    return decode(_detokenize_decoder, body, DETOKENIZE_RULES)


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
