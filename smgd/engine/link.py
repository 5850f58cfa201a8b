"""The life of one worker's sockets and sessions: the trio shell around `Session`.

`EngineLink.run` is all of it. The three sockets are bound once and stay bound while engines come
and go: an engine that was frozen while its sockets were closed and bound again would, on thawing,
take over the identity of its successor; and a restarted engine finds its listener at once.

    run                      owns the paths, binds, and binds again only if a socket has failed
    └─ sockets nursery       for the life of the sockets
        ├─ handshake         HELLO, READY
        ├─ registrations     the input socket's reader
        ├─ outputs           drain, deliver, flush, note the time once
        ├─ monitors          of both data sockets
        ├─ outboxes          one for each engine: what it would not take at once
        ├─ asking            engines that are lost or in doubt, whether they are there
        ├─ files             by which engines find the sockets: whether they are there
        ├─ watch             over the silence of engines that have requests
        └─ (itself)          reports a handshake that does not get on

Engines do not repeat their handshake when the daemon is started anew. What they said is kept in a
record beside the sockets (`Memory`), and `Asking` finds them.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterable
from functools import partial

import msgspec
import structlog
import trio

from smgd.core import Dialect, GenerationRequest, Receiver, RequestIds
from smgd.engine import paths
from smgd.engine.asking import Asking
from smgd.engine.binding import Binding
from smgd.engine.events import (
    AbortForeign,
    EngineReady,
    EnginesLost,
    Notice,
    ReceiverBroke,
    Send,
    SendInit,
    SessionEvent,
    SessionLost,
    SessionReady,
)
from smgd.engine.liveness import DEFAULT_TIMEOUTS, Connections, Patience
from smgd.engine.outbox import Outbox
from smgd.engine.record import Memory, RecordFile
from smgd.engine.session import Session
from smgd.engine.transport import MessageSocket, PeerGoneError, TransportError, WorkerSockets
from smgd.errors import EngineLostError
from smgd.wire import vllm as wire


class LinkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Deadlines, in seconds.

    `startup_timeout`: how often a handshake that does not get on is reported; it is never given up.
    `send_timeout`: how long an engine may leave its queue full. `patience`: how long it may be
    silent while requests are in flight. `ask_interval`: between questions to an engine that is
    lost. `rebind_interval`: between tries to bind again after a socket has failed. `look_interval`:
    between looks whether the socket files are still there. `linger`: how long the last ABORTs may
    take to leave when we stop.
    """

    startup_timeout: float = DEFAULT_TIMEOUTS.zmq_startup
    send_timeout: float = DEFAULT_TIMEOUTS.send
    patience: Patience = Patience()
    ask_interval: float = 2
    rebind_interval: float = 1
    look_interval: float = 5
    linger: float = 0.2


_STOPPED = "the worker was stopped"

DEFAULT_SETTINGS = LinkSettings()


class EngineLink:
    """Binds a worker's sockets and runs sessions on them.

    `bind` makes the sockets; `on_ready` and `on_lost` (with the reason) are called as soon as
    requests can be submitted, and as soon as they cannot any more.
    """

    def __init__(
        self,
        addresses: paths.Addresses,
        dialect: Dialect,
        ids: RequestIds,
        bind: Callable[[paths.Addresses], WorkerSockets],
        *,
        on_ready: Callable[[], None],
        on_lost: Callable[[str], None],
        engines: int = 1,
        settings: LinkSettings = DEFAULT_SETTINGS,
        model: str = "",
    ) -> None:
        self.session = Session(
            addresses.url,
            dialect,
            wire.encode_init([addresses.input], [addresses.output]),
            ids.is_ours,
            engines,
            first_call=secrets.randbits(62),  # an answer to a former life's call proves nothing
        )
        self._roster = self.session.roster
        self._addresses = addresses
        self._engines = engines
        self._settings = settings
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._log = structlog.get_logger("smgd.engine").bind(worker=addresses.url)
        record = RecordFile(addresses, dialect.name, engines, model)
        # By the clock, in microseconds: no life has a million requests a second.
        self._memory = Memory(record, self._roster, self._log, first_wave=time.time_ns() // 1000)
        self._binding = Binding(addresses, bind, settings.rebind_interval, self._log)
        self._input: MessageSocket | None = None
        self._bound_at = 0.0
        self._outboxes = {
            rank.identity: Outbox(settings.send_timeout, partial(self._lose, rank.identity))
            for rank in self._roster.ranks
        }
        self._changes = trio.lowlevel.ParkingLot()  # of the session, from ready or to it
        self._asking = Asking(self._roster, self._outboxes, settings.ask_interval, self._handle)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve engines until cancelled; started once the sockets are bound. Raises `WorkerError`.

        When it ends, what is in flight has been aborted and failed, and the socket files are gone;
        the record stays.
        """
        self._log.info(
            f"Binding ZMQ client for worker {self._addresses.url} "
            f"(handshake={self._addresses.handshake}, engines={self._engines})"
        )
        with self._binding.claim:
            self._memory.recall()
            self.session.begin_waves(self._memory.first_wave)
            sockets = await self._binding.first()
            task_status.started()
            while True:
                await self._serve_until_socket_fails(sockets)
                sockets = await self._binding.again()

    def submit_nowait(self, request: GenerationRequest, receiver: Receiver) -> None:
        """Send a request, or raise `EngineLostError` or `LocalProtocolError` in place of `fail`."""
        while not self._submitted(request, receiver):
            pass  # the engine turned out to be gone, but there is another one
        self.session.silence.note(trio.current_time())

    def _submitted(self, request: GenerationRequest, receiver: Receiver) -> bool:
        for send in self.session.submit(request, receiver):
            try:
                self._transmit(send)
            except TransportError as error:
                self.session.withdraw(request.id)
                self._lose(send.identity, str(error))
                if not self._roster.ready:
                    raise EngineLostError(self._addresses.url, str(error)) from error
                return False
        return True

    def abort_nowait(self, request_id: str) -> None:
        """Forget a request and tell the engine. Does nothing for one that is not in flight."""
        self._handle(self.session.abort(request_id))

    # --------------------------------------------------------------------- life of the sockets

    async def _serve_until_socket_fails(self, sockets: WorkerSockets) -> None:
        self._input = sockets.input
        self._bound_at = trio.current_time()
        reason = _STOPPED
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read_handshake, sockets)
                nursery.start_soon(self._read_registrations, sockets.input)
                nursery.start_soon(self._read_outputs, sockets.output)
                nursery.start_soon(self._follow, "input", sockets.input)
                nursery.start_soon(self._follow, "output", sockets.output)
                for outbox in self._outboxes.values():
                    nursery.start_soon(outbox.run, sockets.input)
                nursery.start_soon(self._asking.run, sockets.input)
                nursery.start_soon(self._keep_files, sockets)
                nursery.start_soon(self._watch)
                await self._report()
        except* TransportError as errors:
            reason = str(errors.exceptions[0])
            self._log.error("ZMQ socket failed; binding again", reason=reason)
        finally:
            self._handle(self._roster.lose(reason))
            for outbox in self._outboxes.values():
                outbox.withdraw()
            self._input = None
            sockets.close(self._settings.linger)

    async def _report(self) -> None:
        """Say that the worker is not ready, as long as that lasts."""
        waited = 0.0
        while True:
            timeout = math.inf if self._roster.ready else self._settings.startup_timeout
            with trio.move_on_after(timeout) as scope:
                await self._changes.park()
                waited = 0.0
            if scope.cancelled_caught:
                waited += timeout
                roster, addresses = self._roster, self._addresses
                self._log.warning(
                    f"ZMQ backend handshake failed for {addresses.url}: startup handshake timed "
                    f"out while waiting for {roster.step} after {waited:g}s ({roster.awaited}); "
                    f"still listening on {addresses.handshake}"
                )

    async def _keep_files(self, sockets: WorkerSockets) -> None:
        while True:
            await trio.sleep(self._settings.look_interval)
            self._binding.look(sockets)
            self._memory.keep()

    async def _watch(self) -> None:
        while True:
            # Looked at when the time is up, so that an output moves no timer.
            now = trio.current_time()
            events, left = self.session.silence.check(now, self._settings.patience)
            self._handle(events)
            await trio.sleep(left)

    # ----------------------------------------------------------------------- what comes in

    async def _read_handshake(self, sockets: WorkerSockets) -> None:
        while True:
            batch = await sockets.handshake.recv_batch()
            # An end that came before a HELLO is heard of before it.
            await trio.lowlevel.checkpoint()
            for frames in batch:
                for event in self._roster.handshake(frames[0], frames[-1]):
                    if isinstance(event, SendInit):
                        self._binding.look(sockets)  # it dials the data sockets next
                        self._answer_hello(sockets.handshake, event)
                    else:
                        self._handle([event])

    async def _read_registrations(self, input_: MessageSocket) -> None:
        while True:
            for frames in await input_.recv_batch():
                self._handle(self._roster.registration(frames[0], frames[-1]))
                self._asking.soon()  # READY may have been said before our time

    async def _read_outputs(self, output: MessageSocket) -> None:
        session, note = self.session, self.session.silence.note
        while True:
            for frames in await output.recv_batch():
                if events := session.receive(frames):
                    self._handle(events)
            if events := session.flush():
                self._handle(events)
            note(trio.current_time())

    async def _follow(self, name: str, socket: MessageSocket) -> None:
        connections = Connections()
        monitor = socket.monitor()
        while True:
            if connections.ended(await monitor.recv()):
                reason = f"the {name} connection was closed"
                self._handle(self._roster.disconnected(reason, connections.count))
            self._asking.soon()

    # ------------------------------------------------------------------------ what goes out

    def _answer_hello(self, handshake: MessageSocket, init: SendInit) -> None:
        self._outboxes[init.identity].withdraw()
        self._memory.remember()
        try:
            handshake.send_nowait([init.identity, init.payload])
        except PeerGoneError:
            self._log.warning("engine left between HELLO and INIT", identity=init.identity.hex())

    def _transmit(self, send: Send | AbortForeign) -> None:
        """Send now, or after what waits already. Raises `TransportError`."""
        if self._input is None:
            raise PeerGoneError("the worker does not run")
        self._outboxes[send.identity].send(self._input, [send.identity, *send.frames])

    # -------------------------------------------------------------------- what has happened

    def _handle(self, events: Iterable[SessionEvent]) -> None:
        for event in events:
            match event:
                case Send() | AbortForeign():
                    self._send_or_lose(event)
                case EngineReady():
                    self._engine_ready(event)
                case SessionReady():
                    self._became_ready()
                case EnginesLost(indices, reason, failed):
                    self._log.warning(
                        "engines lost", engines=indices, reason=reason, requests_failed=failed
                    )
                    self._asking.soon()
                case SessionLost(reason, failed):
                    self._was_lost(reason, failed)
                case Notice(text):
                    self._log.warning(text)
                case ReceiverBroke(request_id, error):
                    self._log.error("stream failed", request_id=request_id, exc_info=error)

    def _lose(self, identity: bytes, reason: str) -> None:
        self._handle(self._roster.lose(reason, identity))

    def _send_or_lose(self, send: Send | AbortForeign) -> None:
        try:
            self._transmit(send)
        except TransportError as error:
            if isinstance(send, AbortForeign):
                self.session.not_aborted(send.request_ids)
            else:  # does nothing if the engine is lost already
                self._lose(send.identity, str(error))

    def _engine_ready(self, event: EngineReady) -> None:
        fields = {"engine": event.index, "version": event.info.version}
        if event.how == "handshake":
            self._log.info("engine ready", **fields)
            self._memory.remember()
        else:
            seconds = round(trio.current_time() - self._bound_at, 3)
            self._log.info(f"engine {event.how}", **fields, seconds_since_bound=seconds)

    def _became_ready(self) -> None:
        info = self._roster.info
        self._log.info("ZMQ worker ready", max_model_len=info.max_model_len if info else None)
        self._changes.unpark_all()
        self._on_ready()

    def _was_lost(self, reason: str, failed: int) -> None:
        if reason == _STOPPED:
            self._log.info("session closed", requests_failed=failed)
        else:
            self._log.warning("engine session ended", reason=reason, requests_failed=failed)
        self._changes.unpark_all()
        self._asking.soon()
        self._on_lost(reason)
