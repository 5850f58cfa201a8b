"""The worker API over HTTP, with simulated engines behind it."""

from __future__ import annotations

import gc
import uuid
import weakref
from pathlib import Path
from typing import Any

import pytest
import trio
from msgspec import structs

from smgd.reload import spec_in
from tests.flows.client import CHAT, head, send
from tests.flows.house import until
from tests.support import no_collector
from tests.workers.api import ApiHouse, api_house

# Ids to 8000 tokens at 5 ms: still running whenever a test looks.
ENDLESS = {"contains": "endless", "token_ids": [300] * 8000}
PACE = ("--itl-ms", "5")
NOBODY = str(uuid.UUID(int=7))


async def test_a_worker_is_added_serves_and_leaves(nursery: trio.Nursery) -> None:
    async with api_house(nursery) as api:
        answer = await api.call("POST", "/workers", {"url": api.urls[1], "colour": "red"})
        worker_id = answer.json["worker_id"]
        location = f"/workers/{worker_id}"
        assert (answer.status, answer.headers["location"]) == (202, location)
        assert answer.json == {
            "status": "accepted",
            "worker_id": str(uuid.UUID(worker_id)),
            "url": api.urls[1],
            "location": location,
            "message": "Worker added; it is registered in the background",
        }
        assert (await api.house.readiness())[1]["missing"] == [f"worker {api.urls[1]} is pending"]
        api.house.start_engine(worker=1)
        await api.until_ready(1)
        assert (await api.house.ask("hello", max_tokens=2)).status == 200
        shown = (await api.call("GET", location)).json
        assert shown.pop("zmq_handshake_address").startswith("tcp://127.0.0.1:2")
        assert shown["models"][0].pop("context_length") > 0
        assert {"chat", "completions"} <= set(shown["models"][0].pop("model_type"))
        assert shown == {
            "id": worker_id,
            "model_id": "smgd-sim",
            "url": api.urls[1],
            "models": [{"id": "smgd-sim"}],
            "worker_type": "regular",
            "connection_mode": "zmq",
            "runtime_type": "vllm",
            "priority": 50,
            "cost": 1.0,
            "max_connection_attempts": 20,
            "is_healthy": True,
            "status": "ready",
            "load": 0,
            "http2": False,
        }
        answer = await api.call("DELETE", location)
        assert (answer.status, answer.json["worker_id"]) == (202, worker_id)
        await api.until_status(worker_id, "gone")
        assert await api.list() == []
        api.outlived.add(1)


async def test_the_list_has_counts_and_a_filter(nursery: trio.Nursery) -> None:
    async with api_house(nursery, models={"m": {"path": "smgd-sim", "aliases": ["alias"]}}) as api:
        first = await api.add(1)
        second = await api.add(2, labels={"model_path": "smgd-sim", "model": "other"})
        answer = (await api.call("GET", "/workers")).json
        assert [worker["id"] for worker in answer["workers"]] == [first, second]
        stats = {"prefill_count": 0, "decode_count": 0, "regular_count": 2}
        assert (answer["total"], answer["stats"]) == (2, stats)
        for name, ids in (("m", [first]), ("alias", [first]), ("other", [second]), ("none", [])):
            found = (await api.call("GET", f"/workers?model={name}")).json
            assert [worker["id"] for worker in found["workers"]] == ids
            assert found["total"] == len(ids)


async def test_a_pending_worker_says_what_it_waits_for(nursery: trio.Nursery) -> None:
    async with api_house(nursery) as api:
        worker_id = await api.add(1, dp_size=2)
        shown = (await api.call("GET", f"/workers/{worker_id}")).json
        job = shown["job_status"]
        assert isinstance(job.pop("timestamp"), int)
        dialled = shown["zmq_handshake_address"]
        waits = f"waiting for HELLO of engine 0, HELLO of engine 1 at {dialled}"
        assert job == {
            "job_type": "AddWorker",
            "worker_url": api.urls[1],
            "status": "processing",
            "message": waits,
        }
        assert shown["dp_size"] == 2


def registered(api: ApiHouse, worker_id: str) -> bool:
    """Tell whether a worker has its sockets, and not its predecessor any more."""
    daemon = api.house.daemon
    return daemon.registry.workers.get(worker_id) is daemon.fleet.get(worker_id).worker


# -------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"url": "http://host:1"}, "smgd serves ipc://<path> workers only"),
        ({"url": "grpc://host:1"}, "smgd serves ipc://<path> workers only"),
        ({"url": "HTTP://host:1"}, "worker URL must start with one of http://, https://, grpc://"),
        ({"url": "ipc://"}, "ZMQ worker URL must be ipc://<path>, not 'ipc://'"),
        (
            {"url": "ipc://tmp/smgd/engine-0"},
            "not 'ipc://tmp/smgd/engine-0': did you mean ipc:///tmp/smgd/engine-0?",
        ),
        ({"url": "ipc://@engine-0"}, "ZMQ worker URL must have an absolute path"),
        ({"url": "ipc:///tmp/a\0b"}, "ZMQ worker URL has a character that cannot be shown"),
        ({"url": "ipc:///x/" + "y" * 120}, "Linux allows 107"),
        (
            {"url": "http://host:1", "zmq_handshake_address": "tcp://127.0.0.1:30500"},
            "zmq_handshake_address is for ZMQ workers only",
        ),
        (
            {"zmq_handshake_address": "ipc:///x"},
            "zmq_handshake_address must be a tcp:// address",
        ),
        ({"worker_type": "prefill"}, "cannot serve worker type prefill"),
        ({"worker_type": "decode"}, "cannot serve worker type decode"),
        ({"worker_type": "chef"}, "invalid request body: Invalid enum value 'chef'"),
        ({"runtime_type": "trtllm"}, "has unsupported runtime trtllm: only"),
        ({"runtime": "mlx"}, "over the ZMQ direct backend"),
        ({"connection_mode": "grpc"}, "has connection_mode grpc, but ipc:// is zmq"),
        ({"dp_rank": 0}, "cannot have a dp_rank"),
        ({"dp_size": 0}, "invalid request body: Expected `int` >= 1 - at `$.dp_size`"),
        ({"models": [{"id": "a"}, {"id": "b"}]}, "has 2 models, but an engine serves one"),
        ({"models": [{"id": "a", "aliases": ["smgd-sim"]}]}, "the name 'smgd-sim' belongs to"),
        ({"labels": {"a": 1}}, "invalid request body: Expected `str`, got `int`"),
        ({"dp_size": 1025}, "invalid request body: Expected `int` <= 1024 - at `$.dp_size`"),
        ({"dp_size": 100_000}, "Expected `int` <= 1024 - at `$.dp_size`"),
        (
            {"dp_size": 100_000, "labels": {"model": "m", "model_path": "smgd-sim"}},
            "at `$.dp_size`",
        ),
        ({"health": {"drain_settle_secs": 1e9}}, "<= 86400.0 - at `$.health.drain_settle_secs`"),
        ({"models": [{"id": ""}]}, "of length >= 1 - at `$.models[0].id`"),
        ({"models": [{"id": "a", "aliases": [""]}]}, "length >= 1 - at `$.models[0].aliases[0]`"),
        ({"models": [{"id": "a", "aliases": ["b", "b"]}]}, "gives its model the name 'b' twice"),
        ({"models": [{"id": "a", "aliases": ["a"]}]}, "gives its model the name 'a' twice"),
        ({"models": [{"id": "a" * 5000}]}, "of length <= 4096 - at `$.models[0].id`"),
        (
            {"models": [{"id": "a", "chat_template": "x" * 300_000}]},
            "of length <= 262144 - at `$.models[0].chat_template`",
        ),
        ({"labels": {"model_path": "/" + "x" * 5000}}, "length <= 4096 - at `$.labels[...]`"),
        ({"labels": {"x" * 300: ""}}, "of length <= 256 - at `key` in `$.labels`"),
        ({"labels": {str(n): "" for n in range(300)}}, "of length <= 256 - at `$.labels`"),
        ({"url": "ipc:///" + "x" * 5000}, "of length <= 4096 - at `$.url`"),
        (
            {"runtime_type": "vllm", "runtime": "sglang"},
            "has two runtimes, runtime_type vllm and runtime sglang: give one of them",
        ),
        ({"runtime_type": "unspecified", "runtime": "sglang"}, "has unsupported runtime sglang"),
        (
            {"labels": {"model": "smgd-sim", "model_path": "/elsewhere"}},
            "another path for model 'smgd-sim' than 'smgd-sim', since the model is configured",
        ),
        ({"url": 7}, "invalid request body: Expected `str`, got `int` - at `$.url`"),
    ],
)
async def test_what_can_be_judged_at_once_is_refused_at_once(
    nursery: trio.Nursery, fields: dict[str, Any], text: str
) -> None:
    async with api_house(nursery) as api:
        assert text in await api.refused(**fields)
        assert text in (await api.house.requests())[-1]["reason"]
        assert await api.list() == []
        assert api.house.daemon.catalog.ids == ["smgd-sim"]


async def test_bodies_that_are_none(nursery: trio.Nursery) -> None:
    async with api_house(nursery) as api:
        deep = b"[" * 100_000
        for body in (b"", b"{", b"[]", b"{}", b'{"url":"\xff"}', deep, b'{"x":' + deep):
            answer = await api.call("POST", "/workers", body)
            assert (answer.status, answer.json["code"]) == (400, "BAD_REQUEST")
            assert answer.json["error"].startswith("invalid request body: ")
        worker = f"/workers/{await api.add(1)}"
        for method in ("PUT", "PATCH"):
            answer = await api.call(method, worker, b'{"x":' + deep)
            assert (answer.status, answer.json["code"]) == (400, "BAD_REQUEST")
            assert answer.json["error"].startswith("invalid request body: maximum recursion depth")
        answer = await api.call("POST", "/workers", {"url": api.urls[1]}, kind="x-form")
        assert (answer.status, answer.json["code"]) == (400, "BAD_REQUEST")
        assert "Content-Type" in answer.json["error"]
        assert answer.headers["x-smg-error-code"] == "BAD_REQUEST"


NULLS: dict[str, Any] = {
    "models": None, "worker_type": None, "connection_mode": None, "runtime_type": None,
    "runtime": None, "labels": None, "priority": None, "cost": None, "dp_size": None,
    "max_connection_attempts": None, "dp_rank": None, "zmq_handshake_address": None,
    "health": None, "api_key": None, "http_pool": None,
}  # fmt: skip
CARD = {"id": "smgd-sim", "aliases": None, "tokenizer_path": None, "chat_template": None}
HEALTH = {"failure_threshold": None, "drain_settle_secs": 7, "timeout_secs": None}


async def test_null_means_absent(nursery: trio.Nursery) -> None:
    async with api_house(nursery) as api:
        plain = (await api.call("GET", f"/workers/{await api.add(1)}")).json
        nulls = await api.add(2, **NULLS)
        filled = NULLS | {"models": [CARD], "health": HEALTH, "labels": {"rack": None, "row": "2"}}
        other = await api.add(3, **filled)
        shown = (await api.call("GET", f"/workers/{nulls}")).json
        own = ("id", "url", "zmq_handshake_address", "job_status")
        assert {k: v for k, v in shown.items() if k not in own} == {
            k: v for k, v in plain.items() if k not in own
        }
        assert (await api.call("GET", f"/workers/{other}")).json["labels"] == {"row": "2"}
        path = f"/workers/{plain['id']}"
        for method, body in (("PUT", {"url": plain["url"], **filled}), ("PATCH", {"cost": None})):
            assert (await api.call(method, path, body)).status == 202
        changes = {"url": None, "priority": None, "labels": {"rack": "7", "a": None}}
        assert (await api.call("PATCH", path, changes)).status == 202
        assert (await api.call("GET", path)).json["labels"] == {"row": "2", "rack": "7"}
        assert not api.house.logged("worker fields ignored")
        assert "Expected `str`, got `null`" not in await api.refused(url=None)
        assert "missing required field `url`" in await api.refused(url=None)
        assert "Expected `object`, got `null`" in await api.refused(models=[None])


async def test_fields_that_do_nothing_are_told(nursery: trio.Nursery) -> None:
    async with api_house(nursery) as api:
        worker_id = await api.add(
            1,
            colour="red",
            api_key="hush",
            health={"check_interval_secs": 5, "drain_settle_secs": 5},
            models=[{"id": "smgd-sim", "context_length": 9}],
            labels={"tool_parser": "hermes", "rack": "7"},
        )
        path = f"/workers/{worker_id}"
        await api.call("PATCH", path, {"health": {"timeout_secs": 1}, "api_key": "hush"})
        shown = (await api.call("GET", path)).json
        await api.call("PUT", path, {**shown, "models": []})
        told = api.house.logged("worker fields ignored")
        assert [line["fields"] for line in told] == [
            ["api_key", "colour", "health.check_interval_secs", "models.context_length"]
            + ["labels.tool_parser"],
            ["health.timeout_secs"],
            ["labels.tool_parser"],
        ]
        assert {(line["log_level"], line["worker"]) for line in told} == {("warning", api.urls[1])}


async def test_a_compressed_body_is_refused(nursery: trio.Nursery) -> None:
    async with api_house(nursery) as api:
        headers = ["Content-Type: application/json", "Content-Encoding: gzip", "Content-Length: 1"]
        call = await send(api.house.port, head("/workers", *headers, method="POST") + b"x", "POST")
        async with call.stream:
            answer = await call.read()
        assert (answer.status, answer.error["code"]) == (415, "unsupported_content_encoding")


async def test_no_worker_without_a_model(nursery: trio.Nursery) -> None:
    async with api_house(
        nursery, models={"a": {"path": "smgd-sim"}, "b": {"path": "smgd-sim"}}
    ) as api:
        text = await api.refused()
        assert text == (
            f"ZMQ worker {api.urls[1]} has no model identity: set labels.model_path to one of "
            "a, b, or to a new one"
        )
        await api.add(1, labels={"model": "b"})
        assert [worker["model_id"] for worker in await api.list()] == ["b"]


async def test_one_url_is_one_worker(nursery: trio.Nursery) -> None:
    async with api_house(nursery, workers=1) as api:
        answer = await api.call("POST", "/workers", {"url": api.urls[0]})
        assert (answer.status, answer.json["code"]) == (409, "WORKER_ALREADY_EXISTS")
        [worker] = await api.list()
        text = f"Worker {api.urls[0]} already exists (id {worker['id']})"
        assert answer.json["error"] == text


async def test_two_workers_cannot_have_one_handshake_address(nursery: trio.Nursery) -> None:
    async with api_house(nursery) as api:
        worker_id = await api.add(1)
        address = (await api.call("GET", f"/workers/{worker_id}")).json["zmq_handshake_address"]
        text = await api.refused(url=api.urls[2], zmq_handshake_address=address)
        claim = f"would bind handshake address {address}, already claimed by worker {api.urls[1]}"
        assert claim in text
        await api.remove(worker_id)
        await api.add(2, zmq_handshake_address=address)


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE"])
async def test_ids(nursery: trio.Nursery, method: str) -> None:
    async with api_house(nursery) as api:
        body = {"url": api.urls[1]} if method == "PUT" else {}
        answer = await api.call(method, "/workers/engine-0", body)
        assert (answer.status, answer.json["code"]) == (400, "BAD_REQUEST")
        assert answer.json["error"] == "worker id 'engine-0' is not a UUID"
        answer = await api.call(method, f"/workers/{NOBODY}", body)
        assert (answer.status, answer.json["code"]) == (404, "WORKER_NOT_FOUND")
        assert answer.json["error"] == f"Worker {NOBODY} not found"


# ------------------------------------------------------------------------- what is declared


async def test_runtimes(nursery: trio.Nursery) -> None:
    text = "runtime_type unspecified for ZMQ worker; defaulting to vLLM EngineCore"
    async with api_house(nursery) as api:
        await api.add(1, runtime="vllm")
        await api.add(2, runtime_type="vllm")
        assert api.house.logged(text) == []
        await api.add(3, runtime_type="unspecified")
        [line] = api.house.logged(text)
        assert (line["worker"], line["log_level"]) == (api.urls[3], "warning")
        assert [worker["runtime_type"] for worker in await api.list()] == ["vllm"] * 3


async def test_workers_of_the_configuration_may_leave_their_runtime_undeclared(
    nursery: trio.Nursery,
) -> None:
    text = "runtime_type unspecified for ZMQ worker; defaulting to vLLM EngineCore"
    async with api_house(nursery, workers=2) as api:
        assert [line["worker"] for line in api.house.logged(text)] == api.urls[:2]
        assert [worker["runtime_type"] for worker in await api.list()] == ["vllm"] * 2
        config = api.house.config
        worker = structs.replace(config.workers[0], runtime_type="vllm")
        assert spec_in(config, config.workers[0]).declared_runtimes == []
        assert spec_in(config, worker).declared_runtimes == ["vllm"]


async def test_the_series_of_a_model_end_with_its_last_worker(nursery: trio.Nursery) -> None:
    async with api_house(nursery, workers=1) as api:
        worker = await api.add(1, labels={"model_path": "smgd-sim", "model": "second"})
        for number in (0, 1):
            api.house.start_engine(worker=number)
        await api.until_ready(2)
        for model in ("smgd-sim", "second"):
            assert (await api.house.ask("hello", model=model, max_tokens=1)).status == 200
        metrics = api.house.daemon.metrics
        assert b'model="second"' in metrics.render()
        await api.remove(worker)
        api.outlived.add(1)
        metrics.render()
        page = metrics.render()
        assert b'model="second"' not in page
        assert b'model="smgd-sim"' in page


async def test_a_disabled_health_check_is_ignored(nursery: trio.Nursery) -> None:
    async with api_house(nursery) as api:
        await api.add(1, health={"disable_health_check": True})
        ignored = [line["event"] for line in api.house.lines if "Ignoring" in line["event"]]
        [text] = ignored
        assert text.startswith(f"Ignoring disabled health checks for ZMQ worker {api.urls[1]}")


async def test_health_checks_that_are_disabled_everywhere_are_ignored_for_each_worker(
    nursery: trio.Nursery,
) -> None:
    async with api_house(nursery, workers=1, health={"disable_health_check": True}) as api:
        await api.add(1)
        ignored = [line["event"] for line in api.house.lines if "Ignoring" in line["event"]]
        assert [text.split(": ")[0].rpartition(" ")[2] for text in ignored] == api.urls[:2]


async def test_an_api_key_is_never_shown(nursery: trio.Nursery) -> None:
    async with api_house(nursery) as api:
        worker_id = await api.add(1, api_key="hush")
        await api.call("PATCH", f"/workers/{worker_id}", {"api_key": "hush"})
        for path in ("/workers", f"/workers/{worker_id}"):
            assert b"hush" not in (await api.call("GET", path)).body
        assert "hush" not in str(api.house.lines)


# ------------------------------------------------------------------------------- failures


async def test_a_failed_registration_stays_visible_and_can_be_repeated(
    nursery: trio.Nursery,
) -> None:
    async with api_house(nursery, workers=1) as api:
        in_the_way = api.in_the_way()
        worker_id = await api.add(1)
        await api.until_status(worker_id, "failed")
        failed = next(worker for worker in await api.list() if worker["id"] == worker_id)
        reason = (
            f"ZMQ backend handshake failed for {api.urls[1]}: ipc socket path {in_the_way} exists "
            "but is not a socket; refusing to unlink"
        )
        assert (failed["reason"], failed["is_healthy"]) == (reason, False)
        job = (await api.call("GET", f"/workers/{worker_id}")).json["job_status"]
        assert (job["job_type"], job["status"], job["message"]) == ("AddWorker", "failed", reason)
        [line] = api.house.logged(f"Failed job: type=AddWorker, worker={api.urls[1]}")
        assert line["reason"] == reason
        assert api.house.take_errors() == [line["event"]]
        [other, missing] = (await api.house.readiness())[1]["missing"]
        assert other == f"worker {api.urls[0]} is pending"
        assert missing == f"worker {api.urls[1]} is failed: {reason}"
        assert (await api.call("GET", "/get_server_info")).json["total_workers"] == 2
        api.house.start_engine(worker=0)  # the others are not harmed
        await api.until_ready(1)
        await trio.Path(in_the_way).rmdir()
        again = await api.add(1)
        await api.until_status(again, "pending")
        assert await api.status(worker_id) == "gone"


async def test_a_failed_worker_can_be_removed_or_replaced(nursery: trio.Nursery) -> None:
    async with api_house(nursery) as api:
        in_the_way = api.in_the_way()
        worker_id = await api.add(1)
        await api.until_status(worker_id, "failed")
        await trio.Path(in_the_way).rmdir()
        answer = await api.call("PUT", f"/workers/{worker_id}", {"url": api.urls[1]})
        assert answer.status == 202
        await api.until_status(worker_id, "pending")
        await api.remove(worker_id)
        api.in_the_way()
        worker_id = await api.add(1)
        await api.until_status(worker_id, "failed")
        await api.remove(worker_id)
        await trio.Path(in_the_way).rmdir()
        assert len(api.house.take_errors()) == 2


# -------------------------------------------------------------------------- PATCH and PUT


async def test_a_patch_keeps_the_connection_and_what_runs_on_it(nursery: trio.Nursery) -> None:
    async with api_house(nursery, workers=1, replies=[ENDLESS]) as api:
        api.house.start_engine(*PACE)
        await api.until_ready(1)
        call = await api.house.call("endless", stream=True, max_tokens=300)
        await call.read("content")
        [worker] = await api.list()
        path = f"/workers/{worker['id']}"
        for change in ({"labels": {"rack": "7"}}, {"labels": {"row": "2"}, "cost": 2.5}):
            answer = await api.call("PATCH", path, {**change, "priority": 9})
            assert (answer.status, answer.json["worker_id"]) == (202, worker["id"])
        shown = (await api.call("GET", path)).json
        assert (shown["priority"], shown["cost"]) == (9, 2.5)
        labels = {"model_path": "smgd-sim", "rack": "7", "row": "2"}
        assert (shown["labels"], shown["load"]) == (labels, 1)
        same = {"url": api.urls[0], "priority": 3}
        assert (await api.call("PUT", path, same)).status == 202
        await call.read()
        assert (call.done, call.finishes()) == (True, ["length"])
        shown = (await api.call("GET", path)).json
        assert (shown["priority"], shown["cost"], "labels" in shown) == (3, 1.0, False)
        assert len(api.house.tally.ready_at) == 1


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"url": "ipc:///x"}, "PATCH cannot change url: use PUT"),
        ({"dp_size": 2, "runtime": "vllm"}, "PATCH cannot change dp_size, runtime: use PUT"),
        ({"priority": "high"}, "invalid request body: Expected `int`"),
        ({"labels": {"model_path": "elsewhere"}}, "labels.model_path of worker ipc:///"),
        (["priority"], "invalid request body: Expected `object`, got `array`"),
    ],
)
async def test_what_a_patch_cannot_change(nursery: trio.Nursery, fields: Any, text: str) -> None:
    async with api_house(nursery, workers=1) as api:
        [worker] = await api.list()
        answer = await api.call("PATCH", f"/workers/{worker['id']}", fields)
        assert (answer.status, answer.json["code"]) == (400, "BAD_REQUEST")
        assert text in answer.json["error"]
        assert await api.list() == [worker]


async def test_a_put_with_another_connection_registers_again(nursery: trio.Nursery) -> None:
    async with api_house(nursery, workers=1, replies=[ENDLESS]) as api:
        engine = api.house.start_engine(*PACE)
        await api.until_ready(1)
        call = await api.house.call("endless", stream=True, max_tokens=200)
        await call.read("content")
        [worker] = await api.list()
        path = f"/workers/{worker['id']}"
        answer = await api.call("PUT", path, {"url": "ipc:///elsewhere"})
        assert (answer.status, "the URL of worker" in answer.json["error"]) == (400, True)
        answer = await api.call("PUT", path, {"url": api.urls[0], "dp_size": 2})
        assert answer.status == 202
        await call.read()  # what ran was drained, not cut
        assert (call.done, call.finishes()) == (True, ["length"])
        event = "engine record set aside: an engine of a former life has to be started anew"
        await until(lambda: api.house.logged(event))
        assert api.house.logged(event)[0]["reason"] == "its count is 1, not 2"
        shown = (await api.call("GET", path)).json
        assert (shown["id"], shown["status"], shown["dp_size"]) == (worker["id"], "pending", 2)
        api.remove_set_aside(0)
        await engine.kill()


# -------------------------------------------------------------------------------- DELETE


async def test_a_draining_worker_takes_nothing_new_and_finishes_what_it_has(
    nursery: trio.Nursery,
) -> None:
    async with api_house(nursery, workers=1, replies=[ENDLESS]) as api:
        api.house.start_engine(*PACE)
        await api.until_ready(1)
        call = await api.house.call("endless", stream=True, max_tokens=200)
        await call.read("content")
        [worker] = await api.list()
        for _ in range(2):
            assert (await api.call("DELETE", f"/workers/{worker['id']}")).status == 202
        shown = (await api.call("GET", f"/workers/{worker['id']}")).json
        assert (shown["status"], shown["is_healthy"]) == ("draining", False)
        assert shown["job_status"]["message"] == "draining: 1 requests in flight"
        answer = await api.house.ask("more")
        assert (answer.status, answer.error["code"]) == (503, "no_available_workers")
        answer = await api.call("PATCH", f"/workers/{worker['id']}", {"priority": 1})
        assert "is being removed" in answer.json["error"]
        again = await api.add(0)  # waits for the other to be gone
        assert [worker["status"] for worker in await api.list()] == ["draining", "pending"]
        await call.read()
        assert (call.done, call.finishes()) == (True, ["length"])
        await api.until_status(worker["id"], "gone")
        assert await api.status(again) == "pending"
    assert api.house.tally.aborts == []


async def test_a_long_drain_can_be_shortened(nursery: trio.Nursery) -> None:
    """Also that of a worker which has been replaced meanwhile."""
    async with api_house(nursery, replies=[ENDLESS], routing={"migration": "off"}) as api:
        worker_id = await api.add(1, health={"drain_settle_secs": 86400})
        path = f"/workers/{worker_id}"
        for leave, body in (("PUT", {"url": api.urls[1], "dp_size": 2}), ("DELETE", None)):
            await until(lambda: registered(api, worker_id))
            engine = api.house.start_engine(*PACE, worker=1)
            await api.until_ready(1)
            call = await api.house.call("endless", stream=True)
            await call.read("content")
            assert (await api.call(leave, path, body)).status == 202
            if leave == "DELETE":
                answer = await api.call("PATCH", path, {"labels": {"a": "b"}})
                assert answer.status == 400
                assert "is being removed: only its health can be changed" in answer.json["error"]
            await trio.sleep(0.1)
            assert api.house.active == 1
            health = {"drain_settle_secs": 0.05}
            assert (await api.call("PATCH", path, {"health": health})).status == 202
            await call.read()
            assert (call.status, call.error["code"]) == (200, "engine_lost")
            await engine.kill()
            if leave == "PUT":
                back = {"url": api.urls[1], "health": {"drain_settle_secs": 86400}}
                assert (await api.call("PUT", path, back)).status == 202
        await api.until_status(worker_id, "gone")
        api.remove_set_aside(1)  # one engine is not two
        api.outlived.add(1)


async def test_draining_ends_with_the_settle_time(nursery: trio.Nursery) -> None:
    async with api_house(nursery, replies=[ENDLESS], routing={"migration": "off"}) as api:
        worker_id = await api.add(1, health={"drain_settle_secs": 0.2})
        api.house.start_engine(*PACE, worker=1)
        await api.until_ready(1)
        call = await api.house.call("endless", stream=True)
        await call.read("content")
        await api.remove(worker_id)
        await call.read()
        assert (call.status, call.error["code"]) == (200, "engine_lost")
        [line] = [line for line in await api.house.requests() if line["path"] == CHAT]
        assert (line["error_code"], line["cause"]) == ("stream_error", "engine_lost")
        labels = {"path": CHAT, "status_code": "200", "error_code": "stream_error"}
        assert await api.house.metric("smg_http_responses_total", **labels) == 1
        labels = {"model": "smgd-sim", "error_type": "unavailable"}
        assert await api.house.metric("smg_router_request_errors_total", **labels) == 1
        page = api.house.daemon.metrics.render().decode()
        assert "smg_worker_errors_total{" not in page, "no engine has failed"
        await until(lambda: api.house.tally.aborts == api.house.tally.adds)
        api.outlived.add(1)


async def test_a_drained_worker_is_put_back_to_work(nursery: trio.Nursery) -> None:
    async with api_house(nursery, workers=1, replies=[ENDLESS]) as api:
        api.house.start_engine(*PACE)
        await api.until_ready(1)
        call = await api.house.call("endless", stream=True, max_tokens=100)
        await call.read("content")
        [worker] = await api.list()
        path = f"/workers/{worker['id']}"
        api.house.daemon.fleet.get(worker["id"]).since = 0
        api.house.daemon.fleet.drain(worker["id"])
        job = (await api.call("GET", path)).json["job_status"]
        assert job.pop("timestamp") > 0
        assert job == {
            "job_type": "DrainWorker",
            "worker_url": api.urls[0],
            "status": "processing",
            "message": "drained, not removed: 1 requests in flight; PUT it to have it serve again",
        }
        await call.read()
        assert (call.done, call.finishes()) == (True, ["length"])
        job = (await api.call("GET", path)).json["job_status"]
        assert (job["job_type"], job["status"]) == ("DrainWorker", "processing")
        answer = await api.house.ask("more")
        assert (answer.status, answer.error["code"]) == (503, "no_available_workers")
        assert (await api.call("PUT", path, {"url": api.urls[0]})).status == 202
        await api.until_ready(1)
        assert (await api.house.ask("more", max_tokens=1)).status == 200
        assert len(api.house.tally.ready_at) == 1, "the engine has not begun anew"


# --------------------------------------------------------------------------- several models


async def test_a_mistyped_path_is_corrected_by_put(nursery: trio.Nursery) -> None:
    async with api_house(nursery) as api:
        labels = {"model": "m", "model_path": "/typo"}
        worker_id = await api.add(1, labels=labels)
        await until(lambda: api.house.logged("model not loaded; will retry"))
        card = {"id": "m", "aliases": ["n"]}
        right = {"url": api.urls[1], "labels": {"model_path": "smgd-sim"}, "models": [card]}
        assert (await api.call("PUT", f"/workers/{worker_id}", right)).status == 202
        await until(lambda: registered(api, worker_id))
        api.house.start_engine(worker=1)
        await api.until_ready(1)
        for name in ("m", "n"):
            assert (await api.house.ask("hello", model=name, max_tokens=1)).status == 200
        assert api.house.take_errors() == ["model not loaded; will retry"]


async def test_the_aliases_that_are_shown_are_those_that_work(nursery: trio.Nursery) -> None:
    models = {"m": {"path": "smgd-sim", "aliases": ["n"]}}
    async with api_house(nursery, workers=1, models=models) as api:
        await api.add(1, labels={"model": "m"})
        await api.add(2, models=[{"id": "x", "aliases": ["y"]}], labels={"model_path": "smgd-sim"})
        for number in (0, 1, 2):
            api.house.start_engine(worker=number)
        await api.until_ready(3)
        shown = [worker["models"][0]["aliases"] for worker in await api.list()]
        assert shown == [["n"], ["n"], ["y"]]
        answer = await api.call("GET", "/get_model_info?model=x")
        assert answer.json["aliases"] == ["y"]
        [*_, worker] = await api.list()
        spec: dict[str, Any] = {"url": api.urls[2], "labels": {"model_path": "smgd-sim"}}
        spec["models"] = [{"id": "x", "aliases": ["z"]}]
        assert (await api.call("PUT", f"/workers/{worker['id']}", spec)).status == 202
        for name, status in (("z", 200), ("y", 404)):
            assert (await api.house.ask("hello", model=name, max_tokens=1)).status == status
        [*_, worker] = await api.list()
        assert worker["models"][0]["aliases"] == ["z"]
        answer = await api.call("GET", "/get_model_info?model=x")
        assert answer.json["aliases"] == ["z"]
        spec["models"] = [{"id": "m", "aliases": ["other"]}]
        answer = await api.call("PUT", f"/workers/{worker['id']}", spec)
        assert (answer.status, "another aliases for model 'm'" in answer.json["error"]) == (
            400,
            True,
        )


async def test_a_label_brings_a_model_and_its_last_worker_takes_it_away(
    nursery: trio.Nursery,
) -> None:
    async with api_house(nursery, workers=1) as api:
        labels = {"model_path": "smgd-sim", "model": "second"}
        first = await api.add(1, labels=labels)
        second = await api.add(2, models=[{"id": "second"}])
        for number in (0, 1, 2):
            api.house.start_engine(worker=number)
        await api.until_ready(3)
        assert len(api.house.logged("model loaded")) == 2
        models = (await api.call("GET", "/v1/models")).json["data"]
        assert [model["id"] for model in models] == ["smgd-sim", "second"]
        for _ in range(4):
            answer = await api.house.ask("hello", model="second", max_tokens=1)
            assert (answer.status, answer.json["model"]) == (200, "second")
        assert (await api.house.ask("hello")).error["code"] == "missing_required_parameter"
        adds = [line["worker"] for line in await api.house.requests() if line.get("worker")]
        assert set(adds) == {api.urls[1], api.urls[2]}
        await api.remove(first)
        assert (await api.house.ask("hello", model="second", max_tokens=1)).status == 200
        await api.remove(second)
        answer = await api.house.ask("hello", model="second")
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        assert (await api.house.ask("hello", max_tokens=1)).status == 200
        api.outlived |= {1, 2}


async def test_a_model_that_cannot_be_loaded_blocks_only_with_a_ready_worker(
    nursery: trio.Nursery,
) -> None:
    async with api_house(nursery, workers=1) as api:
        path = "/nowhere/tulip"
        worker_id = await api.add(1, labels={"model_path": path})
        await until(lambda: api.house.logged("model not loaded; will retry"))
        api.house.start_engine(worker=0)
        await api.until_ready(1)  # nobody has to wait for a model without a ready worker
        api.house.start_engine(worker=1)
        await api.until_status(worker_id, "ready")
        status, body = await api.house.readiness()
        assert (status, body["reason"]) == (503, "tokenizer not yet registered")
        [missing] = body["missing"]
        assert (
            missing
            == f"The tokenizer of model '{path}' is not loaded: there is no directory {path}"
        )
        answer = await api.house.ask("hello", model=path)
        assert (answer.status, answer.error["code"]) == (503, "tokenizer_not_found")
        assert (await api.house.ask("hello", model="smgd-sim", max_tokens=1)).status == 200
        await api.remove(worker_id)
        assert (await api.house.readiness())[0] == 200
        assert api.house.take_errors() == ["model not loaded; will retry"]
        api.outlived.add(1)


async def test_aliases_work_on_every_endpoint(nursery: trio.Nursery) -> None:
    models = {"one": {"path": "smgd-sim", "aliases": ["uno", "org/eins"]}}
    async with api_house(nursery, models=models) as api:
        await api.add(1, labels={"model_path": "smgd-sim", "model": "two"})
        await api.add(2, labels={"model": "org/eins"})
        for number in (1, 2):
            api.house.start_engine(worker=number)
        await api.until_ready(2)
        for name in ("one", "uno", "org/eins"):
            chat = {"messages": [{"role": "user", "content": "hi"}]}
            for path, body in (
                ("/v1/chat/completions", {**chat, "max_tokens": 1}),
                ("/v1/completions", {"prompt": "hi", "max_tokens": 1}),
                ("/tokenize", {"prompt": "hi"}),
                ("/v1/tokenize", chat),
                ("/detokenize", {"tokens": [300]}),
            ):
                answer = await api.call("POST", path, {"model": name, **body})
                assert answer.status == 200, (path, answer.body)
            answer = await api.call("GET", f"/v1/models/{name}")
            assert (answer.status, answer.json["id"]) == (200, "one")
            answer = await api.call("GET", f"/get_model_info?model={name}")
            assert (answer.status, answer.json["served_model_name"]) == (200, "one")
        answer = await api.call("POST", "/tokenize", {"model": "ONE", "prompt": "hi"})
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        page = api.house.daemon.metrics.render().decode()
        assert 'model="uno"' not in page
        assert 'model="ONE"' not in page
        assert 'endpoint="chat",model="one",router_type="zmq",streaming="false"}' in page


# ------------------------------------------------------------------- engines as a whole


async def test_what_engines_cannot_be_asked_over_zmq(nursery: trio.Nursery) -> None:
    async with api_house(nursery, workers=1) as api:
        answer = await api.call("POST", "/v1/embeddings", {"model": "smgd-sim", "input": "a"})
        assert (answer.status, answer.error["code"]) == (501, "unsupported_backend")
        assert answer.error["message"] == "ZMQ backend does not support embeddings yet"
        await api.call("POST", "/rerank", {"model": "nobody's", "query": "a"})
        await api.call("POST", "/v1/classify", [])
        for endpoint, model in (
            ("embeddings", "smgd-sim"), ("rerank", "other"), ("classify", "unknown"),
        ):  # fmt: skip
            labels = {"endpoint": endpoint, "model": model, "error_type": "validation_error"}
            assert await api.house.metric("smg_router_request_errors_total", **labels) == 1
        answer = await api.call("POST", "/flush_cache")
        assert (answer.status, answer.json["status"]) == (200, "success")
        assert answer.json["message"] == (
            "No cache-flush-capable workers available (1 ZMQ workers skipped: no cache-flush RPC)"
        )
        for verb in ("start", "stop"):
            answer = await api.call("POST", f"/{verb}_profile", {})
            assert (answer.status, answer.json["status"]) == (206, "partial_success")
            [failed] = answer.json["failed"]
            text = f"{verb}_profile is not supported over ZMQ"
            assert failed["error"] == f"{verb}_profile failed for worker {api.urls[0]}: {text}"
        for name, there in (("health_generate", "/readiness"), ("engine_metrics", "/metrics")):
            answer = await api.call("GET", f"/{name}")
            assert (answer.status, answer.error["code"]) == (501, "unsupported_backend")
            text = f"/{name} is not implemented for ZMQ workers: "
            assert answer.error["message"].startswith(text)
            assert there in answer.error["message"]


async def test_loads_and_what_the_server_says_of_itself(nursery: trio.Nursery) -> None:
    async with api_house(nursery, workers=1, replies=[ENDLESS]) as api:
        assert (await api.call("GET", "/get_loads")).json["loads"] == []
        api.house.start_engine(*PACE)
        await api.until_ready(1)
        call = await api.house.call("endless", stream=True, max_tokens=300)
        await call.read("content")
        await api.house.barrier()
        body = (await api.call("GET", "/get_loads")).json
        [load] = body["loads"]
        assert (load["worker"], load["dp_rank"], load["num_running_reqs"]) == (api.urls[0], 0, 1)
        assert body["dp_rank_count"] == 1
        server = (await api.call("GET", "/get_server_info")).json
        assert (server["ready"], server["models"], server["total_workers"]) == (
            True, ["smgd-sim"], 1,
        )  # fmt: skip
        await call.close()


# ------------------------------------------------------------------- removed, and added again


def descriptors() -> int:
    gc.collect()  # what earlier tests have left
    return len(list(Path("/proc/self/fd").iterdir()))


def tasks(task: trio.lowlevel.Task | None = None) -> int:
    root = task or trio.lowlevel.current_root_task()
    assert root is not None
    return 1 + sum(tasks(c) for n in root.child_nurseries for c in n.child_tasks)


async def test_a_worker_that_is_added_again_goes_on_with_its_engine(nursery: trio.Nursery) -> None:
    async with api_house(nursery, health={"drain_settle": 0}) as api:
        worker_id = await api.add(1)
        api.house.start_engine(worker=1)
        await api.until_ready(1)
        before: tuple[int, int] | None = None
        for _ in range(50):
            await api.remove(worker_id)
            assert api.record(1).exists()
            worker_id = await api.add(1)
            await api.until_status(worker_id, "ready")
            before = before or (descriptors(), tasks())
        assert (await api.house.ask("hello", max_tokens=2)).status == 200
        assert len(api.house.tally.ready_at) == 1, "the engine has not begun anew"
        assert len(api.house.logged("engine adopted")) == 50
        assert before is not None
        limits = before
        await until(lambda: descriptors() <= limits[0] and tasks() <= limits[1])
        assert sorted(path.name for path in api.record(1).parent.glob("e1*")) == [
            "e1-in.sock", "e1-out.sock", "e1.engine.json", "e1.lock",
        ]  # fmt: skip


async def test_of_an_engine_that_has_ended_before_its_worker_nothing_stays(
    nursery: trio.Nursery,
) -> None:
    async with api_house(nursery) as api:
        worker_id = await api.add(1)
        engine = api.house.start_engine(worker=1)
        await api.until_ready(1)
        await engine.kill()
        await api.until_status(worker_id, "not_ready")
        await api.remove(worker_id)
        assert not api.record(1).exists()


async def test_an_engine_of_another_model_is_not_taken_for_the_one_that_is_wanted(
    nursery: trio.Nursery,
) -> None:
    """Engines do not say which model they have loaded; another one's ids would be garbage."""
    async with api_house(nursery) as api:
        worker_id = await api.add(1)
        engine = api.house.start_engine(worker=1)
        await api.until_ready(1)
        await api.remove(worker_id)
        labels = {"model_path": "/models/other", "tokenizer_path": "smgd-sim"}
        worker_id = await api.add(1, labels=labels)
        await api.until_status(worker_id, "pending")
        event = "engine record set aside: an engine of a former life has to be started anew"
        await until(lambda: api.house.logged(event))
        assert api.house.logged(event)[0]["reason"] == "its model is smgd-sim, not /models/other"
        await engine.kill()
        api.house.start_engine(worker=1)
        await api.until_status(worker_id, "ready")
        api.remove_set_aside(1)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_is_freed_with_its_last_worker(
    nursery: trio.Nursery, *, stream: bool
) -> None:
    """No request, cache or listener holds a tokenizer; it is megabytes, and this happens often."""
    async with api_house(nursery, health={"drain_settle": 0}) as api:
        with no_collector():
            worker_id = await api.add(1, labels={"model": "other", "model_path": "smgd-sim"})
            api.house.start_engine(worker=1)
            await api.until_ready(1)
            tokenizer = api.house.daemon.catalog.get("other").tokenizer
            parts: list[object] = [tokenizer, tokenizer.vocabulary]
            refs = [weakref.ref(part) for part in parts]
            del tokenizer, parts
            call = await api.house.ask(
                "hello", model="other", max_tokens=3, stream=stream, stop=["x"], logprobs=True
            )
            assert call.status == 200
            del call
            await api.remove(worker_id)
            await until(lambda: [ref() for ref in refs] == [None, None])
        api.outlived.add(1)


async def test_deleting_and_adding_fifty_times_leaves_nothing(nursery: trio.Nursery) -> None:
    async def again(api: ApiHouse) -> None:
        await api.remove(await api.add(1))

    async with api_house(nursery) as api:
        await again(api)
        await trio.testing.wait_all_tasks_blocked(0.01)
        before = descriptors(), tasks()
        for _ in range(50):
            await again(api)
        first = await api.add(1)  # and without waiting for the end of the one before
        for _ in range(10):
            assert (await api.call("DELETE", f"/workers/{first}")).status == 202
            first = await api.add(1)
        await api.remove(first)
        await until(lambda: descriptors() <= before[0] and tasks() <= before[1])
        assert await api.list() == []
        assert api.house.daemon.registry.workers == {}
