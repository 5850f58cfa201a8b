"""What people read of answers that tests of whole daemons do not give."""

from __future__ import annotations

from typing import Any

import pytest

from smgd.admin import show
from smgd.admin.commands import CommandError, Commands
from tests.flows.conftest import Build

WORKER: dict[str, Any] = {
    "id": "1be5dcfa-5553-4362-8720-d4cb7b30e87b", "url": "ipc:///e", "model": "m",
    "runtime": "vllm", "state": "ready", "seconds": 61.0, "engines": 2, "requests": 3,
    "running": 2, "waiting": 1, "kv_usage": 0.5, "handshake": "tcp://127.0.0.1:1",
    "priority": 50, "cost": 1.0, "max_model_len": 8192,
    "ranks": [
        {"rank": 0, "running": 2, "waiting": 0, "kv_usage": 1.0},
        {"rank": 1, "running": 0, "waiting": 1, "kv_usage": 0.0},
    ],
}  # fmt: skip


def test_a_grouped_worker_shows_each_of_its_engines() -> None:
    text = show.worker(WORKER)
    assert "state          ready for 1m01s\n" in text
    assert "engines say    2 running, 1 waiting, KV cache 50%\n" in text
    assert "engine 0       2 running, 0 waiting, KV cache 100%\n" in text
    assert "engine 1       0 running, 1 waiting, KV cache 0%\n" in text
    assert "connect with" not in text


def test_a_worker_that_failed_shows_why() -> None:
    text = show.workers([WORKER | {"state": "failed", "reason": "cannot bind"}])
    assert text.splitlines()[-1] == "ipc:///e is failed: cannot bind"


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (show.workers, "no worker; add one: smgctl workers add ipc:///PATH"),
        (show.models, "no model; give one with --model-path, [models.ID] or a worker's model_path"),
        (show.requests, "no request is running"),
    ],
)
def test_empty_lists_are_said(function: Any, said: str) -> None:
    assert function([]) == said


def test_a_model_that_is_not_loaded_shows_why() -> None:
    model = {"id": "m", "path": "p", "ready_workers": 0, "workers": 1, "missing": "not yet"}
    first, second, empty, missing = show.models([model]).splitlines()
    assert first.split() == ["MODEL", "READY", "WORKERS", "CONTEXT", "ALIASES", "PATH"]
    assert second.split() == ["m", "0", "1", "-", "-", "p"]
    assert (empty, missing) == ("", "not yet")


async def test_a_name_that_is_several_workers(build: Build) -> None:
    house = build(workers=2)
    await house.open()
    fleet = house.daemon.fleet
    for number, record in enumerate(list(fleet.records.values())):
        del fleet.records[record.id]
        record.worker.id = f"same-{number}"
        fleet.records[record.id] = record
    commands = Commands.__new__(Commands)
    commands.fleet = fleet
    with pytest.raises(CommandError, match=r"'same-' is several workers: same-0 \(ipc://"):
        commands._find("same-")
    assert commands._find("same-1").id == "same-1"
