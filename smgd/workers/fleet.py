"""The workers of a running daemon: added, changed and removed while it serves.

Whoever adds a worker is told at once what can be judged at once; the rest happens in the nursery
that `Fleet.run` opens, and what fails there stays visible in `records` until it is removed or added
again. A worker has one task, under one cancel scope (`life`); engines that live on when it ends are
remembered, and a worker that is added with its URL goes on with them.

A socket path belongs to one worker at a time. A worker that takes the place of one that is still
draining (`replace`, or added right after `remove`) waits for it to be gone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Sequence

import msgspec
import structlog
import trio

from smgd.config import HealthConfig
from smgd.core import RequestIds
from smgd.engine import guard
from smgd.engine.link import DEFAULT_SETTINGS, LinkSettings
from smgd.engine.paths import Addresses, check_collisions
from smgd.engine.transport import WorkerSockets
from smgd.engine.zmqio import ZmqContext
from smgd.errors import WorkerError, WorkerExistsError, WorkerNotFoundError
from smgd.text.catalog import Catalog
from smgd.text.loader import ModelLoader, ModelSource
from smgd.workers.lifecycle import Thresholds
from smgd.workers.models import WorkerModels
from smgd.workers.record import Record
from smgd.workers.registry import Registry
from smgd.workers.spec import MODEL_LABELS, WorkerPatch, WorkerSpec, judge
from smgd.workers.task import live
from smgd.workers.zmq import ZmqWorker, binder

log = structlog.get_logger("smgd.workers")

# Seconds; how soon it is noticed that a draining worker has become idle.
IDLE_POLL = 0.05

Bind = Callable[[Addresses], WorkerSockets]


async def _none_is_ended(_: str) -> None:
    """Wait for nothing: the engines of this URL are not ours to end."""


class FleetSettings(msgspec.Struct, kw_only=True):
    """What holds for all workers.

    `own` are the addresses (`host:port`) that no worker may have; `managed` are the URLs of workers
    whose engines smgd starts itself, so that they are not given up, and `engine_gone` waits for the
    end of the engine of such a URL, if it was told to end. A change of `link` is for workers that
    are added from then on; for other changes see `Fleet.settings_changed`.
    """

    link: LinkSettings = DEFAULT_SETTINGS
    max_logprobs: int = guard.MAX_LOGPROBS
    health: HealthConfig = HealthConfig()
    own: Sequence[str] = ()
    managed: Container[str] = ()
    engine_gone: Callable[[str], Awaitable[None]] = _none_is_ended


class Fleet:
    """Owns every worker's task; `registry` has those whose task serves."""

    def __init__(
        self,
        registry: Registry,
        catalog: Catalog,
        loader: ModelLoader,
        ids: RequestIds,
        settings: FleetSettings,
        wall_clock: Callable[[], float],
    ) -> None:
        self.records: dict[str, Record] = {}
        self.settings = settings
        self._registry = registry
        self._models = WorkerModels(self.records, registry, catalog, loader)
        self._ids = ids
        self._wall_clock = wall_clock
        self._living: set[Record] = set()
        self._bind: Bind
        self._nursery: trio.Nursery
        self._scope = trio.CancelScope()
        self._ended = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve all workers until `stop` or cancelled."""
        try:
            with ZmqContext() as context, self._scope:
                self._bind = binder(context)
                async with trio.open_nursery() as self._nursery:
                    self._nursery.start_soon(self._probe)
                    task_status.started()
                    await trio.sleep_forever()
        finally:
            self._ended.set()

    async def stop(self) -> None:
        """Let go of all engines, which may live on; return when the sockets are closed."""
        self._scope.cancel(reason="the daemon stops")
        await self._ended.wait()

    @property
    def expects(self) -> bool:
        """Whether any worker waits for engines that are known from before."""
        return any(record.worker.expects for record in self.records.values())

    def model(self, name: str) -> ModelSource | None:
        """Return the model that has a name, loaded or not."""
        return self._models.find(name)

    def get(self, worker_id: str) -> Record:
        """Return a worker. Raises `WorkerNotFoundError`."""
        try:
            return self.records[worker_id]
        except KeyError:
            raise WorkerNotFoundError(f"Worker {worker_id} not found") from None

    def by_url(self, url: str) -> Record | None:
        """Return the worker of a URL that is not on its way out."""
        for record in self.records.values():
            if record.spec.url == url and not record.leaving:
                return record
        return None

    # ------------------------------------------------------------------- what is asked for

    async def start(self, spec: WorkerSpec) -> Record:
        """Add a worker and wait until its sockets are bound. Raises `WorkerError`."""
        record = self._new(spec)
        error: WorkerError | None = await self._nursery.start(self._live, record)
        if error is not None:
            self._forget(record)
            raise error
        return record

    def add(self, spec: WorkerSpec) -> Record:
        """Add a worker; its sockets are bound in the background.

        In place of one that has failed with this URL. Raises `WorkerExistsError`, `WorkerError`.
        """
        before = self.by_url(spec.url)
        if before is not None and before.state != "failed":
            raise WorkerExistsError(f"Worker {spec.url} already exists (id {before.id})")
        record = self._new(spec, before)
        if before is not None:
            self._leave(before)
        self._begin(record)
        return record

    def replace(self, worker_id: str, spec: WorkerSpec) -> Record:
        """Make a worker what `spec` says; its id and URL stay.

        The connection is kept if nothing that it depends on has changed; not that of one that has
        failed, or was told to drain: it is registered anew. Raises `WorkerNotFoundError`,
        `WorkerError`.
        """
        before = self._changeable(worker_id)
        if spec.url != before.spec.url:
            raise WorkerError(
                f"the URL of worker {worker_id} cannot be changed from {before.spec.url} to "
                f"{spec.url}: add a worker, then remove this one"
            )
        wire, model = judge(spec), self._models.of(spec, before)
        if before.keeps(wire, model) and before.state not in ("failed", "draining"):
            self._models.rename(before, model)
            return self._changed(before, spec)
        record = self._new(spec, before, worker_id)
        self._leave(before)
        self._begin(record)
        return record

    def patch(self, worker_id: str, patch: WorkerPatch) -> Record:
        """Change what does not touch the connection; of one that is being removed, only its health.

        Raises `WorkerNotFoundError`, and `WorkerError` for labels that name another model.
        """
        if patch.is_health_only:
            self._patch_leaving(worker_id, patch)
            record = self.get(worker_id)
        else:
            record = self._changeable(worker_id)
        spec = patch.apply(record.spec)
        for label in MODEL_LABELS:
            if spec.labels.get(label) != record.spec.labels.get(label):
                raise WorkerError(
                    f"labels.{label} of worker {record.spec.url} cannot be changed under its "
                    "connection: use PUT"
                )
        return self._changed(record, spec)

    def _patch_leaving(self, worker_id: str, patch: WorkerPatch) -> None:
        """Let the predecessor of a worker that was replaced drain as it is to."""
        for record in self._living:
            if record.id == worker_id and record.leaving:
                record.spec = patch.apply(record.spec)

    def drain(self, worker_id: str) -> Record:
        """Give a worker no new requests, until it is replaced or removed.

        Raises `WorkerNotFoundError`.
        """
        record = self.get(worker_id)
        if record.state not in ("failed", "draining"):
            record.since = int(self._wall_clock())
            record.worker.drain()
        return record

    def remove(self, worker_id: str) -> Record:
        """Drain a worker, then release all it has. Raises `WorkerNotFoundError`."""
        record = self.get(worker_id)
        self._leave(record)
        return record

    def release_model(self, model_id: str) -> None:
        """Serve a model that is not configured any more as long as it has workers."""
        self._models.release(model_id)

    def settings_changed(self) -> None:
        """Tell all workers what `settings` are now."""
        for record in self.records.values():
            self._set(record)

    def _set(self, record: Record) -> None:
        settings = self.settings
        failure = record.spec.health.failure_threshold or settings.health.failure_threshold
        record.worker.set_thresholds(Thresholds(failure=failure))
        record.worker.max_logprobs = settings.max_logprobs

    def _changeable(self, worker_id: str) -> Record:
        record = self.get(worker_id)
        if record.leaving:
            raise WorkerError(
                f"worker {record.spec.url} is being removed: only its health can be changed"
            )
        return record

    def _changed(self, record: Record, spec: WorkerSpec) -> Record:
        record.spec = spec
        self._set(record)
        _notice_health(spec, self.settings.health)
        log.info("worker changed", worker=spec.url)
        return record

    # ------------------------------------------------------------------------ its own life

    def _new(
        self, spec: WorkerSpec, before: Record | None = None, worker_id: str | None = None
    ) -> Record:
        """Return the record of a worker that may be, in the place of one `before`.

        Raises `WorkerError`; nothing has changed then.
        """
        if self._ended.is_set():
            raise WorkerError(f"worker {spec.url} cannot be added: smgd is stopping")
        wire = judge(spec)
        check_collisions([wire.addresses], self.settings.own)
        for other in self._living:  # among them, one that drains has its successor's address
            if other.spec.url != spec.url:
                check_collisions([other.addresses, wire.addresses])
        source = self._models.of(spec, before)
        worker = ZmqWorker(
            wire.addresses,
            source.id,
            wire.dialect,
            self._ids,
            self._bind,
            engines=wire.engines,
            vocab_size=self._models.vocab_size(source),
            settings=self.settings.link,
            worker_id=worker_id,
            model_path=source.path,
            on_change=self._worker_changed,
        )
        self._models.load(spec, source)
        if not spec.declared_runtimes:
            log.warning(
                "runtime_type unspecified for ZMQ worker; defaulting to vLLM EngineCore",
                worker=spec.url,
            )
        _notice_health(spec, self.settings.health)
        record = Record(spec, wire, source, worker)
        record.since = int(self._wall_clock())
        self._set(record)
        self.records[worker.id] = record
        self._living.add(record)
        return record

    def _begin(self, record: Record) -> None:
        record.before = [
            other
            for other in self._living
            if other.spec.url == record.spec.url and other is not record
        ]
        self._nursery.start_soon(self._live, record)

    async def _live(
        self,
        record: Record,
        *,
        task_status: trio.TaskStatus[WorkerError | None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        try:
            await live(record, self._registry, self.settings.engine_gone, task_status=task_status)
        finally:
            self._living.discard(record)
        if record.reason:
            record.since = int(self._wall_clock())

    def _leave(self, record: Record) -> None:
        if record.leaving:
            return
        record.leaving = True
        record.since = int(self._wall_clock())
        record.worker.drain()
        if record.gone.is_set():
            self._forget(record)
        else:
            self._nursery.start_soon(self._drain, record)

    async def _drain(self, record: Record) -> None:
        began = trio.current_time()
        # Nobody tells of the last request, and the time may be set anew meanwhile.
        while record.worker.requests_active:
            left = began + self._settle_seconds(record) - trio.current_time()
            if left <= 0:
                break
            await trio.sleep(min(IDLE_POLL, left))
        record.scope.cancel(reason="the worker is removed")
        await record.gone.wait()
        self._forget(record)

    def _settle_seconds(self, record: Record) -> float:
        own = record.spec.health.drain_settle_secs
        return self.settings.health.drain_settle if own is None else own

    def _forget(self, record: Record) -> None:
        if self.records.get(record.id) is record:
            del self.records[record.id]
            log.info("worker removed", worker=record.spec.url)
        self._models.forget_unused(record.worker.model_id)

    # ------------------------------------------------------------------------- what is heard

    def _worker_changed(self, worker: ZmqWorker) -> None:
        log.info("worker state", worker=worker.url, model=worker.model_id, state=worker.state)
        self._registry.changed(worker)

    async def _probe(self) -> None:
        """Give up workers whose engine stays away, if that is wanted."""
        while True:
            await trio.sleep(self.settings.health.check_interval)
            if not self.settings.health.remove_unhealthy_workers:
                continue
            for record in list(self.records.values()):
                is_managed = record.spec.url in self.settings.managed
                if not (record.reason or record.leaving or is_managed):
                    self._probe_one(record)

    def _probe_one(self, record: Record) -> None:
        record.worker.probe()
        if record.worker.state == "failed":
            log.warning("engine stayed down; removing the worker", worker=record.spec.url)
            self._leave(record)


def _notice_health(spec: WorkerSpec, everywhere: HealthConfig) -> None:
    if spec.health.disable_health_check or everywhere.disable_health_check:
        log.warning(
            f"Ignoring disabled health checks for ZMQ worker {spec.url}: its connection says "
            "whether the engine is there"
        )
