"""Engines hear of their own workers, and what is known of them is told; in memory."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import trio
import trio.testing
from trio.testing import MockClock

from smgd.launch.plan import EngineSpec, Plan
from smgd.launch.records import ProcessRecord
from smgd.launch.strays import KILL_SECONDS
from smgd.launch.wedged import WEDGED_SECONDS
from smgd.samples import ProcessSample
from tests.launch.programs import MemoryPrograms
from tests.launch.supervised import GRACE, SPEC, Lines, running, worker

OTHER = EngineSpec(name="engine-2", url="ipc:///e/engine-2", argv=("run",), env={})


async def test_how_an_engine_fares(autojump_clock: MockClock, lines: Lines) -> None:
    programs = MemoryPrograms()
    async with running(programs) as supervisor:
        programs.process.end(137)
        await trio.testing.wait_all_tasks_blocked()
        waiting = ProcessSample("waiting", 1, 1, None, "was ended by SIGKILL after 0.0 s")
        assert supervisor.process(SPEC.url) == waiting
        await trio.sleep(1.5)
        assert supervisor.processes() == {
            SPEC.url: ProcessSample("running", 2, 1, 101, "was ended by SIGKILL after 0.0 s")
        }
        assert supervisor.process("ipc:///another") is None


async def test_an_engine_hears_of_its_own_worker_alone(
    autojump_clock: MockClock, lines: Lines
) -> None:
    programs = MemoryPrograms()
    async with running(programs, plan=Plan("/e", engines=(SPEC, OTHER))) as supervisor:
        for spec in (SPEC, OTHER):
            supervisor.worker_changed(worker("ready", spec.url))
        supervisor.worker_changed(worker("not_ready", OTHER.url))
        supervisor.worker_changed(worker("not_ready", "ipc:///another"))
        await trio.sleep(WEDGED_SECONDS + 1.5)
        starts = {url: sample.starts for url, sample in supervisor.processes().items()}
        assert starts == {SPEC.url: 1, OTHER.url: 2}
        supervisor.worker_changed(worker("draining"), removed=True)
        await trio.testing.wait_all_tasks_blocked()
        states = {url: sample.state for url, sample in supervisor.processes().items()}
        assert states == {SPEC.url: "stopped", OTHER.url: "running"}


async def test_stop_ends_all_engines_at_a_time(autojump_clock: MockClock, lines: Lines) -> None:
    programs = MemoryPrograms(stubborn=True)
    async with running(programs, plan=Plan("/e", engines=(SPEC, OTHER))) as supervisor:
        began = trio.current_time()
        await supervisor.stop()
        assert trio.current_time() == began + GRACE + KILL_SECONDS
        assert [process.terminated for process in programs.started] == [1, 1]


async def test_engines_that_nobody_would_miss_are_told(
    autojump_clock: MockClock, lines: Lines, tmp_path: Path
) -> None:
    alive = ProcessRecord.of(os.getppid(), "", 1.0)
    for name in ("engine-1", "engine-2"):
        (tmp_path / f"{name}.process.json").write_bytes(msgspec.json.encode(alive))
    async with running(MemoryPrograms(), plan=Plan(str(tmp_path), engines=(SPEC,))):
        pass
    [told] = [line for line in lines if line["log_level"] == "warning"]
    text = "engine runs that was kept and is not configured any more; to end it: kill"
    assert told["event"] == f"{text} {os.getppid()}"
    assert told["engine"] == "engine-2"
