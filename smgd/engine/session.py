"""One worker's session with its engines, without I/O: messages in, events out.

A session has one socket set and one or several engines (ranks). What each of them is, is told in
`handshake`; here is what follows for requests. A rank can be used while it is ready, and so is its
whole family: ranks that stand and fall together are lost together, and used again together.

    waiting --every engine has been ready once--> ready: requests go to the ranks that can be used
    ready   --no rank is left that can be used--> waiting, until one can

A rank is lost with its family when its connection ends, it says HELLO again, it is silent too long
(`check`), a send to it is blocked, it aborts what nobody has asked it to abort (engines that stop
do that), or it says that it is dead; and all are lost with three unreadable messages in a row. It
comes back with a new handshake, or with the answer to a call that was made after the loss: then it
was only slow, or the daemon was restarted and not the engine (`recall`). `asks` has those calls.

Whose connection has ended, nobody says. Where there is more than one family, all are called, and
those that answer leave the others to be the lost ones.

Requests are kept by id from `submit` until exactly one of these: the engine's finish, `abort`, the
loss of their rank, a receiver that broke. Whatever leaves before the engine has finished it is
answered by exactly one ABORT, however it left. An output for an id that is ours but unknown is a
late one of those and is ignored. An id that is not ours was left running by a former life of this
daemon, and gets one ABORT as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from smgd.core import (
    Batch,
    Delta,
    Dialect,
    EngineCounts,
    EngineInfo,
    EngineLoad,
    GenerationRequest,
    Receiver,
)
from smgd.engine import ranks
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
from smgd.engine.handshake import Rank, Said, family, rank_of, read_message
from smgd.engine.liveness import Patience
from smgd.errors import EngineLostError, LocalProtocolError, RemoteProtocolError
from smgd.wire import vllm as wire

# Undecodable messages in a row that end a session: one may be a fault, three are another language.
MAX_UNDECODABLE = 3
# How many ids of a former life are remembered as aborted; engines run some hundreds at a time.
MAX_FOREIGN = 4096

# Seconds; what is left of a deadline may be less than the clock can tell, but is never none.
TICK = 0.001

_LEAVING = "it has aborted a request, as engines do that stop"
_DEAD = "the engine said that it is dead (ENGINE_CORE_DEAD)"
_RECALLED = "it has not answered since smgd was started"


class _Call:
    """One request in flight. `over`: its receiver must not be called any more.

    `unread` is its prompt's length in tokens until the engine has said anything about it.
    """

    __slots__ = ("id", "over", "rank", "receiver", "touched", "unread")

    def __init__(self, request: GenerationRequest, receiver: Receiver, rank: Rank) -> None:
        self.id = request.id
        self.receiver = receiver
        self.rank = rank
        self.unread = len(request.prompt_ids)
        self.touched = False
        self.over = False


class Session:
    """The engines of a worker and the requests that run on them.

    `init` is the payload that answers every HELLO, `is_ours` tells our request ids from those of a
    former life, `worker` is the URL, for texts. Calls are numbered from `first_call`, waves of MoE
    groups from `first_wave`, which has to be above any that a former life has sent.
    """

    def __init__(
        self,
        worker: str,
        dialect: Dialect,
        init: bytes,
        is_ours: Callable[[str], bool],
        engines: int = 1,
        first_call: int = 1,
        first_wave: int = 1,
    ) -> None:
        self.counts = EngineCounts()
        self._worker = worker
        self._dialect = dialect
        self._answers = dialect.heartbeat(0) is not None
        self._init = init
        self._is_ours = is_ours
        self._ranks = [Rank(index) for index in range(engines)]
        self._complete = False  # whether every engine has been ready once
        self._usable: list[Rank] = []
        self._unready: str | None = self._ranks[0].lost  # why, or None: it is ready
        self._calls: dict[str, _Call] = {}
        self._touched: list[_Call] = []
        self._heard: set[Rank] = set()  # since `heard` was called
        self._worked: set[Rank] = set()
        self._undecodable = 0
        self._foreign: dict[str, None] = {}  # a set that keeps the order
        self._next_call = first_call
        self._left: int | None = None  # connections that are left, while it is open whose
        self._turn = 0
        self._wave = first_wave - 1

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
        """What the first engine that can be used said of itself."""
        return self._usable[0].info if self._usable else None

    @property
    def identities(self) -> list[bytes]:
        """The routing identities of the engines."""
        return [rank.identity for rank in self._ranks]

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
    def usable(self) -> list[int]:
        """Which ranks take requests."""
        return [rank.index for rank in self._usable]

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
        """What it waits for to have every engine, for people; empty if it has."""
        return ", ".join(f"{r.awaited} of engine {r.index}" for r in self._ranks if not r.ready)

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
            rank.lockstep = rank.lockstep or message.parallel_config_hash is not None
            return self._progress(rank)
        reason = f"engine {rank.index} was started anew"
        events = self._lose(family(self._ranks, rank) if rank.ready else [rank], reason)
        if rank.recalled:
            events.append(Notice(f"{reason}: its record is void"))
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
        rank.registration = payload
        rank.lockstep = rank.told().data_parallel_size > 1
        return self._progress(rank)

    def _progress(self, rank: Rank) -> list[SessionEvent]:
        return [] if rank.ready or not (rank.said_ready and rank.known) else self._found(rank)

    def recall(self, said: Iterable[Said]) -> None:
        """Know engines as a former life of the daemon knew them; `asks` finds out who is there.

        Raises `RemoteProtocolError`, knowing none, if that cannot be read.
        """
        infos = [(one, self._dialect.read_registration(one.registration)) for one in said]
        for one, info in infos:
            self._ranks[one.index].recall(one, info, _RECALLED)
        self._complete = all(rank.known for rank in self._ranks)

    @property
    def said(self) -> list[Said]:
        """What the engines have said in their handshakes, for `recall` in a later life."""
        return [rank.said for rank in self._ranks if rank.known]

    # ------------------------------------------------------------------ who can be used

    def asks(self) -> list[Send]:
        """Return a call to each engine that is known but lost: whoever answers can be used.

        Where engines do not answer, it is an ABORT of nothing; tell `delivered` if it was sent.
        """
        lost = [rank for rank in self._ranks if rank.known and not rank.ready]
        return self._calls_to(lost) if lost else []

    def delivered(self, identity: bytes) -> list[SessionEvent]:
        """Hear that a message of `asks` has found a connection: all there is of a silent kind."""
        rank = rank_of(self._ranks, identity)
        if self._answers or rank.ready or not rank.recalled:
            return []
        return self._found(rank)

    def _calls_to(self, called: Iterable[Rank]) -> list[Send]:
        frames = self._dialect.heartbeat(self._next_call) or self._dialect.encode_abort([])
        self._next_call += 1
        return [Send(rank.identity, frames) for rank in called]

    def _spoke(self, rank: Rank, call_id: int | None) -> list[SessionEvent]:
        """Take an answer, or any other output: the proof of life where engines do not answer."""
        if call_id is None:
            lives = not self._answers and rank.known and not rank.ready
            return self._found(rank) if lives else []
        if not rank.proof <= call_id < self._next_call:
            return []
        rank.proof = 0
        if rank.known and not rank.ready:
            return self._found(rank)
        return self._tell_apart()

    def _found(self, rank: Rank) -> list[SessionEvent]:
        how = rank.found()
        self.counts.adoptions += how == "adopted"
        events: list[SessionEvent] = [EngineReady(rank.index, rank.told(), how)]
        self._complete = self._complete or all(other.ready for other in self._ranks)
        self._find_usable()
        if self._usable and self._unready is not None:
            self._unready = None
            self._undecodable = 0
            events.append(SessionReady())
        return events

    def _find_usable(self) -> None:
        self._usable = [
            rank
            for rank in self._ranks
            if self._complete and all(other.ready for other in family(self._ranks, rank))
        ]

    def disconnected(self, reason: str, left: int) -> list[SessionEvent]:
        """Hear that a connection of a data socket has ended and how many are `left` on it."""
        living = [rank for rank in self._ranks if rank.ready]
        if left >= len(living):
            return []  # not that of an engine that is in use, as far as can be told
        if self._is_one_family(living):
            return self._lose(living, reason)
        for rank in living:
            rank.proof = self._next_call
        self._left = left
        return [*self._calls_to(living)]

    def _is_one_family(self, members: Sequence[Rank]) -> bool:
        return not members or set(members) <= set(family(self._ranks, members[0]))

    def _tell_apart(self) -> list[SessionEvent]:
        """Give up those that have not answered, once as many have as there are connections."""
        if self._left is None:
            return []
        silent = [rank for rank in self._ranks if rank.ready and rank.proof]
        living = sum(rank.ready for rank in self._ranks)
        if living - len(silent) < self._left:
            return []
        self._left = None
        events: list[SessionEvent] = []
        for rank in silent:
            events += self._lose(family(self._ranks, rank), "its connection was closed")
        return events

    def check(self, now: float, patience: Patience) -> tuple[list[SessionEvent], float]:
        """Look whether engines that have requests of ours are silent for too long.

        Returns what follows, and for how many seconds there is no need to look again.
        """
        events: list[SessionEvent] = []
        left = patience.ask_after
        for rank in list(self._usable):
            if not (rank.in_flight and rank.ready):  # it may have gone with another
                continue
            wait, reason = self._patience_left(rank, now, patience)
            if wait <= 0:
                events += self._lose(family(self._ranks, rank), reason)
                continue
            left = min(left, wait)
            if not rank.called and now - rank.heard_at >= patience.ask_after:
                rank.called = True
                events += self._calls_to([rank])
        return events, max(left, TICK)

    def _patience_left(self, rank: Rank, now: float, patience: Patience) -> tuple[float, str]:
        """Return for how many seconds more an engine may be silent, and of what it dies then."""
        beat = patience.heartbeat - (now - rank.heard_at)
        if self._answers and beat <= 0:
            return beat, f"no sign of life for {patience.heartbeat:g}s with requests in flight"
        unread = sum(call.unread for call in self._calls.values() if call.rank is rank)
        limit = patience.silence_with(unread)
        silence = limit - (now - rank.worked_at)
        reason = f"no output for {limit:.3g}s with requests in flight"
        return (min(beat, silence) if self._answers else silence), reason

    def heard(self, now: float) -> None:
        """Note the time for the engines that have said something since the last call."""
        for rank in self._heard:
            rank.heard_at = now
            rank.called = False
        for rank in self._worked:
            rank.worked_at = now
        self._heard.clear()
        self._worked.clear()

    # ---------------------------------------------------------------------------- requests

    def submit(self, request: GenerationRequest, receiver: Receiver) -> list[Send]:
        """Register a request and return what to send for it; then `heard`.

        Raises `EngineLostError` if the session is not ready, and `LocalProtocolError` for an id
        that is in flight already (which would kill the engine) or that cannot be encoded.
        """
        if self._unready is not None:
            raise EngineLostError(self._worker, self._unready)
        rank = self._choose()
        if request.id in self._calls:
            raise LocalProtocolError(f"request id {request.id} is in flight already")
        sends = [Send(rank.identity, self._dialect.encode_add(request, rank.told()))]
        if rank.lockstep:
            sends += self._wake_others(rank)
        if not rank.in_flight:  # its silence counts from here
            self._heard.add(rank)
            self._worked.add(rank)
        self._calls[request.id] = _Call(request, receiver, rank)
        rank.in_flight.add(request.id)
        return sends

    def abort(self, request_id: str) -> list[Send]:
        """Forget a request and return what to send; nothing for one that is not in flight."""
        call = self._calls.get(request_id)
        if call is None:
            return []
        self._leave(call)
        call.over = True
        return [Send(call.rank.identity, self._aborting([request_id]))]

    def withdraw(self, request_id: str) -> None:
        """Forget a request that could not be sent."""
        call = self._calls.get(request_id)
        if call is not None:
            self._leave(call)
            call.over = True

    def _aborting(self, request_ids: Sequence[str]) -> list[bytes]:
        self.counts.aborts += len(request_ids)
        return self._dialect.encode_abort(request_ids)

    def _choose(self) -> Rank:
        usable = self._usable
        if len(usable) == 1:
            return usable[0]
        scores = [ranks.score(len(rank.in_flight), rank.load) for rank in usable]
        chosen = ranks.lowest(scores, self._turn)
        self._turn = chosen + 1
        return usable[chosen]

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
            return self._said_dead()
        self._undecodable = 0
        events = self._note(batch)
        aborted: list[_Call] = []
        calls, touched = self._calls, self._touched
        for request_id, delta in batch.deltas:
            call = calls.get(request_id)
            if call is None:
                events += self._stray(request_id, delta, batch.engine_index)
                continue
            call.unread = 0
            if delta.finish is not None:
                self._leave(call)
                if delta.finish == "abort":
                    aborted.append(call)
                    continue
            try:
                call.receiver.deliver(delta)
            except Exception as error:  # noqa: BLE001 - a broken stream must not break the others
                events += self._broke(call, error)
                continue
            if not call.touched:
                call.touched = True
                touched.append(call)
        if aborted:
            events += self._lose(family(self._ranks, aborted[0].rank), _LEAVING, aborted)
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
            self.counts.aborts -= 1

    def _note(self, batch: Batch) -> list[SessionEvent]:
        """Take what a message says of the engine itself."""
        if not 0 <= batch.engine_index < len(self._ranks):
            return []
        rank = self._ranks[batch.engine_index]
        if batch.wave_complete is not None:
            self._wave = max(self._wave, batch.wave_complete)
        self._heard.add(rank)
        if batch.reply is not None:
            return self._spoke(rank, batch.reply.call_id)
        self._worked.add(rank)
        if batch.load is not None:
            rank.load = batch.load
        return [] if self._answers else self._spoke(rank, None)

    def _stray(self, request_id: str, delta: Delta, engine_index: int) -> list[SessionEvent]:
        known = request_id in self._foreign or self._is_ours(request_id)
        if known or delta.finish is not None or not 0 <= engine_index < len(self._ranks):
            return []
        if len(self._foreign) >= MAX_FOREIGN:
            del self._foreign[next(iter(self._foreign))]
        self._foreign[request_id] = None
        frames = self._aborting([request_id])
        return [AbortForeign(self._ranks[engine_index].identity, frames, [request_id])]

    def _said_dead(self) -> list[SessionEvent]:
        if not self._is_one_family([rank for rank in self._ranks if rank.ready]):
            # It does not say who it is, but it closes its connection next.
            return [Notice("an engine said that it is dead (ENGINE_CORE_DEAD)")]
        return self.lose(_DEAD)

    def _not_decoded(self, error: RemoteProtocolError) -> list[SessionEvent]:
        self._undecodable += 1
        if self._undecodable > MAX_UNDECODABLE:
            return []
        events: list[SessionEvent] = [Notice(f"output skipped: {error}")]
        if self._undecodable == MAX_UNDECODABLE:
            events += self.lose(f"{MAX_UNDECODABLE} outputs in a row could not be decoded")
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

    def lose(self, reason: str, identity: bytes | None = None) -> list[SessionEvent]:
        """Count an engine with its family as lost, or all of them, until they show that they live.

        What runs there fails, and is aborted in case that they do live.
        """
        if identity is None:
            return self._lose(self._ranks, reason)
        return self._lose(family(self._ranks, rank_of(self._ranks, identity)), reason)

    def _lose(
        self, lost: Sequence[Rank], reason: str, aborted: Sequence[_Call] = ()
    ) -> list[SessionEvent]:
        """Do so; those that the engine itself has `aborted` fail with the others."""
        hit = [rank for rank in lost if rank.ready]
        for rank in lost:
            if rank.known:
                rank.lost, rank.proof = reason, self._next_call
        if not hit:
            if not self._usable and any(rank.known for rank in lost):
                self._unready = reason
            return []
        self.counts.losses += len(hit)
        events = self._changed(hit, reason, sum(len(rank.in_flight) for rank in hit))
        events += self.flush()  # what came before the loss is not lost
        calls = [call for call in self._calls.values() if call.rank in hit]
        for rank in hit:
            if rank.in_flight:
                events.append(Send(rank.identity, self._aborting(sorted(rank.in_flight))))
        # Nothing is in flight there any more when the receivers hear of it: they may call us.
        for call in calls:
            self._leave(call)
        error = EngineLostError(self._worker, reason)
        for call in (*aborted, *calls):
            events += self._fail(call, error)
        return events

    def _changed(self, hit: Sequence[Rank], reason: str, failed: int) -> list[SessionEvent]:
        self._find_usable()
        if self._usable:
            return [EnginesLost([rank.index for rank in hit], reason, failed)]
        was_ready, self._unready = self.ready, reason
        return [SessionLost(reason, failed)] if was_ready else []
