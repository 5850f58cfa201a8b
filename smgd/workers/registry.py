"""The workers of this daemon: by id, by URL, by model, and which of them take requests now."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from smgd.core import Worker
from smgd.errors import WorkerError, no_available_workers
from smgd.samples import RankSample, WorkerSample


class Ready(msgspec.Struct, frozen=True):
    """The workers of a model that take requests; `max_model_len` is their smallest (tokens).

    Without any, it is the smallest of those that did.
    """

    workers: Sequence[Worker]
    max_model_len: int | None


class Registry:
    """All workers, in the order in which they were added.

    Whoever owns a worker tells `changed` when its state has changed; those who asked with
    `on_change` hear of it, and of workers that were added or removed. In between, what a request
    asks for is remembered, so that its price does not depend on the number of workers.
    """

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self._listeners: list[Callable[[Worker], None]] = []
        self._ready: dict[str, Ready] = {}

    def add(self, worker: Worker) -> None:
        """Register a worker. Raises `WorkerError` if its id or URL is taken."""
        if worker.id in self.workers or self.by_url(worker.url) is not None:
            raise WorkerError(f"worker {worker.url} is registered already")
        self.workers[worker.id] = worker
        self.changed(worker)

    def remove(self, worker_id: str) -> Worker | None:
        """Forget a worker and return it, if there was one."""
        worker = self.workers.pop(worker_id, None)
        if worker is not None:
            self.changed(worker)
        return worker

    def by_url(self, url: str) -> Worker | None:
        """Return a worker by its URL."""
        return next((worker for worker in self.workers.values() if worker.url == url), None)

    def of_model(self, model_id: str) -> list[Worker]:
        """Return the workers of a model, ready or not."""
        return [worker for worker in self.workers.values() if worker.model_id == model_id]

    def candidates(self, model_id: str) -> Sequence[Worker]:
        """Return the workers of a model that take requests now, in a stable order."""
        return self._ready_of(model_id).workers

    def _ready_of(self, model_id: str) -> Ready:
        known = self._ready.get(model_id)
        if known is None:
            registered = self.of_model(model_id)
            workers = [w for w in registered if w.state == "ready"]
            lengths = [w.info.max_model_len for w in workers or registered if w.info is not None]
            known = self._ready[model_id] = Ready(workers, min(lengths, default=None))
        return known

    def ready_count(self) -> int:
        """Return how many workers take requests now."""
        return sum(worker.state == "ready" for worker in self.workers.values())

    def known_max_model_len(self, model_id: str) -> int | None:
        """Return the smallest context (tokens) among a model's ready workers.

        Without any, it is that of those whose engines are lost; None if no engine has come yet.
        """
        return self._ready_of(model_id).max_model_len

    def max_model_len(self, model_id: str) -> int:
        """Return that of the ready ones; raises the `ApiError` (503) that says that none is."""
        ready = self._ready_of(model_id)
        if not ready.workers or ready.max_model_len is None:
            raise no_available_workers(model_id)
        return ready.max_model_len

    def samples(self) -> list[WorkerSample]:
        """Return what is true of every worker now, for the metrics."""
        return [
            WorkerSample(
                worker=worker.url,
                model=worker.model_id,
                healthy=worker.state == "ready",
                requests_active=worker.requests_active,
                counts=worker.counts,
                ranks=_ranks(worker),
            )
            for worker in self.workers.values()
        ]

    def on_change(self, listener: Callable[[Worker], None]) -> None:
        """Have a function called after every change of a worker."""
        self._listeners.append(listener)

    def changed(self, worker: Worker) -> None:
        """Tell the listeners that a worker has changed."""
        self._ready.clear()
        for listener in self._listeners:
            listener(worker)


def _ranks(worker: Worker) -> list[RankSample]:
    usable = {*worker.usable}
    reports = zip(worker.rank_loads, worker.rank_work, strict=True)
    return [
        RankSample(rank, rank in usable, load.running, load.waiting, load.kv_usage, work)
        for rank, (load, work) in enumerate(reports)
    ]
