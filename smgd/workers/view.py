"""A worker as the worker API and the admin tools show it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from smgd.workers.fleet import Fleet
from smgd.workers.record import Record


def worker_view(fleet: Fleet, record: Record, endpoints: Iterable[str]) -> dict[str, Any]:
    """Return one worker, without what is empty; `endpoints` are what its model is good for.

    `zmq_handshake_address` is what engines have to dial; `reason` says why a registration failed.
    """
    spec, worker = record.spec, record.worker
    info = worker.info
    view = {
        "id": record.id,
        "model_id": worker.model_id,
        "url": spec.url,
        "models": [_card(fleet, record, list(endpoints), info.max_model_len if info else None)],
        "worker_type": spec.worker_type,
        "connection_mode": "zmq",
        "runtime_type": worker.runtime,
        "zmq_handshake_address": record.addresses.handshake,
        "dp_size": spec.dp_size,
        "labels": spec.labels,
        "priority": spec.priority,
        "cost": spec.cost,
        "max_connection_attempts": spec.max_connection_attempts,
        "is_healthy": record.state == "ready",
        "status": record.state,
        "reason": record.reason,
        "load": worker.requests_active,
        "http2": False,
    }
    return _without_empty(view)


def _card(fleet: Fleet, record: Record, endpoints: list[str], length: int | None) -> dict[str, Any]:
    """Return a worker's model as clients find it, whatever the worker has said of it."""
    model_id = record.worker.model_id
    source = fleet.model(model_id)
    return _without_empty(
        {
            "id": model_id,
            "aliases": list(source.aliases) if source else [],
            "model_type": endpoints,
            "context_length": length,
        }
    )


def _without_empty(view: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in view.items() if value not in (None, "", [], {})}


def job_view(record: Record) -> dict[str, Any] | None:
    """Return what is being done about a worker, or has failed; None once it serves."""
    job: tuple[str, str, str]
    match record.state:
        case "failed":
            job = "AddWorker", "failed", record.reason
        case "draining":
            requests = f"{record.worker.requests_active} requests in flight"
            if record.leaving:
                job = "RemoveWorker", "processing", f"draining: {requests}"
            else:
                text = f"drained, not removed: {requests}; PUT it to have it serve again"
                job = "DrainWorker", "processing", text
        case "pending":
            text = f"waiting for {record.worker.awaited} at {record.addresses.handshake}"
            job = "AddWorker", "processing", record.waits or text
        case _:
            return None
    names = ("job_type", "status", "message")
    return {
        **dict(zip(names, job, strict=True)),
        "worker_url": record.spec.url,
        "timestamp": record.since,
    }


def fleet_view(fleet: Fleet, endpoints: Iterable[str], model_id: str | None) -> dict[str, Any]:
    """Return all workers, or those of one model, with how many there are of each type."""
    endpoints = list(endpoints)
    views = [
        worker_view(fleet, record, endpoints)
        for record in fleet.records.values()
        if model_id is None or record.worker.model_id == model_id
    ]
    stats = {"prefill_count": 0, "decode_count": 0, "regular_count": len(views)}
    return {"workers": views, "total": len(views), "stats": stats}
