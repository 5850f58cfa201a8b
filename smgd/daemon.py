"""The root: what runs, in which order it starts, and in which order it stops.

    root nursery
    ├─ signals
    ├─ watchdog         of systemd: it measures this event loop
    ├─ admin socket
    ├─ loader           a task a model, until it is loaded
    ├─ fleet            a task a worker, for the worker's life: it owns its sockets
    ├─ engines          one `ManagedEngine.run` for each engine that we start ourselves
    ├─ metrics port
    └─ HTTP port        accept ⊂ connections ⊂ one scope a request

Stop order: systemd is told; readiness says "draining" while everything is still accepted for a
short window, so that balancers can turn away; then no connection is accepted and running requests
have the grace time; then they are failed, which tells their clients and aborts them on their
engines; then the workers close their sockets, and the engines that are ours end.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from ipaddress import ip_address

import msgspec
import structlog
import trio
from msgspec import structs

from smgd import log as logging
from smgd import tasks
from smgd.admin import server as admin
from smgd.admin.commands import Commands, Control, Reloaded
from smgd.config import Config
from smgd.core import RequestIds, Worker
from smgd.dispatch import Dispatcher, Migration
from smgd.errors import ConfigError, SmgdError, shutting_down
from smgd.launch.plan import Host, plan
from smgd.launch.supervisor import supervisor_of
from smgd.metrics import Metrics
from smgd.reload import (
    Parts,
    fleet_settings,
    reload,
    set_gate,
    sources_of,
    spec_in,
)
from smgd.systemd import Role, ServiceManager, take
from smgd.text.catalog import Catalog
from smgd.text.loader import ModelLoader
from smgd.text.stage import TextStage
from smgd.web.admission import Admission
from smgd.web.app import make_app, make_metrics_app
from smgd.web.auth import Keys
from smgd.web.connection import Connection
from smgd.web.exchange import Routes
from smgd.web.gate import Gate
from smgd.web.hot import handlers
from smgd.web.server import ServerSettings, open_listeners, serve
from smgd.web.service import Service
from smgd.web.tls import renew, server_context
from smgd.workers.fleet import Fleet
from smgd.workers.policies import policy_for
from smgd.workers.registry import Registry

log = structlog.get_logger("smgd")

# Young garbage is frequent and cheap to look at; a full collection stops every stream. Set after
# start-up, when what lives for ever is frozen out of the collector's sight.
GC_THRESHOLDS = (50_000, 20, 100)


# From the last deadline of a stop to the end of the process.
STOP_MARGIN_SECONDS = 10.0

# What a request that has to end at a stop gets to tell its client so.
FAREWELL_SECONDS = 1.0

# How long clients who have connected during a restart are kept waiting for models and engines: an
# engine that is there answers in 0.2 s.
SETTLE_SECONDS = 3.0
_SETTLE_POLL = 0.01

NO_MANAGER = ServiceManager()

Reread = Callable[[], Config]


class Ports(msgspec.Struct, frozen=True):
    """The ports that were bound, for who asked for port 0; 0 for a Unix socket."""

    http: int
    metrics: int


def main_run(config: Config, reread: Reread | None = None) -> int:
    """Run the daemon until it is told to stop; return the exit code. Raises `ConfigError`.

    `reread` reads the configuration again, for SIGHUP.
    """
    logging.configure(config.log.level, config.log.json)
    try:
        trio.run(_main, Daemon(config, take(os.environ, os.getpid()), reread))
    except BaseExceptionGroup as group:
        ours, faults = group.split(SmgdError)
        if ours is None or faults is not None:
            raise  # what nobody has foreseen is not hidden by what somebody has
        errors = list(_leaves(ours))
        for error in errors:
            if isinstance(error, ConfigError):
                raise error  # noqa: B904  - it has its own cause
        for error in errors:
            log.error("smgd failed", reason=str(error))  # noqa: TRY400 - the text suffices
        return 1
    return 0


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


async def _main(daemon: Daemon) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(daemon.run)
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)


class Daemon:
    """One daemon: built from a configuration, alive while `run` is.

    `manager` is the service manager that has started it; `reread` reads the configuration again,
    or raises `ConfigError`.
    """

    def __init__(
        self,
        config: Config,
        manager: ServiceManager = NO_MANAGER,
        reread: Reread | None = None,
    ) -> None:
        self.config = config
        self.manager = manager
        self._reread = reread
        self.metrics = Metrics()
        self.catalog = Catalog()
        self.registry = Registry()
        self.ids = RequestIds()
        self._started = trio.Event()
        self._stopping = trio.Event()
        self._connections: set[Connection] = set()
        self._tls = server_context(config.tls.cert_path or None, config.tls.key_path or None)
        stage = TextStage(
            config.limits.tokenizer_inline_bytes,
            trio.CapacityLimiter(config.limits.tokenizer_threads),
        )
        self.loader = ModelLoader(self.catalog, stage)
        self.loader.on_loaded(lambda _: self._status_changed())
        self.fleet = Fleet(
            self.registry, self.catalog, self.loader, self.ids, fleet_settings(config), time.time
        )
        gate = Gate(metrics=self.metrics, admission=Admission(), keys=Keys())
        set_gate(gate, config)
        self.service = Service(
            catalog=self.catalog,
            registry=self.registry,
            fleet=self.fleet,
            dispatcher=Dispatcher(
                self.registry.candidates,
                policy_for(config.routing.policy),
                self.ids,
                migration=Migration(config.routing.migration, config.routing.max_migrations),
                on_migration=self._migrated,
                on_choice=lambda model: self.metrics.chosen(model, config.routing.policy),
            ),
            stage=stage,
            metrics=self.metrics,
            gate=gate,
            ids=self.ids,
            wall_clock=time.time,
            started_at=int(time.time()),
            sse_keepalive=config.server.sse_keepalive,
            body_timeout=config.server.body_timeout,
            max_payload_size=config.server.max_payload_size,
            max_logprobs=config.limits.max_logprobs,
        )
        self.metrics.watch_workers(self.registry.samples, trio.current_time)
        self.metrics.watch_lookups(self.catalog.lookups)
        self.metrics.watch_models(lambda: self.loader.sources)
        self.metrics.watch_log(logging.lost_lines)
        self.metrics.watch_connections(lambda: len(self._connections))
        self.metrics.watch_gate(gate.sample)
        planned = plan(config, Host.here())
        self._managed = planned.workers
        self.engines = supervisor_of(planned, config.launch, self._is_loading)
        self.fleet.settings.managed = self.engines.engines
        self.fleet.settings.engine_gone = self.engines.gone
        self.service.process_of = self.engines.process
        self.metrics.watch_processes(self.engines.processes)
        self.registry.on_change(self._tell_engines)

    async def run(self, *, task_status: trio.TaskStatus[Ports] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until a signal or `drain`; started with the ports that were bound.

        Raises `ConfigError` for an address that cannot be listened on, `WorkerError` for a worker
        whose sockets cannot be bound.
        """
        config = self.config
        http = await self._listen("http", config.server.host, config.server.port)
        metrics = await self._listen("metrics", config.metrics_host, config.metrics.port)
        async with trio.open_nursery() as root:
            await root.start(self._signals)
            root.start_soon(self.manager.feed_watchdog)
            await root.start(self.loader.run)
            await root.start(self.fleet.run)
            await root.start(self._serve_admin, root, http, metrics)
            for source in sources_of(config):
                self.loader.add(source)
            for worker in (*config.workers, *self._managed):
                await self.fleet.start(spec_in(config, worker))
            root.start_soon(self.engines.run)
            await root.start(self._serve_metrics, metrics)
            ports = Ports(_port(http), _port(metrics))
            log.info("smgd listening", host=config.server.host, **structs.asdict(ports))
            if not config.auth.api_keys and not all(map(is_local, http)):
                log.warning("no API key is set: whoever reaches the HTTP port may use it")
            task_status.started(ports)
            self._started.set()
            self.manager.notifier.ready(self.status_line())
            self.registry.on_change(lambda _: self._status_changed())
            await self._settle()
            await self._serve_http(http)
            await self.fleet.stop()  # first, for whom the end of an engine is a loss
            await self.engines.stop()
            root.cancel_scope.cancel(reason="the daemon stops")
        log.info("smgd stopped")

    async def _settle(self) -> None:
        """Let those who wait in a queue that outlives us find models and engines, not a 503."""
        if "http" in self.manager.sockets:
            with trio.move_on_after(SETTLE_SECONDS):
                while self.catalog.missing or self.fleet.expects:  # noqa: ASYNC110 - of many tasks
                    await trio.sleep(_SETTLE_POLL)

    async def drain(self) -> None:
        """Stop in order: say so, wait for balancers to see it, then take no more connections."""
        if self.service.draining:
            return
        self.service.draining = True
        self.manager.notifier.stopping(self.status_line(), self._longest_stop())
        log.info("draining", window=self.config.server.drain_window)
        await trio.sleep(self.config.server.drain_window)
        self._stopping.set()

    def reload(self, *, revive: bool = False) -> Reloaded:
        """Read the configuration again, and change what can be changed while serving.

        `revive` as in `reload.reload`. Raises `ConfigError`; nothing has changed then.
        """
        if self._reread is None:
            raise ConfigError("there is no configuration file to read again")
        wanted = self._reread()
        self._renew_certificate()
        self.manager.notifier.reloading()
        parts = Parts(self.service, self.fleet, self.loader, self._managed)
        self.config, reloaded = reload(self.config, wanted, parts, revive=revive)
        self.manager.notifier.ready(self.status_line())
        return reloaded

    def _renew_certificate(self) -> None:
        """Take what the files of TLS hold now. Raises `ConfigError`; the old pair stays then."""
        if self._tls is not None:
            tls = self.config.tls
            renew(self._tls, tls.cert_path, tls.key_path)
            log.info("certificate reloaded", path=tls.cert_path)

    async def _reload_once_started(self) -> None:
        await self._started.wait()
        try:
            self.reload()
        except ConfigError as error:
            log.error("configuration not reloaded, nothing has changed", reason=str(error))  # noqa: TRY400

    def status_line(self) -> str:
        """Return how the daemon is, in the one line that `systemctl status` shows."""
        registry = self.registry
        line = "draining" if self.service.draining else "serving"
        line += f", {registry.ready_count()}/{len(registry.workers)} workers ready"
        missing = ", ".join(self.catalog.missing)
        return f"{line}, tokenizer not loaded: {missing}" if missing else line

    def _longest_stop(self) -> float:
        """Return how many seconds a stop takes at most."""
        server, launch = self.config.server, self.config.launch
        return server.drain_window + server.shutdown_grace + launch.stop_grace + STOP_MARGIN_SECONDS

    def _set_level(self, level: str) -> None:
        """Set the level of the log, until a reload."""
        logging.set_level(level)
        self.config = structs.replace(
            self.config, log=structs.replace(self.config.log, level=level)
        )

    def _tell_engines(self, worker: Worker) -> None:
        """Tell the engines of a change of a worker whose sockets are bound, or that there is none.

        One that is replaced has not gone, unless the one in its place has failed.
        """
        if worker.id in self.registry.workers:
            self.engines.worker_changed(worker)
            return
        record = self.fleet.by_url(worker.url)
        if record is None or record.state == "failed":
            self.engines.worker_changed(worker, removed=True)

    def _is_loading(self, url: str) -> bool:
        record = self.fleet.by_url(url)
        return record is not None and record.worker.loading

    def _status_changed(self) -> None:
        self.manager.notifier.status(self.status_line())

    def _migrated(self, model: str, result: str) -> None:
        self.metrics.migrations.labels(model, result).inc()

    # --------------------------------------------------------------------------------- HTTP

    def _http_app(self) -> Routes:
        hot = handlers(self.service)
        fallback = make_app(self.service, frozenset(path for _, path in hot))
        return Routes(hot, fallback, self.service.gate.refused)

    async def _listen(self, role: Role, host: str, port: int) -> list[trio.SocketListener]:
        if inherited := self.manager.listeners(role):
            return inherited
        try:
            return await open_listeners(host, port, self.config.server.backlog)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from error

    def _server_settings(self) -> ServerSettings:
        server = self.config.server
        return ServerSettings(
            backlog=server.backlog,
            http_path=server.http_path,
            header_timeout=server.header_timeout,
            body_timeout=server.body_timeout,
            keep_alive_timeout=server.keep_alive_timeout,
            write_timeout=server.write_timeout,
            # Requests are told at the end of the grace time; then this cuts whoever does not read.
            shutdown_grace=server.shutdown_grace + FAREWELL_SECONDS,
        )

    async def _serve_http(self, listeners: list[trio.SocketListener]) -> None:
        settings = self._server_settings()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end_grace)
            await serve(
                self._http_app(),
                listeners,
                settings,
                stopping=self._stopping,
                tls=self._tls,
                connections=self._connections,
            )
            nursery.cancel_scope.cancel(reason="no request is left")

    async def _end_grace(self) -> None:
        """Tell the clients of what still runs when the grace time is over."""
        await self._stopping.wait()
        await trio.sleep(self.config.server.shutdown_grace)
        self.service.gate.admission.close()
        for running in list(self.service.running.values()):
            running.generation.fail(shutting_down())

    async def _serve_metrics(
        self,
        listeners: list[trio.SocketListener],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve the metrics port to the last: it ends with the root, not with the HTTP port."""
        app, settings = make_metrics_app(self.metrics), self._server_settings()
        await serve(app, listeners, settings, stopping=trio.Event(), task_status=task_status)

    # -------------------------------------------------------------------------------- admin

    async def _serve_admin(
        self,
        root: trio.Nursery,
        http: list[trio.SocketListener],
        metrics: list[trio.SocketListener],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Answer smgctl to the last."""
        commands = Commands(
            Control(
                service=self.service,
                loader=self.loader,
                config=lambda: self.config,
                drain=lambda: root.start_soon(self.drain),
                reload=partial(self.reload, revive=True),
                set_level=self._set_level,
                listen=[
                    *(f"http {_address(listener)}" for listener in http),
                    *(f"metrics {_address(listener)}" for listener in metrics),
                ],
            )
        )
        inherited = self.manager.listeners("admin")
        path = admin.socket_path(self.config.admin, os.environ)
        with admin.opened(self.config.admin, path, inherited) as listeners:
            await admin.serve(listeners, commands.run, task_status=task_status)

    # ------------------------------------------------------------------------------ signals

    async def _signals(
        self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Reload at HUP; show the tasks at USR1; drain at the first TERM or INT.

        A second one is for people who do not want to wait.
        """
        handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
        with trio.open_signal_receiver(*handled) as signals:
            task_status.started()
            told = False
            async with trio.open_nursery() as nursery:
                async for number in signals:
                    if number == signal.SIGHUP:
                        nursery.start_soon(self._reload_once_started)
                    elif number == signal.SIGUSR1:
                        tasks.dump()
                    elif told:
                        raise SmgdError(
                            f"stopped at once by a second {signal.Signals(number).name}"
                        )
                    else:
                        told = True
                        nursery.start_soon(self.drain)


def _address(listener: trio.SocketListener) -> str:
    address = listener.socket.getsockname()
    if not isinstance(address, tuple):
        return f"unix:{address}"
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"{host}:{address[1]}"


def is_local(listener: trio.SocketListener) -> bool:
    """Tell whether only this host can connect."""
    address = listener.socket.getsockname()
    return not isinstance(address, tuple) or ip_address(address[0]).is_loopback


def _port(listeners: list[trio.SocketListener]) -> int:
    address = listeners[0].socket.getsockname()
    return int(address[1]) if isinstance(address, tuple) else 0
