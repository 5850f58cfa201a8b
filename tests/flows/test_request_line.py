"""The line of a request: what an operator finds with the id that a client complains of."""

from __future__ import annotations

import pytest
import trio

from tests.flows.client import CHAT, Call, chat_body, head, post
from tests.flows.conftest import Start
from tests.flows.house import House, until
from tests.support import PATIENCE

ENDLESS = {"contains": "endless", "token_ids": [300] * 8000}


async def ask(house: House, path: str, method: str = "GET") -> Call:
    stream = await house.dial()
    await stream.send_all(head(path, method=method))
    with trio.fail_after(PATIENCE):
        return await Call(stream).read()


async def test_it_has_the_ids_of_all_three_and_where_the_client_is(start: Start) -> None:
    house = await start()
    answer = await house.ask("the sea", max_tokens=1)
    stream = await house.dial()
    named = post(chat_body("the sea", max_tokens=1)).replace(
        b"\r\n", b"\r\nX-Request-ID: mine-42\r\n", 1
    )
    await stream.send_all(named)
    with trio.fail_after(PATIENCE):
        second = await Call(stream).read()
    own, theirs = await house.requests()
    assert own["request_id"] == answer.json["id"]
    assert "id" not in own
    assert (theirs["request_id"], theirs["id"]) == ("mine-42", second.json["id"])
    assert [line["engine_request"] for line in (own, theirs)] == house.tally.adds
    assert {line["client"] for line in (own, theirs)} == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("method", "asked", "shown", "route", "status"),
    [
        ("POST", "/v1/chat/completion", "/v1/chat/completion", "other", 404),
        ("GET", CHAT, CHAT, CHAT, 405),
        ("DELETE", "/health", "/health", "/health", 405),
        ("POST", "/workers/7", "/workers/7", "/workers/<worker_id>", 405),
        ("GET", "/a%1b[31m%0ab%C3%A4", "/a%1B%5B31m%0Ab%C3%A4", "other", 404),
        ("GET", "/" + "x" * 5000, "/" + "x" * 199, "other", 404),
        ("DELETE", "/v1//models", "/v1//models", "other", 405),
    ],
)
async def test_it_shows_what_was_asked_for_and_metrics_a_route(
    start: Start, method: str, asked: str, shown: str, route: str, status: int
) -> None:
    house = await start()
    assert (await ask(house, asked, method)).status == status
    [line] = await house.requests()
    assert (line["path"], line["status"], line["client"]) == (shown, status, "127.0.0.1")
    assert await house.metric("smg_http_requests_total", method=method, path=route) == 1


async def test_a_lost_stream_is_found_by_the_id_of_its_request(start: Start) -> None:
    house = await start("--itl-ms", "5", replies=[ENDLESS])
    call = await house.call("endless", stream=True)
    await call.read("content")
    await house.engines[0].kill()
    await call.read()
    await until(lambda: house.active == 0)
    [lost] = house.logged("stream lost")
    [line] = await house.requests()
    assert lost["request_id"] == line["request_id"] == call.frames[0]["id"]
    assert lost["engine_request"] == line["engine_request"] == house.tally.adds[0]
