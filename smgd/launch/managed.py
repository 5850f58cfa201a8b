"""One engine that is kept running: a task for its whole life, and what is told of its worker.

    run                        find or start, wait for the end, wait, start again
    ├─ output                  until there is no more of it
    ├─ record                  is written again when somebody has removed it
    └─ wedged                  ends an engine that runs and does not serve

What an end means is decided in `life`, what is shown of the output in `reader`; processes are
behind the seam of `process`. A family of processes is ended by its guardian, so that leaving the
task, however that happens, is one signal and cannot block; `stop` is the way that also waits.

An engine and its worker go together: when the worker is removed, the engine ends, and when there is
one again, it is started. Whoever removes the worker wants the GPU, and nothing else says so. An
engine that was told to end serves nobody any more: the next worker waits for its end (`gone`).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import partial

import structlog
import trio

from smgd.core import WorkerState
from smgd.launch.life import End, EngineLife
from smgd.launch.plan import EngineSpec
from smgd.launch.process import EngineProcess, Found, Programs
from smgd.launch.reader import show_output
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
        self._is_told_to_end = False  # the latest process
        self._wedged = Wedged(self._is_loading)  # likewise
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
