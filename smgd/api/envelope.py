"""The parts of an answer that OpenAI's surfaces share: errors, usage, finish reasons."""

from __future__ import annotations

from typing import Any

import msgspec

from smgd.core import FinishReason
from smgd.errors import ApiError

_encode = msgspec.json.Encoder().encode


class Usage(msgspec.Struct):
    """Tokens of a whole answer, over all its sequences."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong: `code` is stable and for machines, `message` for people."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    """The envelope around `ErrorDetail`."""

    error: ErrorDetail


def error_body(error: ApiError) -> bytes:
    """Return the JSON body of an error answer."""
    return _encode(ErrorBody(ErrorDetail(error.message, error.type, error.param, error.code)))


def error_event(error: ApiError) -> bytes:
    """Return the frames that end a stream which has already begun."""
    return b"data: " + error_body(error) + b"\n\ndata: [DONE]\n\n"


def finish_reason(reason: FinishReason) -> str:
    """Return OpenAI's word for an engine's finish reason."""
    return "stop" if reason == "repetition" else reason


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return OpenAI's usage object. Cached tokens are part of the prompt's."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
