"""The life of one worker, in a task of its own.

It begins when its predecessors at the same socket path are gone, and when it ends nothing is left
of it, save for the record of engines that live on. Whatever ends it, be it a fault of ours, is the
failure of this worker alone: it stays visible, with its reason.
"""

from __future__ import annotations

import structlog
import trio

from smgd.errors import WorkerError
from smgd.workers.record import Record
from smgd.workers.registry import Registry

log = structlog.get_logger("smgd.workers")


async def live(
    record: Record,
    registry: Registry,
    *,
    task_status: trio.TaskStatus[WorkerError | None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Be one worker until its scope is cancelled, or it fails: `record.reason` then says why.

    Who waits for its start is given the error of one that does not come so far.
    """
    starting = _Starting(task_status)
    try:
        await _serve(record, registry, starting)
    except WorkerError as error:
        _failed(record, error, starting)
    except Exception as error:
        log.exception("worker failed", worker=record.spec.url)
        text = f"smgd itself has failed, and its log has how: {type(error).__name__}: {error}"
        _failed(record, WorkerError(text), starting)


async def _serve(record: Record, registry: Registry, starting: _Starting) -> None:
    try:
        with record.scope:
            for predecessor in record.before:
                await predecessor.gone.wait()
            record.before = ()
            registry.add(record.worker)
            try:
                await record.worker.run(task_status=starting)
            finally:
                registry.remove(record.id)
    finally:
        if record.leaving and record.worker.deserted:
            _remove_memory(record)
        record.gone.set()


def _failed(record: Record, error: WorkerError, starting: _Starting) -> None:
    if starting.failed(error):
        return
    url = record.spec.url
    record.reason = f"ZMQ backend handshake failed for {url}: {error}"
    log.error(f"Failed job: type=AddWorker, worker={url}", reason=record.reason)


def _remove_memory(record: Record) -> None:
    """Remove what is known of a worker's engines: they are gone."""
    file = record.addresses.record
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        log.warning("cannot remove the engine record", file=str(file), reason=str(error))


class _Starting:
    """Who waits for the start of a worker, if somebody does, and has not been told of it yet."""

    def __init__(self, status: trio.TaskStatus[WorkerError | None]) -> None:
        self._status = status
        self._waits = status is not trio.TASK_STATUS_IGNORED

    def started(self, value: None = None) -> None:
        """Say that its sockets are bound."""
        self._waits = False
        self._status.started(value)

    def failed(self, error: WorkerError) -> bool:
        """Say why it does not start; return whether there is somebody to hear it."""
        if self._waits:
            self._status.started(error)
        return self._waits
