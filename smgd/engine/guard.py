"""What must not reach an engine, as one list; the last thing before a request is encoded.

An engine core trusts its front end. Out-of-range values do not come back as errors: they end its
main loop or its input thread, for every client. The measured cases: an empty prompt, one that fills
the context, ids outside the vocabulary, more logprobs than ids (the engine dies); a sampling value
out of range, which fails while the message is decoded (it never hears anything again); LoRA without
support and empty allow lists, which it ignores in silence. The rest is what vLLM's own front end
refuses on the engine's behalf.

Two constraints at once, a batch of prompts or a missing `max_tokens` cannot be expressed in a
`GenerationRequest`; a duplicate id is the session's to refuse. Grammars that do not compile are the
engine's to report, but text that its compilers might not survive (deep nesting) is not sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec

from smgd.config import LimitsConfig
from smgd.core import Constraint, EngineInfo, GenerationRequest, Sampling
from smgd.errors import UNDECODABLE, ApiError, invalid_request

# The default is vLLM's own for --max-logprobs; the registration does not tell the engine's.
MAX_LOGPROBS = LimitsConfig().max_logprobs
# Deepest nesting of a schema and of a structural tag that vLLM's front end lets through.
MAX_SCHEMA_DEPTH = 64
MAX_TAG_DEPTH = 80

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


class _Range(msgspec.Struct, frozen=True):
    """Where a sampling value has to lie; `above` excludes `low` itself."""

    low: float
    high: float | None = None
    above: bool = False


_RANGES: dict[str, _Range] = {
    "temperature": _Range(0.0, 2.0),
    "top_p": _Range(0.0, 1.0, above=True),
    "min_p": _Range(0.0, 1.0),
    "presence_penalty": _Range(-2.0, 2.0),
    "frequency_penalty": _Range(-2.0, 2.0),
    "repetition_penalty": _Range(0.0, above=True),
}

_INTEGERS: dict[str, tuple[int, int]] = {
    "max_tokens": (1, _INT64_MAX),
    "min_tokens": (0, _INT64_MAX),
    "top_k": (-1, _INT64_MAX),
    "seed": (_INT64_MIN, _INT64_MAX),
}


def check(
    request: GenerationRequest,
    info: EngineInfo,
    vocab_size: int | None,
    max_logprobs: int = MAX_LOGPROBS,
) -> None:
    """Raise the `ApiError` (400) for the first thing that would harm or mislead the engine.

    `vocab_size` is that of the model's configuration; without it, ids are only known not to be
    negative.
    """
    sampling = request.sampling
    _check_prompt(request.prompt_ids, info.max_model_len)
    for name, allowed in _RANGES.items():
        _check_decimal(name, getattr(sampling, name), allowed)
    for name, (low, high) in _INTEGERS.items():
        _check_integer(name, getattr(sampling, name), low, high)
    _check_integer("priority", request.routing.priority, _INT64_MIN, _INT64_MAX)
    if sampling.min_tokens > sampling.max_tokens:
        text = f"min_tokens ({sampling.min_tokens}) is above max_tokens ({sampling.max_tokens})"
        raise invalid_request("invalid_value", text, "min_tokens")
    most = max_logprobs if vocab_size is None else min(max_logprobs, vocab_size)
    _check_integer("logprobs", sampling.logprobs, 0, most)
    _check_integer("prompt_logprobs", sampling.prompt_logprobs, 0, most)
    _check_ids("prompt", request.prompt_ids, vocab_size)
    _check_id_lists(sampling, vocab_size)
    if request.constraint is not None:
        _check_constraint(request.constraint)
    if request.routing.lora_name is not None and not info.supports_lora:
        text = f"this engine serves no adapters, so not '{request.routing.lora_name}' either"
        raise invalid_request("lora_not_supported", text, "model")


def _check_prompt(prompt_ids: list[int], max_model_len: int) -> None:
    length = len(prompt_ids)
    if not length:
        raise invalid_request("prompt_empty", "the prompt has no tokens", "prompt")
    if length >= max_model_len:
        text = (
            f"the prompt has {length} tokens, but the maximum context length is {max_model_len} "
            f"tokens including at least one that is generated"
        )
        raise invalid_request("context_length_exceeded", text, "prompt")


def _check_decimal(name: str, value: float, allowed: _Range) -> None:
    if not math.isfinite(value):
        raise invalid_request("invalid_value", f"{name} must be a finite number", name)
    if value < allowed.low or (allowed.above and value == allowed.low):
        bound = f"above {allowed.low:g}" if allowed.above else f"at least {allowed.low:g}"
        text = f"{name} must be {bound}, got {value!r}"
        raise invalid_request("decimal_below_min_value", text, name)
    if allowed.high is not None and value > allowed.high:
        text = f"{name} must be at most {allowed.high:g}, got {value!r}"
        raise invalid_request("decimal_above_max_value", text, name)


def _check_integer(name: str, value: int | None, low: int, high: int) -> None:
    if value is None:
        return
    if value < low:
        text = f"{name} must be at least {low}, got {value}"
        raise invalid_request("integer_below_min_value", text, name)
    if value > high:
        text = f"{name} must be at most {high}, got {value}"
        raise invalid_request("integer_above_max_value", text, name)


def _check_id_lists(sampling: Sampling, vocab_size: int | None) -> None:
    _check_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    if sampling.min_tokens:  # then, and only then, the engine uses them as indices
        _check_ids("stop_token_ids", sampling.all_stop_token_ids, vocab_size)
    if sampling.logit_bias is not None:
        _check_ids("logit_bias", sampling.logit_bias, vocab_size)
        if not all(map(math.isfinite, sampling.logit_bias.values())):
            text = "logit_bias must be finite numbers"
            raise invalid_request("invalid_value", text, "logit_bias")
    if sampling.allowed_token_ids is not None:
        if not sampling.allowed_token_ids:
            text = "allowed_token_ids is empty, so no token could be generated"
            raise invalid_request("empty_array", text, "allowed_token_ids")
        _check_ids("allowed_token_ids", sampling.allowed_token_ids, vocab_size)
    for word in sampling.bad_words_token_ids or ():
        if not word:
            raise invalid_request("empty_array", "bad_words has a word without tokens", "bad_words")
        _check_ids("bad_words", word, vocab_size)


def _check_ids(name: str, ids: Iterable[int], vocab_size: int | None) -> None:
    lowest, highest = min(ids, default=0), max(ids, default=0)
    if lowest < 0 or highest > _INT64_MAX or (vocab_size is not None and highest >= vocab_size):
        text = f"{name} has token id {lowest if lowest < 0 else highest}"
        if vocab_size is not None:
            text += f", but the model's ids are 0 to {vocab_size - 1}"
        raise invalid_request("token_id_out_of_vocabulary", text, name)


def _check_constraint(constraint: Constraint) -> None:
    kind, value = constraint.kind, constraint.value
    if kind == "json_object" and value is False:
        raise _bad_constraint(kind, "must not be false")
    if kind == "choice" and not (
        isinstance(value, list | tuple) and value and all(isinstance(item, str) for item in value)
    ):
        raise _bad_constraint(kind, "must be a list of at least one string")
    if kind in ("regex", "grammar") and not (isinstance(value, str) and value.strip()):
        raise _bad_constraint(kind, "must be a text that is not blank")
    if kind == "regex" and "\0" in value:
        raise _bad_constraint(kind, "must not contain NUL")
    if kind in ("json", "structural_tag"):
        limit = MAX_SCHEMA_DEPTH if kind == "json" else MAX_TAG_DEPTH
        if _depth(_as_object(kind, value), limit) > limit:
            raise _bad_constraint(kind, f"is nested deeper than {limit} levels")


def _as_object(kind: str, value: Any) -> Any:
    if not isinstance(value, str | bytes):
        return value
    try:
        return msgspec.json.decode(value)
    except UNDECODABLE as error:
        raise _bad_constraint(kind, f"is not valid JSON: {error}") from error


def _depth(value: Any, limit: int) -> int:
    """Return how deep containers nest, level by level and not beyond `limit` + 1."""
    depth, level = 0, [value]
    while depth <= limit:
        containers = [item for item in level if isinstance(item, dict | list | tuple)]
        if not containers:
            break
        depth += 1
        level = [
            item
            for container in containers
            for item in (container.values() if isinstance(container, dict) else container)
        ]
    return depth


def _bad_constraint(kind: str, text: str) -> ApiError:
    return invalid_request("invalid_value", f"structured output '{kind}' {text}", kind)
