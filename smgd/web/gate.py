"""The gate: what holds for every route, whether Quart serves it or a raw handler does.

Both kinds of route call the same code: request ids, the record of an access with its metrics and
its one canonical log line, keys, CORS, admission and error rendering. `Gate` is what the
configuration says of these; a request's way through it is

    access = gate.enter(...)            a record, with an id; counted as being answered
    gate.authenticate(access, ...)      401 without a key, before anything else is told
    gate.admission.admit(access)        only routes that make engines or tokenizers work; if no
    turn = gate.park(access)              permit is free, a place in the queue,
    await gate.wait(access, turn)         and in its turn the permit
    ...                                 the route
    gate.leave(access)                  always: permit back, metrics, log line

and all but the waiting is synchronous.
"""

from __future__ import annotations

import re
import secrets
from itertools import product
from typing import Any
from urllib.parse import quote

import msgspec
import structlog
import trio

from smgd.errors import ApiError, invalid_request
from smgd.metrics import Metrics
from smgd.samples import GateSample
from smgd.web.admission import Admission
from smgd.web.auth import Keys
from smgd.web.cors import Cors
from smgd.web.headers import Header, Headers

log = structlog.get_logger("smgd.request")

JSON = (b"content-type", b"application/json")

# Accepted from clients, first match wins; what is echoed must be fit for a header and a log.
REQUEST_ID_HEADERS = (b"x-request-id", b"x-correlation-id", b"x-trace-id", b"request-id")
REQUEST_ID_MAX = 128

# nginx's status for a client that closed before the answer was complete.
CLIENT_CLOSED = 499

# Asked for every few seconds by balancers and scrapers: not worth a line at info.
PROBES = frozenset({"/health", "/liveness", "/readiness", "/metrics"})

# What needs no key: balancers and orchestrators have none, and learn nothing but how smgd is.
OPEN = frozenset(product(("GET", "HEAD"), ("/health", "/liveness", "/readiness")))

# A client may call its method anything; a metric's label may not be anything.
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER = "other"

# The error code of what never became a request.
BAD_HTTP = "bad_http"

# Of RFC 9110 and its registry; https://www.iana.org/assignments/http-parameters.
COMPRESSIONS = frozenset(
    {b"gzip", b"x-gzip", b"deflate", b"br", b"zstd", b"compress", b"x-compress", b"dcb", b"dcz"}
)

# Characters of a path in the log; a client may send sixty thousand.
SHOWN_PATH = 200


class Access:
    """The record of one request, from its head to the end of its answer.

    Times are on trio's clock, in seconds. `route` is what metrics know the request by, `path` what
    was asked for. `fields` go into the canonical line as they are, `cors` into the answer.
    """

    __slots__ = (
        "cors", "error_code", "fields", "id", "method", "path", "route", "started", "status",
    )  # fmt: skip

    def __init__(self, method: str, route: str, path: str, request_id: str, client: str) -> None:
        self.method = method if method in METHODS else OTHER
        self.route = route
        self.path = path
        self.id = request_id
        self.started = trio.current_time()
        self.fields: dict[str, Any] = {"client": client}
        self.cors: Headers = []
        self.left()

    def answered(self, status: int, error_code: str = "") -> None:
        """Note how the request was answered."""
        self.status = status
        self.error_code = error_code

    def left(self) -> None:
        """Note that the client did not wait for the end of its answer."""
        self.answered(CLIENT_CLOSED, "client_closed_request")

    def close(self, metrics: Metrics) -> None:
        """Count the request and write its line."""
        seconds = trio.current_time() - self.started
        metrics.answered(self.method, self.route, self.status, self.error_code, seconds)
        write = log.debug if self.route in PROBES else log.info
        if self.error_code:
            self.fields["error_code"] = self.error_code
        write(
            "request",
            method=self.method,
            path=self.path,
            status=self.status,
            request_id=self.id,
            duration_ms=round(seconds * 1000, 1),
            **self.fields,
        )


class Gate(msgspec.Struct, kw_only=True, eq=False):
    """What the configuration says of all routes, and the requests that are being answered.

    `header`, wherever it is a parameter, returns the value of a request's header by its lower-case
    name.
    """

    metrics: Metrics
    admission: Admission
    keys: Keys
    cors: Cors | None = None
    answering: set[Access] = set()

    def enter(
        self,
        method: str,
        route: str,
        header: Header,
        own_id: str,
        client: str,
        path: str | None = None,
    ) -> Access:
        """Begin the record of a request from the address `client`.

        `own_id` is its id if the client gives none, `path` what was asked for where `route` is a
        pattern, or none of ours.
        """
        shown = route if path is None else shown_path(path)
        access = Access(method, route, shown, request_id(header, own_id), client)
        if access.id != own_id:
            access.fields["id"] = own_id
        if self.cors is not None:
            access.cors = self.cors.headers(header(b"origin"))
        self.answering.add(access)
        return access

    def authenticate(self, access: Access, header: Header) -> None:
        """Raise `ApiError` 401 if the route needs a key and the request has none of ours.

        A path that is no route needs one, too: without a key nobody learns which there are.
        """
        if self.keys and (access.method, access.route) not in OPEN:
            self.keys.check(header)

    def park(self, access: Access) -> trio.Event:
        """Take a place in the queue; what is returned is set when its turn has come.

        `leave` gives the place back, or the permit. Raises `ApiError` 429 or 503.
        """
        turn = trio.Event()
        self.admission.park(access, turn.set)
        return turn

    async def wait(self, access: Access, turn: trio.Event) -> None:
        """Wait in the queue for a permit. Raises `ApiError` 503."""
        with trio.move_on_at(access.started + self.admission.timeout):
            await turn.wait()
        access.fields["queued_ms"] = round((trio.current_time() - access.started) * 1000, 1)
        self.admission.settle(access)

    def leave(self, access: Access) -> None:
        """End a request, however it has come to its end."""
        self.answering.discard(access)
        self.admission.leave(access)
        access.close(self.metrics)

    def refused(self, client: str, status: int, reason: str) -> None:
        """Count a request that cannot be read as HTTP, and write its line."""
        self.metrics.answered(OTHER, OTHER, status, BAD_HTTP, 0.0)
        log.info("request refused", client=client, status=status, reason=reason)

    def sample(self) -> GateSample:
        """Return what metrics tell of the gate."""
        admission, now = self.admission, trio.current_time()
        return GateSample(
            ages=[now - access.started for access in self.answering],
            running=admission.running,
            waiting=admission.waiting,
            allowed=admission.allowed,
            full=admission.full,
            timeouts=admission.timeouts,
        )


def shown_path(path: str) -> str:
    """Return a path as it stands in the log: cut, and with nothing in it that a terminal obeys."""
    return quote(path[:SHOWN_PATH], safe="/:@!$&'()*+,;=~%")[:SHOWN_PATH]


# Of the ids of requests whose answer has none of its own.
REQUEST = "req-"


def new_id(prefix: str) -> str:
    """Return a fresh public id: the prefix and 24 hexadecimal digits."""
    return prefix + secrets.token_hex(12)


def request_id(header: Header, otherwise: str) -> str:
    """Return the client's own request id if it is fit to be echoed, else `otherwise`."""
    for name in REQUEST_ID_HEADERS:
        value = header(name)
        if value and len(value) <= REQUEST_ID_MAX and all(0x21 <= byte <= 0x7E for byte in value):
            return value.decode("ascii")
    return otherwise


def check_content_type(value: bytes | None) -> None:
    """Refuse bodies that do not say they are JSON. Raises `ApiError` 400.

    A browser sends `text/plain` across origins without asking; JSON it has to ask for.
    """
    kind = (value or b"").split(b";")[0].strip().lower()
    if kind != b"application/json" and not kind.endswith(b"+json"):
        text = "Expected request with `Content-Type: application/json`"
        raise invalid_request("json_parse_error", text)


def check_content_encoding(value: bytes | None) -> None:
    """Refuse bodies that are compressed: they are read as they come. Raises `ApiError` 415.

    What is no compression (`utf-8`, by clients that mean the charset) is let pass: the body tells.
    """
    if value and not COMPRESSIONS.isdisjoint(re.split(rb"[,\s]+", value.lower())):
        shown = value.lower().decode("latin-1")[:40]
        text = f"Content-Encoding {shown!r} is not supported: send the body as it is"
        raise ApiError(415, "unsupported_content_encoding", text)


def common_headers(access: Access) -> Headers:
    """Return the headers of every answer."""
    return [(b"x-request-id", access.id.encode("ascii")), *access.cors]


def error_headers(access: Access, error: ApiError) -> Headers:
    """Return the headers of an error answer."""
    headers = [JSON, (b"x-smg-error-code", error.code.encode()), *common_headers(access)]
    if error.retry_after is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def unknown_url(method: str, path: str) -> ApiError:
    """Return the 404 for a path that is no route."""
    return ApiError(404, "unknown_url", f"Invalid URL ({method} {path})")


def method_not_allowed(method: str, path: str) -> ApiError:
    """Return the 405 for a route that has no such method."""
    return ApiError(405, "method_not_allowed", f"Method {method} is not allowed for {path}")
