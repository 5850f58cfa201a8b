"""The life of one worker, in a task of its own.

It begins when its predecessors at the same socket path are gone, and their engine too if that is
being ended; it is registered once its sockets are bound. When it ends nothing is left of it, save
for the record of engines that live on. Whatever ends it, be it a fault of ours, is the failure of
this worker alone: it stays visible, with its reason.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog
import trio

from smgd.errors import WorkerError
from smgd.workers.record import Record
from smgd.workers.registry import Registry

log = structlog.get_logger("smgd.workers")


async def live(
    record: Record,
    registry: Registry,
    engine_gone: Callable[[str], Awaitable[None]],
    *,
    task_status: trio.TaskStatus[WorkerError | None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Be one worker until its scope is cancelled, or it fails: `record.reason` then says why.

    Who waits for its start is given the error of one that does not come so far. `engine_gone` waits
    for the end of the engine of a URL that was told to end.
    """
    starting = _Starting(task_status, lambda: registry.add(record.worker))
    try:
        await _serve(record, registry, engine_gone, starting)
    except WorkerError as error:
        _failed(record, error, registry, starting)
    except Exception as error:
        log.exception("worker failed", worker=record.spec.url)
        text = f"smgd itself has failed, and its log has how: {type(error).__name__}: {error}"
        _failed(record, WorkerError(text), registry, starting)


async def _serve(
    record: Record,
    registry: Registry,
    engine_gone: Callable[[str], Awaitable[None]],
    starting: _Starting,
) -> None:
    try:
        with record.scope:
            for predecessor in record.before:
                await predecessor.gone.wait()
            await engine_gone(record.spec.url)
            record.before = ()
            try:
                await record.worker.run(task_status=starting)
            finally:
                if registry.remove(record.id) is None:
                    registry.changed(record.worker)  # for whom a predecessor's end said nothing
    finally:
        if record.leaving and record.worker.deserted:
            _remove_memory(record)
        record.gone.set()


def _failed(record: Record, error: WorkerError, registry: Registry, starting: _Starting) -> None:
    if starting.failed(error):
        return
    url = record.spec.url
    record.reason = f"ZMQ backend handshake failed for {url}: {error}"
    log.error(f"Failed job: type=AddWorker, worker={url}", reason=record.reason)
    registry.changed(record.worker)


def _remove_memory(record: Record) -> None:
    """Remove what is known of a worker's engines: they are gone."""
    file = record.addresses.record
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        log.warning("cannot remove the engine record", file=str(file), reason=str(error))


class _Starting:
    """Who waits for the start of a worker, if somebody does, and has not been told of it yet.

    `register` is called before they are told.
    """

    def __init__(
        self, status: trio.TaskStatus[WorkerError | None], register: Callable[[], None]
    ) -> None:
        self._status = status
        self._register = register
        self._waits = status is not trio.TASK_STATUS_IGNORED

    def started(self, value: None = None) -> None:
        """Say that its sockets are bound. Raises `WorkerError` if it cannot be registered."""
        self._register()
        self._waits = False
        self._status.started(value)

    def failed(self, error: WorkerError) -> bool:
        """Say why it does not start; return whether there is somebody to hear it."""
        if self._waits:
            self._status.started(error)
        return self._waits
