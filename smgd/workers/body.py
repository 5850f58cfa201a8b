"""What a client of the worker API has sent: a spec or a patch, and the names that do nothing here.

Clients serialize what they do not set as null, and set what matters to workers of other kinds.
Neither may keep an engine out, and the second may not go unsaid.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import structs

from smgd.errors import UNDECODABLE, WorkerError
from smgd.workers.spec import Health, ModelCard, WorkerPatch, WorkerSpec

T = TypeVar("T", WorkerSpec, WorkerPatch)

# `GET /workers/{id}` shows them, so whoever sends back what it got has them in the body.
SHOWN = frozenset(
    ("id", "model_id", "is_healthy", "status", "reason", "load", "http2")
    + ("job_status", "engine_process")
)
# Of a model card by the API's schema; smgd has no parsers that are chosen by worker.
_LABELS = ("reasoning_parser", "tool_parser")


def decode(body: bytes) -> dict[str, Any]:
    """Return a body's fields without those that are null. Raises `WorkerError`."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except UNDECODABLE as error:
        raise WorkerError(f"invalid request body: {error}") from error
    return {name: _given(value) for name, value in _without_nulls(fields).items()}


def convert(fields: Mapping[str, Any], kind: type[T]) -> T:
    """Return the spec or patch that `decode` has found. Raises `WorkerError`."""
    try:
        return msgspec.convert(fields, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise WorkerError(f"invalid request body: {error}") from error


def ignored(fields: Mapping[str, Any], kind: type[T]) -> list[str]:
    """Return the names of fields that change nothing, of what `convert` has taken."""
    names = [*_unknown(fields.keys() - SHOWN, kind)]
    names += [f"health.{name}" for name in _unknown(fields.get("health", ()), Health)]
    for card in fields.get("models", ()):
        names += [f"models.{name}" for name in _unknown(card, ModelCard)]
    names += [f"labels.{name}" for name in _LABELS if name in fields.get("labels", ())]
    return names


def _unknown(names: Iterable[str], kind: type[msgspec.Struct]) -> list[str]:
    return sorted(set(names) - {field.name for field in structs.fields(kind)})


def _given(value: Any) -> Any:
    """Return a field's value without its null members: `health`, `labels`, each of `models`."""
    if isinstance(value, list):
        return [_without_nulls(each) if isinstance(each, dict) else each for each in value]
    return _without_nulls(value) if isinstance(value, dict) else value


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
