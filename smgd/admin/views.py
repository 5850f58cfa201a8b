"""What operators see: the state of the daemon as plain structs, which become JSON or tables.

Durations are in seconds, `kv_usage` is in 0..1. What is empty or unknown is left out of the JSON of
a worker, as in the worker API.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import trio

from smgd.admin import connect
from smgd.config import Config
from smgd.core import Worker, WorkerState
from smgd.samples import ProcessSample
from smgd.text.loader import ModelLoader
from smgd.web.service import Running, Service
from smgd.workers.record import Record
from smgd.workers.registry import Registry

MASK: Final = "***"
_SECRET: Final = re.compile(r"(^|[-_])(keys?|tokens?|secrets?|passwords?)$", re.IGNORECASE)


class StatusView(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon as a whole. `not_ready` is why /readiness says 503, `missing` what it is about."""

    version: str
    pid: int
    state: str
    uptime: float
    ready_workers: int
    workers: int
    requests: int
    models: list[str]
    listen: list[str]
    log_level: str
    not_ready: str | None = None
    missing: list[str] = []


class WorkerView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker in a list. `reason` is why it is not ready, `seconds` how long it is in its state.

    `requests` are ours; `running` and `waiting` are those that the engines last reported.
    """

    id: str
    url: str
    model: str
    runtime: str
    state: WorkerState
    seconds: float
    engines: int
    requests: int
    running: int
    waiting: int
    kv_usage: float
    reason: str = ""


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """One engine of a worker, as it last reported."""

    rank: int
    running: int
    waiting: int
    kv_usage: float


class WorkerDetail(WorkerView, frozen=True, kw_only=True, omit_defaults=True):
    """A worker alone. What has been `seen` of the handshake and what it waits for are told of one
    that is not ready, with the command line of an engine that would connect; `engine_process` of
    one whose engine smgd starts itself."""

    handshake: str
    input: str
    output: str
    priority: int
    cost: float
    labels: dict[str, str] = {}
    max_model_len: int | None = None
    engine_version: str = ""
    ranks: list[EngineView] = []
    seen: list[str] = []
    waiting_for: str = ""
    connect: str = ""
    engine_process: ProcessSample | None = None


class ModelView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model. `missing` is why its requests are refused, beside workers."""

    id: str
    path: str
    ready_workers: int
    workers: int
    aliases: list[str] = []
    max_model_len: int | None = None
    missing: str = ""


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """A request that runs. `request_id` is the client's own, if it has sent one."""

    id: str
    request_id: str
    model: str
    endpoint: str
    workers: list[str]
    client: str
    stream: bool
    seconds: float
    prompt_tokens: int
    tokens: int


class StateTimes:
    """Since when each worker is in its state; the registry tells of every change."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._since: dict[str, tuple[WorkerState, float]] = {}
        registry.on_change(self._changed)

    def seconds(self, worker: Worker) -> float:
        """Return how long a worker has been in its state."""
        now = trio.current_time()
        return now - self._since.get(worker.id, (worker.state, now))[1]

    def _changed(self, worker: Worker) -> None:
        if worker.id not in self._registry.workers:
            self._since.pop(worker.id, None)
        elif self._since.get(worker.id, (None, 0.0))[0] != worker.state:
            self._since[worker.id] = (worker.state, trio.current_time())


class Views:
    """Looks at the parts of a daemon."""

    def __init__(self, service: Service, loader: ModelLoader) -> None:
        self._service = service
        self._loader = loader
        self._times = StateTimes(service.registry)

    def workers(self) -> list[WorkerView]:
        """Return all workers, also those that could not be registered."""
        records = self._service.fleet.records.values()
        return [WorkerView(**self._common(record)) for record in records]

    def worker(self, record: Record) -> WorkerDetail:
        """Return one worker."""
        worker, spec, info = record.worker, record.spec, record.worker.info
        return WorkerDetail(
            **self._common(record),
            handshake=record.addresses.handshake,
            input=record.addresses.input,
            output=record.addresses.output,
            priority=spec.priority,
            cost=spec.cost,
            labels=spec.labels,
            max_model_len=info.max_model_len if info else None,
            engine_version=info.version if info else "",
            ranks=_ranks(worker),
            engine_process=self._service.process_of(spec.url),
            **self._handshake(record),
        )

    def _common(self, record: Record) -> dict[str, Any]:
        worker, load = record.worker, record.worker.load
        return {
            "id": record.id,
            "url": record.spec.url,
            "model": worker.model_id,
            "runtime": worker.runtime,
            "state": record.state,
            "seconds": round(self._seconds(record), 1),
            "engines": record.spec.dp_size or 1,
            "requests": worker.requests_active,
            "running": load.running,
            "waiting": load.waiting,
            "kv_usage": round(load.kv_usage, 4),
            "reason": record.reason or record.waits or _unready(record),
        }

    def _seconds(self, record: Record) -> float:
        if record.reason or record.leaving or record.waits:
            return max(self._service.wall_clock() - record.since, 0.0)
        return self._times.seconds(record.worker)

    def _handshake(self, record: Record) -> dict[str, Any]:
        """Return what an operator needs to know to get an engine connected."""
        if record.state not in ("pending", "not_ready") or record.waits:
            return {}
        worker = record.worker
        seen = {"seen": worker.seen, "waiting_for": worker.awaited}
        if self._service.process_of(record.spec.url) is not None:
            return seen
        source = self._loader.sources.get(worker.model_id)
        command = connect.command(
            worker.runtime,
            source.path if source else worker.model_id,
            record.spec.dp_size or 1,
            record.addresses.handshake,
        )
        return {**seen, "connect": command}

    def models(self) -> list[ModelView]:
        """Return all models."""
        registry, catalog = self._service.registry, self._service.catalog
        return [
            ModelView(
                id=source.id,
                path=source.path,
                aliases=list(source.aliases),
                ready_workers=len(registry.candidates(source.id)),
                workers=len(registry.of_model(source.id)),
                max_model_len=registry.known_max_model_len(source.id),
                missing=catalog.why_missing(source.id) if source.id in catalog.missing else "",
            )
            for source in self._loader.sources.values()
        ]

    def requests(self) -> list[RequestView]:
        """Return the requests that run, the oldest first."""
        running = sorted(self._service.running.values(), key=lambda r: r.access.started)
        return [_request(request) for request in running]


def _unready(record: Record) -> str:
    if record.state == "draining":
        return "being removed" if record.leaving else "drained, not removed"
    return record.worker.unready or ""


def _ranks(worker: Worker) -> list[EngineView]:
    return [
        EngineView(
            rank=rank, running=load.running, waiting=load.waiting, kv_usage=round(load.kv_usage, 4)
        )
        for rank, load in enumerate(worker.rank_loads)
    ]


def _request(running: Running) -> RequestView:
    sequences = running.generation.sequences
    first = sequences[0].request
    workers = dict.fromkeys(s.worker.url for s in sequences if s.worker is not None)
    return RequestView(
        id=running.id,
        request_id=running.access.id,
        model=first.model,
        endpoint=running.endpoint,
        workers=list(workers),
        client=running.client,
        stream=running.stream,
        seconds=round(trio.current_time() - running.access.started, 1),
        prompt_tokens=len(first.prompt_ids),
        tokens=sum(len(sequence.ids) for sequence in sequences),
    )


def masked(config: Config) -> dict[str, Any]:
    """Return a configuration with the values of its secrets hidden."""
    found: dict[str, Any] = _masked(msgspec.to_builtins(config))
    return found


def _masked(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: MASK if _SECRET.search(key) and _is_text(inner) else _masked(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return _masked_arguments(value)
    return value


def _is_text(value: Any) -> bool:
    """Tell whether a value can be a secret: a text, or several. An empty one is not set."""
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(inner, str) for inner in value)
    return isinstance(value, str) and value != ""


def _masked_arguments(values: list[Any] | tuple[Any, ...]) -> list[Any]:
    """Hide the value behind a flag such as --api-key, in both ways of writing it."""
    shown: list[Any] = []
    secret_follows = False
    for value in values:
        name, equals, _ = value.partition("=") if isinstance(value, str) else ("", "", "")
        is_flag = name.startswith("-") and _SECRET.search(name) is not None
        if secret_follows:
            shown.append(MASK)
        else:
            shown.append(f"{name}={MASK}" if is_flag and equals else _masked(value))
        secret_follows = is_flag and not equals
    return shown
