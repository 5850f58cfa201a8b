"""The ASGI application that Hypercorn runs: hot routes to raw handlers, the rest to `fallback`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import structlog
import trio

from smgd.web.exchange import Routes, plain_path, run_exchange
from smgd.web.hyper import Message, Receive, Scope, Send
from smgd.web.settings import ServerSettings
from smgd.web.streams import WRITE_STEP

log = structlog.get_logger("smgd.web")


class GuardedApp:
    """Runs a `Routes` under Hypercorn, with the two guards that Hypercorn's `send` lacks.

    1. An HTTP/2 client that opens no window holds up a `send` above the stream and its deadline:
       so there is one here, for each 64 KiB.
    2. The last message of a response is sent to its end. Hypercorn tells the application of the
       disconnect from inside that very send; an application that stops itself on hearing it (as
       Quart-Trio does) would cancel the send before the connection is closed or recycled, and the
       connection would stay open for ever.

    Of HTTP alone: `protocols` begins no WebSocket. Lifespan is not passed on: what has to be
    started and stopped is the daemon's, in its order and its nurseries. Quart's `before_serving`
    hooks therefore never run.
    """

    def __init__(self, routes: Routes, settings: ServerSettings) -> None:
        self._routes = routes
        self._settings = settings
        self.refused = routes.refused

    async def __call__(
        self, scope: Scope, receive: Receive, send: Send, *_: Callable[..., Any]
    ) -> None:
        guard = self._guarded_h2 if scope["http_version"] == "2" else _guarded_h1
        try:
            await self._dispatch(scope, receive, guard(send))
        except* trio.BrokenResourceError:
            log.debug("client takes no data", path=scope["path"])

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._routes.hot.get((scope["method"], plain_path(scope["path"])))
        if handler is None:
            await self._routes.fallback(scope, receive, send)
        else:
            timeout = self._settings.body_timeout
            await run_exchange(scope, receive, send, handler, body_timeout=timeout)

    def _guarded_h2(self, send: Send) -> Send:
        async def guarded(message: Message) -> None:
            for piece in _pieces(message):
                deadline = trio.move_on_after(self._settings.write_timeout, shield=_is_last(piece))
                with deadline:
                    await send(piece)
                if deadline.cancelled_caught:
                    raise trio.BrokenResourceError("the client takes no data")

        return guarded


def _guarded_h1(send: Send) -> Send:
    async def guarded(message: Message) -> None:
        if not _is_last(message):
            await send(message)
            return
        with trio.CancelScope(shield=True):
            await send(message)

    return guarded


def _is_last(message: Message) -> bool:
    return message["type"] == "http.response.body" and not message.get("more_body", False)


def _pieces(message: Message) -> Iterator[Message]:
    body = message.get("body", b"")
    while len(body) > WRITE_STEP:
        yield {"type": "http.response.body", "body": body[:WRITE_STEP], "more_body": True}
        body = body[WRITE_STEP:]
    yield {**message, "body": body} if body else message
