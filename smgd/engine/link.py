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
        ├─ sender            what the input socket would not take at once, under the send deadline
        └─ (itself)          until ready, reporting; then until lost, under the silence deadline

Whoever submits or aborts sends synchronously, from its own task, unless the sender has something to
send first; so order is kept, and no task has to wake for a request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import msgspec
import structlog
import trio

from smgd.core import Dialect, GenerationRequest, Receiver, RequestIds
from smgd.engine import paths
from smgd.engine.events import (
    AbortForeign,
    EngineReady,
    Notice,
    ReceiverBroke,
    Send,
    SendInit,
    SessionEvent,
    SessionLost,
    SessionReady,
)
from smgd.engine.liveness import Connections
from smgd.engine.session import Session
from smgd.engine.transport import MessageSocket, PeerGoneError, TransportError, WorkerSockets
from smgd.errors import EngineLostError, WorkerError
from smgd.wire import vllm as wire

# libzmq lets go of an address only a moment after its socket was closed, so that a worker which
# follows another on the same path may have to try more than once.
_BIND_RETRIES = 5
_BIND_PAUSE = 0.1  # seconds


class LinkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Deadlines, in seconds.

    `startup_timeout`: how often a handshake that does not get on is reported; it is never given up.
    `send_timeout`: how long an engine may leave its queue full. `silence_timeout`: how long it may
    send nothing while requests are in flight. `rebind_interval`: between tries to bind again after
    a socket has failed. `linger`: how long the last ABORTs may take to leave when we stop.
    """

    startup_timeout: float = 600
    send_timeout: float = 10
    silence_timeout: float = 300
    rebind_interval: float = 1
    linger: float = 0.2


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
    ) -> None:
        init = wire.encode_init([addresses.input], [addresses.output])
        self.session = Session(addresses.url, dialect, init, ids.is_ours, engines)
        self._addresses = addresses
        self._bind = bind
        self._engines = engines
        self._settings = settings
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._log = structlog.get_logger("smgd.engine").bind(worker=addresses.url)
        self._ready = trio.Event()
        self._serving = trio.CancelScope()  # around a session that is ready
        self._heard_at = 0.0  # when an engine last spoke, or was given something to speak about
        self._input: MessageSocket | None = None
        self._outbox: deque[list[bytes]] = deque()
        self._outbox_filled = trio.lowlevel.ParkingLot()
        self._sending = trio.CancelScope()  # the sender's, around the first of the outbox

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve engines until cancelled; started once the sockets are bound. Raises `WorkerError`.

        When it ends, what is in flight has been aborted and failed, and the socket files are gone.
        """
        handshake = self._addresses.handshake
        self._log.info(
            f"Binding ZMQ client for worker {self._addresses.url} "
            f"(handshake={handshake}, engines={self._engines})"
        )
        with paths.claimed(self._addresses):
            sockets = await self._bind_first()
            task_status.started()
            while True:
                await self._serve_until_socket_fails(sockets)
                sockets = await self._bind_again()

    def submit_nowait(self, request: GenerationRequest, receiver: Receiver) -> None:
        """Send a request, or raise `EngineLostError` or `LocalProtocolError` in place of `fail`."""
        sends = self.session.submit(request, receiver)
        try:
            for send in sends:
                self._transmit(send)
        except TransportError as error:
            self.session.abort(request.id)
            self._handle(self.session.reset(str(error)))
            raise EngineLostError(self._addresses.url, str(error)) from error
        if self.session.in_flight == 1:
            self._heard_at = trio.current_time()

    def abort_nowait(self, request_id: str) -> None:
        """Forget a request and tell the engine. Does nothing for one that is not in flight."""
        self._handle(self.session.abort(request_id))

    # --------------------------------------------------------------------- life of the sockets

    async def _serve_until_socket_fails(self, sockets: WorkerSockets) -> None:
        self._input = sockets.input
        reason = "the worker was stopped"
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read_handshake, sockets.handshake)
                nursery.start_soon(self._read_registrations, sockets.input)
                nursery.start_soon(self._read_outputs, sockets.output)
                nursery.start_soon(self._watch, "input", sockets.input)
                nursery.start_soon(self._watch, "output", sockets.output)
                nursery.start_soon(self._send_outbox, sockets.input)
                while True:
                    await self._until_ready()
                    await self._until_lost()
        except* TransportError as errors:
            reason = str(errors.exceptions[0])
            self._log.error("ZMQ socket failed; binding again", reason=reason)
        finally:
            self._handle(self.session.reset(reason))
            self._outbox.clear()
            self._input = None
            sockets.close(self._settings.linger)

    async def _bind_first(self) -> WorkerSockets:
        for _ in range(_BIND_RETRIES):
            try:
                return self._bind(self._addresses)
            except WorkerError:
                await trio.sleep(_BIND_PAUSE)
        return self._bind(self._addresses)

    async def _bind_again(self) -> WorkerSockets:
        while True:
            await trio.sleep(self._settings.rebind_interval)
            try:
                return self._bind(self._addresses)
            except WorkerError as error:
                self._log.error("cannot bind again; will retry", reason=str(error))

    async def _until_ready(self) -> None:
        waited = 0.0
        while not self.session.ready:
            with trio.move_on_after(self._settings.startup_timeout):
                await self._ready.wait()
                continue
            waited += self._settings.startup_timeout
            self._log.warning(
                f"ZMQ backend handshake incomplete for {self._addresses.url}: startup handshake "
                f"timed out while waiting for {self.session.awaited} after {waited:g}s; "
                f"still listening on {self._addresses.handshake}"
            )

    async def _until_lost(self) -> None:
        with trio.CancelScope() as self._serving:
            left = self._settings.silence_timeout
            while left > 0:  # looked at when the time is up, so that an output moves no timer
                await trio.sleep(left)
                left = self._silence_left()
        if not self._serving.cancel_called:
            seconds = self._settings.silence_timeout
            reason = f"no output for {seconds:g}s with requests in flight"
            self._handle(self.session.suspend(reason))

    def _silence_left(self) -> float:
        passed = trio.current_time() - self._heard_at if self.session.in_flight else 0.0
        return self._settings.silence_timeout - passed

    # ----------------------------------------------------------------------- what comes in

    async def _read_handshake(self, handshake: MessageSocket) -> None:
        while True:
            for frames in await handshake.recv_batch():
                for event in self.session.handshake(frames[0], frames[-1]):
                    if isinstance(event, SendInit):
                        self._answer_hello(handshake, event)
                    else:
                        self._handle([event])

    async def _read_registrations(self, input_: MessageSocket) -> None:
        while True:
            for frames in await input_.recv_batch():
                self._handle(self.session.registration(frames[0], frames[-1]))

    async def _read_outputs(self, output: MessageSocket) -> None:
        session = self.session
        while True:
            for frames in await output.recv_batch():
                if events := session.receive(frames):
                    self._handle(events)
            if events := session.flush():
                self._handle(events)
            self._heard_at = trio.current_time()

    async def _watch(self, name: str, socket: MessageSocket) -> None:
        connections = Connections(self._engines)
        monitor = socket.monitor()
        while True:
            if connections.lost(await monitor.recv()):
                self._handle(self.session.reset(f"the {name} connection was closed"))

    # ------------------------------------------------------------------------ what goes out

    def _answer_hello(self, handshake: MessageSocket, init: SendInit) -> None:
        # What waits for this identity was meant for the engine's former life.
        if self._outbox and self._outbox[0][0] == init.identity:
            self._sending.cancel()
        self._outbox = deque(message for message in self._outbox if message[0] != init.identity)
        try:
            handshake.send_nowait([init.identity, init.payload])
        except PeerGoneError:
            self._log.warning("engine left between HELLO and INIT", identity=init.identity.hex())

    def _transmit(self, send: Send | AbortForeign) -> None:
        """Send now, or after what waits already. Raises `TransportError`."""
        if self._input is None:
            raise PeerGoneError("the worker does not run")
        message = [send.identity, *send.frames]
        if not self._outbox:
            try:
                self._input.send_nowait(message)
                return
            except trio.WouldBlock:
                pass
        self._outbox.append(message)
        self._outbox_filled.unpark()

    async def _send_outbox(self, input_: MessageSocket) -> None:
        while True:
            while self._outbox:
                message = self._outbox[0]
                with trio.move_on_after(self._settings.send_timeout) as self._sending:
                    await self._send_queued(input_, message)
                if not self._outbox or self._outbox[0] is not message:
                    continue  # a HELLO has withdrawn it
                if self._sending.cancelled_caught:
                    seconds = self._settings.send_timeout
                    self._handle(self.session.suspend(f"a send was blocked for {seconds:g}s"))
                else:
                    self._outbox.popleft()
            await self._outbox_filled.park()

    async def _send_queued(self, input_: MessageSocket, message: list[bytes]) -> None:
        try:
            await input_.send(message)
        except PeerGoneError as error:
            self._handle(self.session.reset(str(error)))

    # -------------------------------------------------------------------- what has happened

    def _handle(self, events: Iterable[SessionEvent]) -> None:
        for event in events:
            match event:
                case Send() | AbortForeign():
                    self._send_or_lose(event)
                case EngineReady(index, info):
                    self._log.info("engine ready", engine=index, version=info.version)
                case SessionReady():
                    self._became_ready()
                case SessionLost(reason, failed):
                    self._was_lost(reason, failed)
                case Notice(text):
                    self._log.warning(text)
                case ReceiverBroke(request_id, error):
                    self._log.error("stream failed", request_id=request_id, exc_info=error)

    def _send_or_lose(self, send: Send | AbortForeign) -> None:
        try:
            self._transmit(send)
        except TransportError as error:
            if isinstance(send, AbortForeign):
                self.session.not_aborted(send.request_ids)
            else:  # does nothing if the session is lost already
                self._handle(self.session.reset(str(error)))

    def _became_ready(self) -> None:
        info = self.session.info
        self._log.info("ZMQ worker ready", max_model_len=info.max_model_len if info else None)
        self._ready.set()
        self._on_ready()

    def _was_lost(self, reason: str, failed: int) -> None:
        self._log.warning("engine session ended", reason=reason, requests_failed=failed)
        self._ready = trio.Event()
        self._serving.cancel()
        self._on_lost(reason)
