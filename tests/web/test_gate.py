"""Every route of both kinds goes through the gate, on both HTTP paths.

The routes are read from the tables that serve them, so that one which is added later is walked,
too; written down here are only the exceptions.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import trio

from smgd.web.app import make_app
from smgd.web.hot import handlers
from tests.flows.client import CHAT, Call, chat_body, head, send
from tests.flows.house import House, until
from tests.support import PATIENCE
from tests.workers.api import api_house

HttpPath = Literal["fast", "stock"]

# What needs no key.
OPEN = {"/health", "/liveness", "/readiness"}

KEY = "sk-right-1"
BEARER = f"Authorization: Bearer {KEY}"
AUTH: dict[str, Any] = {"auth": {"api_keys": ["sk-right-0", KEY]}}
RIGHT = (BEARER, f"authorization: bearer {KEY}", f"X-Api-Key: {KEY}")
WRONG = ("Authorization: Bearer sk-wrong", "x-api-key: sk-wrong")

PAGE = "https://chat.example.org"
ORIGIN = f"Origin: {PAGE}"
ASKS = ("Access-Control-Request-Method: POST", "Access-Control-Request-Headers: x-stainless-os")

# Ids to 8000 tokens at 5 ms: still running whenever a test looks.
ENDLESS = {"contains": "endless", "token_ids": [300] * 8000}
PACE = ("--itl-ms", "5")


@dataclass(frozen=True)
class Route:
    """A route as it is asked for; `rule` is how it is called in the tables."""

    method: str
    path: str
    rule: str
    hot: bool

    @property
    def takes_body(self) -> bool:
        return self.method in ("POST", "PUT", "PATCH")

    def __str__(self) -> str:
        return f"{self.method} {self.rule}"


def routes_of(house: House) -> list[Route]:
    """Return all routes of a daemon."""
    hot = handlers(house.daemon.service)
    app = make_app(house.daemon.service, frozenset(path for _, path in hot))
    found = [Route(method, path, path, True) for method, path in hot]
    for rule in app.url_map.iter_rules():
        path = re.sub(r"<[^>]+>", str(uuid.UUID(int=7)), rule.rule)
        methods = sorted((rule.methods or set()) - {"OPTIONS"})
        found += [Route(method, path, rule.rule, False) for method in methods]
    assert {route.hot for route in found} == {True, False}
    assert len(found) > 30
    return found


class Walk:
    """A house, its routes, and how they are asked; whatever is answered has the request's id."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.routes = routes_of(house)

    async def ask(
        self, route: Route, *headers: str, body: bytes = b"{}", framed: bool = True
    ) -> Call:
        """Make a request; with `framed` false the body's framing is in `headers`."""
        lines = ["x-request-id: walk-7", *headers]
        data = body if route.takes_body else b""
        if data:
            lines += ["Content-Type: application/json"]
            lines += [f"Content-Length: {len(data)}"] if framed else []
        request = head(route.path, *lines, method=route.method) + data
        call = await send(self.house.port, request, route.method)
        with trio.fail_after(PATIENCE):
            async with call.stream:
                await call.read()
        assert call.complete, route
        assert call.headers["x-request-id"] == "walk-7", route
        return call


@asynccontextmanager
async def walking(
    nursery: trio.Nursery, http_path: HttpPath, workers: int = 0, **tables: Any
) -> AsyncIterator[Walk]:
    tables["server"] = {"http_path": http_path} | tables.get("server", {})
    async with api_house(nursery, workers=workers, **tables) as api:
        yield Walk(api.house)


def code_of(call: Call) -> str:
    """Return the code of an error, which HEAD has in its header alone; empty without an error."""
    code = call.headers.get("x-smg-error-code", "")
    if call.body and code and isinstance(call.json["error"], dict):
        assert call.error["code"] == code
        assert call.error.keys() == {"message", "type", "param", "code"}
    return code


NOWHERE = [
    Route("GET", "/", "other", False),
    Route("GET", "/v2/nothing", "other", False),
    Route("POST", "/v1/responses", "other", False),
    Route("GET", CHAT, "other", False),  # a route, by another method
    Route("DELETE", "/health", "other", False),
    Route("OPTIONS", CHAT, "other", False),
]


# -------------------------------------------------------------------------------------- keys


async def test_no_route_is_answered_without_a_key(
    nursery: trio.Nursery, http_path: HttpPath
) -> None:
    async with walking(nursery, http_path, **AUTH) as walk:
        answers = walk.house.daemon.service.gate
        for route in walk.routes + NOWHERE:
            bare = await walk.ask(route)
            if route.rule in OPEN:
                assert bare.status in (200, 503), route
                assert code_of(bare) == "", route
                continue
            texts = set()
            for call in (bare, *[await walk.ask(route, header) for header in WRONG]):
                assert (call.status, code_of(call)) == (401, "invalid_api_key"), route
                assert call.headers["www-authenticate"] == "Bearer"
                assert b"sk-" not in call.body
                texts.add(call.body)
            if route.method != "HEAD":
                assert len(texts) == 2, "one text without a key, one with a wrong one"
                assert bare.error["type"] == "invalid_request_error"
                assert bare.error["message"].startswith("This server needs an API key.")
        await until(lambda: not answers.answering)
        assert "sk-" not in str(walk.house.lines)


async def test_every_route_is_answered_with_a_key(
    nursery: trio.Nursery, http_path: HttpPath
) -> None:
    async with walking(nursery, http_path, **AUTH) as walk:
        for route in walk.routes:
            for header in RIGHT:
                call = await walk.ask(route, header)
                code = code_of(call)
                assert call.status not in (401, 405), route
                assert (call.status, code) not in ((404, "unknown_url"), (500, "internal_error"))
        for route in NOWHERE:
            call = await walk.ask(route, BEARER)
            known = route.path in (CHAT, "/health")
            expected = (405, "method_not_allowed") if known else (404, "unknown_url")
            assert (call.status, code_of(call)) == expected, route
        [status] = {(await walk.ask(route)).status for route in walk.routes if route.rule in OPEN
                    if route.rule != "/readiness"}  # fmt: skip
        assert status == 200


async def test_without_keys_everybody_is_served(nursery: trio.Nursery, http_path: HttpPath) -> None:
    async with walking(nursery, http_path) as walk:
        for route in walk.routes + NOWHERE:
            for header in ("Accept: */*", WRONG[0]):
                assert (await walk.ask(route, header)).status != 401, route


async def test_a_port_that_others_reach_and_that_needs_no_key_is_warned_of(
    nursery: trio.Nursery, http_path: HttpPath
) -> None:
    everywhere: dict[str, Any] = {"server": {"host": "0.0.0.0"}}
    for tables, warnings in (({}, 0), (everywhere, 1), ({**everywhere, **AUTH}, 0)):
        async with walking(nursery, http_path, **tables) as walk:
            found = walk.house.logged("no API key is set: whoever reaches the HTTP port may use it")
            assert [line["log_level"] for line in found] == ["warning"] * warnings


async def test_the_metrics_port_needs_no_key(nursery: trio.Nursery, http_path: HttpPath) -> None:
    async with walking(nursery, http_path, **AUTH) as walk:
        assert await walk.house.metric("smg_http_inflight_requests") == 0
        labels = {"path": CHAT, "status_code": "401", "error_code": "invalid_api_key"}
        call = await walk.ask(Route("POST", CHAT, CHAT, True))
        assert call.status == 401
        assert await walk.house.metric("smg_http_responses_total", **labels) == 1


# -------------------------------------------------------------------------------------- bodies


CHUNKED = "Transfer-Encoding: chunked"


def chunked(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


async def test_no_route_takes_a_body_that_is_too_large(
    nursery: trio.Nursery, http_path: HttpPath
) -> None:
    async with walking(nursery, http_path, server={"max_payload_size": 100}, **AUTH) as walk:
        walked = [route for route in walk.routes if route.takes_body]
        for route in walked:
            for body, framing in ((b"x" * 101, ()), (chunked(b"x" * 101), (CHUNKED,))):
                call = await walk.ask(route, BEARER, *framing, body=body, framed=not framing)
                assert (call.status, code_of(call)) == (413, "request_too_large"), route
                assert call.error["message"] == "Request body is larger than 100 bytes"
            for body, framing in ((b"x" * 100, ()), (chunked(b"x" * 100), (CHUNKED,))):
                call = await walk.ask(route, BEARER, *framing, body=body, framed=not framing)
                assert call.status != 413, route
            call = await walk.ask(route, body=b"x" * 101)
            assert call.status == 401, "the key comes first"
        assert {route.hot for route in walked} == {True, False}


async def test_the_limit_of_bodies_changes_for_all_routes(
    nursery: trio.Nursery, http_path: HttpPath
) -> None:
    async with walking(nursery, http_path) as walk:
        walk.house.daemon.service.max_payload_size = 10
        for route in walk.routes:
            if route.takes_body:
                assert (await walk.ask(route, body=b"x" * 11)).status == 413, route


# -------------------------------------------------------------------------------------- admission


@asynccontextmanager
async def occupied(
    nursery: trio.Nursery, http_path: HttpPath, **limits: Any
) -> AsyncIterator[Walk]:
    """Give a house that has one permit, and a stream that has it."""
    tables: dict[str, Any] = {"limits": {"max_concurrent_requests": 1, **limits}}
    async with walking(nursery, http_path, 1, replies=[ENDLESS], **tables) as walk:
        walk.house.start_engine(*PACE)
        await walk.house.ready()
        call = await walk.house.call("endless", stream=True)
        await call.read("content")
        yield walk
        await call.close()


async def test_only_what_makes_engines_work_is_kept_out_by_a_full_queue(
    nursery: trio.Nursery, http_path: HttpPath
) -> None:
    async with occupied(nursery, http_path, queue_size=0) as walk:
        hot = [route for route in walk.routes if route.hot]
        for route in walk.routes:
            call = await walk.ask(route)
            refused = (call.status, code_of(call)) == (429, "admission_queue_full")
            assert refused is route.hot, route
            assert call.headers.get("retry-after") == ("1" if route.hot else None), route
        gate = walk.house.daemon.service.gate
        assert (gate.admission.running, gate.admission.full) == (1, len(hot))
        metric = walk.house.metric
        assert await metric("smg_admission_inflight") == 1
        assert await metric("smg_admission_queue_depth") == 0
        assert await metric("smg_admission_queue_rejected_total", reason="full") == len(hot)
        assert await metric("smg_http_rate_limit_total", result="rejected") == len(hot)
        assert await metric("smg_http_rate_limit_total", result="allowed") == 1


async def test_who_waits_for_too_long_is_told_so(
    nursery: trio.Nursery, http_path: HttpPath
) -> None:
    async with occupied(nursery, http_path, queue_size=1, queue_timeout_secs=0.02) as walk:
        hot = [route for route in walk.routes if route.hot]
        for route in hot:
            call = await walk.ask(route)
            assert (call.status, code_of(call)) == (503, "admission_queue_timeout"), route
            assert call.headers["retry-after"] == "1"
        rejected = await walk.house.metric("smg_admission_queue_rejected_total", reason="timeout")
        assert rejected == len(hot)
        [*lines] = [line for line in await walk.house.requests() if line["status"] == 503]
        assert len(lines) == len(hot)
        assert all(line["queued_ms"] >= 20 for line in lines)


# -------------------------------------------------------------------------------------- CORS


def allowed(call: Call) -> str | None:
    return call.headers.get("access-control-allow-origin")


async def test_every_answer_tells_a_page_that_it_may_read_it(
    nursery: trio.Nursery, http_path: HttpPath
) -> None:
    server = {"cors_allowed_origins": [PAGE]}
    async with walking(nursery, http_path, server=server, **AUTH) as walk:
        for route in walk.routes + NOWHERE:
            for headers in ((), (BEARER,)):  # errors as well
                call = await walk.ask(route, ORIGIN, *headers)
                assert allowed(call) == PAGE, route
                assert call.headers["vary"].lower() == "origin"
                assert "x-request-id" in call.headers["access-control-expose-headers"]
                for origin in ("Origin: https://evil.example.org", "Accept: */*"):
                    call = await walk.ask(route, origin, *headers)
                    assert allowed(call) is None, route
                    assert call.headers["vary"].lower() == "origin"


async def test_a_preflight_needs_no_key_and_tells_no_paths(
    nursery: trio.Nursery, http_path: HttpPath
) -> None:
    server = {"cors_allowed_origins": [PAGE]}
    async with walking(nursery, http_path, server=server, **AUTH) as walk:
        answers = set()
        for path in {route.path for route in walk.routes + NOWHERE}:
            route = Route("OPTIONS", path, path, False)
            call = await walk.ask(route, ORIGIN, *ASKS)
            assert (call.status, call.body, allowed(call)) == (204, b"", PAGE), route
            assert "POST" in call.headers["access-control-allow-methods"]
            assert call.headers["access-control-allow-headers"] == "x-stainless-os"
            call.headers.pop("date", "")
            answers.add(frozenset(call.headers.items()))
            stranger = await walk.ask(route, "Origin: https://evil.example.org", *ASKS)
            assert (stranger.status, allowed(stranger)) == (204, None)
            assert "access-control-allow-methods" not in stranger.headers
        assert len(answers) == 1


async def test_nothing_is_allowed_unless_it_is_configured(
    nursery: trio.Nursery, http_path: HttpPath
) -> None:
    async with walking(nursery, http_path) as walk:
        for route in walk.routes:
            call = await walk.ask(route, ORIGIN)
            assert not [name for name in call.headers if name.startswith("access-control")], route
        call = await walk.ask(Route("OPTIONS", CHAT, CHAT, False), ORIGIN, *ASKS)
        assert (call.status, allowed(call)) == (405, None)


async def test_a_stream_may_be_read_by_a_page(nursery: trio.Nursery, http_path: HttpPath) -> None:
    async with walking(
        nursery, http_path, 1, server={"cors_allowed_origins": ["*"]}, **AUTH
    ) as walk:
        walk.house.start_engine()
        await walk.house.ready()
        chat = Route("POST", CHAT, CHAT, True)
        for stream in (True, False):
            body = chat_body("hello", max_tokens=3, stream=stream)
            call = await walk.ask(chat, ORIGIN, BEARER, body=body)
            assert (call.status, allowed(call)) == (200, "*")
            assert ("event-stream" in call.headers["content-type"]) is stream


# -------------------------------------------------------------------------------------- counting


async def test_routes_of_both_kinds_are_counted_while_they_are_answered(
    nursery: trio.Nursery, http_path: HttpPath
) -> None:
    async with walking(nursery, http_path) as walk:
        answering = walk.house.daemon.service.gate.answering
        half: Callable[[str], bytes] = lambda path: head(  # noqa: E731
            path, "Content-Type: application/json", "Content-Length: 9"
        )
        calls = [await send(walk.house.port, half(path)) for path in (CHAT, "/workers")]
        await until(lambda: {access.route for access in answering} == {CHAT, "/workers"})
        assert await walk.house.metric("smg_http_inflight_requests") == 2
        for call in calls:
            await call.close()
        await until(lambda: not answering)
