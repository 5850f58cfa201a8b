"""Engines as real processes: started, read, ended, left alive and found again."""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
import structlog
import trio

from smgd.launch.plan import EngineSpec
from smgd.launch.process import EngineProcess, GuardedPrograms
from tests.launch.families import PATIENCE, marked, members, until

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
        assert not record.exists()


@pytest.mark.parametrize("text", ["", "{}", '{"pid": "1"}', "[]"])
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
    (tmp_path / "engine-1.process.json").unlink()
    first.note_served()  # a record that somebody has removed does not come back
    assert names(tmp_path) == ["engine-1.log"]
    await end(first)


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
