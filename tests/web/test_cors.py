"""CORS: which origins are told what."""

from __future__ import annotations

import pytest

from smgd.web.cors import Cors, is_preflight, preflight_headers

PAGE = b"https://chat.example.org"


def told(cors: Cors, origin: bytes | None) -> dict[bytes, bytes]:
    return dict(cors.headers(origin))


def test_a_listed_origin_may_read_and_others_may_not() -> None:
    cors = Cors(["https://chat.example.org", "HTTP://localhost:3000"])
    assert told(cors, PAGE) == {
        b"vary": b"origin",
        b"access-control-allow-origin": PAGE,
        b"access-control-expose-headers": b"x-request-id, x-smg-error-code, retry-after, location",
    }
    assert told(cors, b"http://localhost:3000")[b"access-control-allow-origin"]
    strangers = (None, b"", b"null", b"*", b"http://chat.example.org", PAGE + b".evil", PAGE + b"/")
    for origin in strangers:
        assert told(cors, origin) == {b"vary": b"origin"}


def test_a_star_is_everybody() -> None:
    cors = Cors(["*"])
    for origin in (None, PAGE, b"null"):
        assert told(cors, origin)[b"access-control-allow-origin"] == b"*"
        assert b"access-control-allow-credentials" not in told(cors, origin)


@pytest.mark.parametrize(
    ("method", "headers", "is_one"),
    [
        ("OPTIONS", {b"origin": PAGE, b"access-control-request-method": b"POST"}, True),
        ("OPTIONS", {b"origin": PAGE}, False),
        ("OPTIONS", {b"access-control-request-method": b"POST"}, False),
        ("POST", {b"origin": PAGE, b"access-control-request-method": b"POST"}, False),
    ],
)
def test_what_a_preflight_is(method: str, headers: dict[bytes, bytes], is_one: bool) -> None:
    assert is_preflight(method, headers.get) is is_one


@pytest.mark.parametrize(
    ("asked", "answered"),
    [
        (b"authorization, x-stainless-os", b"authorization, x-stainless-os"),
        (b"content-type", b"content-type"),
        (b"", b"authorization, content-type, x-api-key"),
        (b"*", b"authorization, content-type, x-api-key"),
        (b"a b", b"authorization, content-type, x-api-key"),
        (b"a\xff", b"authorization, content-type, x-api-key"),
        (b"a" * 3000, b"authorization, content-type, x-api-key"),
    ],
)
def test_a_preflight_is_told_what_the_page_may_send(asked: bytes, answered: bytes) -> None:
    headers = {b"access-control-request-headers": asked}
    found = dict(preflight_headers(Cors(["*"]).headers(PAGE), headers.get))
    assert found == {
        b"access-control-allow-methods": b"GET, POST, PUT, PATCH, DELETE",
        b"access-control-allow-headers": answered,
        b"access-control-max-age": b"7200",
    }


def test_a_stranger_is_told_nothing() -> None:
    headers = {b"access-control-request-headers": b"content-type"}
    assert preflight_headers(Cors(["https://x"]).headers(PAGE), headers.get) == []
