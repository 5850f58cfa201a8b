"""The worker API: workers are added, shown, changed and removed while the daemon serves.

Its errors have an envelope of their own, `{"error", "code"}`, as clients of this API expect.
"""

from __future__ import annotations

import uuid
from typing import Any, TypeVar, cast

import structlog
from msgspec import structs
from quart import Response, g, request
from quart_trio import QuartTrio

from smgd.api import SURFACES
from smgd.errors import ApiError, WorkerError, WorkerExistsError, WorkerNotFoundError
from smgd.web import gate
from smgd.web.replies import json_response
from smgd.web.service import Service
from smgd.workers.body import convert, decode, ignored
from smgd.workers.record import Record
from smgd.workers.spec import WorkerPatch, WorkerSpec
from smgd.workers.view import fleet_view, job_view, worker_view

log = structlog.get_logger(__name__)

T = TypeVar("T", WorkerSpec, WorkerPatch)

# What a worker's model can be asked for.
ENDPOINTS = tuple(surface.endpoint for surface in SURFACES)

# Of a worker, but not to be changed under its connection.
_NOT_PATCHED = {field.name for field in structs.fields(WorkerSpec)} - {
    field.name for field in structs.fields(WorkerPatch)
}


def add_routes(app: QuartTrio, service: Service) -> None:
    """Add the routes of the worker API, and how their errors are told."""
    fleet = service.fleet

    @app.errorhandler(WorkerError)
    async def refused(error: WorkerError) -> Response:
        status, code = _status_of(error)
        g.access.fields["reason"] = str(error)
        response = json_response({"error": str(error), "code": code}, status)
        response.headers["x-smg-error-code"] = code
        return response

    @app.post("/workers")
    async def add() -> Response:
        fields, spec = await _asked(WorkerSpec)
        record = fleet.add(spec)
        _tell_ignored(record, fields, WorkerSpec)
        return _accepted(record, "Worker added; it is registered in the background")

    @app.get("/workers")
    async def show_all() -> Response:
        name = request.args.get("model")
        return json_response(
            fleet_view(fleet, ENDPOINTS, _model_id(service, name) if name else None)
        )

    @app.get("/workers/<worker_id>")
    async def show(worker_id: str) -> Response:
        record = fleet.get(_id(worker_id))
        job = job_view(record)
        view = worker_view(fleet, record, ENDPOINTS)
        if process := service.process_of(record.spec.url):
            view["engine_process"] = process
        return json_response(view | ({"job_status": job} if job else {}))

    @app.put("/workers/<worker_id>")
    async def replace(worker_id: str) -> Response:
        fields, spec = await _asked(WorkerSpec)
        record = fleet.replace(_id(worker_id), spec)
        _tell_ignored(record, fields, WorkerSpec)
        return _accepted(record, "Worker replaced")

    @app.patch("/workers/<worker_id>")
    async def change(worker_id: str) -> Response:
        fields = decode(await _body())
        if fixed := sorted(_NOT_PATCHED & fields.keys()):
            raise WorkerError(f"PATCH cannot change {', '.join(fixed)}: use PUT")
        record = fleet.patch(_id(worker_id), convert(fields, WorkerPatch))
        _tell_ignored(record, fields, WorkerPatch)
        return _accepted(record, "Worker changed")

    @app.delete("/workers/<worker_id>")
    async def remove(worker_id: str) -> Response:
        return _accepted(fleet.remove(_id(worker_id)), "Worker is drained, then removed")


def _status_of(error: WorkerError) -> tuple[int, str]:
    if isinstance(error, WorkerNotFoundError):
        return 404, "WORKER_NOT_FOUND"
    if isinstance(error, WorkerExistsError):
        return 409, "WORKER_ALREADY_EXISTS"
    return 400, "BAD_REQUEST"


def _id(text: str) -> str:
    try:
        return str(uuid.UUID(text))
    except ValueError as error:
        raise WorkerError(f"worker id {text!r} is not a UUID") from error


def _model_id(service: Service, name: str) -> str:
    """Return the id behind a name; one that nobody has matches no worker."""
    source = service.fleet.model(name)
    return source.id if source is not None else name


async def _body() -> bytes:
    # Cross-origin forms of a browser can send anything but JSON.
    content_type = request.headers.get("content-type", "")
    content_encoding = request.headers.get("content-encoding", "")
    gate.check_content_encoding(content_encoding.encode())
    try:
        gate.check_content_type(content_type.encode())
    except ApiError as error:
        raise WorkerError(error.message) from error
    return cast("bytes", await request.get_data(as_text=False))


async def _asked(kind: type[T]) -> tuple[dict[str, Any], T]:
    fields = decode(await _body())
    return fields, convert(fields, kind)


def _tell_ignored(record: Record, fields: dict[str, Any], kind: type[T]) -> None:
    if names := ignored(fields, kind):
        log.warning("worker fields ignored", worker=record.spec.url, fields=names)


def _accepted(record: Record, message: str) -> Response:
    location = f"/workers/{record.id}"
    body = {
        "status": "accepted",
        "worker_id": record.id,
        "url": record.spec.url,
        "location": location,
        "message": message,
    }
    response = json_response(body, 202)
    response.headers["Location"] = location
    return response
