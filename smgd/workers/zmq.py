"""A worker whose engines dial in over ZMQ: one `EngineLink` behind the `Worker` interface."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import trio

from smgd.core import (
    Dialect,
    EngineCounts,
    EngineInfo,
    EngineLoad,
    EngineWork,
    GenerationRequest,
    Receiver,
    RequestIds,
    WorkerState,
)
from smgd.engine import guard
from smgd.engine.link import DEFAULT_SETTINGS, EngineLink, LinkSettings
from smgd.engine.paths import Addresses
from smgd.engine.transport import WorkerSockets
from smgd.engine.zmqio import ZmqContext, bind_worker
from smgd.errors import EngineLostError
from smgd.workers.lifecycle import Lifecycle, Thresholds


def binder(context: ZmqContext) -> Callable[[Addresses], WorkerSockets]:
    """Return the function that binds a worker's sockets in a context."""

    def bind(addresses: Addresses) -> WorkerSockets:
        return bind_worker(context, addresses.handshake, addresses.input, addresses.output)

    return bind


class ZmqWorker:
    """Runs requests on the engines that dial one socket path; `run` is its life.

    `vocab_size` is that of the model's configuration: ids at or above it kill an engine; None if it
    is not known. `max_logprobs` is how many alternatives per token the engine allows; both may be
    set later. `worker_id` is made up if it is not given. Engines of a former life serve again only
    if their model was at `model_path`. `on_change` hears of every change of `state`.
    """

    def __init__(
        self,
        addresses: Addresses,
        model_id: str,
        dialect: Dialect,
        ids: RequestIds,
        bind: Callable[[Addresses], WorkerSockets],
        *,
        engines: int = 1,
        vocab_size: int | None = None,
        max_logprobs: int = guard.MAX_LOGPROBS,
        settings: LinkSettings = DEFAULT_SETTINGS,
        worker_id: str | None = None,
        model_path: str = "",
        on_change: Callable[[ZmqWorker], None] = lambda _: None,
    ) -> None:
        self.id = worker_id or str(uuid.uuid4())
        self.url = addresses.url
        self.model_id = model_id
        self.runtime = dialect.name
        self.vocab_size = vocab_size
        self.max_logprobs = max_logprobs
        self.on_change = on_change
        self._lifecycle = Lifecycle()
        self._link = EngineLink(
            addresses,
            dialect,
            ids,
            bind,
            engines=engines,
            settings=settings,
            model=model_path,
            on_ready=self._became_ready,
            on_lost=self._was_lost,
        )
        self._told: EngineInfo | None = None
        self._session = self._link.session
        self._roster = self._session.roster

    @property
    def state(self) -> WorkerState:
        """Where the worker is in its life; only `ready` takes requests."""
        # Those whose engine is lost hear of it before the lifecycle does, and may look around here.
        if self._lifecycle.state == "ready" and not self._roster.ready:
            return "not_ready"
        return self._lifecycle.state

    @property
    def load(self) -> EngineLoad:
        """What the engines last reported, summed over ranks; cache usage is their mean."""
        return self._roster.load

    @property
    def rank_loads(self) -> list[EngineLoad]:
        """What each engine last reported, by rank."""
        return self._roster.rank_loads

    @property
    def rank_work(self) -> list[EngineWork]:
        """What each engine has done for us, by rank."""
        return self._session.rank_work

    @property
    def usable(self) -> list[int]:
        """The ranks of the engines that take requests."""
        return self._roster.usable

    @property
    def counts(self) -> EngineCounts:
        """What has happened between worker and engines."""
        return self._session.counts

    @property
    def info(self) -> EngineInfo | None:
        """What the engine said at registration, also once it is gone; None until then."""
        return self._roster.info or self._told

    @property
    def requests_active(self) -> int:
        """Requests of ours that are in flight on this worker."""
        return self._session.in_flight

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; started once the sockets are bound. Raises `WorkerError`."""
        await self._link.run(task_status=task_status)

    def submit_nowait(self, request: GenerationRequest, receiver: Receiver) -> None:
        """Send a request.

        Raises `ApiError` (400) for what would harm the engine, and `EngineLostError` if the worker
        is not ready; the receiver hears nothing then.
        """
        if self.state != "ready":
            raise EngineLostError(self.url, f"the worker is {self.state}")
        self.check(request)
        self._link.submit_nowait(request, receiver)
        self.counts.requests += 1

    def check(self, request: GenerationRequest) -> None:
        """Raise the `ApiError` (400) for what would harm the engine."""
        info = self._roster.info
        if info is not None:
            guard.check(request, info, self.vocab_size, self.max_logprobs)

    def abort_nowait(self, request_id: str) -> None:
        """Tell the engine to drop a request. Does nothing for one that is not in flight."""
        self._link.abort_nowait(request_id)

    def drain(self) -> None:
        """Take no new requests; what runs goes on until `run` is cancelled."""
        self._changed(self._lifecycle.removed())

    def set_thresholds(self, thresholds: Thresholds) -> None:
        """Set how many bad probes it takes to give the worker up."""
        self._lifecycle.thresholds = thresholds

    def probe(self) -> None:
        """Count how long the engine has been away: too long for its thresholds is `failed`.

        Only for workers that are to be given up at some time; without it, none ever fails.
        """
        self._changed(self._lifecycle.probed(self._roster.ready))

    @property
    def expects(self) -> bool:
        """Whether it knows engines that do not serve and may answer at any moment."""
        return not self._roster.ready and bool(self._roster.said)

    @property
    def loading(self) -> bool:
        """Whether any engine has said HELLO, and has its model still to load."""
        return any(rank.greeted and not rank.known for rank in self._roster.ranks)

    @property
    def unready(self) -> str | None:
        """Why the engines cannot be used, or None if they can."""
        return self._roster.unready

    @property
    def deserted(self) -> bool:
        """Whether the last engine was seen to leave; one that is only not heard of has not."""
        return self._roster.deserted

    @property
    def seen(self) -> list[str]:
        """What has come of the engines' handshakes, for people."""
        return self._roster.seen

    @property
    def awaited(self) -> str:
        """What the worker waits for to become ready, for people."""
        return self._roster.awaited

    def _became_ready(self) -> None:
        self._told = self._roster.info
        self._changed(self._lifecycle.handshake_complete())

    def _was_lost(self, reason: str) -> None:
        self._changed(self._lifecycle.engine_lost())

    def _changed(self, changed: bool) -> None:
        if changed:
            self.on_change(self)
