"""SIGHUP: what changes while serving, what is named in the log, what a broken file does."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from smgd.config import load
from smgd.config.keys import all_keys
from smgd.daemon import Daemon
from smgd.errors import ConfigError
from smgd.reload import (
    FIXED,
    FOR_NEW_WORKERS,
    Parts,
    automatic_limit,
    differences,
    setters,
)
from tests.flows.client import HOST, fetch
from tests.flows.house import start_program, until
from tests.workers.api import ApiHouse, api_house

BASE = f"""
[server]
host = "{HOST}"
port = 0
drain_window = 0
[metrics]
port = 0
"""
MODEL = '[models."smgd-sim"]\n'
ENDLESS = {"contains": "endless", "token_ids": [300] * 8000}


class Reloading:
    """A house whose daemon reads a file again; the file has tables, and workers by number."""

    def __init__(self, api: ApiHouse, file: Path) -> None:
        self.api = api
        self.file = file

    def write(self, *workers: int, tables: str = MODEL, base: str = BASE, worker: str = "") -> None:
        urls = "".join(f'[[workers]]\nurl = "{self.api.urls[n]}"\n{worker}\n' for n in workers)
        self.file.write_text(base + tables + urls)

    def reload(self, *workers: int, revive: bool = False, **parts: str) -> list[str]:
        """Have a new file read; return the keys that cannot change."""
        self.write(*workers, **parts)
        return self.api.house.daemon.reload(revive=revive).restart_needed

    def states(self) -> dict[int, str]:
        """Return the states of all workers, by number."""
        records = self.api.house.daemon.fleet.records.values()
        return {self.api.urls.index(record.spec.url): record.state for record in records}

    async def until(self, **states: str) -> None:
        wanted = {int(name[1:]): state for name, state in states.items()}
        await until(lambda: self.states() == wanted)

    def fixed(self) -> list[str]:
        """Return the keys that the log says cannot change."""
        return [line["key"] for line in self.api.house.logged(FIXED)]


@asynccontextmanager
async def reloading(
    nursery: trio.Nursery, directory: Path, *workers: int, **options: Any
) -> AsyncIterator[Reloading]:
    file = directory / "smgd.toml"
    async with api_house(nursery, start=False, **options) as api:
        case = Reloading(api, file)
        case.write(*workers)
        api.house.daemon = Daemon(load(file), reread=lambda: load(file))
        await api.house.open()
        yield case


# ------------------------------------------------------------------------------- workers


async def test_workers_come_and_go_and_the_others_do_not_notice(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    async with reloading(nursery, tmp_path, 0, 1, replies=[ENDLESS]) as case:
        house = case.api.house
        house.start_engine("--itl-ms", "5", worker=0)
        await case.until(w0="ready", w1="pending")
        await until(lambda: house.daemon.service.not_ready() is None)
        call = await house.call("endless", stream=True, max_tokens=200)
        await call.read("content")
        case.reload(0, 2)
        await case.until(w0="ready", w2="pending")
        house.start_engine(worker=2)
        await case.until(w0="ready", w2="ready")
        await call.read()
        assert (call.done, call.finishes()) == (True, ["length"])
        assert len(house.tally.ready_at) == 2
        assert case.fixed() == []


async def test_a_worker_whose_table_has_changed_is_registered_again(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    async with reloading(nursery, tmp_path, 0) as case:
        fleet = case.api.house.daemon.fleet
        [before] = fleet.records.values()
        case.reload(0, worker="engine_count = 2")
        [after] = fleet.records.values()
        assert (after.id, after.spec.dp_size) == (before.id, 2)
        await before.gone.wait()
        case.reload(0, worker="engine_count = 2")
        assert list(fleet.records.values()) == [after]


async def test_a_worker_that_was_drained_serves_again_if_somebody_asks_for_it(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    async with reloading(nursery, tmp_path, 0, 1) as case:
        house = case.api.house
        house.start_engine(worker=0)
        await case.until(w0="ready", w1="pending")
        untouched = house.daemon.fleet.by_url(case.api.urls[1])
        drained = house.daemon.fleet.by_url(case.api.urls[0])
        assert drained is not None
        house.daemon.fleet.drain(drained.id)
        await case.until(w0="draining", w1="pending")
        case.reload(0, 1)  # as by SIGHUP, which a renewed certificate brings at night
        assert drained.state == "draining"
        stays = "worker stays drained; smgctl reload lets it serve again"
        assert [line["worker"] for line in house.logged(stays)] == [case.api.urls[0]]
        case.reload(0, 1, revive=True)
        await case.until(w0="ready", w1="pending")
        assert house.daemon.fleet.by_url(case.api.urls[1]) is untouched
        assert len(house.tally.ready_at) == 1, "the engine has not begun anew"


async def test_all_that_were_drained_serve_again(nursery: trio.Nursery, tmp_path: Path) -> None:
    async with reloading(nursery, tmp_path, 0, 1, 2) as case:
        fleet = case.api.house.daemon.fleet
        for record in list(fleet.records.values()):
            fleet.drain(record.id)
        await case.until(w0="draining", w1="draining", w2="draining")
        case.reload(0, 1, 2, revive=True)
        await case.until(w0="pending", w1="pending", w2="pending")


async def test_all_tables_that_have_changed_are_registered_again(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    async with reloading(nursery, tmp_path, 0, 1, replies=[ENDLESS]) as case:
        house, fleet = case.api.house, case.api.house.daemon.fleet
        house.start_engine("--itl-ms", "5", worker=0)
        await case.until(w0="ready", w1="pending")
        await until(lambda: house.daemon.service.not_ready() is None)
        call = await house.call("endless", stream=True)
        await call.read("content")
        case.reload(0, 1, worker="engine_count = 2")  # while the first still has to drain
        assert [record.spec.dp_size for record in fleet.records.values()] == [2, 2]
        await case.api.add(3)
        house.engines[0].terminate()  # seen by the worker that drains, it leaves nothing behind
        await call.read()
        await case.until(w0="pending", w1="pending", w3="pending")
        await call.stream.aclose()


async def test_a_worker_that_could_not_be_changed_is_tried_again(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    async with reloading(nursery, tmp_path, 0) as case:
        api, daemon = case.api, case.api.house.daemon
        former = daemon.config.workers
        other = await api.add(1)
        taken = daemon.fleet.get(other).addresses.handshake
        moved = f'zmq_handshake_address = "{taken}"'
        case.write(0, worker=moved)
        for _ in range(2):
            reloaded = daemon.reload()
            [reason] = reloaded.not_changed
            assert reason.startswith(f"worker {api.urls[0]}: worker {api.urls[0]} would bind")
            assert daemon.config.workers == former
        await api.remove(other)
        assert daemon.reload().not_changed == []
        assert daemon.config.workers != former
        assert api.house.take_errors() == ["worker not changed"] * 2


async def test_workers_of_the_api_are_left_alone_and_failed_ones_are_tried_again(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    async with reloading(nursery, tmp_path, 0) as case:
        await case.api.add(3)
        in_the_way = case.api.in_the_way(1)
        case.reload(0, 1)
        await case.until(w0="pending", w1="failed", w3="pending")
        await trio.Path(in_the_way).rmdir()
        case.reload(0, 1)
        await case.until(w0="pending", w1="pending", w3="pending")
        case.reload()
        await case.until(w3="pending")
        assert len(case.api.house.take_errors()) == 1


async def test_a_worker_that_collides_is_reported_and_the_rest_is_done(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    async with reloading(nursery, tmp_path, 0) as case:
        taken = case.api.house.daemon.fleet.by_url(case.api.urls[0])
        assert taken is not None
        address = taken.addresses.handshake
        tables = MODEL + f'[[workers]]\nurl = "{case.api.urls[1]}"\n'
        tables += f'zmq_handshake_address = "{address}"\n'
        case.reload(0, 2, tables=tables)
        await case.until(w0="pending", w2="pending")
        [line] = case.api.house.logged("worker not changed")
        assert f"already claimed by worker {case.api.urls[0]}" in line["reason"]
        assert case.api.house.take_errors() == ["worker not changed"]


# -------------------------------------------------------------------------------- models


async def test_models_come_and_go_with_their_last_worker(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    second = MODEL + '[models."two"]\npath = "smgd-sim"\naliases = ["zwei"]\n'
    async with reloading(nursery, tmp_path, 0) as case:
        house = case.api.house
        catalog = house.daemon.catalog
        case.reload(0, tables=second, worker='model = "smgd-sim"')
        await until(lambda: not catalog.missing)
        assert catalog.get("zwei").id == "two"
        added = await case.api.add(1, labels={"model": "two"})
        case.reload(0)
        assert catalog.ids == ["smgd-sim", "two"]  # it still has a worker
        await case.api.remove(added)
        assert catalog.ids == ["smgd-sim"]
        served = catalog.get("smgd-sim")
        case.reload(0, tables=MODEL + 'aliases = ["sim"]\n')
        await until(lambda: catalog.get("sim") is not served)


async def test_a_model_whose_name_is_taken_is_reported_and_the_rest_is_done(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    """A worker of the API has brought another model with that name."""
    async with reloading(nursery, tmp_path, 0) as case:
        labels = {"model_path": "/models/other", "tokenizer_path": "smgd-sim", "model": "two"}
        await case.api.add(3, labels=labels)
        tables = '[models."one"]\npath = "smgd-sim"\naliases = ["two"]\n'
        case.reload(0, 1, tables=MODEL + tables, worker='model = "smgd-sim"')
        [line] = case.api.house.logged("model not changed")
        assert (line["model"], line["reason"]) == (
            "one", "the name 'two' belongs to the model at /models/other already"
        )  # fmt: skip
        await case.until(w0="pending", w1="pending", w3="pending")
        assert case.api.house.take_errors() == ["model not changed"]


async def test_a_model_can_get_another_name(nursery: trio.Nursery, tmp_path: Path) -> None:
    def named(name: str) -> str:
        return f'[models."{name}"]\npath = "smgd-sim"\naliases = ["sim"]\n'

    async with reloading(nursery, tmp_path) as case:
        house = case.api.house
        case.reload(0, tables=named("old"))
        house.start_engine(worker=0)
        await house.ready(1)
        case.reload(0, tables=named("new"), worker='model = "new"')
        await case.until(w0="ready")
        await until(lambda: house.daemon.catalog.ids == ["new"])
        await until(lambda: house.daemon.service.not_ready() is None)
        for name in ("sim", "new"):
            assert (await house.ask("hello", model=name, max_tokens=1)).status == 200
        assert (await house.ask("hello", model="old")).error["code"] == "model_not_found"


# ------------------------------------------------------------------------------ settings


async def test_limits_change_and_the_rest_is_named(nursery: trio.Nursery, tmp_path: Path) -> None:
    async with reloading(nursery, tmp_path, 0) as case:
        house = case.api.house
        service, fleet = house.daemon.service, house.daemon.fleet
        base = BASE.replace("drain_window = 0", "drain_window = 0.01\nbacklog = 7")
        base = base.replace("[server]", "[server]\nmax_payload_size = 99\nsse_keepalive = 3")
        tables = f"""
        {MODEL}
        [limits]
        max_logprobs = 5
        tokenizer_inline_bytes = 11
        tokenizer_threads = 4
        [timeouts]
        silence = 17
        [health]
        drain_settle = 0.5
        remove_unhealthy_workers = true
        [routing]
        policy = "round_robin"
        """
        assert case.reload(0, tables=tables, base=base) == ["server.backlog", "routing.policy"]
        assert (service.max_payload_size, service.sse_keepalive) == (99, 3)
        assert (service.stage.threshold_bytes, service.stage.limiter.total_tokens) == (11, 4)
        [record] = fleet.records.values()
        assert service.max_logprobs == fleet.settings.max_logprobs == 5
        assert record.worker.max_logprobs == 5
        assert fleet.settings.health.drain_settle == 0.5
        assert fleet.settings.health.remove_unhealthy_workers
        assert fleet.settings.link.patience.silence == 17
        assert house.daemon.config.server.drain_window == 0.01
        [later] = house.logged("changed for workers that are added from now on")
        assert later["key"] == "timeouts.silence"
        assert case.fixed() == ["server.backlog", "routing.policy"]
        assert house.daemon.config.server.backlog == 2048  # what is in force
        case.reload(0, tables=tables, base=base)  # and it is told each time
        assert case.fixed() == ["server.backlog", "routing.policy"] * 2


async def test_engines_do_not_change(nursery: trio.Nursery, tmp_path: Path) -> None:
    async with reloading(nursery, tmp_path, 0) as case:
        assert case.reload(0, tables=MODEL + '[[engines]]\nbackend = "sim"\n') == ["engines"]
        assert case.fixed() == ["engines"]


async def test_keys_origins_and_admission_change(nursery: trio.Nursery, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-1")
    async with reloading(nursery, tmp_path, 0) as case:
        house = case.api.house
        gate = house.daemon.service.gate
        assert (await fetch(house.port, "/version")).status == 200

        async def status(key: str) -> int:
            headers = (f"x-api-key: {key}", "Origin: https://a")
            return (await fetch(house.port, "/version", "GET", *headers)).status

        base = BASE.replace("[server]", '[server]\ncors_allowed_origins = ["https://a"]')
        tables = f"""
        {MODEL}
        [auth]
        api_key_files = ["{keys}"]
        [limits]
        max_concurrent_requests = 1
        queue_size = 2
        queue_timeout_secs = 3
        """
        assert case.reload(0, tables=tables, base=base) == []
        assert (await status("sk-1"), await status("sk-2")) == (200, 401)
        assert gate.cors is not None
        assert [gate.admission.admit("a"), gate.admission.admit("b")] == [True, False]
        assert gate.admission.timeout == 3
        keys.write_text("sk-2")  # the file is the same, what is in it is not
        assert case.reload(0, tables=tables, base=base) == []
        assert (await status("sk-1"), await status("sk-2")) == (401, 200)
        keys.write_text("")
        with pytest.raises(ConfigError, match="there is no key in"):
            case.reload(0, tables=tables, base=base)
        assert (await status("sk-1"), await status("sk-2")) == (401, 200)
        assert case.reload(0) == []
        assert await status("sk-1") == 200
        assert gate.admission.timeout == 60
        assert gate.admission.admit("b")
        gate.admission.leave("a")
        gate.admission.leave("b")
        assert "sk-" not in str(house.lines)


def test_the_limit_that_is_not_given_follows_the_cores() -> None:
    assert automatic_limit() >= 4096
    assert automatic_limit() % 1024 == 0


async def test_a_default_that_is_written_out_is_no_change(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    async with reloading(nursery, tmp_path, 0) as case:
        base = BASE.replace("[server]", "[server]\nkeep_alive_timeout = 90")
        assert case.reload(0, base=base + "[timeouts]\nsend = 10\n") == []
        assert case.api.house.logged("changed for workers that are added from now on") == []


async def test_every_key_that_can_change_is_a_key(nursery: trio.Nursery, tmp_path: Path) -> None:
    async with reloading(nursery, tmp_path) as case:
        daemon = case.api.house.daemon
        live = setters(Parts(daemon.service, daemon.fleet, daemon.loader))
        assert live.keys() | FOR_NEW_WORKERS <= all_keys().keys()
        assert list(differences(daemon.config, daemon.config)) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[[workers", "this is not TOML"),
        ("[limits]\nmax_logprob = 5\n", "limits.max_logprob: there is no such key"),
        ('[[workers]]\nurl = "ipc:///x"\nmodel = "none"\n', "for which there is no"),
    ],
)
async def test_a_broken_file_changes_nothing(
    nursery: trio.Nursery, tmp_path: Path, text: str, reason: str
) -> None:
    async with reloading(nursery, tmp_path, 0) as case:
        config = case.api.house.daemon.config
        with pytest.raises(ConfigError, match=reason):
            case.reload(1, tables=MODEL + text)
        assert case.api.house.daemon.config is config
        assert case.states() == {0: "pending"}


async def test_without_a_file_there_is_nothing_to_read(nursery: trio.Nursery) -> None:
    async with api_house(nursery) as api:
        with pytest.raises(ConfigError, match="there is no configuration file to read again"):
            api.house.daemon.reload()


# ----------------------------------------------------------------- as a process of its own


async def test_sighup(nursery: trio.Nursery, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = []

    def logged(event: str) -> list[dict[str, Any]]:
        return [line for line in lines if line["event"] == event]

    async with api_house(nursery) as api:
        case = Reloading(api, tmp_path / "smgd.toml")
        case.write(1)
        command = [sys.executable, "-m", "smgd.cli", "run", "--config", str(case.file)]
        process = await start_program(nursery, command, lambda line: lines.append(json.loads(line)))
        await until(lambda: logged("smgd listening"))
        port = logged("smgd listening")[0]["http"]
        case.write(2, tables=MODEL + '[log]\nlevel = "debug"\n')
        process.send_signal(signal.SIGHUP)
        await until(lambda: logged("configuration reloaded"))
        await until(lambda: logged("worker removed"))
        urls = [worker["url"] for worker in (await fetch(port, "/workers")).json["workers"]]
        assert urls == [api.urls[2]]
        await fetch(port, "/health")
        await until(lambda: any(line.get("path") == "/health" for line in logged("request")))
        case.write(1, tables="[broken")
        process.send_signal(signal.SIGHUP)
        await until(lambda: logged("configuration not reloaded, nothing has changed"))
        assert "this is not TOML" in lines[-1]["reason"]
        process.send_signal(signal.SIGUSR1)
        await until(lambda: logged("tasks dumped"))
        assert any("smgd.engine.link" in line["at"] for line in logged("task"))
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
