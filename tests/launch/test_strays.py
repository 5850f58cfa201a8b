"""What is left of an engine is looked for, and ended; real processes are in test_process."""

from __future__ import annotations

import errno
import os
import signal
import threading
from pathlib import Path

import pytest
import structlog
import trio
from trio.testing import MockClock

from smgd.launch import strays
from smgd.launch.plan import EngineSpec
from smgd.launch.strays import KILL_SECONDS, Strays, Traces
from tests.support import PATIENCE

TRACES = Traces("engine-1", "mark")


def spec_in(directory: Path, name: str = "engine-1") -> EngineSpec:
    return EngineSpec(name=name, url=f"ipc://{directory}/{name}", argv=(), env={})


def test_the_mark_is_that_of_a_path_however_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = Traces.of(spec_in(tmp_path)).mark
    assert mark.endswith(f"{tmp_path}/engine-1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    for same in (Path(), tmp_path / "link"):
        assert Traces.of(spec_in(same)).mark == mark
    assert Traces.of(spec_in(tmp_path / "other")).mark != mark
    assert Traces.of(spec_in(tmp_path, "engine-2")).mark != mark
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert Traces.of(spec_in(tmp_path)).mark != mark


async def test_one_looks_after_the_other_and_nobody_waits_for_a_look_when_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looking: list[Traces] = []
    goes_on = threading.Event()
    looked = 0

    def find(traces: Traces) -> set[int]:
        nonlocal looked
        looking.append(traces)
        goes_on.wait(2 * PATIENCE)
        looked += 1
        return set()

    monkeypatch.setattr(strays, "_find", find)
    hunt = Strays()
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(hunt.end, TRACES, 1.0)
        await trio.sleep(0.1)
        with trio.fail_after(PATIENCE):
            while not looking:  # noqa: ASYNC110 - a thread's doing
                await trio.sleep(0.001)
        nursery.cancel_scope.cancel()
    assert (looking, looked) == ([TRACES], 0)
    goes_on.set()
    with trio.fail_after(PATIENCE):
        await hunt.end(TRACES, 1.0)
    assert looking == [TRACES] * 2


async def test_what_sigkill_does_not_end_is_told_once_and_waited_for(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    sent: list[signal.Signals] = []
    began = trio.current_time()

    def find(_: Traces) -> set[int]:
        return {7} if trio.from_thread.run_sync(trio.current_time) < began + 30 else set()

    def send(_: int, number: signal.Signals, __: Traces) -> bool:
        sent.append(number)
        return len(sent) > 1  # the first could not be sent

    monkeypatch.setattr(strays, "_find", find)
    monkeypatch.setattr(strays, "_send", send)
    with structlog.testing.capture_logs() as lines:
        await Strays().end(TRACES, 10.0)
    assert 30 <= trio.current_time() - began < 31
    assert sent[:2] == [signal.SIGTERM] * 2
    assert set(sent[2:]) == {signal.SIGKILL}
    assert KILL_SECONDS < 20
    assert [line["event"] for line in lines] == [
        "processes are left of an earlier engine; ending them",
        "processes of an earlier engine do not end, not even by SIGKILL",
    ]
    assert [line["pids"] for line in lines] == [[7], [7]]


async def test_what_cannot_be_looked_at_is_not_taken_for_nothing(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    answers = [OSError(errno.EMFILE, "Too many open files")] * 3

    def find(_: Traces) -> set[int]:
        if answers:
            raise answers.pop()
        return set()

    monkeypatch.setattr(strays, "_find", find)
    with structlog.testing.capture_logs() as lines:
        await Strays().end(TRACES, 1.0)
    [told] = lines
    assert told["event"] == "cannot look for processes of an earlier engine; trying again"
    assert told["reason"] == "[Errno 24] Too many open files"


async def test_a_signal_that_cannot_be_sent_is_no_end_of_smgd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_descriptor(_: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", no_descriptor)
    found = [{os.getppid()}, set()]
    monkeypatch.setattr(strays, "_find", lambda _: found.pop(0))
    with trio.fail_after(PATIENCE):
        await Strays().end(TRACES, 1.0)
    assert found == []
