"""The HTTP server: Hypercorn's protocols in nurseries of ours.

    connections nursery     one task a connection, each in its own cancel scope
    └─ accept nursery       one task a listener; cancelled first at stop

Hypercorn's own `serve` is not used: its accept loop gives no hold on the socket, without which no
write deadline, no direct write and no orderly end is possible (see `connection.py`).

At stop: no more connections are accepted, the listeners are closed, idle connections end at once,
busy ones after their answer, and what is left after `shutdown_grace` is aborted.
"""

from __future__ import annotations

import ssl
from functools import partial

import structlog
import trio

from smgd.web.connection import Connection, Shared, close_idle, sweep
from smgd.web.exchange import Routes
from smgd.web.guard import GuardedApp
from smgd.web.h1 import FastProtocols
from smgd.web.hangups import HangupWatch
from smgd.web.hyper import AsgiApp, check_hypercorn, make_config
from smgd.web.protocols import Protocols
from smgd.web.settings import ServerSettings
from smgd.web.streams import (
    DeadlineStream,
    Shortage,
    accept,
    open_listeners,
    prepare_listener,
)

__all__ = ["ServerSettings", "open_listeners", "serve"]

log = structlog.get_logger("smgd.web")


async def serve(
    app: Routes | AsgiApp,
    listeners: list[trio.SocketListener],
    settings: ServerSettings,
    *,
    stopping: trio.Event,
    tls: ssl.SSLContext | None = None,
    connections: set[Connection] | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve `app` on `listeners` until `stopping` is set and running requests have ended.

    `connections`, if given, has those that are open, for as long as they are.
    The listeners are closed when this returns. Raises `ConfigError` for a Hypercorn that we do not
    know.
    """
    check_hypercorn()
    for listener in listeners:
        prepare_listener(listener, settings.write_timeout)
    routes = app if isinstance(app, Routes) else Routes({}, app)
    fast = partial(FastProtocols, routes, settings)
    with HangupWatch() as hangups:
        shared = Shared(
            app=GuardedApp(routes, settings),
            settings=settings,
            config=make_config(settings),
            hangups=hangups,
            protocols=fast if settings.http_path == "fast" else Protocols,
            connections=set() if connections is None else connections,
        )
        async with trio.open_nursery() as helpers:
            helpers.start_soon(hangups.run)
            helpers.start_soon(shared.turns.run)
            helpers.start_soon(_sweep, shared)
            async with trio.open_nursery() as living:
                try:
                    await _accept_until(stopping, listeners, tls, shared, living, task_status)
                    await _drain(shared)
                finally:
                    for connection in list(shared.connections):
                        connection.abort()
            helpers.cancel_scope.cancel(reason="no connection is left")


async def _accept_until(
    stopping: trio.Event,
    listeners: list[trio.SocketListener],
    tls: ssl.SSLContext | None,
    shared: Shared,
    connections: trio.Nursery,
    task_status: trio.TaskStatus[None],
) -> None:
    shortage = Shortage()
    try:
        async with trio.open_nursery() as accepting:
            for listener in listeners:
                accepting.start_soon(_accept_loop, listener, tls, shared, connections, shortage)
            task_status.started()
            await stopping.wait()
            accepting.cancel_scope.cancel(reason="the server stops")
    finally:
        for listener in listeners:
            listener.socket.close()


async def _accept_loop(
    listener: trio.SocketListener,
    tls: ssl.SSLContext | None,
    shared: Shared,
    connections: trio.Nursery,
    shortage: Shortage,
) -> None:
    while True:
        accepted = await accept(listener, shortage)
        lowest = DeadlineStream(accepted, shared.settings.write_timeout, shared.turns)
        secure = None
        if tls is not None:
            secure = trio.SSLStream(lowest, tls, server_side=True, https_compatible=True)
        connections.start_soon(_run, Connection(shared, lowest, secure))


async def _run(connection: Connection) -> None:
    try:
        await connection.run()
    except Exception:
        # A fault in a protocol library, set off by one client, must not end all the others.
        log.exception("connection failed")


async def _drain(shared: Shared) -> None:
    await shared.context.terminated.set()
    close_idle(shared.connections)
    with trio.move_on_after(shared.settings.shutdown_grace):
        await shared.all_closed()


async def _sweep(shared: Shared) -> None:
    """Look at all connections, often enough for the shortest of the times to be kept."""
    settings = shared.settings
    shortest = min(settings.header_timeout, settings.keep_alive_timeout, settings.linger_timeout)
    pause = min(max(shortest / 4, 0.02), 1.0)
    while True:
        await trio.sleep(pause)
        sweep(shared.connections)
