"""A supervisor of engines in memory, and what it says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
import trio
import trio.testing

from smgd.launch.plan import EngineSpec, Plan
from smgd.launch.strays import KILL_SECONDS
from smgd.launch.supervisor import Supervisor
from tests.launch.programs import MemoryPrograms
from tests.support import MemoryWorker

GRACE = 20.0
SPEC = EngineSpec(
    name="engine-1", url="ipc:///e/engine-1", argv=("run", "a b"), env={"TOKEN": "secret"}
)
PLAN = Plan("/e", engines=(SPEC,), warnings=("vllm argument -dp 2 is dropped",))

Lines = list[structlog.typing.EventDict]


def said(lines: Lines, level: str) -> list[str]:
    return [line["event"] for line in lines if line["log_level"] == level]


@asynccontextmanager
async def running(
    programs: MemoryPrograms, *, keep: bool = False, plan: Plan = PLAN, loading: bool = False
) -> AsyncIterator[Supervisor]:
    """Run a supervisor; at the end it must end by itself or have been stopped."""
    supervisor = Supervisor(
        plan, programs, keep=keep, stop_grace=GRACE, is_loading=lambda _: loading
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        await trio.testing.wait_all_tasks_blocked()
        yield supervisor
        with trio.fail_after(GRACE + 2 * KILL_SECONDS):
            await supervisor.stop()


def state(supervisor: Supervisor) -> str:
    return supervisor.engines[SPEC.url].life.state


def worker(state: str, url: str = SPEC.url) -> MemoryWorker:
    changed = MemoryWorker(url)
    changed.state = state  # type: ignore[assignment]
    return changed
