"""HTTP/1.x responses into bytes: heads, framing, dates. Plain functions and one plain object."""

from __future__ import annotations

import time
from email.utils import formatdate
from enum import Enum, auto
from http import HTTPStatus
from typing import NamedTuple

from smgd.web.h1parse import Request
from smgd.web.headers import Headers

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"

_STATUS_LINES = {s.value: b"HTTP/1.1 %d %b" % (s, s.phrase.encode("ascii")) for s in HTTPStatus}


class _Date:
    """The `date` header, made once a second."""

    def __init__(self) -> None:
        self._second = 0
        self._line = b""

    def line(self) -> bytes:
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._line = b"date: " + formatdate(second, usegmt=True).encode("ascii")
        return self._line


_date = _Date()


class Framing(Enum):
    """How the end of a response's body is told (RFC 9112, 6.3)."""

    NO_BODY = auto()
    LENGTH = auto()
    CHUNKED = auto()
    CLOSE = auto()


class Plan(NamedTuple):
    """What a response's head says; `length` is that of its body, in bytes, under LENGTH."""

    headers: Headers
    framing: Framing
    length: int
    keep_alive: bool


def plan_response(request: Request, status: int, headers: Headers, *, closing: bool) -> Plan:
    """Decide how a response is framed and whether the connection goes on after it.

    It does not if the server or the handler (`connection: close`) wants it to end, if the request
    was not read to its end, or if only the end of the connection tells the end of the body.
    """
    keep_alive = request.keep_alive and request.complete and not closing
    framing = Framing.CHUNKED if request.version == "1.1" else Framing.CLOSE
    length = 0
    sent: Headers = []
    for name, value in headers:
        if name == b"content-length":
            framing, length = Framing.LENGTH, int(value)
            if status == 204:
                continue
        elif name == b"connection":
            keep_alive = keep_alive and value.lower() != b"close"
            continue
        elif name == b"transfer-encoding":
            continue
        sent.append((name, value))
    if request.method == "HEAD" or status in (204, 304):
        framing, length = Framing.NO_BODY, 0
    if framing is Framing.CHUNKED:
        sent.append((b"transfer-encoding", b"chunked"))
    keep_alive = keep_alive and framing is not Framing.CLOSE
    if not keep_alive:
        sent.append((b"connection", b"close"))
    elif request.version == "1.0":
        sent.append((b"connection", b"keep-alive"))
    return Plan(sent, framing, length, keep_alive)


def render_head(status: int, headers: Headers) -> bytes:
    """Return the head of a response. Raises ValueError for a header that would break out of it."""
    lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d " % status, _date.line()]
    lines += [b"%b: %b" % header for header in headers]
    head = b"\r\n".join(lines)
    breaks = len(lines) - 1
    if head.count(b"\n") != breaks or head.count(b"\r") != breaks or b"\0" in head:
        raise ValueError("a response header contains a line break")
    return head + b"\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """Return data as one chunk; none for no data, since an empty chunk ends the body."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""
