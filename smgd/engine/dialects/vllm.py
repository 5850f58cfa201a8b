"""vLLM's EngineCore as a `Dialect`, on the structs of `wire/vllm.py`.

Down, only what differs from the engine's defaults is sent, except what must never be left to them:
`max_tokens` (16 if missing) and the ids that end a text, which the engine core does not know by
itself. Up, most outputs are one token and nothing else, and `decode` has a short way for those.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from smgd.core import (
    Batch,
    Constraint,
    Delta,
    EngineInfo,
    EngineLoad,
    FinishReason,
    GenerationRequest,
    Sampling,
    Timings,
    TokenLogprobs,
)
from smgd.errors import LocalProtocolError, RemoteProtocolError
from smgd.wire import vllm as wire
from smgd.wire.fnv import fnv1a_64

_FINISH: dict[int, FinishReason] = {0: "stop", 1: "length", 2: "abort", 3: "error", 4: "repetition"}

# Fields of `Sampling` that are also keys on the wire, with the engine's defaults.
_DEFAULTS: tuple[tuple[str, Any], ...] = (
    ("min_tokens", 0),
    ("temperature", 1.0),
    ("top_p", 1.0),
    ("top_k", 0),
    ("min_p", 0.0),
    ("presence_penalty", 0.0),
    ("frequency_penalty", 0.0),
    ("repetition_penalty", 1.0),
    ("seed", None),
    ("stop_token_ids", []),
    ("logprobs", None),
    ("prompt_logprobs", None),
    ("allowed_token_ids", None),
)


class VllmDialect:
    """Serves vLLM 0.27.1 to 0.32."""

    name = "vllm"

    def read_registration(self, payload: bytes) -> EngineInfo:
        """Read the map that an engine sends first. Raises `RemoteProtocolError`."""
        seen = wire.decode_registration(payload)
        if seen.max_model_len < 1:
            raise RemoteProtocolError(f"registration with max_model_len {seen.max_model_len}")
        return EngineInfo(
            max_model_len=seen.max_model_len,
            version=seen.vllm_version,
            instance_id=seen.instance_id,
            data_parallel_size=seen.data_parallel_size,
            supports_lora=seen.supports_lora,
        )

    def encode_add(self, request: GenerationRequest, info: EngineInfo) -> list[bytes]:
        """Return the frames that submit a request. Raises `LocalProtocolError`."""
        params = _sampling_map(request.sampling)
        if request.constraint is not None:
            params["structured_outputs"] = _structured_outputs(request.constraint)
        routing = request.routing
        try:
            return wire.encode_add(
                request.id,
                request.prompt_ids,
                params,
                arrival_time=time.time(),
                lora_request=_lora_request(routing.lora_name) if routing.lora_name else None,
                cache_salt=routing.cache_salt,
                priority=routing.priority,
            )
        except (TypeError, OverflowError, ValueError) as error:
            raise LocalProtocolError(f"cannot encode request {request.id}: {error}") from error

    def encode_abort(self, request_ids: Sequence[str]) -> list[bytes]:
        """Return the frames that abort requests; unknown ids do no harm."""
        return wire.encode_abort(list(request_ids))

    def decode(self, frames: Sequence[bytes]) -> Batch:
        """Decode one output message. Raises `RemoteProtocolError`."""
        if not frames:
            raise RemoteProtocolError("a message without frames")
        head = frames[0]
        if head == wire.ENGINE_CORE_DEAD:
            return Batch(0, [], dead=True)
        message = wire.decode_outputs(head)
        deltas: list[tuple[str, Delta]] = []
        for output in message.outputs:
            if (
                output.finish_reason is None
                and output.new_logprobs is None
                and output.prefill_stats is None
                and output.events is None
                and output.new_prompt_logprobs_tensors is None
            ):
                delta = Delta(output.new_token_ids)
            else:
                delta = _whole_delta(output, frames, message.timestamp)
            deltas.append((output.request_id, delta))
        stats = message.scheduler_stats
        batch = Batch(
            message.engine_index,
            deltas,
            None if stats is None else _load(stats),
            None if message.utility_output is None else message.utility_output.call_id,
            message.wave_complete,
        )
        cache = None if stats is None else stats.prefix_cache_stats
        if cache is not None and cache.queries:
            batch.prefix_queries, batch.prefix_hits = cache.queries, cache.hits
        return batch

    def heartbeat(self, call_id: int) -> list[bytes]:
        """Return the cheapest call: the engine answers between two steps, within 1 ms if idle."""
        return wire.encode_utility(call_id, "is_sleeping", [])


def _sampling_map(sampling: Sampling) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "_all_stop_token_ids": sampling.all_stop_token_ids,
    }
    if sampling.eos_token_id is not None:
        params["_eos_token_id"] = sampling.eos_token_id
    if sampling.bad_words_token_ids is not None:
        params["_bad_words_token_ids"] = sampling.bad_words_token_ids
    if sampling.logit_bias is not None:
        bias = sampling.logit_bias.items()
        params["logit_bias"] = {token: min(100.0, max(-100.0, value)) for token, value in bias}
    for name, default in _DEFAULTS:
        value = getattr(sampling, name)
        if value != default:
            params[name] = value
    return params


def _structured_outputs(constraint: Constraint) -> dict[str, Any]:
    """Return the engine's map for a constraint.

    A backend must be named: an engine whose first structured request names none refuses it. That
    it was chosen automatically allows the engine to fall back to another.
    """
    kind, value = constraint.kind, constraint.value
    if kind == "choice":  # the front end's to rewrite: the engine's backends do not know it
        kind, value = "grammar", choice_grammar(value)
    elif kind == "json_object":
        value = True
    elif kind == "structural_tag" and not isinstance(value, str):
        value = json.dumps(value)
    return {kind: value, "_backend": "xgrammar", "_backend_was_auto": True}


def choice_grammar(choices: Sequence[str]) -> str:
    """Return the EBNF grammar that allows exactly these strings."""
    alternatives = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return f"root ::= {alternatives}"


def _lora_request(name: str) -> list[Any]:
    """Return the three elements that all versions share: name, a number from 1, where it lies.

    The number has to be the same in every request for an adapter, so it is made from the name.
    """
    return [name, 1 + fnv1a_64(name.encode()) % 0x7FFFFFFF, name]


def _load(stats: wire.SchedulerStats) -> EngineLoad:
    # Requests whose grammar is still being compiled are "skipped": they wait as well.
    waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
    return EngineLoad(stats.num_running_reqs, waiting, stats.kv_cache_usage)


def _whole_delta(output: wire.EngineCoreOutput, frames: Sequence[bytes], sent: float) -> Delta:
    delta = Delta(output.new_token_ids)
    if output.prefill_stats is not None:
        delta.cached_tokens = output.prefill_stats.num_cached_tokens
    if output.events is not None:
        delta.timings = _timings(output.events, sent)
    if output.finish_reason is not None:
        # A code from a later version ends the request all the same.
        delta.finish = _FINISH.get(output.finish_reason, "error")
        delta.stop_reason = output.stop_reason
        delta.timings = delta.timings or Timings()
        delta.timings.last_token = sent
    if output.new_logprobs is not None:
        delta.logprobs = _rows(output.new_logprobs, frames[1:])
        if len(delta.logprobs) != len(delta.ids):
            raise RemoteProtocolError(
                f"{len(delta.logprobs)} rows of logprobs for {len(delta.ids)} tokens"
            )
    if output.new_prompt_logprobs_tensors is not None:
        # The first token of a prompt follows nothing, so it has no row.
        delta.prompt_logprobs = [None, *_rows(output.new_prompt_logprobs_tensors, frames[1:])]
    return delta


def _timings(events: list[wire.EngineCoreEvent], sent: float) -> Timings:
    timings = Timings(first_token=sent)
    for event in events:
        if event.type == wire.EVENT_QUEUED:
            timings.queued = event.timestamp
        elif event.type == wire.EVENT_SCHEDULED:
            timings.scheduled = event.timestamp
    return timings


def _rows(tensors: Any, aux: Sequence[bytes]) -> list[TokenLogprobs]:
    """Split `[ids, logprobs, ranks, ...]`, two matrices and a vector, into one row per token."""
    if not isinstance(tensors, list) or len(tensors) < 3:
        raise RemoteProtocolError("logprobs are not three arrays")
    shape, ids = wire.read_tensor(tensors[0], aux)
    same_shape, logprobs = wire.read_tensor(tensors[1], aux)
    _, ranks = wire.read_tensor(tensors[2], aux)
    if len(shape) != 2 or shape != same_shape or shape[0] != len(ranks) or not ids:
        raise RemoteProtocolError(
            f"logprobs of shapes {shape} and {same_shape} with {len(ranks)} ranks"
        )
    if not isinstance(ids[0], int) or not isinstance(ranks[0], int):
        raise RemoteProtocolError("ids or ranks of logprobs are not integers")
    width = len(ids) // len(ranks)
    return [
        TokenLogprobs(ids[at : at + width], logprobs[at : at + width], rank)
        for at, rank in zip(range(0, len(ids), width), ranks, strict=True)
    ]
