"""Who watches over the engines that smgd has started: one task an engine (`managed`).

It tells each of them what becomes of its worker, and tells of engines that a former smgd has left
running and that nobody has configured any more.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import structlog
import trio

from smgd.config import LaunchConfig
from smgd.core import Worker
from smgd.launch.managed import ManagedEngine
from smgd.launch.plan import Plan
from smgd.launch.process import GuardedPrograms, Programs
from smgd.launch.records import Forgotten, forgotten
from smgd.samples import ProcessSample

log = structlog.get_logger("smgd.launch")


class Supervisor:
    """All engines that smgd has started; `run` is their lives.

    `stop_grace` is how long (seconds) they get from SIGTERM to SIGKILL; `is_loading` as for
    `ManagedEngine`.
    """

    def __init__(
        self,
        plan: Plan,
        programs: Programs,
        *,
        keep: bool,
        stop_grace: float,
        is_loading: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self.engines = {
            spec.url: ManagedEngine(spec, programs, is_loading, keep=keep) for spec in plan.engines
        }
        self._plan = plan
        self._stop_grace = stop_grace

    async def run(self) -> None:
        """Keep all engines running until `stop` or cancelled."""
        for text in self._plan.warnings:
            log.warning(text)
        self._tell_forgotten()
        async with trio.open_nursery() as nursery:
            for engine in self.engines.values():
                nursery.start_soon(engine.run)

    async def stop(self) -> None:
        """End all engines, or let go of those that are kept; return when that is done."""
        async with trio.open_nursery() as nursery:
            for engine in self.engines.values():
                nursery.start_soon(engine.stop, self._stop_grace)

    def worker_changed(self, worker: Worker, *, removed: bool = False) -> None:
        """Hear of a change of any worker, as the registry tells it, or that it was `removed`."""
        engine = self.engines.get(worker.url)
        if engine is None:
            return
        if removed:
            engine.worker_removed()
        else:
            engine.worker_changed(worker.state)

    async def gone(self, url: str) -> None:
        """Wait until the engine of a worker has ended, if it is being ended."""
        engine = self.engines.get(url)
        if engine is not None:
            await engine.gone()

    def process(self, url: str) -> ProcessSample | None:
        """Return how the engine of a worker fares, None for one that smgd has not started."""
        engine = self.engines.get(url)
        return engine.sample if engine else None

    def processes(self) -> dict[str, ProcessSample]:
        """Return how all engines fare, by the URL of the worker."""
        return {url: engine.sample for url, engine in self.engines.items()}

    def _tell_forgotten(self) -> None:
        """Tell of engines that were kept and that nobody would miss: they have their GPUs still."""
        known = {spec.name for spec in self._plan.engines}
        found: list[Forgotten] = []
        try:
            found = forgotten(self._plan.directory, known)
        except OSError as error:
            log.warning("cannot look for engines that were kept", reason=str(error))
        for engine in found:
            log.warning(
                "engine runs that was kept and is not configured any more; to end it:"
                f" kill {engine.pid}",
                engine=engine.name,
            )


def supervisor_of(
    plan: Plan, launch: LaunchConfig, is_loading: Callable[[str], bool]
) -> Supervisor:
    """Return what runs the engines of a plan as processes."""
    grace = launch.stop_grace
    programs = GuardedPrograms(os.environ, keep=launch.keep_engines, stop_grace=grace)
    return Supervisor(
        plan, programs, keep=launch.keep_engines, stop_grace=grace, is_loading=is_loading
    )
