"""Every command against a whole daemon, asked by smgctl."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import structlog
import trio
from msgspec import structs

from smgd import log as logging
from smgd.admin.protocol import Request
from smgd.config import Config
from smgd.daemon import Daemon
from smgd.wire.fnv import handshake_port
from tests.admin.conftest import Ctl, raw, socket_of
from tests.flows.conftest import Build, Start
from tests.flows.house import House, LocalEngine, until
from tests.support import PATIENCE

ENDLESS = {"contains": "endless", "token_ids": [300] * 8000}
PACE = ("--itl-ms", "5")


def url_of(house: House, worker: int = 0) -> str:
    return f"ipc://{house.paths[worker]}"


# ----------------------------------------------------------------------------------- looking


async def test_status_says_what_is_missing(build: Build, admin: dict[str, str], ctl: Ctl) -> None:
    house = build(admin=admin)
    await house.open()
    text = (await ctl("status")).out
    assert "state      serving\nnot ready  insufficient healthy workers\n" in text
    assert f"missing    worker {url_of(house)} is pending\n" in text
    assert "workers    0/1 ready\n" in text
    house.start_engine()
    await house.ready()
    answer = (await ctl("--json", "status")).json
    assert (answer["ready_workers"], answer["not_ready"], answer["missing"]) == (1, None, [])
    assert answer["models"] == ["smgd-sim"]
    assert f"http 127.0.0.1:{house.port}" in answer["listen"]


async def test_a_pending_worker_says_how_an_engine_connects(
    build: Build, admin: dict[str, str], ctl: Ctl, nursery: trio.Nursery
) -> None:
    house = build(admin=admin)
    await house.open()
    port = handshake_port(str(house.paths[0]))
    text = (await ctl("workers", "show", url_of(house))).out
    assert "\nstate         pending for " in text
    for line in (
        "reason        no engine has dialled in yet",
        f"handshake     tcp://127.0.0.1:{port}",
        "waiting for   HELLO of engine 0",
        "seen so far   nothing",
        f"connect with  smgd-sim --handshake tcp://127.0.0.1:{port} --data-parallel-size 1",
    ):
        assert f"{line}\n" in text
    # The command is the one that connects.
    [command] = [line for line in text.splitlines() if line.startswith("connect with")]
    engine = LocalEngine(command.split()[3:])
    nursery.start_soon(engine.run)
    await house.ready()
    assert "\nstate           ready for" in (await ctl("workers", "show", url_of(house))).out


async def test_what_has_been_seen_of_a_handshake(
    build: Build, admin: dict[str, str], ctl: Ctl
) -> None:
    house = build(admin=admin)
    await house.open()
    house.start_engine("--startup-ms", "30000")
    worker = next(iter(house.daemon.registry.workers.values()))
    await until(lambda: getattr(worker, "seen", []))
    text = (await ctl("workers", "show", str(house.paths[0]))).out
    assert "waiting for   READY and registration of engine 0\n" in text
    assert "seen so far   HELLO of engine 0\n" in text


async def test_a_lost_engine(start: Start, admin: dict[str, str], ctl: Ctl) -> None:
    house = await start(admin=admin)
    await house.engines[0].kill()
    await until(lambda: house.daemon.registry.ready_count() == 0)
    shown = (await ctl("workers", "show", url_of(house), "--json")).json
    assert shown["state"] == "not_ready"
    assert shown["reason"].endswith("connection was closed")
    assert "HELLO of engine 0" in shown["waiting_for"]
    text = (await ctl("workers", "list")).out
    assert f"{url_of(house)} is not_ready: the" in text


async def test_workers_and_models(start: Start, admin: dict[str, str], ctl: Ctl) -> None:
    house = await start(workers=2, admin=admin)
    first, *rows = (await ctl("workers", "list")).out.splitlines()
    assert first.split() == [
        "ID", "URL", "MODEL", "STATE", "FOR", "ENGINES", "REQUESTS", "WAITING", "KV"
    ]  # fmt: skip
    assert [row.split()[1:4] for row in rows] == [
        [url_of(house, number), "smgd-sim", "ready"] for number in range(2)
    ]
    [model] = (await ctl("models", "--json")).json
    assert model == {
        "id": "smgd-sim", "path": "smgd-sim", "ready_workers": 2, "workers": 2,
        "max_model_len": 8192,
    }  # fmt: skip
    assert "smgd-sim      2        2     8192" in (await ctl("models")).out


async def test_a_worker_is_found_by_url_path_id_and_its_beginning(
    build: Build, admin: dict[str, str], ctl: Ctl
) -> None:
    house = build(workers=2, admin=admin)
    await house.open()
    worker = house.daemon.registry.by_url(url_of(house))
    assert worker is not None
    for name in (worker.url, str(house.paths[0]), worker.id, worker.id[:12]):
        assert (await ctl("workers", "show", name, "--json")).json["id"] == worker.id
    unknown = await ctl("workers", "show", "ipc:///none")
    assert (unknown.code, unknown.out) == (1, "")
    assert unknown.err == (
        f"smgctl: no worker 'ipc:///none'; there are: {url_of(house)}, {url_of(house, 1)}\n"
    )


# ---------------------------------------------------------------------------------- changing


async def test_add_patch_drain_and_remove(build: Build, admin: dict[str, str], ctl: Ctl) -> None:
    house = build(workers=2, admin=admin)
    url = url_of(house, 1)
    await house.open()
    fleet = house.daemon.fleet
    old = fleet.by_url(url)
    assert old is not None
    assert (await ctl("workers", "remove", url)).out == (
        f"{url} is draining; requests that still run: 0\n"
    )
    await until(lambda: old.id not in fleet.records)
    added = await ctl("workers", "add", url, "--priority", "7", "--label", "a=b", "--json")
    assert (added.json["state"], added.json["priority"]) == ("pending", 7)
    house.start_engine(worker=1)
    await house.ready()
    patched = await ctl("workers", "patch", url, "--cost", "2", "--label", "c=d")
    assert "labels          a=b, c=d\n" in patched.out
    drained = await ctl("workers", "drain", url, "--json")
    assert (await ctl("workers", "show", url, "--json")).json["reason"] == "drained, not removed"
    assert drained.json["state"] == "draining"
    assert house.daemon.registry.ready_count() == 0
    assert (await ctl("workers", "list", "--json")).json[1]["state"] == "draining"
    await ctl("workers", "remove", url)
    await until(lambda: fleet.by_url(url) is None and len(fleet.records) == 1)


async def test_a_worker_that_waits_for_another_has_no_command(
    build: Build, admin: dict[str, str], ctl: Ctl
) -> None:
    house = build(admin=admin, replies=[ENDLESS])
    await house.open()
    house.start_engine(*PACE)
    await house.ready()
    call = await house.call("endless", stream=True)
    await call.read("content")
    url, fleet = url_of(house), house.daemon.fleet
    [old] = fleet.records.values()
    await ctl("workers", "remove", url)
    new = (await ctl("workers", "add", url, "--json")).json
    text = (await ctl("workers", "show", url)).out
    assert f"reason       waits until worker {old.id} at the same URL has drained\n" in text
    assert "connect with" not in text
    assert "HELLO" not in text
    assert f"waits until worker {old.id}" in (await ctl("workers", "list")).out
    assert (await ctl("workers", "patch", old.id, "--drain-settle-secs", "0")).code == 0
    await until(lambda: house.daemon.registry.workers.get(new["id"]))
    await house.ready()
    assert "state           ready" in (await ctl("workers", "show", new["id"])).out
    await call.close()


async def test_who_has_commanded_is_in_the_log(
    start: Start, admin: dict[str, str], ctl: Ctl
) -> None:
    house = await start(admin=admin, replies=[ENDLESS])
    call = await house.call("endless", stream=True)
    await call.read("content")
    [running] = house.daemon.service.running
    url = url_of(house)
    commands = [
        ("workers", "add", f"{url}-more"), ("workers", "patch", url, "--cost", "2"),
        ("workers", "drain", url), ("workers", "remove", url), ("abort", running), ("reload",),
        ("loglevel", "info"), ("drain",),
    ]  # fmt: skip
    for command in commands:
        await ctl(*command)
    lines = house.logged("admin command")
    who = {(line["uid"], line["pid"]) for line in lines}
    assert who == {(os.geteuid(), os.getpid())}, "smgctl runs in a thread of ours here"
    assert len(lines) == len(commands)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("add", "http://x"), "worker http://x cannot be served: smgd serves ipc://<path>"),
        (("add", "ipc:///x", "--runtime-type", "mlx"), "has unsupported runtime mlx"),
        (("add", "ipc:///x", "--zmq-handshake-address", "ipc:///y"), "must be a tcp:// address"),
        (("patch", "0", "--priority", "1"), "no worker '0'"),
    ],
)
async def test_what_cannot_be_is_said(
    argv: tuple[str, ...], said: str, build: Build, admin: dict[str, str], ctl: Ctl
) -> None:
    house = build(workers=0, admin=admin)
    await house.open()
    done = await ctl("workers", *argv)
    assert (done.code, done.out) == (1, "")
    assert said in done.err


async def test_requests_and_abort(start: Start, admin: dict[str, str], ctl: Ctl) -> None:
    house = await start(*PACE, admin=admin, replies=[ENDLESS])
    assert (await ctl("requests")).out == "no request is running\n"
    calls = [await house.call("endless", stream=True), await house.call("endless")]
    await calls[0].read("content")
    await until(lambda: len(house.daemon.service.running) == 2)
    first, second = (await ctl("requests", "--json")).json
    assert first["model"] == "smgd-sim"
    assert first["workers"] == [url_of(house)]
    assert first["client"] == "127.0.0.1"
    assert first["tokens"] > 0
    assert (first["stream"], second["stream"]) == (True, False)
    assert first["id"] in (await ctl("requests")).out
    for request in (first, second):
        assert (await ctl("abort", request["id"])).out.startswith(f"aborted {request['id']} after")
    for call in calls:
        await call.read()
    error = {
        "message": "The request was aborted by an operator of this server",
        "code": "request_aborted",
    }
    assert error.items() <= calls[0].frames[-1]["error"].items()
    assert calls[1].status == 403
    assert error.items() <= calls[1].json["error"].items()
    await until(lambda: len(house.tally.aborts) == 2)
    gone = await ctl("abort", first["id"])
    assert (gone.code, gone.err) == (
        1, f"smgctl: no request '{first['id']}' is running (any more): smgctl requests\n"
    )  # fmt: skip


async def test_every_request_with_a_clients_own_id_is_aborted(
    start: Start, admin: dict[str, str], ctl: Ctl
) -> None:
    house = await start(*PACE, admin=admin, replies=[ENDLESS])
    calls = [await house.call("endless", stream=True) for _ in range(2)]
    for call in calls:
        await call.read("content")
    for running in house.daemon.service.running.values():
        running.access.id = "mine"
    assert len((await ctl("abort", "mine")).out.splitlines()) == 2
    for call in calls:
        await call.read()
    await until(lambda: not house.daemon.service.running)


async def test_loglevel(build: Build, admin: dict[str, str], ctl: Ctl) -> None:
    house = build(admin=admin)
    await house.open()
    before = logging.current_level()
    try:
        assert (await ctl("loglevel", "error")).out == "error\n"
        assert (await ctl("loglevel")).out == "error\n"
        assert '[log]\nlevel = "error"\n' in (await ctl("config", "show")).out
        assert "log level  error" in (await ctl("status")).out
        house.daemon._reread = lambda: house.config  # and until the file is read again
        assert (await ctl("reload")).code == 0
        assert (await ctl("loglevel")).out == "info\n"
        wrong = await ctl("loglevel", "loud")
        assert wrong.code == 1
        assert "level 'loud': there are debug, info, warn, warning, error" in wrong.err
    finally:
        logging.set_level(before)


async def test_config_show(build: Build, admin: dict[str, str], ctl: Ctl) -> None:
    house = build(admin=admin, auth={"api_keys": ["sk-1", "sk-2"]})
    await house.open()
    shown = await ctl("config", "show")  # smgctl needs no key
    assert '[auth]\napi_keys = "***"\n' in shown.out
    assert "sk-" not in shown.out
    assert f'[admin]\nsocket = "{admin["socket"]}"\n' in shown.out
    assert f'[[workers]]\nurl = "{url_of(house)}"\n' in shown.out
    assert (await ctl("config", "show", "--json")).json["models"] == {
        "smgd-sim": {"path": "", "tokenizer_path": "", "chat_template": "", "aliases": []}
    }


async def test_reload_says_what_needs_a_restart(
    build: Build, admin: dict[str, str], ctl: Ctl
) -> None:
    house = build(admin=admin)
    await house.open()
    wrong = await ctl("reload")
    assert (wrong.code, wrong.err) == (
        1, "smgctl: there is no configuration file to read again\n"
    )  # fmt: skip
    changed = house.config
    house.daemon._reread = lambda: changed
    assert (await ctl("reload")).out == "reloaded\n"
    changed = Config(models=house.config.models, workers=house.config.workers)
    text = (await ctl("reload")).out
    assert text.startswith("reloaded; these have changed and take effect at the next start: ")
    assert "server.host" in text
    assert "admin.socket" in text
    [worker] = house.config.workers
    moved = structs.replace(worker, zmq_handshake_address="ipc:///x")
    changed = structs.replace(house.config, workers=(moved,))
    failed = await ctl("reload")
    assert failed.code == 1
    assert failed.err.startswith(f"smgctl: reloaded, but not all of it: worker {worker.url}: ")
    assert house.take_errors() == ["worker not changed"]


async def test_drain_is_a_stop_in_order(
    start: Start, admin: dict[str, str], ctl: Ctl, nursery: trio.Nursery
) -> None:
    house = await start(*PACE, admin=admin, replies=[ENDLESS], server={"drain_window": 0.3})
    call = await house.call("endless", stream=True)
    await call.read("content")
    said = (await ctl("drain")).out
    assert said == (
        "draining: new requests are taken for 0.3 s, then the running ones (1 now) have 180 s\n"
    )
    assert "state      draining\nnot ready  draining\n" in (await ctl("status")).out
    # SIGTERM after it is the first one, which does not mean: at once.
    signal.raise_signal(signal.SIGTERM)
    [running] = (await ctl("requests", "--json")).json
    assert (await ctl("abort", running["id"])).code == 0
    with trio.fail_after(PATIENCE):
        await call.read()
        await house.stopped.wait()
    assert call.frames[-1]["error"]["code"] == "request_aborted"
    gone = await ctl("status")
    assert gone.code == 3
    assert f"there is no socket {admin['socket']}: start smgd" in gone.err


# ---------------------------------------------------------------------------------- faults


async def test_wrong_commands_and_arguments(build: Build, admin: dict[str, str]) -> None:
    house = build(admin=admin)
    await house.open()
    answers = await raw(
        socket_of(house),
        b'{"command":"dance"}',
        b'{"command":"abort"}',
        b'{"command":"status","args":{"x":1}}',
    )
    assert [answer["kind"] for answer in answers] == ["usage"] * 3
    assert answers[0]["error"].startswith("there is no command 'dance'; there are: status, work")
    assert answers[1]["error"] == "abort: Object missing required field `id`"


async def test_a_fault_of_ours_is_told_and_ends_nothing(
    build: Build, admin: dict[str, str]
) -> None:
    house = build(admin=admin)
    await house.open()

    def reread() -> Any:
        raise ZeroDivisionError

    house.daemon._reread = reread
    first, second = await raw(socket_of(house), b'{"command":"reload"}', b'{"command":"status"}')
    assert first == {"error": "it failed by a fault of smgd's; its log has it", "kind": "failed"}
    assert second["result"]["state"] == "serving"
    assert house.take_errors() == ["admin command failed"]


def test_no_socket_unless_asked_for() -> None:
    with structlog.testing.capture_logs():
        assert Daemon(Config()).config.admin.socket == ""
    assert Request("status").args == {}
