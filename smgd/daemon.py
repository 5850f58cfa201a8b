"""The root: what runs, in which order it starts, and in which order it stops.

    root nursery
    ├─ signals
    ├─ model loaders    one a model, until it is loaded
    ├─ workers          one `ZmqWorker.run` each: it owns its sockets for the worker's life
    ├─ metrics port
    └─ HTTP port        accept ⊂ connections ⊂ one scope a request

Stop order: readiness says "draining" while everything is still accepted for a short window, so that
balancers can turn away; then no connection is accepted and running requests have the grace time;
then they are cancelled, which aborts them on their engines; then the workers close their sockets.
"""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable
from functools import partial

import msgspec
import structlog
import trio
from msgspec import structs

from smgd import log as logging
from smgd.config import Config, ModelConfig, WorkerConfig
from smgd.core import RequestIds
from smgd.dispatch import Dispatcher
from smgd.engine.dialects import dialect_for
from smgd.engine.link import LinkSettings
from smgd.engine.paths import Addresses, derive
from smgd.engine.transport import WorkerSockets
from smgd.engine.zmqio import ZmqContext
from smgd.errors import ConfigError, ModelError, SmgdError
from smgd.metrics import Metrics
from smgd.text.catalog import Catalog
from smgd.text.model import load_model, model_id
from smgd.text.stage import TextStage
from smgd.web.app import make_app, make_metrics_app
from smgd.web.exchange import Dispatcher as HttpDispatcher
from smgd.web.hot import handlers
from smgd.web.server import ServerSettings, open_listeners, serve
from smgd.web.service import Service
from smgd.workers.policies import policy_for
from smgd.workers.registry import Registry
from smgd.workers.zmq import ZmqWorker, binder

log = structlog.get_logger("smgd")

Bind = Callable[[Addresses], WorkerSockets]

# A model that cannot be loaded (hub not reachable, files not there yet) is tried again.
MODEL_RETRY_SECONDS = 30.0

# Young garbage is frequent and cheap to look at; a full collection stops every stream. Set after
# start-up, when what lives for ever is frozen out of the collector's sight.
GC_THRESHOLDS = (50_000, 20, 100)


class Ports(msgspec.Struct, frozen=True):
    """The ports that were bound, for who asked for port 0."""

    http: int
    metrics: int


def main_run(config: Config) -> int:
    """Run the daemon until it is told to stop; return the exit code. Raises `ConfigError`."""
    logging.configure(config.log.level, config.log.json)
    try:
        trio.run(_main, Daemon(config))
    except BaseExceptionGroup as group:
        error = _first(group)
        if isinstance(error, ConfigError):
            raise error from group
        if not isinstance(error, SmgdError):
            raise
        log.error("smgd failed", reason=str(error))  # noqa: TRY400 - the text suffices
        return 1
    return 0


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _main(daemon: Daemon) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(daemon.run)
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)


class Daemon:
    """One daemon: built from a configuration, alive while `run` is."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.metrics = Metrics()
        self.catalog = Catalog()
        self.registry = Registry()
        self.ids = RequestIds()
        self._stopping = trio.Event()
        self.service = Service(
            catalog=self.catalog,
            registry=self.registry,
            dispatcher=Dispatcher(
                self.registry.candidates, policy_for(config.routing.policy), self.ids
            ),
            stage=TextStage(
                config.limits.tokenizer_inline_chars,
                trio.CapacityLimiter(config.limits.tokenizer_threads),
            ),
            metrics=self.metrics,
            ids=self.ids,
            wall_clock=time.time,
            started_at=int(time.time()),
            sse_keepalive=config.server.sse_keepalive,
            max_payload_size=config.server.max_payload_size,
            max_logprobs=config.limits.max_logprobs,
        )
        self.metrics.watch_workers(self.registry.samples)

    async def run(self, *, task_status: trio.TaskStatus[Ports] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until a signal or `drain`; started with the ports that were bound.

        Raises `ConfigError` for an address that cannot be listened on, `WorkerError` for a worker
        whose sockets cannot be bound.
        """
        config = self.config
        http = await self._listen(config.server.host, config.server.port)
        metrics = await self._listen(config.metrics_host, config.metrics.port)
        with ZmqContext() as context:
            async with trio.open_nursery() as root:
                await root.start(self._signals)
                self._start_models(root)
                for worker in config.workers:
                    await root.start(self._add_worker(worker, binder(context)).run)
                # Scraped to the last: it ends with the root, not with the HTTP port.
                await root.start(self._serve, make_metrics_app(self.metrics), metrics, trio.Event())
                ports = Ports(_port(http), _port(metrics))
                log.info("smgd listening", host=config.server.host, **structs.asdict(ports))
                task_status.started(ports)
                await self._serve(self._http_app(), http, self._stopping)
                root.cancel_scope.cancel(reason="the daemon stops")
        log.info("smgd stopped")

    async def drain(self) -> None:
        """Stop in order: say so, wait for balancers to see it, then take no more connections."""
        if self.service.draining:
            return
        self.service.draining = True
        log.info("draining", window=self.config.server.drain_window)
        await trio.sleep(self.config.server.drain_window)
        self._stopping.set()

    # ------------------------------------------------------------------------------- models

    def _start_models(self, nursery: trio.Nursery) -> None:
        for name, model in self.config.models.items():
            path = self.config.model_path(name)
            served = name if model.path else model_id(path)
            self.catalog.expect(served, (name, *model.aliases))
            nursery.start_soon(self._load_model, served, path, model)

    async def _load_model(self, served: str, path: str, model: ModelConfig) -> None:
        load = partial(
            load_model,
            path,
            tokenizer_path=model.tokenizer_path or None,
            chat_template=model.chat_template or None,
            served_model_name=served,
            aliases=model.aliases,
        )
        while True:
            try:
                loaded = await self.service.stage.load(load)
            except ModelError as error:
                self.catalog.failed(served, error)
                log.error("model not loaded; will retry", model=served, reason=str(error))  # noqa: TRY400
                await trio.sleep(MODEL_RETRY_SECONDS)
            else:
                break
        for worker in self.registry.of_model(served):
            if isinstance(worker, ZmqWorker):
                worker.vocab_size = loaded.files.vocab_size
        self.catalog.loaded(loaded)
        log.info("model loaded", model=served, path=path, eos=loaded.files.eos_token_ids)

    # ------------------------------------------------------------------------------ workers

    def _add_worker(self, config: WorkerConfig, bind: Bind) -> ZmqWorker:
        timeouts = self.config.timeouts
        worker = ZmqWorker(
            derive(config.url, config.zmq_handshake_address or None),
            self.catalog.resolve(self.config.model_of(config)),
            dialect_for(config.runtime_type, config.url),
            self.ids,
            bind,
            engines=config.engine_count,
            max_logprobs=self.config.limits.max_logprobs,
            settings=LinkSettings(
                startup_timeout=timeouts.zmq_startup,
                send_timeout=timeouts.send,
                silence_timeout=timeouts.silence,
            ),
            on_change=self._worker_changed,
        )
        self.registry.add(worker)
        return worker

    def _worker_changed(self, worker: ZmqWorker) -> None:
        log.info("worker state", worker=worker.url, model=worker.model_id, state=worker.state)
        self.registry.changed(worker)

    # --------------------------------------------------------------------------------- HTTP

    def _http_app(self) -> HttpDispatcher:
        hot = handlers(self.service)
        fallback = make_app(self.service, frozenset(path for _, path in hot))
        return HttpDispatcher(hot, fallback)

    async def _listen(self, host: str, port: int) -> list[trio.SocketListener]:
        try:
            return await open_listeners(host, port, self.config.server.backlog)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from error

    async def _serve(
        self,
        app: HttpDispatcher,
        listeners: list[trio.SocketListener],
        stopping: trio.Event,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        server = self.config.server
        settings = ServerSettings(
            backlog=server.backlog,
            header_timeout=server.header_timeout,
            keep_alive_timeout=server.keep_alive_timeout,
            write_timeout=server.write_timeout,
            shutdown_grace=server.shutdown_grace,
        )
        await serve(app, listeners, settings, stopping=stopping, task_status=task_status)

    # ------------------------------------------------------------------------------ signals

    async def _signals(
        self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Drain at the first TERM or INT; a second one is for people who do not want to wait."""
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            async with trio.open_nursery() as nursery:
                async for number in signals:
                    if self.service.draining:
                        raise SmgdError(
                            f"stopped at once by a second {signal.Signals(number).name}"
                        )
                    nursery.start_soon(self.drain)


def _port(listeners: list[trio.SocketListener]) -> int:
    port: int = listeners[0].socket.getsockname()[1]
    return port
