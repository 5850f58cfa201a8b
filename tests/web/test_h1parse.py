"""The request parser: any bytes become requests or a refusal, however they are cut."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from smgd.web.h1parse import Request, RequestParser

MAX_HEAD = 2000


@dataclass
class Parsed:
    requests: list[tuple[object, ...]]
    refused: int | None


def parse(*pieces: bytes) -> Parsed:
    parser = RequestParser(MAX_HEAD)
    requests: list[Request] = []
    bodies: dict[Request, bytes] = {}
    for piece in pieces:
        parser.feed(piece)
        while parser.requests:
            requests.append(parser.requests.popleft())
        for request in requests:
            bodies[request] = bodies.get(request, b"") + request.take_body()
    return Parsed(
        [
            (r.method, r.path, r.query, r.version, r.headers, r.keep_alive, r.complete, bodies[r])
            for r in requests
        ],
        parser.refusal.status if parser.refusal else None,
    )


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({place % (len(data) + 1) for place in places} | {len(data)})
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


HEADERS = st.lists(
    st.tuples(
        st.sampled_from([b"X-A", b"accept", b"Cookie", b"Expect"]),
        st.binary(max_size=20).map(lambda v: bytes(c for c in v if 32 < c < 127)),
    ),
    max_size=4,
)
BODIES = st.binary(max_size=50)


@st.composite
def valid_requests(draw: st.DrawFn) -> bytes:
    headers = [(b"Host", b"test"), *draw(HEADERS)]
    body = draw(BODIES)
    match draw(st.sampled_from(["length", "chunked", "upgrade"])):
        case "chunked":
            headers.append((b"Transfer-Encoding", b"chunked"))
            pieces = [p for p in cut(body, draw(st.lists(st.integers(0, 50), max_size=3))) if p]
            chunks = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in pieces)
            body = chunks + b"0\r\n\r\n"
        case "upgrade":
            headers += [(b"Connection", b"Upgrade"), (b"Upgrade", b"h2c")]
            headers.append((b"Content-Length", b"%d" % len(body)))
        case _:
            headers.append((b"Content-Length", b"%d" % len(body)))
    target = draw(st.sampled_from([b"/", b"/a%20b?q=1", b"http://h/p", b"/v1/models"]))
    head = b"POST %b HTTP/1.1\r\n" % target
    return head + b"".join(b"%b: %b\r\n" % header for header in headers) + b"\r\n" + body


PLACES = st.lists(st.integers(0, 10_000), max_size=8)


@given(st.lists(valid_requests(), max_size=4), PLACES)
def test_cutting_changes_nothing(requests: list[bytes], places: list[int]) -> None:
    data = b"".join(requests)
    whole = parse(data)
    assert whole.refused is None
    assert len(whole.requests) == len(requests)
    assert all(request[-2] for request in whole.requests)
    assert parse(*cut(data, places)) == whole
    assert parse(*(bytes([byte]) for byte in data)) == whole


@given(st.lists(valid_requests(), min_size=1, max_size=3), st.data())
def test_damage_is_refused_or_harmless(requests: list[bytes], data: st.DataObject) -> None:
    damaged = bytearray(b"".join(requests))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    whole = parse(bytes(damaged))
    assert parse(*cut(bytes(damaged), data.draw(PLACES))) == whole


def test_a_line_without_a_version_is_malformed_wherever_it_is_cut() -> None:
    offer = b"POST / HTTP/1.1\r\nHost: t\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    data = offer + b"POST /!HTTP/1.1\r\nHost: t\r\n\r\n"
    assert {parse(*cut(data, [place])).refused for place in range(len(data))} == {400}


@given(st.binary(max_size=300))
@example(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
@example(b"GET /\r\n\r\n")
@example(b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n")
@example(b"GET a HTTP/1.1\r\nHost: a\r\n\r\n")
@example(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\nGARBAGE")
def test_any_bytes_parse_or_are_refused(data: bytes) -> None:
    parse(data)


def post(*headers: str, body: bytes = b"", version: str = "1.1") -> bytes:
    lines = [f"POST /p HTTP/{version}", "Host: a", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (post("Transfer-Encoding: gzip, chunked"), 501),
        (post("Transfer-Encoding: chunked", version="1.0"), 400),
        (post("Host: b"), 400),
        (b"POST /p HTTP/1.1\r\n\r\n", 400),
        (b"POST /p HTTP/2.0\r\nHost: a\r\n\r\n", 505),
        (b"GET /p\r\n\r\n", 400),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", 405),
        (b"GET p HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET * HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET ftp://h/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET p?u=http://h/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /" + b"x" * MAX_HEAD, 414),
        (b"GET /" + b"x" * MAX_HEAD + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414),
        (post("X: " + "y" * MAX_HEAD), 431),
        (post("X: " + "y" * MAX_HEAD)[:-4], 431),
        (post(*["X: y"] * MAX_HEAD), 431),
    ],
)
def test_refusals(data: bytes, status: int) -> None:
    assert parse(data) == Parsed([], status)


def test_a_head_of_just_the_limit_is_read() -> None:
    room = MAX_HEAD - len("/p") - len("hostx" + "a") - 2 * 4
    assert parse(post("X: " + "y" * room)).refused is None
    assert parse(post("X: " + "y" * (room + 1))).refused == 431


def test_what_comes_before_a_refusal_is_answered() -> None:
    parsed = parse(post("Content-Length: 2", body=b"hi") + b"nonsense\r\n\r\n")
    assert [request[-1] for request in parsed.requests] == [b"hi"]
    assert parsed.refused == 400


def test_trailers_count_as_head_and_are_dropped() -> None:
    start = post("Transfer-Encoding: chunked", body=b"0\r\nX-T: 1\r\n")
    (request,) = parse(start + b"\r\n").requests
    assert request[4] == [(b"host", b"a"), (b"transfer-encoding", b"chunked")]
    assert parse(start, b"X-T: y\r\n" * MAX_HEAD).refused == 431


@pytest.mark.parametrize("after", ["0\r\nX: ", "0\r\n", "1;x=", "1\r\nx\r\n1;x=", "1\r\nx"])
def test_what_is_endless_beside_the_data_of_a_body_is_refused(after: str) -> None:
    parser = RequestParser(MAX_HEAD)
    parser.feed(post("Transfer-Encoding: chunked", body=b"1\r\nx\r\n" + after.encode()))
    fed = 0
    while parser.refusal is None and fed < 10 * MAX_HEAD:
        parser.feed(b"a" * 100)
        fed += 100
    assert parser.refusal is not None
    assert parser.refusal.status in (400, 431)
    assert fed <= MAX_HEAD + 100


def test_a_body_in_tiny_chunks_may_be_long() -> None:
    parser = RequestParser(MAX_HEAD)
    parser.feed(post("Transfer-Encoding: chunked"))
    for _ in range(MAX_HEAD):
        for byte in (b"1", b"\r\n", b"x", b"\r\n"):
            parser.feed(byte)
    parser.feed(b"0\r\n\r\n")
    assert parser.refusal is None
    (request,) = parser.requests
    assert (request.complete, request.take_body()) == (True, b"x" * MAX_HEAD)


def test_it_is_known_when_a_head_has_begun() -> None:
    parser = RequestParser(MAX_HEAD)
    assert not parser.in_head
    for piece, in_head in [
        (b"\r\n", False),
        (b"P", True),
        (post("Content-Length: 2")[1:], False),
        (b"h", False),
        (b"i", False),
        (b"GET /vers", True),
        (b"ion HTTP/1.1\r\nHost: a\r\n\r\n\r\n", False),
        (post() + b"G", True),
    ]:
        parser.feed(piece)
        assert parser.in_head is in_head, piece


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"/p", "/p", b""),
        (b"http://h", "/", b""),
        (b"http://h/", "/", b""),
        (b"HTTPS://h:1/a/b?c=/d", "/a/b", b"c=/d"),
        (b"http://h?a=/version", "/", b"a=/version"),
        (b"http://h/?a=http://i/b", "/", b"a=http://i/b"),
        (b"/?u=http://i/b", "/", b"u=http://i/b"),
    ],
)
def test_path_and_query_of_a_target(target: bytes, path: str, query: bytes) -> None:
    (request,) = parse(b"GET %b HTTP/1.1\r\nHost: h\r\n\r\n" % target).requests
    assert request[1:3] == (path, query)


def test_any_number_of_upgrades_is_read() -> None:
    offer = post("Connection: Upgrade", "Upgrade: h2c")
    assert len(parse(offer * 3000).requests) == 3000


def test_the_offer_of_an_upgrade_is_dropped_and_close_is_kept() -> None:
    offer = ["Connection: Upgrade, close", "Upgrade: h2c", "Content-Length: 2"]
    (request,) = parse(post(*offer, body=b"hi")).requests
    assert request[4] == [(b"host", b"a"), (b"content-length", b"2"), (b"connection", b"close")]
    assert request[5:] == (False, True, b"hi")
