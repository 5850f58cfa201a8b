"""Text completions: one prompt or many, as text or as token ids, each continued as it stands."""

from __future__ import annotations

from typing import Any

import msgspec

from smgd.api import params as common
from smgd.api.answer import Format, make_answer
from smgd.api.base import Plan, PlanContext, Surface
from smgd.api.fields import FieldRules, decode, missing_parameter
from smgd.api.logprobs import CompletionLogprobs
from smgd.errors import ApiError, invalid_request, unsupported_parameter

# vLLM's default for this surface; OpenAI's as well.
DEFAULT_MAX_TOKENS = 16


class CompletionRequest(common.GenerationParams, kw_only=True):
    """The body of POST /v1/completions, as far as it is honoured.

    `max_completion_tokens` is the chat's, and may only repeat `max_tokens`: there are clients that
    send both everywhere.
    """

    prompt: Any
    max_completion_tokens: int | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


RULES = FieldRules.of(CompletionRequest)

_decoder = msgspec.json.Decoder(CompletionRequest)


def decode_completion(body: bytes) -> tuple[CompletionRequest, list[str]]:
    """Decode and check a body. Raises `ApiError` 400."""
    request, unknown = decode(_decoder, body, RULES)
    common.check(request)
    if request.max_completion_tokens not in (None, request.max_tokens):
        raise unsupported_parameter("max_completion_tokens", "Use 'max_tokens'.")
    request.prompt = read_prompts(request.prompt)
    count, choices = len(request.prompt), request.n or 1
    if count * choices > common.MAX_SEQUENCES:
        text = (
            f"{count} prompts with {choices} choices each are {count * choices} sequences; "
            f"the maximum is {common.MAX_SEQUENCES}."
        )
        raise invalid_request("array_above_max_length", text, "prompt")
    return request, unknown


def read_prompts(prompt: Any) -> list[str | list[int]]:
    """Return the prompts behind the four forms that OpenAI allows. Raises `ApiError` 400."""
    if prompt is None:
        raise missing_parameter("prompt")
    prompts = [prompt] if isinstance(prompt, str) or (prompt and _is_ids(prompt)) else prompt
    if not isinstance(prompts, list) or not all(isinstance(p, str) or _is_ids(p) for p in prompts):
        text = (
            "Invalid type for 'prompt': expected a string, an array of strings, an array of token "
            "ids, or an array of arrays of token ids."
        )
        raise invalid_request("invalid_type", text, "prompt")
    if not prompts or "" in prompts or [] in prompts:
        raise _empty()
    return prompts


def _is_ids(value: Any) -> bool:
    # bool is an int to Python, not to JSON.
    return isinstance(value, list) and all(type(item) is int for item in value)


def _empty() -> ApiError:
    text = "Invalid 'prompt': a prompt must have at least one token."
    return invalid_request("prompt_empty", text, "prompt")


async def plan_completion(request: CompletionRequest, context: PlanContext) -> Plan:
    """Tokenize what is text, apply defaults. Raises `ApiError` 400."""
    common.check_logprobs(request.logprobs, "logprobs", context)
    prompts: list[tuple[list[int], int]] = []
    for prompt in request.prompt:
        ids = await _ids(prompt, request, context)
        tokens = common.max_tokens(
            request.max_tokens, "max_tokens", DEFAULT_MAX_TOKENS, len(ids), context, prompt="prompt"
        )
        prompts.append((ids, tokens))
    requests = common.sequences(request, context, prompts, request.logprobs)
    return make_answer(FORMAT, request, context, requests, continues_prompt=True)


async def _ids(
    prompt: str | list[int], request: CompletionRequest, context: PlanContext
) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    common.check_text(prompt, context, "prompt")
    special = request.add_special_tokens is not False
    ids = await context.stage.encode(context.model.tokenizer, prompt, add_special_tokens=special)
    if not ids:
        raise _empty()
    return ids


def _text(text: str) -> dict[str, Any]:
    return {"text": text}


FORMAT = Format(
    chunk_object="text_completion",
    whole_object="text_completion",
    role=b"",
    text=(b'"text":', b""),
    empty=b'"text":""',
    whole=_text,
    logprobs=CompletionLogprobs,
)

SURFACE = Surface(
    path="/v1/completions",
    endpoint="completions",
    id_prefix="cmpl-",
    decode=decode_completion,
    plan=plan_completion,
)
