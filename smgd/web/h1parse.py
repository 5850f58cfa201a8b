"""HTTP/1.x requests out of bytes: llhttp (by httptools) in its strict mode, and our limits.

A plain object: `feed` takes what came, `requests` holds the requests whose heads are complete, in
order; the bodies of all but the last are complete too. `refusal` says why nothing after them can be
read. Nothing is ever resynchronised: after a refusal the connection ends, since whatever two
parsers may read differently is how requests are smuggled (RFC 9112, 11.2).

llhttp refuses by itself: both Content-Length and Transfer-Encoding, repeated or odd Content-Length,
a last coding that is not chunked, bad chunk sizes, bare CR or LF, folded headers, blanks before a
colon, control characters. Left to us: sizes, `Host`, versions, codings, and upgrades.
"""

from __future__ import annotations

from collections import deque
from urllib.parse import unquote

import httptools

from smgd.web.headers import Headers


class Refusal(Exception):  # noqa: N818  (an answer, more than an error)
    """A request that cannot be read; `status` is the answer that it gets."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class Request:
    """One request. Header names are lower case; `body` is what has come of it so far.

    `complete` says that all of the body is there. `expects_continue`: the client waits for a 100
    before it sends the body.
    """

    __slots__ = (
        "body",
        "complete",
        "content_length",
        "expects_continue",
        "headers",
        "keep_alive",
        "method",
        "path",
        "query",
        "raw_path",
        "version",
    )

    def __init__(self, method: str, target: bytes, version: str, headers: Headers) -> None:
        self.method = method
        self.version = version
        self.headers = headers
        self.raw_path, _, self.query = origin_form(target, method).partition(b"?")
        path = self.raw_path.decode("ascii")
        self.path = unquote(path) if "%" in path else path
        self.content_length: int | None = None
        self.expects_continue = False
        self.keep_alive = False
        self.body: list[bytes] = []
        self.complete = False

    def take_body(self) -> bytes:
        """Return what has come of the body since the last time."""
        body = self.body
        if not body:
            return b""
        self.body = []
        return body[0] if len(body) == 1 else b"".join(body)


class RequestParser:
    """Parses one connection's bytes. `max_head` bounds a request's line and headers, in bytes, and
    whatever else is not body: trailers, the extensions of a chunk.

    `in_head` says that a request has begun whose head is not complete.
    """

    def __init__(self, max_head: int) -> None:
        self.requests: deque[Request] = deque()
        self.refusal: Refusal | None = None
        self._max_head = max_head
        self._parser = httptools.HttpRequestParser(self)
        self._request: Request | None = None  # whose body is being read
        self._url = b""
        self._headers: Headers = []
        self._size = 0
        # Bytes since the last that came to something: whole lines count in `_size`, but llhttp also
        # holds the beginning of a line, in the head of a request and in the trailers of a body.
        self._unfinished = 0
        self.in_head = False

    def feed(self, data: bytes) -> None:
        """Take bytes that came. Never raises; see `requests` and `refusal`."""
        if self.refusal is not None:
            return
        self._unfinished += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            cause = error.__context__
            self.refusal = cause if isinstance(cause, Refusal) else _refusal(error)
        else:
            if self._unfinished > self._max_head:
                self.refusal = self._too_large()

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                # llhttp takes what follows an upgrade's head for another protocol. We never
                # upgrade, and the request may have a body (Java's client offers h2c with every
                # POST): so it is read again as what it is without the offer (RFC 9110, 7.8).
                head = self._head_without_upgrade()
                data = data[upgrade.args[0] :]
                self._parser = httptools.HttpRequestParser(self)
                self._parser.feed_data(head)
            else:
                return

    def _head_without_upgrade(self) -> bytes:
        version = self._parser.get_http_version()
        lines = [
            b"%b %b HTTP/%b" % (self._parser.get_method(), self._url, version.encode()),
            *(b"%b: %b" % header for header in self._headers if header[0] not in _OFFERS),
        ]
        if any(b"close" in value.lower() for name, value in self._headers if name == b"connection"):
            lines.append(b"connection: close")
        return b"\r\n".join(lines) + b"\r\n\r\n"

    # ----------------------------------------------------------------- llhttp's callbacks, in order

    def on_message_begin(self) -> None:
        self.in_head = True
        self._url = b""
        self._headers = []
        self._size = 0

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._size += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._size += len(name) + len(value) + 4
        if self._size > self._max_head:
            raise self._too_large()
        if self._request is None:  # else it is a trailer, and those are dropped
            self._headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        if self._parser.should_upgrade():
            if self._parser.get_method() == b"CONNECT":
                raise Refusal(405, "This is no proxy")
            return
        version = self._parser.get_http_version()
        method = self._parser.get_method().decode("ascii")
        request = Request(method, self._url, version, self._headers)
        request.keep_alive = self._parser.should_keep_alive()
        _check_head(request)
        self._request = request
        self.in_head = False
        self.requests.append(request)

    def on_body(self, data: bytes) -> None:
        self._unfinished = 0
        if self._request is not None:
            self._request.body.append(data)

    def on_message_complete(self) -> None:
        if self._request is not None:
            self._request.complete = True
            self._request = None
            self._unfinished = 0

    def _too_large(self) -> Refusal:
        if len(self._url) * 2 > self._max_head:
            return Refusal(414, f"Request line is larger than {self._max_head} bytes")
        return Refusal(431, f"Request head is larger than {self._max_head} bytes")


_OFFERS = (b"upgrade", b"http2-settings", b"connection")


def _refusal(error: httptools.HttpParserError) -> Refusal:
    return Refusal(400, f"Malformed request: {error}")


def origin_form(target: bytes, method: str) -> bytes:
    """Return path and query of a request target in whichever form (RFC 9112, 3.2).

    Raises `Refusal`.
    """
    if target.startswith(b"/") or (target == b"*" and method == "OPTIONS"):
        return target
    scheme, found, rest = target.partition(b"://")
    if not found or scheme.lower() not in (b"http", b"https"):
        raise Refusal(400, "Malformed request target")
    place, mark, query = rest.partition(b"?")
    return b"/" + place.partition(b"/")[2] + mark + query


def _check_head(request: Request) -> None:
    """Read what frames the request from its headers. Raises `Refusal`."""
    if request.version == "0.9":  # or none: llhttp refuses such a line by itself, but not always
        raise Refusal(400, "Malformed request: no version of HTTP that is known")
    if request.version not in ("1.1", "1.0"):
        raise Refusal(505, f"HTTP/{request.version} is not supported here")
    hosts = 0
    for name, value in request.headers:
        if name == b"host":
            hosts += 1
        elif name == b"content-length":
            request.content_length = int(value)
        elif name == b"transfer-encoding":
            if request.version == "1.0":
                raise Refusal(400, "Transfer-Encoding is not part of HTTP/1.0")
            if value.lower() != b"chunked":
                raise Refusal(501, "The only supported transfer coding is chunked")
        elif name == b"expect" and request.version == "1.1":
            request.expects_continue = value.lower() == b"100-continue"
    if hosts > 1 or (hosts == 0 and request.version == "1.1"):
        raise Refusal(400, "Exactly one Host header is required")
