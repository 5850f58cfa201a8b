"""What a vLLM engine sends: scheduler statistics and output messages, always in full length.

Every array has all the elements of the simulated version, nil included, every map all its keys, in
the order of the recorded frames: the test compares them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from smgd.sim.model import LogprobRow
from smgd.sim.wire import Layout
from smgd.wire.vllm import EXT_RAW_VIEW

_pack = msgspec.msgpack.Encoder().encode

# Below this many bytes a tensor travels inside the message, else as a frame of its own.
ZERO_COPY_THRESHOLD = 256

FINISH_STOP, FINISH_LENGTH, FINISH_ABORT, FINISH_ERROR, FINISH_REPETITION = range(5)
EVENT_QUEUED, EVENT_SCHEDULED = 1, 2


def scheduler_stats(
    layout: Layout,
    *,
    running: int,
    waiting: int,
    kv_usage: float,
    prefix_requests: int = 0,
    prefix_queries: int = 0,
    prefix_hits: int = 0,
) -> dict[str, Any]:
    """Return the statistics of a step. The prefix counts are of this step; queries are tokens."""
    stages = {"waiting_to_start": 0, "in_progress": 0, "completed_waiting": 0}
    old = layout.is_old
    return {
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_skipped_waiting_reqs": 0,
        **({} if old else {"num_kv_fetch_reqs_by_stage": stages}),
        "step_counter": 0,
        "current_wave": 0,
        "kv_cache_usage": kv_usage,
        "iteration_details": None,
        "prefix_cache_stats": {
            "reset": False,
            "requests": prefix_requests,
            "queries": prefix_queries,
            "hits": prefix_hits,
            "preempted_requests": 0,
            "preempted_queries": 0,
            "preempted_hits": 0,
            **({} if old else {"hits_by_source": {}}),
        },
        "connector_prefix_cache_stats": None,
        "kv_cache_eviction_events": [],
        "spec_decoding_stats": None,
        "kv_connector_stats": None,
        **({} if old else {"ec_connector_stats": None}),
        "waiting_lora_adapters": {},
        "running_lora_adapters": {},
        "cudagraph_stats": None,
        "perf_stats": None,
    }


def prefill_stats(prompt: int, cached: int, created: int) -> dict[str, int]:
    """Return what a request's first output says of its prompt. All counts are tokens."""
    return {
        "num_prompt_tokens": prompt,
        "num_computed_tokens": prompt - cached,
        "num_cached_tokens": cached,
        "num_local_cached_tokens": cached,
        "num_external_cached_tokens": 0,
        "num_cache_creation_tokens": created,
    }


class Output(msgspec.Struct, kw_only=True):
    """One request's share of a step; `logprobs` has one row per id."""

    request_id: str
    ids: list[int] = []
    logprobs: list[LogprobRow] | None = None
    prompt_logprobs: list[LogprobRow] | None = None
    finish: int | None = None
    stop_reason: int | str | None = None
    events: list[tuple[int, float]] | None = None
    trace_headers: dict[str, str] | None = None
    prefill_stats: dict[str, int] | None = None


def encode_outputs(
    layout: Layout,
    engine_index: int,
    timestamp: float,
    outputs: Sequence[Output] = (),
    *,
    stats: dict[str, Any] | None = None,
    utility: tuple[int, str | None, Any] | None = None,
    finished: list[str] | None = None,
    from_step: bool = False,
) -> list[bytes]:
    """Return the frames of an output message.

    `timestamp` is monotonic seconds; `utility` is call id, failure and result; what does not come
    out of a step lacks the weight version.
    """
    aux: list[bytes] = []
    message: list[Any] = [
        engine_index,
        [_output(layout, output, aux) for output in outputs],
        stats,
        timestamp,
        None if utility is None else [utility[0], utility[1], _result(utility)],
        finished,
        None,  # wave_complete
        None,  # start_wave
        "default" if from_step else None,  # weight_version
    ]
    return [_pack(message[: layout.message_length]), *aux]


def encode_output(layout: Layout, output: Output) -> bytes:
    """Return one output as it stands in a message; it must be without logprobs."""
    return _pack(_output(layout, output, []))


def _result(utility: tuple[int, str | None, Any]) -> list[Any] | None:
    return None if utility[1] is not None else [None, utility[2]]


def _output(layout: Layout, output: Output, aux: list[bytes]) -> list[Any]:
    events = output.events
    fields: list[Any] = [
        output.request_id,
        output.ids,
        None if output.logprobs is None else _logprobs(output.logprobs, aux),
        _prompt_logprobs(layout, output.prompt_logprobs, aux),
        None,  # pooling_output
        output.finish,
        output.stop_reason,
        None if events is None else [{"type": t, "timestamp": at} for t, at in events],
        None,  # kv_transfer_params
        None,  # ec_transfer_params
        output.trace_headers,
        output.prefill_stats,
        None,  # routed_experts
        0,  # num_nans_in_logits
    ]
    return fields + [None] * (layout.output_length - len(fields))


def _logprobs(rows: list[LogprobRow], aux: list[bytes]) -> list[Any] | None:
    if not rows:
        return None
    ids, logprobs, ranks = _columns(rows)
    shape = [len(rows), len(ids) // len(rows)]
    return [
        _tensor("<i4", shape, array("i", ids), aux),
        _tensor("<f4", shape, array("f", logprobs), aux),
        _tensor("<i8", shape[:1], array("q", ranks), aux),
        None,
    ]


def _prompt_logprobs(
    layout: Layout, rows: list[LogprobRow] | None, aux: list[bytes]
) -> list[Any] | None:
    if not rows:
        return None
    ids, logprobs, ranks = _columns(rows)
    shape = [len(rows), len(ids) // len(rows)]
    return [
        _tensor("int32", shape, array("i", ids), aux),
        _tensor("float32", shape, array("f", logprobs), aux),
        _tensor("int32", shape[:1], array("i", ranks), aux),
        None,
        None,
    ][: layout.prompt_logprobs_length]


def _columns(rows: list[LogprobRow]) -> tuple[list[int], list[float], list[int]]:
    ids = [token for row in rows for token in row[0]]
    return ids, [value for row in rows for value in row[1]], [row[2] for row in rows]


def _tensor(dtype: str, shape: list[int], items: array[Any], aux: list[bytes]) -> list[Any]:
    data = items.tobytes()
    if len(data) < ZERO_COPY_THRESHOLD:
        return [dtype, shape, msgspec.msgpack.Ext(EXT_RAW_VIEW, data)]
    aux.append(data)
    return [dtype, shape, len(aux)]
