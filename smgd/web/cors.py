"""CORS: which web pages may use this server from a browser (the Fetch standard, section 3.2).

Nothing is allowed unless an origin is configured. Keys travel in a header that a page has to set
itself, never in a cookie, so credentials in the sense of CORS are not allowed to anybody, and `*`
gives away no more than a server without keys does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from smgd.web.headers import Header, Headers

ANY: Final = "*"

# What pages may read of an answer beside its body.
_EXPOSED: Final = b"x-request-id, x-smg-error-code, retry-after, location"
_METHODS: Final = b"GET, POST, PUT, PATCH, DELETE"
# Seconds; browsers cap it themselves, Chromium at two hours.
_MAX_AGE: Final = b"7200"

# A list of header names. `*` would not cover authorization, so what is asked for is repeated.
_NAMES: Final = re.compile(rb"[A-Za-z0-9_-]+( *, *[A-Za-z0-9_-]+)*")
_NAMES_MAX: Final = 2048


class Cors:
    """The origins whose pages may read answers: `scheme://host[:port]` each, or `*` for all."""

    __slots__ = ("_allowed", "_others")

    def __init__(self, origins: Iterable[str]) -> None:
        texts = {origin.lower() for origin in origins}
        self._allowed = {text.encode(): _answer(text.encode()) for text in texts - {ANY}}
        self._others = _answer(ANY.encode()) if ANY in texts else _answer(None)

    def headers(self, origin: bytes | None) -> Headers:
        """Return what every answer to a request from `origin` has, errors and streams as well."""
        return self._allowed.get(origin or b"", self._others)


def is_preflight(method: str, header: Header) -> bool:
    """Tell whether a browser only asks whether a page may send a request."""
    return method == "OPTIONS" and None not in (
        header(b"origin"),
        header(b"access-control-request-method"),
    )


def preflight_headers(allowed: Headers, header: Header) -> Headers:
    """Return what the answer to a preflight has beside the headers `allowed` of every answer.

    It is the same for all paths: it tells nobody which of them exist.
    """
    if not any(name == b"access-control-allow-origin" for name, _ in allowed):
        return []
    names = header(b"access-control-request-headers") or b""
    if len(names) > _NAMES_MAX or not _NAMES.fullmatch(names):
        names = b"authorization, content-type, x-api-key"
    return [
        (b"access-control-allow-methods", _METHODS),
        (b"access-control-allow-headers", names),
        (b"access-control-max-age", _MAX_AGE),
    ]


def _answer(origin: bytes | None) -> Headers:
    # Caches must not give one origin's answer to another, nor a refusal.
    vary = (b"vary", b"origin")
    if origin is None:
        return [vary]
    return [
        vary,
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", _EXPOSED),
    ]
