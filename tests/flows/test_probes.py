"""What balancers, scrapers and people who mistype see."""

from __future__ import annotations

import re
from typing import Any

import pytest
import trio

from smgd import __version__
from tests.flows.client import CHAT, Call, dial, fetch, head
from tests.flows.conftest import Build, Start
from tests.flows.house import sample, until


async def test_readiness_tells_the_truth_from_the_first_engine_to_the_last(build: Build) -> None:
    house = build(workers=2)
    await house.open()

    def nobody(state: str) -> dict[str, object]:
        missing = [f"worker ipc://{path} is {state}" for path in house.paths]
        reason = "insufficient healthy workers"
        return {"status": "not ready", "reason": reason, "missing": missing}

    assert await house.readiness() == (503, nobody("pending"))
    first = house.start_engine(worker=0)
    await house.ready(1)
    one = {"status": "ready", "healthy_workers": 1, "total_workers": 2}
    assert await house.readiness() == (200, one)
    second = house.start_engine(worker=1)
    await house.ready(2)
    assert await house.readiness() == (200, {**one, "healthy_workers": 2})
    await first.kill()
    await until(lambda: house.daemon.registry.ready_count() == 1)
    assert await house.readiness() == (200, one)
    await second.kill()
    await until(lambda: house.daemon.registry.ready_count() == 0)
    assert await house.readiness() == (503, nobody("not_ready"))


async def test_readiness_waits_for_the_tokenizer(build: Build) -> None:
    house = build(model_path="/nowhere/model")
    await house.open()
    house.start_engine()
    await until(lambda: house.daemon.registry.ready_count())
    await until(lambda: house.logged("model not loaded; will retry"))
    status, body = await house.readiness()
    assert (status, body["reason"]) == (503, "tokenizer not yet registered")
    [missing] = body["missing"]
    assert missing.startswith("The tokenizer of model '/nowhere/model' is not loaded: ")
    answer = await house.ask("hello")
    assert (answer.status, answer.error["code"]) == (503, "tokenizer_not_found")
    assert answer.headers["retry-after"] == "1"
    assert house.take_errors() == ["model not loaded; will retry"]


@pytest.mark.parametrize("path", ["/health", "/liveness"])
async def test_liveness_is_always_ok(build: Build, path: str) -> None:
    house = build(server={"drain_window": 0.3})
    await house.open()
    for ready in (False, True):
        if ready:
            house.start_engine()
            await house.ready()
        answer = await fetch(house.port, path)
        assert (answer.status, answer.body) == (200, b"OK")
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    house.daemon.service.draining = True
    answer = await fetch(house.port, path)
    assert (answer.status, answer.body) == (200, b"OK")
    reason = {"status": "not ready", "reason": "draining"}
    assert await house.readiness() == (503, reason)
    house.daemon.service.draining = False


async def test_version(start: Start) -> None:
    house = await start()
    answer = await fetch(house.port, "/version")
    assert (answer.status, answer.json) == (200, {"version": __version__})


async def test_gauges_go_up_and_come_back(start: Start) -> None:
    house = await start(
        "--itl-ms", "5", workers=2, routing={"policy": "round_robin"},
        replies=[{"contains": "long", "token_ids": [300] * 5000}],
    )  # fmt: skip
    urls = [f"ipc://{path}" for path in house.paths]
    calls = [await house.call("a long one", stream=True) for _ in range(3)]
    for call in calls:
        await call.read("content")
    await house.barrier()  # the load has been reported
    assert await house.metric("smg_worker_requests_active", worker=urls[0]) == 2
    assert await house.metric("smg_worker_requests_active", worker=urls[1]) == 1
    for url, running in zip(urls, (2, 1), strict=True):
        labels = {"worker": url, "dp_rank": "0", "model": "smgd-sim"}
        assert await house.metric("smg_engine_running_requests", **labels) == running
        assert await house.metric("smg_worker_health", worker=url) == 1
    assert await house.metric("smg_http_inflight_requests") == 3
    for call in calls:
        await call.close()
    await house.quiet()
    for url in urls:
        assert await house.metric("smg_worker_requests_active", worker=url) == 0
        assert await house.metric("smg_engine_running_requests", worker=url) == 0
        assert await house.metric("smg_engine_waiting_requests", worker=url) == 0
    labels = {"path": CHAT, "status_code": "499", "error_code": "client_closed_request"}
    assert await house.metric("smg_http_responses_total", **labels) == 3


async def test_counters_of_finished_requests(start: Start) -> None:
    house = await start("--itl-ms", "10")
    for stream in (False, True):
        assert (await house.ask("count me", max_tokens=6, stream=stream)).status == 200
    assert (await house.ask("refuse me", max_tokens=0, nonsense=1)).status == 400
    kind = {"router_type": "zmq", "backend_type": "regular"}
    labels = {**kind, "model": "smgd-sim", "endpoint": "chat"}
    zmq = {**labels, "connection_mode": "zmq"}
    for page in (house.port, house.metrics_port):
        text = (await fetch(page, "/metrics")).body.decode()
        assert sample(text, "smg_router_requests_total", **zmq, streaming="true") == 1
    assert await house.metric("smg_router_request_duration_seconds_count", **zmq) == 2
    refused = {**zmq, "error_type": "validation_error"}
    assert await house.metric("smg_router_request_errors_total", **refused) == 1
    mistakes: list[dict[str, Any]] = [{"messages": []}, {"temperature": "hot"}]
    for wrong in mistakes:
        named = await house.ask("", model="smgd-sim", **wrong)
        assert named.status == 400
    assert await house.metric("smg_router_request_errors_total", **refused) == 3
    decode = await house.metric("smg_router_stage_duration_seconds_sum", stage="decode")
    assert 0.05 < decode < await house.metric("smg_router_request_duration_seconds_sum")
    for stage in ("queue", "prefill", "decode"):
        name = "smg_router_stage_duration_seconds_count"
        assert await house.metric(name, router_type="zmq", stage=stage) == 2
    chosen = {"model": "smgd-sim", "policy": "least_load", "connection_mode": "zmq"}
    assert await house.metric("smg_worker_selection_total", **chosen) == 2
    pool = {"worker_type": "regular", "connection_mode": "zmq", "model": "smgd-sim"}
    assert await house.metric("smg_worker_pool_size", **pool) == 1
    assert await house.metric("smg_router_tokens_total", **labels, token_type="output") == 12
    assert await house.metric("smg_router_ttft_seconds_count", **labels) == 2
    assert await house.metric("smg_router_generation_duration_seconds_count", **labels) == 2
    assert await house.metric("smg_request_unknown_fields_total", endpoint="chat") == 1
    assert await house.metric("smg_http_requests_total", method="POST", path=CHAT) == 5


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_of_a_request_that_is_given_up_are_counted(
    start: Start, *, stream: bool
) -> None:
    house = await start("--itl-ms", "2", replies=[{"contains": "long", "token_ids": [300] * 5000}])
    engine = {"worker": f"ipc://{house.paths[0]}"}
    call = await house.call("a long one", stream=stream)
    with trio.fail_after(10):
        while (  # noqa: ASYNC110 - asked over HTTP
            await house.metric("smg_engine_generated_tokens_total", **engine) < 5
        ):
            await trio.sleep(0.01)
    await call.close()
    await house.quiet()
    [line] = [line for line in await house.requests() if line["path"] == CHAT]
    counted = await house.metric("smg_router_tokens_total", token_type="output")
    generated = await house.metric("smg_engine_generated_tokens_total", **engine)
    assert 5 <= line["completion_tokens"] == counted <= generated
    assert (line["status"], line["finish_reason"]) == (499, None)


async def test_aborts_are_counted(start: Start) -> None:
    house = await start("--itl-ms", "2", replies=[{"contains": "long", "token_ids": [300] * 5000}])
    for _ in range(2):
        call = await house.call("a long one", stream=True)
        await call.read("content")
        await call.close()
    await house.quiet()
    await until(lambda: len(house.tally.aborts) == 2)
    assert await house.metric("smg_engine_aborts_total", worker=f"ipc://{house.paths[0]}") == 2


async def test_both_metrics_ports_say_the_same(start: Start) -> None:
    house = await start()
    pages = [await fetch(port, "/metrics") for port in (house.port, house.metrics_port)]
    for page in pages:
        assert page.status == 200
        assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    names = [set(re.findall(r"(?m)^smg_\w+", page.body.decode())) for page in pages]
    assert names[0] <= names[1]
    answer = await fetch(house.metrics_port, "/elsewhere")
    assert (answer.status, answer.error["code"]) == (404, "unknown_url")


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_an_unknown_url_is_told_in_the_envelope(start: Start, method: str) -> None:
    house = await start()
    answer = await fetch(house.port, "/v2/nothing", method)
    assert answer.status == 404
    assert answer.headers["x-smg-error-code"] == "unknown_url"
    error = answer.error
    assert (error["code"], error["type"]) == ("unknown_url", "invalid_request_error")
    assert (error["param"], error["message"]) == (None, f"Invalid URL ({method} /v2/nothing)")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", CHAT),
        ("PUT", CHAT),
        ("POST", "/health"),
        ("POST", "/v1/models"),
        ("PUT", "/metrics"),
    ],
)
async def test_a_wrong_method_is_a_405(start: Start, method: str, path: str) -> None:
    house = await start()
    answer = await fetch(house.port, path, method)
    assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
    assert answer.error["message"] == f"Method {method} is not allowed for {path}"
    allowed = {m.strip() for m in answer.headers["allow"].split(",")}
    assert method not in allowed
    assert ("POST" if path == CHAT else "GET") in allowed


async def test_head_has_no_body_and_the_connection_goes_on(start: Start) -> None:
    house = await start()
    async with await dial(house.port) as stream:
        for path, status in (("/health", 200), ("/readiness", 200), ("/nothing", 404)):
            await stream.send_all(head(path, method="HEAD"))
            call = await Call(stream, "HEAD").read()
            assert (call.status, call.body, call.complete) == (status, b"", True)
        await stream.send_all(head("/health", method="GET"))
        assert (await Call(stream, "GET").read()).body == b"OK"


@pytest.mark.parametrize("path", ["/health", "/v1/models", CHAT])
async def test_options_is_answered(start: Start, path: str) -> None:
    house = await start()
    answer = await fetch(house.port, path, "OPTIONS")
    assert answer.status == (405 if path == CHAT else 200)
    assert ("POST" if path == CHAT else "GET") in answer.headers["allow"]
