"""Sockets that are bound, and whose files somebody takes away: real files, sockets in memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock

from smgd.engine import paths
from smgd.engine.binding import Binding
from smgd.engine.transport import WorkerSockets
from smgd.errors import WorkerError
from tests.engine_unit.memory import MemoryWorker
from tests.engine_unit.test_claim import listener

GONE = "files of this worker were removed or replaced; making them anew"
BACK = "files of this worker are in place again"
OBSTACLE = "cannot bind again; will retry"


class Bench:
    """A binding and the worker whose sockets it binds."""

    def __init__(self, directory: Path) -> None:
        self.addresses = paths.derive(f"ipc://{directory}/dir/engine-0")
        self.engine = MemoryWorker()
        self.binding = Binding(self.addresses, self.engine.bind, 1, structlog.get_logger())

    @contextmanager
    def claimed(self) -> Iterator[list[Any]]:
        """Give what is logged meanwhile."""
        with capture_logs() as logs, self.binding.claim:
            yield logs

    def files(self) -> list[bool]:
        addresses = self.addresses
        return [path.exists() for path in (addresses.lock, *addresses.sockets)]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def events(logs: list[Any]) -> list[str]:
    return [log["event"] for log in logs]


async def looked(bench: Bench, sockets: WorkerSockets, times: int = 2) -> None:
    for _ in range(times):
        bench.binding.look(sockets)


@pytest.mark.parametrize("which", [[0], [1], [0, 1]])
async def test_socket_files_that_are_removed_are_made_anew(bench: Bench, which: list[int]) -> None:
    with bench.claimed() as logs:
        sockets = await bench.binding.first()
        await looked(bench, sockets)
        assert logs == []
        gone = [bench.addresses.sockets[index] for index in which]
        kept = [path for path in bench.addresses.sockets if path not in gone]
        before = [path.stat().st_ino for path in kept]
        for path in gone:
            path.unlink()
        await looked(bench, sockets)
        assert bench.files() == [True, True, True]
        assert [path.stat().st_ino for path in kept] == before
        assert events(logs) == [GONE, BACK]
        assert logs[0]["files"] == list(map(str, gone))
        assert bench.engine.binds == 1, "the sockets are the same"
    assert bench.files() == [False, False, False]


async def test_a_directory_that_is_removed_is_made_anew(bench: Bench) -> None:
    with bench.claimed() as logs:
        sockets = await bench.binding.first()
        shutil.rmtree(bench.addresses.lock.parent)
        await looked(bench, sockets)
        assert bench.files() == [True, True, True]
        assert len(logs[0]["files"]) == 3


async def test_a_lock_that_is_removed_is_taken_anew(bench: Bench) -> None:
    with bench.claimed() as logs:
        sockets = await bench.binding.first()
        bench.addresses.lock.unlink()
        await looked(bench, sockets)
        assert (events(logs), logs[0]["files"]) == ([GONE, BACK], [str(bench.addresses.lock)])


async def test_a_path_that_somebody_else_uses_is_told_once_and_taken_when_it_is_free(
    bench: Bench,
) -> None:
    path, _ = bench.addresses.sockets
    with bench.claimed() as logs:
        sockets = await bench.binding.first()
        path.unlink()
        with listener(path):
            await looked(bench, sockets, 3)
            assert events(logs) == [GONE, OBSTACLE]
            assert "is in use by the process with pid" in logs[1]["reason"]
            path.unlink()
            path.write_text("")
            await looked(bench, sockets, 3)
            assert events(logs[2:]) == [OBSTACLE]
            assert "is not a socket; refusing to unlink" in logs[2]["reason"]
            assert path.read_text() == ""
        path.unlink()
        await looked(bench, sockets)
        assert events(logs[3:]) == [BACK]
        for _ in range(2):  # each time is news
            path.unlink()
            bench.binding.look(sockets)
        assert events(logs[4:]) == [GONE, BACK] * 2


async def test_of_two_files_one_may_come_back_before_the_other(bench: Bench) -> None:
    with bench.claimed() as logs:
        sockets = await bench.binding.first()
        for path in bench.addresses.sockets:
            path.unlink()
        bench.engine.output.bind_errors = [WorkerError("cannot bind it: No space left")] * 2
        await looked(bench, sockets, 4)
        assert events(logs) == [GONE, OBSTACLE, GONE, BACK]
        assert logs[2]["files"] == [str(bench.addresses.sockets[1])]
    assert bench.files() == [False, False, False]


async def test_sockets_that_have_failed_are_bound_where_their_files_are(
    bench: Bench, autojump_clock: MockClock
) -> None:
    with bench.claimed() as logs:
        await bench.binding.first()
        bench.engine.bind_errors = [WorkerError("cannot bind x: Address already in use")]
        sockets = await bench.binding.again()
        assert trio.current_time() == 2
        assert events(logs) == [OBSTACLE]
        await looked(bench, sockets)
        path, _ = bench.addresses.sockets
        path.unlink()
        with listener(path):  # before it is bound again
            with trio.move_on_after(5) as scope:
                await bench.binding.again()
            assert scope.cancelled_caught
            assert path.exists()
        assert "is in use by the process" in logs[-1]["reason"]
        await looked(bench, await bench.binding.again())
