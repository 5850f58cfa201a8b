"""ASGI on the fast HTTP/1.x path: what is not a hot route runs on the same connections.

The application is cancelled when its client hangs up, so `receive` never has to say so: after the
body it waits. A disconnect therefore cannot arrive inside the last `send`, which on Hypercorn keeps
connections open (see `guard.py`).
"""

from __future__ import annotations

from typing import Protocol

import trio

from smgd.errors import ApiError
from smgd.web.exchange import Exchange, answer
from smgd.web.h1parse import Request
from smgd.web.hyper import AsgiApp, Message, Scope
from smgd.web.protocols import Peers


class BodySource(Protocol):
    """Where more of a request's body comes from."""

    async def read_more(self, request: Request) -> None:
        """Wait for more of the body."""
        ...


async def run_asgi(
    app: AsgiApp, exchange: Exchange, request: Request, source: BodySource, peers: Peers
) -> None:
    """Run an application for one request. What it raises is logged and becomes a bare 500."""
    whole = False
    refusal: ApiError | None = None

    async def read_more() -> None:
        nonlocal refusal
        try:
            await source.read_more(request)
        except ApiError as error:
            if exchange.started:  # the answer that is on its way needs no body
                await trio.sleep_forever()
            refusal = error
            raise

    async def receive() -> Message:
        nonlocal whole
        if whole or exchange.started:  # a body is not invited behind its answer
            await trio.sleep_forever()
        if not request.body and not request.complete:
            await read_more()
        body, whole = request.take_body(), request.complete
        return {"type": "http.request", "body": body, "more_body": not whole}

    async def send(message: Message) -> None:
        if refusal is not None:
            raise refusal
        if message["type"] == "http.response.start":
            await exchange.start(message["status"], list(message.get("headers", ())))
        elif message["type"] != "http.response.body":
            raise RuntimeError(f"unexpected ASGI message {message['type']}")
        elif message.get("more_body", False):
            await exchange.write(message.get("body", b""))
        else:
            await exchange.end(message.get("body", b""))

    async def handler(_: Exchange) -> None:
        try:
            await app(_scope(request, peers), receive, send)
        except* ApiError:
            if refusal is None:
                raise
            headers = [(b"content-type", b"text/plain")]
            await exchange.respond(refusal.status, headers, b"Malformed request body\n")

    await answer(exchange, handler)


def _scope(request: Request, peers: Peers) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.1"},
        "http_version": request.version,
        "method": request.method,
        "scheme": peers.scheme,
        "path": request.path,
        "raw_path": request.raw_path,
        "query_string": request.query,
        "root_path": "",
        "headers": request.headers,
        "client": peers.client,
        "server": peers.server,
        "state": {},
        "extensions": {},
    }
