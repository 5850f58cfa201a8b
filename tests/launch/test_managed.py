"""Engines are kept running, whatever they do; in memory, on a clock that jumps."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest
import structlog
import trio
import trio.testing
from trio.testing import MockClock

from smgd.launch.life import CRASH_LOOP, STABLE_SECONDS
from smgd.launch.managed import RECORD_SECONDS
from smgd.launch.output import BURST_LINES, LAST_WORDS
from smgd.launch.process import Found
from smgd.launch.strays import KILL_SECONDS
from smgd.launch.supervisor import Supervisor
from smgd.launch.wedged import WEDGED_SECONDS
from smgd.samples import ProcessSample
from tests.launch.programs import MemoryProcess, MemoryPrograms
from tests.launch.supervised import GRACE, PLAN, SPEC, Lines, running, said, state, worker

# ------------------------------------------------------------------------------- starting


async def test_an_engine_is_started_and_the_log_says_how(
    autojump_clock: MockClock, lines: Lines
) -> None:
    async with running(MemoryPrograms()) as supervisor:
        assert state(supervisor) == "running"
    assert said(lines, "warning") == ["vllm argument -dp 2 is dropped"]
    [started] = [line for line in lines if line["event"] == "engine started"]
    assert (started["engine"], started["pid"]) == ("engine-1", 100)
    assert started["command"] == "run 'a b'"
    assert "secret" not in str(lines)


@pytest.mark.parametrize("status", [0, 1, 137, None])
async def test_an_engine_that_ends_is_started_again_whatever_its_status(
    autojump_clock: MockClock, lines: Lines, status: int | None
) -> None:
    programs = MemoryPrograms()
    async with running(programs):
        await trio.sleep(STABLE_SECONDS)
        programs.process.end(status)
        await trio.sleep(1.5)
        assert len(programs.started) == 2
        assert programs.started[0].closed
        assert not programs.started[0].terminated
    assert said(lines, "warning")[1].endswith("after 60.0 s; next start in 1 s")


async def test_a_crash_loop_slows_down_and_is_reported(
    autojump_clock: MockClock, lines: Lines
) -> None:
    programs = MemoryPrograms()
    async with running(programs) as supervisor:
        for wait in (1, 2, 4, 8, 16, 32, 60, 60):
            programs.process.end(1)
            await trio.sleep(wait + 0.5)
            assert state(supervisor) == "running"
    at = programs.started_at
    waited = [1, 2.5, 4.5, 8.5, 16.5, 32.5, 60.5, 60.5]
    assert [b - a for a, b in pairwise(at)] == pytest.approx(waited)
    assert len(said(lines, "error")) == 8 - (CRASH_LOOP - 1)
    assert said(lines, "error")[0].startswith(
        "engine ended with status 1 after 0.5 s, the 5th time"
    )


async def test_the_waits_of_a_crash_loop(autojump_clock: MockClock, lines: Lines) -> None:
    programs = MemoryPrograms(failures=7)
    began = trio.current_time()
    async with running(programs) as supervisor:
        assert state(supervisor) == "waiting"
        await trio.sleep(1 + 2 + 4 + 8 + 16 + 32 + 60.5)
        assert state(supervisor) == "running"
    assert programs.started_at == [began + 123]
    texts = said(lines, "warning")[1:] + said(lines, "error")
    assert len(said(lines, "error")) == 7 - (CRASH_LOOP - 1)
    assert texts[0] == (
        "engine cannot be started: [Errno 11] Resource temporarily unavailable; next start in 1 s"
    )


async def test_what_no_process_can_be_given_is_no_end_of_smgd(
    autojump_clock: MockClock, lines: Lines
) -> None:
    programs = MemoryPrograms(failures=1, error=ValueError("embedded null byte"))
    async with running(programs):
        await trio.sleep(1.5)
        assert len(programs.started) == 1
    assert "engine cannot be started: embedded null byte; next start in 1 s" in said(
        lines, "warning"
    )


# ------------------------------------------------------------------------------- output


async def test_output_is_in_the_log_with_the_name_of_the_engine(
    autojump_clock: MockClock, lines: Lines
) -> None:
    programs = MemoryPrograms()
    async with running(programs):
        programs.process.print(b"Loading\nwei")
        await trio.testing.wait_all_tasks_blocked()
        assert said(lines, "info")[-1] == "[engine-1] Loading"
        programs.process.print(b"ghts\nTraceback")
        programs.process.end(1)
        await trio.sleep(0.5)
        last = [text for text in said(lines, "info") if text.startswith("[engine-1]")]
        assert last[1:] == ["[engine-1] weights", "[engine-1] Traceback"]


async def test_output_that_stays_open_holds_up_nothing(
    autojump_clock: MockClock, lines: Lines
) -> None:
    programs = MemoryPrograms()
    async with running(programs):
        programs.process.print(b"last words")
        programs.process.end(0, output_stays_open=True)
        await trio.sleep(2.5)
        assert len(programs.started) == 2
    assert "[engine-1] last words" in said(lines, "info")


async def test_what_is_held_back_is_shown_after_a_silence(
    autojump_clock: MockClock, lines: Lines
) -> None:
    programs = MemoryPrograms()
    async with running(programs):
        programs.process.print(b"line\n" * (BURST_LINES + 50))
        await trio.sleep(0.5)
        assert len(said(lines, "info")) == BURST_LINES + 1
        await trio.sleep(1)
        assert "[engine-1] ... 30 lines suppressed" in said(lines, "info")
        assert len(said(lines, "info")) == BURST_LINES + 1 + 1 + LAST_WORDS
        programs.process.print(b"later\n")
        await trio.testing.wait_all_tasks_blocked()
        assert said(lines, "info")[-1] == "[engine-1] later"


async def test_an_engine_that_prints_without_end_is_read_now_and_then(
    autojump_clock: MockClock, lines: Lines
) -> None:
    programs = MemoryPrograms()
    async with running(programs):
        for _ in range(101):
            programs.process.print(b"line\n" * BURST_LINES)
        await trio.sleep(0.505)
        assert 40 < programs.process.unread < 60
        await trio.sleep(0.6)
        assert programs.process.unread == 0


@pytest.mark.parametrize("stopped", [False, True])
async def test_last_words_are_told_as_warnings_where_output_is_not_logged(
    autojump_clock: MockClock, lines: Lines, stopped: bool
) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    programs = MemoryPrograms()
    try:
        async with running(programs) as supervisor:
            programs.process.print(b"why it died\nTraceback")
            await trio.sleep(0.1)
            if stopped:
                await supervisor.stop()
            else:
                programs.process.end(3)
                await trio.sleep(0.5)
    finally:
        structlog.reset_defaults()
    words = ["[engine-1] why it died", "[engine-1] Traceback"]
    end = "engine ended with status 3 after 0.1 s; next start in 1 s"
    assert said(lines, "warning") == [PLAN.warnings[0], *([] if stopped else [*words, end])]
    assert len(lines) == len(said(lines, "warning"))


# ------------------------------------------------------------------------------- wedged


async def test_an_engine_that_is_lost_and_lives_on_is_ended_and_started_again(
    autojump_clock: MockClock, lines: Lines
) -> None:
    programs = MemoryPrograms()
    async with running(programs) as supervisor:
        supervisor.worker_changed(worker("ready"))
        await trio.sleep(1000)
        supervisor.worker_changed(worker("not_ready"))
        await trio.sleep(WEDGED_SECONDS - 1)
        assert not programs.process.terminated
        await trio.sleep(3)
        assert programs.started[0].terminated == 1
        assert len(programs.started) == 2
        assert "engine runs, and has not served for 30 s; ending it" in said(lines, "warning")
        await trio.sleep(1000)  # the new one is not to blame for it
        assert len(programs.started) == 2


async def test_an_engine_that_comes_back_in_time_is_left_alone(
    autojump_clock: MockClock, lines: Lines
) -> None:
    programs = MemoryPrograms()
    async with running(programs) as supervisor:
        for _ in range(3):
            supervisor.worker_changed(worker("not_ready"))
            await trio.sleep(WEDGED_SECONDS - 1)
            supervisor.worker_changed(worker("ready"))
        supervisor.worker_changed(worker("not_ready", "ipc:///another"))
        await trio.sleep(1000)
        assert not programs.process.terminated


async def test_an_engine_that_takes_long_to_load_is_left_alone(
    autojump_clock: MockClock, lines: Lines
) -> None:
    programs = MemoryPrograms()
    async with running(programs) as supervisor:
        supervisor.worker_changed(worker("pending"))
        await trio.sleep(10_000)
        assert not programs.process.terminated


async def test_a_change_of_a_worker_that_is_not_ready_renews_no_patience(
    autojump_clock: MockClock, lines: Lines
) -> None:
    programs = MemoryPrograms()
    async with running(programs) as supervisor:
        supervisor.worker_changed(worker("ready"))
        for _ in range(3):
            supervisor.worker_changed(worker("not_ready"))
            await trio.sleep(WEDGED_SECONDS / 2)
        assert programs.started[0].terminated == 1


async def test_an_engine_that_loads_anew_in_the_process_that_is_there_is_left_alone(
    autojump_clock: MockClock, lines: Lines
) -> None:
    programs = MemoryPrograms()
    async with running(programs, loading=True) as supervisor:
        supervisor.worker_changed(worker("ready"))
        supervisor.worker_changed(worker("not_ready"))
        await trio.sleep(1000)
        assert not programs.process.terminated
        supervisor.worker_changed(worker("ready"))


# ------------------------------------------------------------------------------- its worker


async def test_an_engine_ends_with_its_worker_and_is_started_with_the_next(
    autojump_clock: MockClock, lines: Lines
) -> None:
    programs = MemoryPrograms()
    async with running(programs) as supervisor:
        supervisor.worker_changed(worker("ready"))
        supervisor.worker_changed(worker("draining"))
        before = programs.process.terminated
        supervisor.worker_changed(worker("draining"), removed=True)
        await trio.sleep(1000)
        assert (before, programs.process.terminated) == (0, 1)
        assert supervisor.process(SPEC.url) == ProcessSample("stopped", 1, 0)
        supervisor.worker_changed(worker("pending"))
        await trio.testing.wait_all_tasks_blocked()
        assert state(supervisor) == "running"
        assert len(programs.started) == 2
    assert "its worker was removed or has failed; ending the engine" in said(lines, "info")
    assert said(lines, "warning") == [PLAN.warnings[0]]


async def test_an_engine_that_waits_for_its_next_start_waits_for_a_worker_then(
    autojump_clock: MockClock, lines: Lines
) -> None:
    programs = MemoryPrograms(failures=4)
    async with running(programs) as supervisor:
        await trio.sleep(5)
        for _ in range(2):
            supervisor.worker_changed(worker("failed"), removed=True)
        await trio.sleep(1000)
        assert (state(supervisor), programs.started) == ("stopped", [])
        supervisor.worker_changed(worker("pending"))
        supervisor.worker_changed(worker("pending"), removed=True)
        await trio.sleep(1000)
        assert (state(supervisor), programs.started) == ("stopped", [])
        supervisor.worker_changed(worker("pending"))
        await trio.sleep(10)
        assert state(supervisor) == "running"


async def test_an_engine_without_a_worker_ends_also_if_it_is_to_be_kept(
    autojump_clock: MockClock, lines: Lines
) -> None:
    programs = MemoryPrograms(stubborn=True)
    async with running(programs, keep=True) as supervisor:
        supervisor.worker_changed(worker("draining"), removed=True)
        await trio.sleep(1)
        assert programs.process.terminated == 1
        programs.process.end(0)
        await trio.sleep(1)
        assert state(supervisor) == "stopped"


async def test_an_engine_that_is_being_ended_is_no_crash_when_its_worker_comes_back(
    autojump_clock: MockClock, lines: Lines
) -> None:
    programs = MemoryPrograms(stubborn=True)
    async with running(programs) as supervisor, trio.open_nursery() as nursery:
        await supervisor.gone(SPEC.url)  # nobody ends it: at once
        await supervisor.gone("ipc:///another")
        supervisor.worker_changed(worker("ready"))
        supervisor.worker_changed(worker("draining"), removed=True)
        gone = trio.Event()

        async def wait_for_the_end() -> None:
            await supervisor.gone(SPEC.url)
            gone.set()

        nursery.start_soon(wait_for_the_end)
        await trio.sleep(5)
        supervisor.worker_changed(worker("pending"))
        await trio.sleep(WEDGED_SECONDS + 5)
        assert (gone.is_set(), len(programs.started)) == (False, 1)
        programs.process.print(b"bye")
        programs.process.end(143)
        await trio.testing.wait_all_tasks_blocked()
        assert gone.is_set()
        assert supervisor.process(SPEC.url) == ProcessSample("running", 2, 0, 101)
        programs.process.end(1)  # that one was told nothing
        await trio.sleep(0.5)
        assert state(supervisor) == "waiting"
        await trio.sleep(1)
        programs.process.end(0)
    assert "engine was ended by SIGTERM" not in str(lines)
    ended = [text for text in said(lines, "warning") if text.startswith("engine ended")]
    assert len(ended) == 1
    assert ended[0].startswith("engine ended with status 1 after")


# ------------------------------------------------------------------------------- stopping


async def test_stop_ends_the_engine_and_starts_no_other(
    autojump_clock: MockClock, lines: Lines
) -> None:
    programs = MemoryPrograms()
    async with running(programs) as supervisor:
        await supervisor.stop()
        assert state(supervisor) == "stopped"
        assert programs.process.terminated == 1
        await trio.sleep(1000)
        assert len(programs.started) == 1
    assert said(lines, "info")[-1] == "engine stopped"


async def test_stop_between_two_lives_is_at_once(autojump_clock: MockClock, lines: Lines) -> None:
    async with running(MemoryPrograms(failures=99)) as supervisor:
        await trio.sleep(100)
        began = trio.current_time()
        await supervisor.stop()
        assert trio.current_time() == began
        assert state(supervisor) == "stopped"


async def test_stop_does_not_wait_for_ever(autojump_clock: MockClock, lines: Lines) -> None:
    async with running(MemoryPrograms(stubborn=True)) as supervisor:
        began = trio.current_time()
        await supervisor.stop()
        assert trio.current_time() == began + GRACE + KILL_SECONDS
    assert said(lines, "error") == ["engine does not end, not even by SIGKILL"]


async def test_an_engine_that_was_taken_over_has_the_grace_that_it_was_started_with(
    autojump_clock: MockClock, lines: Lines
) -> None:
    programs = MemoryPrograms()
    left = MemoryProcess(7, stubborn=True, grace=2 * GRACE)
    programs.left = Found(left, is_same=True)
    async with trio.open_nursery() as nursery:
        supervisor = Supervisor(PLAN, programs, keep=False, stop_grace=GRACE)
        nursery.start_soon(supervisor.run)
        await trio.sleep(1)
        nursery.start_soon(supervisor.stop)
        await trio.sleep(2 * GRACE)
        left.end(None)
    assert said(lines, "error") == []
    assert said(lines, "info")[-1] == "engine stopped"


async def test_an_engine_that_takes_long_to_end_is_not_taken_for_one_that_hangs(
    autojump_clock: MockClock, lines: Lines
) -> None:
    programs = MemoryPrograms(stubborn=True)
    async with trio.open_nursery() as nursery:
        supervisor = Supervisor(PLAN, programs, keep=False, stop_grace=10 * WEDGED_SECONDS)
        nursery.start_soon(supervisor.run)
        await trio.sleep(1)
        supervisor.worker_changed(worker("ready"))
        supervisor.worker_changed(worker("not_ready"))
        nursery.start_soon(supervisor.stop)
        await trio.sleep(1)
        supervisor.worker_changed(worker("not_ready"))
        await trio.sleep(9 * WEDGED_SECONDS)
        programs.process.end(0)
    assert said(lines, "warning") == [PLAN.warnings[0]]


async def test_an_engine_does_not_outlive_the_task_that_owns_it(
    autojump_clock: MockClock, lines: Lines
) -> None:
    programs = MemoryPrograms()
    supervisor = Supervisor(PLAN, programs, keep=False, stop_grace=GRACE)
    with trio.move_on_after(1):
        await supervisor.run()
    assert programs.process.terminated == 1
    assert programs.process.closed
    assert state(supervisor) == "stopped"


# ------------------------------------------------------------------------------- kept engines


async def test_an_engine_that_is_kept_is_left_running_at_stop(
    autojump_clock: MockClock, lines: Lines
) -> None:
    programs = MemoryPrograms()
    async with running(programs, keep=True) as supervisor:
        await supervisor.stop()
        assert state(supervisor) == "stopped"
    assert not programs.process.terminated
    assert programs.process.closed
    assert said(lines, "info")[-1] == "engine left running"


async def test_an_engine_that_was_left_is_taken_over_and_watched(
    autojump_clock: MockClock, lines: Lines
) -> None:
    programs = MemoryPrograms()
    left = MemoryProcess(7)
    programs.left = Found(left, is_same=True)
    async with running(programs) as supervisor:
        assert supervisor.engines[SPEC.url].life.pid == 7
        assert programs.started == []
        left.end(None)
        await trio.sleep(1.5)
        assert len(programs.started) == 1
    assert "engine found that was left running" in said(lines, "info")
    assert "engine ended after 0.0 s; next start in 1 s" in said(lines, "warning")
    assert programs.process.terminated == 1


async def test_an_engine_that_was_left_and_is_another_is_ended_first(
    autojump_clock: MockClock, lines: Lines
) -> None:
    programs = MemoryPrograms()
    left = MemoryProcess(7, stubborn=True)
    programs.left = Found(left, is_same=False)
    async with running(programs) as supervisor:
        assert left.terminated == 1
        assert "its command or its model is another one than configured; ending it" in said(
            lines, "warning"
        )
        assert programs.started == []
        left.end(None)
        await trio.testing.wait_all_tasks_blocked()
        assert left.closed
        assert supervisor.engines[SPEC.url].life.pid == 100


async def test_nothing_is_started_beside_what_is_left_of_an_engine(
    autojump_clock: MockClock, lines: Lines
) -> None:
    programs = MemoryPrograms()
    async with running(programs):
        assert programs.cleared == 1
        programs.left = None


def served(pid: int = 7) -> Found:
    return Found(MemoryProcess(pid, served=True), is_same=True)


async def test_an_engine_that_has_served_and_is_not_found_by_its_worker_is_started_again(
    autojump_clock: MockClock, lines: Lines
) -> None:
    programs = MemoryPrograms()
    programs.left = served()
    async with running(programs) as supervisor:
        supervisor.worker_changed(worker("pending"))
        await trio.sleep(WEDGED_SECONDS - 1)
        assert programs.started == []
        await trio.sleep(3)
        assert len(programs.started) == 1
        await trio.sleep(1000)  # that one may load for as long as it takes
        assert len(programs.started) == 1
    assert "engine runs, and has not served for 30 s; ending it" in said(lines, "warning")


@pytest.mark.parametrize("at", ["before", "after"])
async def test_an_engine_that_is_adopted_is_left_alone(
    autojump_clock: MockClock, lines: Lines, at: str
) -> None:
    programs = MemoryPrograms()
    programs.left = served()
    supervisor = Supervisor(PLAN, programs, keep=False, stop_grace=GRACE)
    if at == "before":
        supervisor.worker_changed(worker("ready"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        await trio.sleep(1)
        supervisor.worker_changed(worker("ready"))
        await trio.sleep(1000)
        assert programs.started == []
        await supervisor.stop()


async def test_an_engine_that_was_loading_when_it_was_left_has_all_the_time(
    autojump_clock: MockClock, lines: Lines
) -> None:
    programs = MemoryPrograms()
    left = MemoryProcess(7)
    programs.left = Found(left, is_same=True)
    async with running(programs) as supervisor:
        supervisor.worker_changed(worker("pending"))
        await trio.sleep(10_000)
        assert programs.started == []
        supervisor.worker_changed(worker("ready"))
        assert left.served
        left.end(0)
        await trio.sleep(2)


async def test_a_record_that_cannot_be_written_is_told(
    autojump_clock: MockClock, lines: Lines
) -> None:
    programs = MemoryPrograms()
    async with running(programs) as supervisor:
        programs.process.record_error = OSError(28, "No space left on device")
        supervisor.worker_changed(worker("ready"))
    [told] = [line for line in lines if line["event"].startswith("process record not written")]
    assert told["reason"] == "[Errno 28] No space left on device"


async def test_a_record_that_was_removed_is_written_again(
    autojump_clock: MockClock, lines: Lines
) -> None:
    programs = MemoryPrograms()
    async with running(programs, keep=True):
        process = programs.process
        process.record_error = OSError(2, "No such file or directory")
        process.record_is_removed = True
        await trio.sleep(3 * RECORD_SECONDS + 1)
        [told] = said(lines, "warning")[1:]
        assert told.startswith("process record was removed, and cannot be written")
        process.record_error = None
        await trio.sleep(3 * RECORD_SECONDS)
        assert not process.record_is_removed
    assert said(lines, "error") == ["process record was removed; written anew"]


async def test_nothing_is_started_as_long_as_it_is_not_clear_what_runs(
    autojump_clock: MockClock, lines: Lines
) -> None:
    programs = MemoryPrograms()
    programs.left = served()
    programs.find_errors = [OSError(24, "Too many open files")] * 3
    async with running(programs) as supervisor:
        await trio.sleep(6.5)
        assert (state(supervisor), programs.cleared) == ("waiting", 0)
        await trio.sleep(1)
        assert supervisor.engines[SPEC.url].life.pid == 7
    assert programs.started == []
    text = "engine cannot be started: [Errno 24] Too many open files; next start in 1 s"
    assert text in said(lines, "warning")
