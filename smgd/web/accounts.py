"""What metrics and the log are told of a request that engines have run, and of errors."""

from __future__ import annotations

import msgspec
import trio

from smgd.api.base import Plan
from smgd.api.envelope import Usage
from smgd.core import Timings
from smgd.dispatch import Generation
from smgd.errors import UNDECODABLE, ApiError, WorkerLeftError
from smgd.metrics import Finished
from smgd.text.catalog import Catalog
from smgd.web import gate
from smgd.web.service import Service


def account(
    service: Service, endpoint: str, access: gate.Access, generation: Generation, plan: Plan
) -> None:
    """Count a request that engines have run, however it has ended, and note it for its line."""
    usage = _usage(generation, plan)
    first = [s.first_token_at for s in generation.sequences if s.first_token_at is not None]
    now = trio.current_time()
    ttft = min(first) - access.started if first else None
    last = max(now if s.ended_at is None else s.ended_at for s in generation.sequences)
    queue, prefill, decode = _engine_times(generation.sequences[0].timings)
    service.metrics.finished(
        plan.requests[0].model,
        endpoint,
        Finished(
            streaming=plan.stream,
            prompt_tokens=usage.prompt,
            completion_tokens=usage.completion,
            seconds=now - access.started,
            ttft=ttft,
            generation=last - min(first) if first else None,
            queue=queue,
            prefill=prefill,
            decode=decode,
        ),
    )
    first_sequence = generation.sequences[0]
    worker = first_sequence.worker
    access.fields.update(
        worker=worker.url if worker else None,
        engine_request=first_sequence.running.id,
        prompt_tokens=usage.prompt,
        completion_tokens=usage.completion,
        cached_tokens=usage.cached,
        finish_reason=plan.finish_reasons() or None,
        ttft_ms=round(ttft * 1000, 1) if ttft is not None else None,
    )


def _usage(generation: Generation, plan: Plan) -> Usage:
    """Return the tokens of a request; of one that ended early also those that nobody has taken."""
    usage = plan.usage()
    if not plan.done:
        usage.completion = sum(s.received for s in generation.sequences)
        usage.cached = usage.cached or max(s.cached_tokens for s in generation.sequences)
    return usage


def _engine_times(timings: Timings | None) -> tuple[float | None, float | None, float | None]:
    """Return how long a sequence waited in the engine, and its prompt and its tokens took (s)."""
    if timings is None:
        return None, None, None
    queued, scheduled, first = timings.queued, timings.scheduled, timings.first_token
    return (
        _between(queued, scheduled),
        _between(scheduled, first),
        _between(first, timings.last_token),
    )


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


class _Named(msgspec.Struct):
    model: str = ""


_named = msgspec.json.Decoder(_Named)


def named_model(catalog: Catalog, body: bytes) -> str:
    """Return what metrics call the model that a body names, however wrong the body may be else."""
    try:
        name = _named.decode(body).model
    except UNDECODABLE:
        name = ""
    if not name:
        return "unknown"
    try:
        return catalog.resolve(name)
    except ApiError:
        return "other"


# The field's words for kinds of errors, by our codes.
_ERROR_TYPES = {
    "no_available_workers": "no_workers",
    "engine_lost": "backend_error",
    "shutting_down": "unavailable",
    "tokenizer_not_found": "unavailable",
    "request_timeout": "timeout",
    "admission_queue_full": "unavailable",
    "admission_queue_timeout": "timeout",
    "engine_error": "backend_error",
    "unsupported_backend": "validation_error",
}


def error_type(error: ApiError) -> str:
    """Return the field's word for the kind of an error."""
    if isinstance(error.__cause__, WorkerLeftError):
        return "unavailable"
    other = "validation_error" if error.status < 500 else "internal_error"
    return _ERROR_TYPES.get(error.code, other)
