"""The parent of an engine ends when all of the engine has, and sees to it that all of it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from smgd.launch import guardian
from tests.launch.families import marked, members, until
from tests.support import PATIENCE

PYTHON = (sys.executable, "-I", "-S")
STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True);"
    "signal.pause()"
)

Popen = subprocess.Popen[str]


@pytest.fixture
def mark() -> Iterator[str]:
    with marked() as word:
        yield word


def start(*command: str, grace: float = 2 * PATIENCE, parent: int | None = None) -> Popen:
    parent = os.getpid() if parent is None else parent
    arguments = [*PYTHON, guardian.__file__, str(grace), str(parent), *command]
    pipe = subprocess.PIPE
    return subprocess.Popen(arguments, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def run(
    *command: str, grace: float = 2 * PATIENCE, parent: int | None = None
) -> tuple[int, str, str]:
    with start(*command, grace=grace, parent=parent) as process:
        out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


def sleeper(mark: str) -> list[str]:
    """Return a command that sleeps and has the word in its command line."""
    return [*PYTHON, "-c", "import time; print('up', flush=True); time.sleep(1000)", mark]


def wait_up(process: Popen) -> None:
    assert process.stdout is not None
    assert process.stdout.readline()


# ------------------------------------------------------------------------------- its status


@pytest.mark.parametrize(
    ("script", "status"), [("exit 0", 0), ("exit 3", 3), ("kill -KILL $$", 137)]
)
def test_the_status_is_that_of_the_command(script: str, status: int) -> None:
    assert run("sh", "-c", script) == (status, "", "")


def test_output_goes_where_that_of_the_guardian_does() -> None:
    assert run("sh", "-c", "echo out; echo err >&2") == (0, "out\n", "err\n")


def test_a_command_that_is_not_there_is_told() -> None:
    status, _, err = run("/nonexistent/engine")
    assert (status, err) == (
        guardian.EXIT_NOT_STARTED,
        "cannot start /nonexistent/engine: No such file or directory\n",
    )


def test_a_command_starts_with_clean_signals_and_no_descriptor_of_ours() -> None:
    read, write = os.pipe()
    os.set_inheritable(write, True)
    script = "grep -E '^Sig(Blk|Ign)' /proc/self/status; ls /proc/self/fd | wc -l"
    process = subprocess.Popen(
        [*PYTHON, guardian.__file__, "1", str(os.getpid()), "sh", "-c", script],
        stdout=subprocess.PIPE,
        close_fds=False,
        text=True,
    )
    os.close(write)
    with process, os.fdopen(read, "rb") as pipe:
        out, _ = process.communicate(timeout=PATIENCE)
        assert pipe.read() == b""
    blocked, ignored, descriptors = out.splitlines()
    assert int(blocked.split()[1], 16) == 0
    assert not int(ignored.split()[1], 16) & (1 << (signal.SIGPIPE - 1))
    assert int(descriptors) <= 4  # the three, and that of `ls` on the directory


# ------------------------------------------------------------------------------- the family


@pytest.mark.parametrize("leave_the_group", ["", "setsid"])
def test_those_who_are_left_over_are_ended(mark: str, leave_the_group: str) -> None:
    left = " ".join(f"'{word}'" for word in sleeper(mark)[:-3])
    code = "import time; time.sleep(1000)"
    script = f"{leave_the_group} {left} -c '{code}' {mark} & exit 5"
    assert run("sh", "-c", script)[0] == 5
    assert members(mark) == []


def test_a_whole_tree_outside_the_group_is_ended(mark: str) -> None:
    inner = f"{sys.executable} -c 'import time; time.sleep(1000)' {mark}"
    script = f'setsid sh -c "{inner} & {inner} & wait" {mark} & exit 0'
    assert run("sh", "-c", script, grace=0.3)[0] == 0
    assert members(mark) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_end_it_ends_the_command(mark: str, number: signal.Signals) -> None:
    with start(*sleeper(mark)) as process:
        wait_up(process)
        process.send_signal(number)
        assert process.wait(PATIENCE) == 128 + signal.SIGTERM
    assert members(mark) == []


def test_who_does_not_heed_sigterm_is_killed_after_the_grace(mark: str) -> None:
    with start(*PYTHON, "-c", STUBBORN, mark, grace=0.1) as process:
        wait_up(process)
        process.terminate()
        assert process.wait(PATIENCE) == 128 + signal.SIGKILL
    assert members(mark) == []


def test_a_command_may_end_in_its_own_way_within_the_grace() -> None:
    script = "trap 'echo bye; exit 9' TERM; echo up; while :; do sleep 0.01; done"
    with start("sh", "-c", script) as process:
        wait_up(process)
        process.terminate()
        out, _ = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (9, "bye\n")


def test_all_of_the_family_is_told_to_end_not_only_its_first_process() -> None:
    child = "(trap 'echo bye; exit' TERM; echo up; while :; do sleep 0.01; done)"
    first = f"trap : TERM; {child} & while kill -0 $! 2>&-; do wait $!; done; exit 9"
    with start("sh", "-c", first) as process:
        wait_up(process)
        process.terminate()
        out, _ = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (9, "bye\n")


# ------------------------------------------------------------------------------- who dies first


def parent_script(mark: str, parent: str, directory: Path) -> list[str]:
    """Return a program that starts a guardian and then waits to be killed."""
    command = [*PYTHON, guardian.__file__, "10", "PARENT", *sleeper(mark)]
    code = (
        "import os, subprocess, time\n"
        f"command = {command!r}\n"
        f"command[command.index('PARENT')] = {parent}\n"
        f"out = open({str(directory / 'out')!r}, 'w')\n"
        "subprocess.Popen(command, start_new_session=True, stdout=out)\n"
        "time.sleep(1000)\n"
    )
    return [sys.executable, "-c", code]


def test_when_smgd_is_killed_all_of_the_engine_ends(mark: str, tmp_path: Path) -> None:
    with subprocess.Popen(parent_script(mark, "str(os.getpid())", tmp_path)) as parent:
        until((tmp_path / "out").exists)
        until((tmp_path / "out").read_text)
        parent.kill()
    until(lambda: members(mark) == [])


def test_an_engine_that_is_kept_survives_and_ends_when_told(mark: str, tmp_path: Path) -> None:
    with subprocess.Popen(parent_script(mark, "'0'", tmp_path)) as parent:
        until((tmp_path / "out").exists)
        until((tmp_path / "out").read_text)
        parent.kill()
    keeper, engine = sorted(members(mark))
    os.kill(keeper, signal.SIGTERM)
    until(lambda: members(mark) == [])
    assert keeper < engine


def test_when_the_guardian_is_killed_the_engine_is_told_to_end(mark: str) -> None:
    with start(*sleeper(mark)) as process:
        wait_up(process)
        process.kill()
        assert process.wait(PATIENCE) == -signal.SIGKILL
    until(lambda: members(mark) == [])


def test_nothing_is_started_for_a_smgd_that_is_gone_already(mark: str) -> None:
    assert run(*sleeper(mark), parent=1)[:2] == (guardian.EXIT_NOT_STARTED, "")
