"""Who watches over the engines that smgd has started: one task an engine, for its whole life.

    run
    └─ one task an engine      find or start, wait for the end, wait, start again
        ├─ output              until there is no more of it
        └─ patience            ends an engine that runs and does not serve

What an end means is decided in `life`, what is shown of the output in `output`; processes are
behind the seam of `process`. A family of processes is ended by its guardian, so that leaving the
task, however that happens, is one signal and cannot block; `stop` is the way that also waits.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Sequence

import structlog
import trio

from smgd.config import LaunchConfig
from smgd.core import Worker, WorkerState
from smgd.launch.life import End, EngineLife
from smgd.launch.output import Output
from smgd.launch.plan import EngineSpec, Plan
from smgd.launch.process import EngineProcess, GuardedPrograms, Programs

log = structlog.get_logger("smgd.launch")

# An engine whose connection is lost ends by itself within some 7 s, unless it hangs: vLLM can lose
# one of its threads and live on for ever, deaf or dumb.
WEDGED_SECONDS = 30.0
# From the end of an engine to that of its output: somebody else may hold the other end of the pipe.
LAST_OUTPUT_SECONDS = 1.0
# From SIGKILL to the end of a process. Longer than this is a driver that does not let go.
KILL_SECONDS = 5.0


class ManagedEngine:
    """One engine that is to run: `life` is its state."""

    def __init__(self, spec: EngineSpec, programs: Programs, *, keep: bool) -> None:
        self.spec = spec
        self.life = EngineLife()
        self._programs = programs
        self._keep = keep
        self._wanted = True
        self._process: EngineProcess | None = None
        self._scope = trio.CancelScope()
        self._patience = trio.CancelScope()
        self._ended = trio.Event()
        self._log = log.bind(engine=spec.name)

    async def run(self) -> None:
        """Keep the engine running until `stop` or cancelled."""
        try:
            with self._scope:
                process = await self._left_over()
                while self._wanted:
                    end = await self._live(process)
                    process = None
                    await self._pause(end)
        finally:
            self.life.stopped()
            self._ended.set()

    async def stop(self, seconds: float) -> None:
        """End the engine, or let go of it if it is to be kept; return when that is done.

        After `seconds` it is left to its guardian.
        """
        self._wanted = False
        if self._process is not None and not self._keep:
            self._process.terminate()
        else:
            if self._process is not None:
                self._log.info("engine left running", pid=self._process.pid)
            self._scope.cancel(reason="the engine is not wanted any more")
        with trio.move_on_after(seconds) as patience:
            await self._ended.wait()
        if patience.cancelled_caught:
            self._log.error("engine does not end, not even by SIGKILL", pid=self.life.pid)
            self._scope.cancel(reason="the engine does not end")

    def worker_changed(self, state: WorkerState) -> None:
        """Hear whether the engine serves: one that did, and does not come back, is ended."""
        if state == "ready":
            self._patience.deadline = math.inf
        elif state == "not_ready":
            self._patience.deadline = trio.current_time() + WEDGED_SECONDS

    async def _left_over(self) -> EngineProcess | None:
        """Return the engine that an earlier smgd has left; one with another command is ended."""
        found = self._programs.find(self.spec)
        if found is None:
            return None
        process = found.process
        self._log.info(
            "engine found that was left running", pid=process.pid, output=str(process.log)
        )
        if found.is_same:
            return process
        self._log.warning("its command is another one than configured; ending it", pid=process.pid)
        process.terminate()
        await self._watch(process)
        return None

    async def _live(self, process: EngineProcess | None) -> End:
        """Live one life of the engine, in a process that was found or a new one."""
        try:
            process = process or self._start()
        except OSError as error:
            return self.life.not_started(str(error))
        self.life.started(trio.current_time(), process.pid)
        status = await self._watch(process)
        return self.life.ended(trio.current_time(), status)

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
        is_over = False
        try:
            async with trio.open_nursery() as watching:
                watching.start_soon(self._end_wedged, process)
                async with trio.open_nursery() as reading:
                    reading.start_soon(self._show_output, process)
                    status = await process.wait()
                    is_over = True
                    reading.cancel_scope.deadline = trio.current_time() + LAST_OUTPUT_SECONDS
                watching.cancel_scope.cancel(reason="the engine has ended")
            return status
        finally:
            self._process = None
            if not is_over and not self._keep:
                process.terminate()
            process.close()

    async def _show_output(self, process: EngineProcess) -> None:
        output = Output()
        try:
            while data := await process.read():
                self._show(output.feed(data, trio.current_time()))
        finally:
            self._show(output.finish())

    def _show(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._log.info(f"[{self.spec.name}] {line}")

    async def _end_wedged(self, process: EngineProcess) -> None:
        with trio.CancelScope() as self._patience:
            await trio.sleep_forever()
        self._log.warning(
            f"engine runs, and has not served for {WEDGED_SECONDS:g} s; ending it", pid=process.pid
        )
        process.terminate()

    async def _pause(self, end: End) -> None:
        if not self._wanted:
            self._log.info("engine stopped")
            return
        (self._log.error if end.is_crash_loop else self._log.warning)(end.text)
        await trio.sleep(end.wait)


class Supervisor:
    """All engines that smgd has started; `run` is their lives.

    `stop_grace` is how long (seconds) they get from SIGTERM to SIGKILL.
    """

    def __init__(self, plan: Plan, programs: Programs, *, keep: bool, stop_grace: float) -> None:
        self.engines = {spec.url: ManagedEngine(spec, programs, keep=keep) for spec in plan.engines}
        self._warnings = plan.warnings
        self._stop_seconds = stop_grace + KILL_SECONDS

    async def run(self) -> None:
        """Keep all engines running until `stop` or cancelled."""
        for text in self._warnings:
            log.warning(text)
        async with trio.open_nursery() as nursery:
            for engine in self.engines.values():
                nursery.start_soon(engine.run)

    async def stop(self) -> None:
        """End all engines, or let go of those that are kept; return when that is done."""
        async with trio.open_nursery() as nursery:
            for engine in self.engines.values():
                nursery.start_soon(engine.stop, self._stop_seconds)

    def worker_changed(self, worker: Worker) -> None:
        """Hear of a change of any worker, as the registry tells it."""
        if worker.url in self.engines:
            self.engines[worker.url].worker_changed(worker.state)


def supervisor_of(plan: Plan, launch: LaunchConfig) -> Supervisor:
    """Return what runs the engines of a plan as processes."""
    grace = launch.stop_grace
    programs = GuardedPrograms(os.environ, keep=launch.keep_engines, stop_grace=grace)
    return Supervisor(plan, programs, keep=launch.keep_engines, stop_grace=grace)
