"""One worker's session with its engines, without I/O: messages in, events out.

The session is one for all ranks, since they share sockets and vLLM stops all of them when one dies:

    waiting --all engines ready--> ready
    ready --`reset`: connection gone, sentinel, a new HELLO--> waiting
    ready --`suspend`: no sign of life, or garbage--> suspended
    ready --a request was aborted, and not by us--> suspended      (engines that stop do that)
    suspended --a readable output--> ready       (a slow engine has come back; it says no HELLO)

An engine that seemed to stop is believed only if it answers the heartbeat: its last messages are
readable as well.

Requests are kept by id from `submit` until exactly one of these: the engine's finish, `abort`, the
loss of the session, a receiver that broke. Whatever leaves before the engine has finished it is
answered by exactly one ABORT, however it left. An output for an id that is ours but unknown is a
late one of those and is ignored. An id that is not ours was left running by a former life of this
daemon, and gets one ABORT as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from smgd.core import Batch, Delta, Dialect, EngineInfo, EngineLoad, GenerationRequest, Receiver
from smgd.engine import ranks
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
from smgd.engine.handshake import Rank, rank_of, read_message
from smgd.errors import EngineLostError, LocalProtocolError, RemoteProtocolError
from smgd.wire import vllm as wire

# Undecodable messages in a row that end a session: one may be a fault, three are another language.
MAX_UNDECODABLE = 3
# How many ids of a former life are remembered as aborted; engines run some hundreds at a time.
MAX_FOREIGN = 4096
# The call id of heartbeats. Any answer to it is a sign of life, so it need not be told from others.
HEARTBEAT_CALL = 1

_LEAVING = "it has aborted a request, as engines do that stop"


class _Call:
    """One request in flight. `over`: its receiver must not be called any more."""

    __slots__ = ("id", "over", "rank", "receiver", "touched")

    def __init__(self, request_id: str, receiver: Receiver, rank: Rank) -> None:
        self.id = request_id
        self.receiver = receiver
        self.rank = rank
        self.touched = False
        self.over = False


class Session:
    """The engines of a worker and the requests that run on them.

    `init` is the payload that answers every HELLO, `is_ours` tells our request ids from those of a
    former life, `worker` is the URL, for texts.
    """

    def __init__(
        self,
        worker: str,
        dialect: Dialect,
        init: bytes,
        is_ours: Callable[[str], bool],
        engines: int = 1,
    ) -> None:
        self._worker = worker
        self._dialect = dialect
        self._init = init
        self._is_ours = is_ours
        self._ranks = [Rank(index) for index in range(engines)]
        self._unready: str | None = "no engine has dialled in yet"  # why, or None: it is ready
        self._suspended = False
        self._leaving = False  # why it is suspended
        self._calls: dict[str, _Call] = {}
        self._touched: list[_Call] = []
        self._undecodable = 0
        self._foreign: dict[str, None] = {}  # a set that keeps the order
        self._turn = 0
        self._wave = 0

    @property
    def ready(self) -> bool:
        """Whether requests may be submitted."""
        return self._unready is None

    @property
    def in_flight(self) -> int:
        """How many requests the engines have not finished."""
        return len(self._calls)

    @property
    def info(self) -> EngineInfo | None:
        """What the first engine said of itself, while it is known."""
        return self._ranks[0].info

    @property
    def load(self) -> EngineLoad:
        """What the engines last reported: requests summed, cache usage averaged over the ranks."""
        loads = self.rank_loads
        return EngineLoad(
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            kv_usage=sum(load.kv_usage for load in loads) / len(loads),
        )

    @property
    def rank_loads(self) -> list[EngineLoad]:
        """What each engine last reported, by rank."""
        return [rank.load for rank in self._ranks]

    @property
    def unready(self) -> str | None:
        """Why requests may not be submitted, or None if they may."""
        return self._unready

    @property
    def seen(self) -> list[str]:
        """What of the handshakes has come, for people: one text for each engine that was heard."""
        return [f"{r.seen} of engine {r.index}" for r in self._ranks if r.seen]

    @property
    def awaited(self) -> str:
        """What it waits for to become ready, for people."""
        if self._suspended:
            return "an answer to the heartbeat" if self._leaving else "any output"
        missing = [f"{r.awaited} of engine {r.index}" for r in self._ranks if not r.ready]
        return ", ".join(missing) or "HELLO of an engine that was started anew"

    # --------------------------------------------------------------------------- handshake

    def handshake(self, identity: bytes, payload: bytes) -> list[SessionEvent]:
        """Take a message from the handshake socket."""
        try:
            rank = rank_of(self._ranks, identity)
            message = read_message(rank, payload)
        except RemoteProtocolError as error:
            return [Notice(str(error))]
        if message.status == "READY":
            rank.said_ready = True
            rank.lockstep = message.parallel_config_hash is not None
            return self._progress(rank)
        events: list[SessionEvent] = []
        if self.ready or self._suspended:
            events = self._lose(f"engine {rank.index} was started anew")
        rank.forget()
        rank.greeted = True
        return [*events, SendInit(identity, self._init)]

    def registration(self, identity: bytes, payload: bytes) -> list[SessionEvent]:
        """Take a message from the input socket: engines send nothing else there."""
        try:
            rank = rank_of(self._ranks, identity)
            rank.info = self._dialect.read_registration(payload)
        except RemoteProtocolError as error:
            return [Notice(str(error))]
        return self._progress(rank)

    def _progress(self, rank: Rank) -> list[SessionEvent]:
        if self.ready or rank.info is None or not rank.said_ready:
            return []
        events: list[SessionEvent] = [EngineReady(rank.index, rank.info)]
        if all(other.ready for other in self._ranks):
            events.append(self._now_ready())
        return events

    def _now_ready(self) -> SessionReady:
        self._unready = None
        self._suspended = self._leaving = False
        self._undecodable = 0
        return SessionReady()

    # ---------------------------------------------------------------------------- requests

    def submit(self, request: GenerationRequest, receiver: Receiver) -> list[Send]:
        """Register a request and return what to send for it.

        Raises `EngineLostError` if the session is not ready, and `LocalProtocolError` for an id
        that is in flight already (which would kill the engine) or that cannot be encoded.
        """
        rank = self._choose()
        if self._unready is not None or rank.info is None:
            raise EngineLostError(self._worker, self._unready or "it has not registered")
        if request.id in self._calls:
            raise LocalProtocolError(f"request id {request.id} is in flight already")
        sends = [Send(rank.identity, self._dialect.encode_add(request, rank.info))]
        if rank.lockstep:
            sends += self._wake_others(rank)
        self._calls[request.id] = _Call(request.id, receiver, rank)
        rank.in_flight.add(request.id)
        return sends

    def abort(self, request_id: str) -> list[Send]:
        """Forget a request and return what to send; nothing for one that is not in flight."""
        call = self._calls.get(request_id)
        if call is None:
            return []
        self._leave(call)
        call.over = True
        return [Send(call.rank.identity, self._dialect.encode_abort([request_id]))]

    def _choose(self) -> Rank:
        if len(self._ranks) == 1:
            return self._ranks[0]
        scores = [ranks.score(len(rank.in_flight), rank.load) for rank in self._ranks]
        chosen = ranks.lowest(scores, self._turn)
        self._turn = chosen + 1
        return self._ranks[chosen]

    def _wake_others(self, target: Rank) -> list[Send]:
        """Wake the parked ranks of a MoE model: alone, the target would never answer.

        A wave number must be higher than any that was sent or seen, or it is ignored silently.
        """
        self._wave += 1
        frames = wire.encode_start_dp_wave(self._wave, target.index)
        return [Send(rank.identity, frames) for rank in self._ranks if rank is not target]

    def _leave(self, call: _Call) -> None:
        del self._calls[call.id]
        in_flight = call.rank.in_flight
        in_flight.discard(call.id)
        if not in_flight:
            call.rank.load = ranks.settled(call.rank.load)

    # ----------------------------------------------------------------------------- outputs

    def receive(self, frames: Sequence[bytes]) -> Sequence[SessionEvent]:
        """Take a message from the output socket and deliver what is in it; then `flush`."""
        try:
            batch = self._dialect.decode(frames)
        except RemoteProtocolError as error:
            return self._not_decoded(error)
        if batch.dead:
            return self.reset("the engine said that it is dead (ENGINE_CORE_DEAD)")
        events: list[SessionEvent] = []
        self._undecodable = 0
        if self._suspended and (batch.reply is not None or not self._leaving):
            events.append(self._now_ready())
        self._note(batch)
        leaving = False
        calls, touched = self._calls, self._touched
        for request_id, delta in batch.deltas:
            call = calls.get(request_id)
            if call is None:
                events += self._stray(request_id, delta, batch.engine_index)
                continue
            if delta.finish is not None:
                self._leave(call)
                if delta.finish == "abort":
                    leaving = True
                    events += self._fail(call, EngineLostError(self._worker, _LEAVING))
                    continue
            try:
                call.receiver.deliver(delta)
            except Exception as error:  # noqa: BLE001 - a broken stream must not break the others
                events += self._broke(call, error)
                continue
            if not call.touched:
                call.touched = True
                touched.append(call)
        if leaving:
            events += self.suspend(_LEAVING, leaving=True)
        return events

    def flush(self) -> Sequence[SessionEvent]:
        """Flush every receiver that was delivered to since the last call, once each."""
        touched, self._touched = self._touched, []
        events: list[SessionEvent] = []
        for call in touched:
            call.touched = False
            if call.over:
                continue
            try:
                call.receiver.flush()
            except Exception as error:  # noqa: BLE001 - a broken stream must not break the others
                events += self._broke(call, error)
        return events

    def not_aborted(self, request_ids: Iterable[str]) -> None:
        """Hear that an `AbortForeign` could not be sent: the next output of the id tries again."""
        for request_id in request_ids:
            self._foreign.pop(request_id, None)

    def _note(self, batch: Batch) -> None:
        """Take what a message says of the engine itself."""
        if batch.wave_complete is not None:
            self._wave = max(self._wave, batch.wave_complete)
        if batch.load is not None and 0 <= batch.engine_index < len(self._ranks):
            self._ranks[batch.engine_index].load = batch.load

    def _stray(self, request_id: str, delta: Delta, engine_index: int) -> list[SessionEvent]:
        known = request_id in self._foreign or self._is_ours(request_id)
        if known or delta.finish is not None or not 0 <= engine_index < len(self._ranks):
            return []
        if len(self._foreign) >= MAX_FOREIGN:
            del self._foreign[next(iter(self._foreign))]
        self._foreign[request_id] = None
        frames = self._dialect.encode_abort([request_id])
        return [AbortForeign(self._ranks[engine_index].identity, frames, [request_id])]

    def _not_decoded(self, error: RemoteProtocolError) -> list[SessionEvent]:
        self._undecodable += 1
        if self._undecodable > MAX_UNDECODABLE:
            return []
        events: list[SessionEvent] = [Notice(f"output skipped: {error}")]
        if self._undecodable == MAX_UNDECODABLE:
            events += self.suspend(f"{MAX_UNDECODABLE} outputs in a row could not be decoded")
        return events

    def _broke(self, call: _Call, error: Exception) -> list[SessionEvent]:
        events: list[SessionEvent] = [ReceiverBroke(call.id, error)]
        return events + list(self.abort(call.id)) + self._fail(call, error)

    def _fail(self, call: _Call, error: Exception) -> list[SessionEvent]:
        call.over = True
        try:
            call.receiver.fail(error)
        except Exception as second:  # noqa: BLE001 - a broken stream must not break the others
            return [ReceiverBroke(call.id, second)]
        return []

    # -------------------------------------------------------------------------------- loss

    def reset(self, reason: str) -> list[SessionEvent]:
        """The engine is gone: fail what runs, and wait for one that is started anew."""
        events = self._lose(reason)
        if len(self._ranks) == 1:  # of several, those that are gone will say HELLO, others not
            self._ranks[0].forget()
        return events

    def suspend(self, reason: str, leaving: bool = False) -> list[SessionEvent]:
        """The engine is there but cannot be used: fail what runs, and wait for a sign of life.

        A heartbeat is sent along with the ABORTs, so that an engine which was only slow says so;
        from one that seemed to be `leaving`, only the answer to it counts.
        """
        if not self.ready:
            return []
        events = self._lose(reason)
        self._suspended, self._leaving = True, leaving
        frames = self._dialect.heartbeat(HEARTBEAT_CALL)
        if frames is not None:
            events += [Send(rank.identity, frames) for rank in self._ranks]
        return events

    def _lose(self, reason: str) -> list[SessionEvent]:
        if not self.ready:
            if self._suspended:
                self._unready = reason
            self._suspended = self._leaving = False
            return []
        self._unready = reason
        events: list[SessionEvent] = [SessionLost(reason, self.in_flight)]
        events += self.flush()  # what came before the loss is not lost
        for rank in self._ranks:
            if rank.in_flight:
                frames = self._dialect.encode_abort(sorted(rank.in_flight))
                events.append(Send(rank.identity, frames))
        # Nothing is in flight any more when the receivers hear of it: they may call us.
        calls = list(self._calls.values())
        for call in calls:
            self._leave(call)
        error = EngineLostError(self._worker, reason)
        for call in calls:
            events += self._fail(call, error)
        return events
