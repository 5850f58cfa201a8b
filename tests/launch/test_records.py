"""Which engines were left running and are not configured any more."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from smgd.launch.records import Forgotten, ProcessRecord, began, forgotten


@pytest.fixture
def pid() -> Iterator[int]:
    """The pid of a process that sleeps."""
    command = [sys.executable, "-c", "import time; time.sleep(1000)"]
    with subprocess.Popen(command) as process:
        yield process.pid
        process.kill()


def write(directory: Path, name: str, record: ProcessRecord) -> None:
    (directory / f"{name}.process.json").write_bytes(msgspec.json.encode(record))


def test_those_that_live_and_are_not_known_are_forgotten(tmp_path: Path, pid: int) -> None:
    for name in ("engine-1", "engine-2", "engine-3", "other-4"):
        write(tmp_path, name, ProcessRecord.of(pid, "", 1.0))
    found = forgotten(str(tmp_path), {"engine-2"})
    assert found == [Forgotten("engine-1", pid), Forgotten("engine-3", pid)]
    assert forgotten(str(tmp_path / "none"), set()) == []


def test_those_that_are_gone_and_what_cannot_be_read_are_not(tmp_path: Path, pid: int) -> None:
    write(tmp_path, "engine-1", ProcessRecord(pid, began(pid) - 1, ""))
    write(tmp_path, "engine-2", ProcessRecord(2**22 - 1, 0, ""))
    (tmp_path / "engine-3.process.json").write_bytes(b"\xff")
    (tmp_path / "engine-4.process.json").mkdir()
    assert forgotten(str(tmp_path), set()) == []


@pytest.mark.parametrize(
    ("owner", "is_forgotten"),
    [("other", False), ("own", True), ("gone", True), ("", True), ("x", True)],
)
def test_those_of_another_smgd_that_runs_are_not(
    tmp_path: Path, pid: int, owner: str, is_forgotten: bool
) -> None:
    write(tmp_path, "engine-1", ProcessRecord.of(pid, "", 1.0))
    pids = {"other": os.getppid(), "own": os.getpid(), "gone": 2**22 - 1}
    (tmp_path / "engine-1.lock").write_text(str(pids.get(owner, owner)))
    assert bool(forgotten(str(tmp_path), set())) == is_forgotten


def test_a_process_that_had_ended_at_once_is_not_alive() -> None:
    assert not ProcessRecord(2**22 - 1, 0, "").is_alive
    assert ProcessRecord.of(os.getpid(), "", 1.0).is_alive
