"""What SIGUSR1 shows: every task, under its owner, with the line at which it waits."""

from __future__ import annotations

import pytest
import structlog
import trio
from trio.testing import wait_all_tasks_blocked

from smgd import tasks


async def sleeper() -> None:
    await trio.sleep_forever()


async def owner() -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sleeper)
        nursery.start_soon(sleeper)


async def test_the_tree_has_every_task_under_its_owner(nursery: trio.Nursery) -> None:
    nursery.start_soon(owner)
    await wait_all_tasks_blocked()
    with structlog.testing.capture_logs() as lines:
        tasks.dump()
    names = [line["name"].rpartition(".")[2] for line in lines if line["event"] == "task"]
    at = names.index("owner")
    assert names[at : at + 3] == ["owner", "sleeper", "sleeper"]
    depths = [line["depth"] for line in lines[at : at + 3]]
    assert depths == [depths[0], depths[0] + 1, depths[0] + 1]
    assert lines[at + 1]["at"].startswith("tests.test_tasks:")
    assert lines[at + 1]["at"].endswith(" sleeper")
    assert lines[-1]["event"] == "tasks dumped"
    assert lines[-1]["tasks"] == lines[-1]["shown"] == len(names)
    nursery.cancel_scope.cancel()


async def test_of_many_tasks_the_first_are_shown(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "MAX_LINES", 10)
    for _ in range(30):
        nursery.start_soon(sleeper)
    await wait_all_tasks_blocked()
    with structlog.testing.capture_logs() as lines:
        tasks.dump()
    assert len(lines) == 11
    assert lines[-1]["tasks"] > 30
    nursery.cancel_scope.cancel()
