"""Response heads and framing, as values."""

from __future__ import annotations

import pytest

from smgd.web.h1parse import Request
from smgd.web.h1write import Framing, chunk, plan_response, render_head

LENGTH = (b"content-length", b"5")
CHUNKED = (b"transfer-encoding", b"chunked")
CLOSE = (b"connection", b"close")
KEEP = (b"connection", b"keep-alive")


def request(method: str = "POST", version: str = "1.1", *, keep_alive: bool = True) -> Request:
    made = Request(method, b"/", version, [])
    made.keep_alive = keep_alive
    made.complete = True
    return made


@pytest.mark.parametrize(
    ("asked", "status", "headers", "plan"),
    [
        (request(), 200, [], ([CHUNKED], Framing.CHUNKED, 0, True)),
        (request(), 200, [LENGTH], ([LENGTH], Framing.LENGTH, 5, True)),
        (request(), 200, [CLOSE], ([CHUNKED, CLOSE], Framing.CHUNKED, 0, False)),
        (request(), 200, [CHUNKED], ([CHUNKED], Framing.CHUNKED, 0, True)),
        (request(), 204, [LENGTH], ([], Framing.NO_BODY, 0, True)),
        (request(), 304, [LENGTH], ([LENGTH], Framing.NO_BODY, 0, True)),
        (request("HEAD"), 200, [LENGTH], ([LENGTH], Framing.NO_BODY, 0, True)),
        (request("HEAD"), 200, [], ([], Framing.NO_BODY, 0, True)),
        (request(version="1.0"), 200, [], ([CLOSE], Framing.CLOSE, 0, False)),
        (request(version="1.0"), 200, [LENGTH], ([LENGTH, KEEP], Framing.LENGTH, 5, True)),
        (request(keep_alive=False), 200, [LENGTH], ([LENGTH, CLOSE], Framing.LENGTH, 5, False)),
    ],
)
def test_how_a_response_is_framed(
    asked: Request, status: int, headers: list[tuple[bytes, bytes]], plan: object
) -> None:
    assert plan_response(asked, status, headers, closing=False) == plan


def test_a_response_ends_the_connection_if_the_server_stops_or_the_body_is_unread() -> None:
    half = request()
    half.complete = False
    for plan in (
        plan_response(request(), 200, [LENGTH], closing=True),
        plan_response(half, 200, [LENGTH], closing=False),
    ):
        assert plan.headers == [LENGTH, CLOSE]
        assert not plan.keep_alive


def test_a_head() -> None:
    lines = render_head(200, [(b"a", b"b"), (b"c", b"d")]).split(b"\r\n")
    assert lines[0] == b"HTTP/1.1 200 OK"
    assert lines[1].startswith(b"date: ")
    assert lines[1].endswith(b" GMT")
    assert lines[2:] == [b"a: b", b"c: d", b"", b""]


def test_a_head_with_a_status_that_has_no_name() -> None:
    assert render_head(299, []).startswith(b"HTTP/1.1 299 \r\n")


@pytest.mark.parametrize("bad", [b"a\r\nb: c", b"a\n", b"\r", b"\0"])
def test_a_head_cannot_be_broken_out_of(bad: bytes) -> None:
    with pytest.raises(ValueError, match="line break"):
        render_head(200, [(b"x", bad)])
    with pytest.raises(ValueError, match="line break"):
        render_head(200, [(bad, b"x")])


def test_chunks() -> None:
    assert chunk(b"x" * 17) == b"11\r\n" + b"x" * 17 + b"\r\n"
    assert chunk(b"") == b""
