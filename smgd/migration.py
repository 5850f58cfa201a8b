"""Whether a sequence whose engine is lost may go on with another, and with which request.

An engine continues from token ids: the prompt and what was generated become the new prompt, and the
limits shrink by what is there already. That is the same text as an undisturbed run where sampling
depends on nothing but the ids so far, or on nothing that can be repeated at all (no seed): greedy
or unseeded, without the penalties that count generated tokens apart from the prompt's. Elsewhere it
is a good text but another one (`best-effort`). What a constraint or prompt log-probabilities mean
in the middle of a text is not known to engines, so those cannot go on once they have begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from msgspec import structs

from smgd.core import GenerationRequest, Sampling

Mode: TypeAlias = Literal["best-effort", "exact", "off"]

# vLLM samples greedily below this.
GREEDY_BELOW = 1e-5


def refusal(request: GenerationRequest, generated: int, mode: Mode) -> str | None:
    """Return why a request with so many generated tokens cannot go on elsewhere, or None."""
    if mode == "off":
        return "migration is off"
    if not generated:
        return None  # nothing has begun, so nothing has to fit
    if request.constraint is not None:
        return "a structured output cannot be continued in the middle"
    if request.sampling.prompt_logprobs is not None:
        return "prompt logprobs cannot be continued in the middle"
    if mode == "exact" and not _is_exact(request.sampling):
        return "its sampling (seed or penalties) cannot be continued exactly"
    return None


def _is_exact(sampling: Sampling) -> bool:
    repeatable = sampling.seed is None or sampling.temperature < GREEDY_BELOW
    return repeatable and not sampling.presence_penalty and not sampling.frequency_penalty


def continuation(
    request: GenerationRequest, generated: Sequence[int], request_id: str
) -> GenerationRequest:
    """Return the request that goes on after what `request` has generated. Counts are in tokens."""
    count = len(generated)
    if not count:
        return structs.replace(request, id=request_id)
    sampling = structs.replace(
        request.sampling,
        max_tokens=request.sampling.max_tokens - count,
        min_tokens=max(0, request.sampling.min_tokens - count),
    )
    return structs.replace(
        request, id=request_id, prompt_ids=[*request.prompt_ids, *generated], sampling=sampling
    )
