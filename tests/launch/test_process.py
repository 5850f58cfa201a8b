"""Engines as real processes: started, read, ended, left alive and found again."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
import structlog
import trio

from smgd.launch.plan import EngineSpec
from smgd.launch.process import EngineProcess, GuardedPrograms
from smgd.launch.records import began
from tests.launch.families import heeds_sigterm, marked, members, until
from tests.support import MEASURING, PATIENCE

STUBBORN = "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"
SLEEP = (sys.executable, "-c", "import time; print('up', flush=True); time.sleep(1000)")


@pytest.fixture
def mark() -> Iterator[str]:
    with marked() as word:
        yield word


def spec_of(directory: Path, *argv: str, **env: str) -> EngineSpec:
    return EngineSpec(name="engine-1", url=f"ipc://{directory}/engine-1", argv=argv, env=env)


def programs(environ: Mapping[str, str] = {}, *, keep: bool = False) -> GuardedPrograms:
    return GuardedPrograms({**os.environ, **environ}, keep=keep, stop_grace=5)


def names(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir())


async def read_all(process: EngineProcess) -> bytes:
    data = b""
    while part := await process.read():
        data += part
    return data


# ------------------------------------------------------------------------------- ends with smgd


async def test_output_and_status_of_an_engine(tmp_path: Path) -> None:
    process = programs().start(spec_of(tmp_path, "sh", "-c", "echo a; echo b >&2; exit 3"))
    with trio.fail_after(PATIENCE):
        assert await process.wait() == 3
        assert await read_all(process) == b"a\nb\n"
    process.terminate()
    process.close()
    process.close()
    assert process.log is None
    assert names(tmp_path) == []


async def test_the_environment_is_ours_and_its_own_but_not_what_is_for_us_alone(
    tmp_path: Path,
) -> None:
    script = 'echo "$OWN|$SHARED|$NOTIFY_SOCKET$WATCHDOG_USEC$LISTEN_FDS$LISTEN_PID$SMGD_API_KEY|"'
    for_smgd = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "1", "LISTEN_FDS": "1", "LISTEN_PID": "1"}
    ours = {"SHARED": "ours", "OWN": "ours", "SMGD_API_KEY": "sk-1", **for_smgd}
    process = programs(ours).start(spec_of(tmp_path, "sh", "-c", script, OWN="its"))
    with trio.fail_after(PATIENCE):
        assert await process.wait() == 0
        assert await read_all(process) == b"its|ours||\n"
    process.close()


async def test_terminate_ends_all_of_it(mark: str, tmp_path: Path) -> None:
    process = programs().start(spec_of(tmp_path, *SLEEP, mark))
    with trio.fail_after(PATIENCE):
        assert await process.read()
        assert len(members(mark)) == 2
        process.terminate()
        assert await process.wait() == 143
    process.close()
    assert members(mark) == []


async def test_what_is_not_there_ends_at_once_with_a_reason(tmp_path: Path) -> None:
    process = programs().start(spec_of(tmp_path, "/nonexistent/python"))
    with trio.fail_after(PATIENCE):
        assert await process.wait() == 127
        assert b"cannot start /nonexistent/python" in await read_all(process)
    process.close()


async def test_an_environment_that_cannot_be_is_no_start(tmp_path: Path) -> None:
    before = names(Path("/proc/self/fd"))
    huge = spec_of(tmp_path, "true", HUGE="x" * 2**22)
    with pytest.raises(OSError, match="Argument list too long"):
        programs().start(huge)
    with pytest.raises(OSError, match="Argument list too long"):
        programs(keep=True).start(huge)
    assert names(Path("/proc/self/fd")) == before


# ------------------------------------------------------------------------------- outlives smgd


async def test_an_engine_that_is_kept_is_found_again(mark: str, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, *SLEEP, mark, KEY="secret")
    first = programs(keep=True).start(spec)
    assert first.log == tmp_path / "engine-1.log"
    assert await first.read() == b""
    until((tmp_path / "engine-1.log").read_bytes)

    found = programs().find(spec)
    assert found is not None
    assert found.is_same
    assert (found.process.pid, found.process.log) == (first.pid, first.log)
    with trio.fail_after(PATIENCE):
        found.process.terminate()
        assert await found.process.wait() is None
        assert await first.wait() == 143
    found.process.close()
    first.close()
    assert members(mark) == []
    assert programs().find(spec) is None
    assert names(tmp_path) == ["engine-1.log"]


async def test_what_is_kept_about_an_engine_is_for_our_eyes_only(mark: str, tmp_path: Path) -> None:
    process = programs(keep=True).start(spec_of(tmp_path, *SLEEP, mark, KEY="secret"))
    for file in (tmp_path / name for name in names(tmp_path)):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert b"secret" not in file.read_bytes()
    process.terminate()
    with trio.fail_after(PATIENCE):
        assert await process.wait() == 143
    process.close()


@pytest.mark.parametrize(
    "change",
    [{"argv": ("other",)}, {"env": {"A": "1"}}, {"model": "/other"}, {"runtime": "sglang"}],
)
async def test_an_engine_with_another_command_or_model_is_told_apart(
    mark: str, tmp_path: Path, change: dict[str, object]
) -> None:
    spec = spec_of(tmp_path, *SLEEP, mark)
    process = programs(keep=True).start(spec)
    other = msgspec.structs.replace(spec, **change)
    found = programs(keep=True).find(other)
    assert found is not None
    assert not found.is_same
    found.process.close()
    process.terminate()
    with trio.fail_after(PATIENCE):
        await process.wait()
    process.close()


async def test_a_record_of_a_process_that_is_gone_finds_nothing(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "true")
    record = tmp_path / "engine-1.process.json"
    for pid in (2**22 - 1, os.getpid()):  # no such process; one that began at another time
        record.write_text(f'{{"pid": {pid}, "began": 1, "digest": ""}}')
        assert programs().find(spec) is None
        await programs().clear(spec)
        assert not record.exists()


def record_of(pid: int) -> str:
    return f'{{"pid": {pid}, "began": 1, "digest": ""}}'


@pytest.mark.parametrize(
    "text",
    ["", "{}", '{"pid": "1"}', "[]", *map(record_of, (99999999999, 2**31, 0, -1))],
)
async def test_a_damaged_record_finds_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "engine-1.process.json").write_text(text)
    assert programs().find(spec_of(tmp_path, "true")) is None


def test_a_record_that_cannot_be_read_finds_nothing_and_is_told_at_the_start(
    tmp_path: Path,
) -> None:
    spec = spec_of(tmp_path, "true")
    (tmp_path / "engine-1.process.json" / "x").mkdir(parents=True)
    assert programs().find(spec) is None
    with pytest.raises(OSError, match=r"engine-1\.process\.json"):
        programs(keep=True).start(spec)
    assert names(tmp_path) == ["engine-1.process.json"]


async def test_a_found_engine_has_the_grace_that_it_was_started_with(
    mark: str, tmp_path: Path
) -> None:
    spec = spec_of(tmp_path, *SLEEP, mark)
    first = GuardedPrograms(os.environ, keep=True, stop_grace=7).start(spec)
    found = programs().find(spec)
    assert found is not None
    assert (first.grace, found.process.grace) == (7, 7)
    found.process.close()
    await end(first)


async def test_that_an_engine_has_served_is_known_to_the_next_smgd(
    mark: str, tmp_path: Path
) -> None:
    spec = spec_of(tmp_path, *SLEEP, mark)
    first = programs(keep=True).start(spec)
    assert not first.served
    before = programs().find(spec)
    first.note_served()
    after = programs().find(spec)
    assert before is not None
    assert after is not None
    assert (before.process.served, after.process.served, after.is_same) == (False, True, True)
    before.process.close()
    after.process.close()
    await end(first)


async def test_a_record_that_was_removed_is_written_again_as_long_as_the_engine_lives(
    mark: str, tmp_path: Path
) -> None:
    directory = tmp_path / "sockets"
    directory.mkdir()
    spec = spec_of(directory, *SLEEP, mark)
    first = programs(keep=True).start(spec)
    first.note_served()
    record = directory / "engine-1.process.json"
    before = record.read_bytes()
    assert not first.keep_record()
    shutil.rmtree(directory)
    with pytest.raises(FileNotFoundError):
        first.keep_record()
    directory.mkdir()
    assert first.keep_record()
    assert record.read_bytes() == before
    found = programs().find(spec)
    assert found is not None
    assert (found.process.pid, found.process.served) == (first.pid, True)
    found.process.close()
    await end(first)
    assert not first.keep_record()
    assert names(directory) == []
    owned = programs().start(spec)
    assert not owned.keep_record()
    await end(owned)


async def test_an_engine_is_not_missed_for_want_of_descriptors(mark: str, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, *SLEEP, mark)
    first = programs(keep=True).start(spec)
    until(lambda: len(members(mark)) == 2)
    with few_descriptors(), pytest.raises(OSError, match="Too many open files"):
        programs().find(spec)
    for free in (1, 2):
        with few_descriptors(free), suppress(OSError):
            found = programs().find(spec)
            assert found is not None
            found.process.close()
    with few_descriptors(), pytest.raises(OSError, match="Too many open files"):
        await programs().clear(spec)
    assert (tmp_path / "engine-1.process.json").exists()
    assert len(members(mark)) == 2
    await end(first)


@contextmanager
def few_descriptors(free: int = 0) -> Iterator[None]:
    """Let no more than so many files be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    while taken[-1] != len(names(Path("/proc/self/fd"))) - 2:
        taken.append(os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + 1 + free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)


async def test_an_engine_that_cannot_be_watched_is_ended_at_once(
    mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_descriptor(_: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", no_descriptor)
    for keep in (False, True):
        with pytest.raises(OSError, match="Too many open files"):
            programs(keep=keep).start(spec_of(tmp_path, *SLEEP, mark))
    until(lambda: members(mark) == [])


async def end(process: EngineProcess) -> None:
    process.terminate()
    with trio.fail_after(PATIENCE):
        await process.wait()
    process.close()


# ------------------------------------------------------------------------------- left by guardians


@pytest.mark.parametrize("keep", [False, True])
async def test_when_somebody_kills_the_guardian_all_of_the_engine_is_ended(
    mark: str, tmp_path: Path, keep: bool
) -> None:
    outside = f"setsid {sys.executable} -c '{STUBBORN}' {mark}"
    command = ("sh", "-c", f"trap '' TERM; {outside} & {outside} & wait; wait", mark)
    spec = spec_of(tmp_path, *command)
    process = GuardedPrograms(os.environ, keep=keep, stop_grace=0.3).start(spec)
    until(lambda: len(members(mark)) == 4)
    if keep:
        found = programs().find(spec)
        assert found is not None
        process = found.process
    os.kill(process.pid, signal.SIGKILL)
    with structlog.testing.capture_logs() as lines, trio.fail_after(PATIENCE):
        status = await process.wait()
    assert status == (None if keep else 128 + signal.SIGKILL)
    process.close()
    assert members(mark) == []
    assert lines[0]["event"] == "processes are left of an earlier engine; ending them"
    assert (lines[0]["engine"], len(lines[0]["pids"])) == ("engine-1", 3)
    assert "engine-1.process.json" not in names(tmp_path)


TITLE = (
    "import signal, sys; signal.signal(15, signal.SIG_IGN);"
    "from setproctitle import setproctitle; setproctitle(sys.argv[1]);"
    "print('up', flush=True); signal.pause()"
)


@pytest.mark.parametrize("keeps_environment", [True, False])
async def test_processes_that_set_their_title_are_found(
    mark: str, tmp_path: Path, keeps_environment: bool
) -> None:
    clear = () if keeps_environment else ("env", "-u", "SPT_NOENV", "-u", MEASURING)
    process = programs().start(spec_of(tmp_path, *clear, sys.executable, "-c", TITLE, mark))
    with trio.fail_after(PATIENCE):
        assert (await process.read()).startswith(b"up")
    [pid] = set(members(mark)) - {process.pid}
    environ = environ_of(pid)
    assert (b"SMGD_ENGINE=" in environ, b"PATH=" in environ) == (keeps_environment,) * 2
    await killed(process, grace=0.3)
    assert members(mark) == []


def environ_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


CLEARED = ("env", "-i", sys.executable, "-c", STUBBORN)


async def killed(process: EngineProcess, grace: float) -> None:
    """Kill the guardian of an engine, and wait for the end of the rest."""
    os.kill(process.pid, signal.SIGKILL)
    process.grace = grace
    with trio.fail_after(PATIENCE):
        assert await process.wait() == 128 + signal.SIGKILL
    process.close()


async def test_processes_without_the_mark_are_found_by_their_session(
    mark: str, tmp_path: Path
) -> None:
    script = f"setsid {' '.join(CLEARED[:4])} '{STUBBORN}' {mark}-outside & exec \"$@\""
    spec = spec_of(tmp_path, "sh", "-c", script, "sh", *CLEARED, mark)
    process = programs(keep=True).start(spec)
    until(lambda: len(members(mark)) == 3)
    until(lambda: not any(map(heeds_sigterm, {*members(mark)} - {process.pid})))
    await killed(process, grace=0.3)
    until(lambda: len(members(mark)) == 1)
    assert members(f"{mark}-outside") != []  # who has left the session, too, is not known


async def test_the_next_smgd_ends_what_has_no_mark_by_the_record(mark: str, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, *CLEARED, mark)
    process = programs(keep=True).start(spec)
    until(lambda: len(members(mark)) == 2)
    until(lambda: not any(map(heeds_sigterm, {*members(mark)} - {process.pid})))
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: began(process.pid) == 0)
    assert len(members(mark)) == 1
    following = GuardedPrograms(os.environ, keep=True, stop_grace=0)
    assert following.find(spec) is None
    with trio.fail_after(PATIENCE):
        await following.clear(spec)
        assert members(mark) == []
        await process.wait()
    process.close()


async def test_sessions_of_the_living_are_let_alone(mark: str, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, *CLEARED, mark)
    process = programs().start(spec)
    until(lambda: len(members(mark)) == 2)
    other = msgspec.structs.replace(spec, name="engine-2", url=f"ipc://{tmp_path}/engine-2")
    (tmp_path / "engine-2.process.json").write_text(record_of(process.pid))
    assert programs().find(other) is None
    with trio.fail_after(PATIENCE):
        await programs().clear(other)
    assert len(members(mark)) == 2
    await killed(process, grace=0)


async def test_the_mark_stays_when_the_directory_is_made_anew(mark: str, tmp_path: Path) -> None:
    directory = tmp_path / "sockets"
    directory.mkdir()
    spec = spec_of(directory, *SLEEP, mark)
    process = programs(keep=True).start(spec)
    until(lambda: len(members(mark)) == 2)
    directory.rename(tmp_path / "former")
    directory.mkdir()
    with trio.fail_after(PATIENCE):
        await programs().clear(spec)
        assert members(mark) == []
        await process.wait()
    process.close()


async def test_what_is_left_of_an_engine_that_cannot_be_found_is_ended(
    mark: str, tmp_path: Path
) -> None:
    spec = spec_of(tmp_path, *SLEEP, mark)
    process = programs(keep=True).start(spec)
    until((tmp_path / "engine-1.log").read_bytes)
    (tmp_path / "engine-1.process.json").unlink()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with trio.fail_after(PATIENCE):
        for directory in (elsewhere, tmp_path / "none"):
            await programs().clear(spec_of(directory, *SLEEP))
        assert len(members(mark)) == 2
        await programs().clear(spec)
        assert members(mark) == []
        assert await process.wait() == 128 + signal.SIGTERM
    process.close()
