"""Who watches over the engines that smgd has started: one task an engine, for its whole life.

    run
    └─ one task an engine      find or start, wait for the end, wait, start again
        ├─ output              until there is no more of it
        ├─ record              is written again when somebody has removed it
        └─ wedged              ends an engine that runs and does not serve

What an end means is decided in `life`, what is shown of the output in `reader`; processes are
behind the seam of `process`. A family of processes is ended by its guardian, so that leaving the
task, however that happens, is one signal and cannot block; `stop` is the way that also waits.

An engine and its worker go together: when the worker is removed, the engine ends, and when there is
one again, it is started. Whoever removes the worker wants the GPU, and nothing else says so. An
engine that was told to end serves nobody any more: the next worker waits for its end (`gone`).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from functools import partial

import structlog
import trio

from smgd.config import LaunchConfig
from smgd.core import Worker, WorkerState
from smgd.launch.life import End, EngineLife
from smgd.launch.plan import EngineSpec, Plan
from smgd.launch.process import EngineProcess, Found, GuardedPrograms, Programs
from smgd.launch.reader import show_output
from smgd.launch.records import Forgotten, forgotten
from smgd.launch.strays import KILL_SECONDS
from smgd.launch.wedged import Wedged
from smgd.once import Once
from smgd.samples import ProcessSample

log = structlog.get_logger("smgd.launch")

# From the end of an engine to that of its output: somebody else may hold the other end of the pipe.
LAST_OUTPUT_SECONDS = 1.0
# Between looks whether the record of an engine that is kept is still there.
RECORD_SECONDS = 5.0


class ManagedEngine:
    """One engine that is to run: `life` is its state.

    `is_loading` tells whether an engine has said HELLO to a worker and is not ready yet.
    """

    def __init__(
        self, spec: EngineSpec, programs: Programs, is_loading: Callable[[str], bool], *, keep: bool
    ) -> None:
        self.spec = spec
        self.life = EngineLife()
        self._programs = programs
        self._is_loading = partial(is_loading, spec.url)
        self._keep = keep
        self._wanted = True
        self._has_worker = trio.Event()
        self._has_worker.set()
        self._worker_state: WorkerState = "pending"
        self._process: EngineProcess | None = None
        self._wedged = Wedged(self._is_loading)  # the latest process
        self._is_told_to_end = False  # likewise
        self._gone = trio.Event()
        self._gone.set()
        self._scope = trio.CancelScope()
        self._pausing = trio.CancelScope()
        self._ended = trio.Event()
        self._log = log.bind(engine=spec.name)

    @property
    def sample(self) -> ProcessSample:
        """How it fares now."""
        life = self.life
        return ProcessSample(life.state, life.starts, life.restarts, life.pid, life.last_end)

    async def run(self) -> None:
        """Keep the engine running until `stop` or cancelled."""
        try:
            with self._scope:
                process = await self._left_over()
                while self._wanted:
                    await self._worker_is_there()
                    end = await self._live(process)
                    process = None
                    await self._pause(end)
        finally:
            self.life.stopped()
            self._ended.set()

    async def stop(self, stop_grace: float) -> None:
        """End the engine, or let go of it if it is to be kept; return when that is done.

        It has `stop_grace` or its own grace (seconds), and a moment; then it is left to its
        guardian.
        """
        self._wanted = False
        self._wedged.hear(is_missed=self._is_missed)
        process = self._process
        seconds = max(stop_grace, process.grace if process else 0.0) + KILL_SECONDS
        if process is not None and (not self._keep or not self._has_worker.is_set()):
            process.terminate()
        else:
            if process is not None:
                self._log.info("engine left running", pid=process.pid)
            self._scope.cancel(reason="the engine is not wanted any more")
        with trio.move_on_after(seconds) as patience:
            await self._ended.wait()
        if patience.cancelled_caught:
            self._log.error("engine does not end, not even by SIGKILL", pid=self.life.pid)
            self._scope.cancel(reason="the engine does not end")

    # ------------------------------------------------------------------------- its worker

    def worker_changed(self, state: WorkerState) -> None:
        """Hear whether the engine serves: one that did, and does not come back, is ended."""
        self._worker_state = state
        self._has_worker.set()
        if self._process is not None and state == "ready":
            self._note_served(self._process)
        self._wedged.hear(is_missed=self._is_missed)

    def worker_removed(self) -> None:
        """Hear that there is no worker: end the engine, and start none until there is one."""
        if not self._has_worker.is_set():
            return
        self._has_worker = trio.Event()
        self._wedged.hear(is_missed=self._is_missed)
        if self._process is not None:
            self._log.info(
                "its worker was removed or has failed; ending the engine", pid=self._process.pid
            )
            self._is_told_to_end = True
            if self._gone.is_set():
                self._gone = trio.Event()
            self._process.terminate()
        self._pausing.cancel(reason="the worker was removed")

    async def gone(self) -> None:
        """Wait until the engine has ended, if it was told to since its worker was removed."""
        await self._gone.wait()

    def _note_served(self, process: EngineProcess) -> None:
        try:
            process.note_served()
        except OSError as error:
            self._log.warning(
                "process record not written: should this engine not serve the next smgd, it is not"
                " started again",
                reason=str(error),
            )

    @property
    def _is_missed(self) -> bool:
        """Whether its process does not serve and should; one that has not served yet need not."""
        return (
            self._process is not None
            and self._process.served
            and self._worker_state in ("pending", "not_ready")
            and self._is_expected
            and self.life.state == "running"
        )

    # -------------------------------------------------------------------------- its lives

    async def _left_over(self) -> EngineProcess | None:
        """Return the engine that an earlier smgd has left; one with another command is ended."""
        found = await self._found()
        if found is None:
            return None
        process = found.process
        self._log.info(
            "engine found that was left running", pid=process.pid, output=str(process.log)
        )
        if found.is_same:
            if self._worker_state == "ready":
                self._note_served(process)
            return process
        self._log.warning(
            "its command or its model is another one than configured; ending it", pid=process.pid
        )
        process.terminate()
        await self._watch(process)
        return None

    async def _found(self) -> Found | None:
        """Look for the engine until it is clear whether there is one: nothing runs beside it."""
        while True:
            try:
                found = self._programs.find(self.spec)
                if found is None:
                    await self._programs.clear(self.spec)
            except OSError as error:
                await self._pause(self.life.not_started(str(error)))
            else:
                return found

    async def _live(self, process: EngineProcess | None) -> End | None:
        """Live one life of the engine, in a process that was found or a new one."""
        self._is_told_to_end = False
        try:
            process = process or self._start()
        except (OSError, ValueError) as error:  # ValueError: what no process can be given
            return self.life.not_started(str(error))
        self.life.started(trio.current_time(), process.pid)
        status = await self._watch(process)
        if not self._is_expected:
            self.life.stopped()
            return None
        return self.life.ended(trio.current_time(), status)

    @property
    def _is_expected(self) -> bool:
        """Whether there is to be an engine, and nobody has told the latest one to end."""
        return self._wanted and self._has_worker.is_set() and not self._is_told_to_end

    def _start(self) -> EngineProcess:
        process = self._programs.start(self.spec)
        self._log.info(
            "engine started",
            pid=process.pid,
            command=shlex.join(self.spec.argv),
            env=[*self.spec.env],
            output=process.log and str(process.log),
        )
        return process

    async def _watch(self, process: EngineProcess) -> int | None:
        """Wait for the end of a process; it does not outlive this, unless it is to be kept."""
        self._process = process
        self._wedged = Wedged(self._is_loading)
        self._wedged.hear(is_missed=self._is_missed)
        is_over = False
        try:
            async with trio.open_nursery() as watching:
                watching.start_soon(self._wedged.watch, process, self._log)
                watching.start_soon(self._keep_record, process)
                async with trio.open_nursery() as reading:
                    reading.start_soon(self._read, process)
                    status = await process.wait()
                    is_over = True
                    reading.cancel_scope.deadline = trio.current_time() + LAST_OUTPUT_SECONDS
                watching.cancel_scope.cancel(reason="the engine has ended")
            return status
        finally:
            self._process = None
            self._gone.set()
            if not is_over and not self._keep:
                process.terminate()
            process.close()

    async def _keep_record(self, process: EngineProcess) -> None:
        failure = Once()
        while True:
            await trio.sleep(RECORD_SECONDS)
            try:
                if process.keep_record():
                    self._log.error("process record was removed; written anew", pid=process.pid)
                failure.over()
            except OSError as error:
                if failure.is_news(str(error)):
                    self._log.warning(
                        "process record was removed, and cannot be written: the next smgd does not"
                        " find this engine, and ends it to start another; trying again",
                        reason=str(error),
                    )

    async def _read(self, process: EngineProcess) -> None:
        await show_output(process, self.spec.name, self._log, lambda: self._is_expected)

    async def _pause(self, end: End | None) -> None:
        """Wait for the time of the next start."""
        if end is not None:
            (self._log.error if end.is_crash_loop else self._log.warning)(end.text)
            with trio.CancelScope(deadline=trio.current_time() + end.wait) as self._pausing:
                await trio.sleep_forever()
        if not self._is_expected:
            self.life.stopped()
            self._log.info("engine stopped")

    async def _worker_is_there(self) -> None:
        while not self._has_worker.is_set():
            await self._has_worker.wait()


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
