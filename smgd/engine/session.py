"""One worker's session with its engines, without I/O: messages in, events out.

Who the engines are and which of them can be used, the `Roster` knows; here is what runs on them.

Requests are kept by id from `submit` until exactly one of these: the engine's finish, `abort`, the
loss of their rank, a receiver that broke. Whatever leaves before the engine has finished it is
answered by exactly one ABORT, however it left. An output for an id that is ours but unknown is a
late one of those and is ignored. An id that is not ours was left running by a former life of this
daemon, and gets one ABORT as well.

An engine is lost, too, if it is silent for too long while it has requests (`silence`), and if it
aborts what nobody has asked it to abort: engines that stop do that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy

from smgd.core import (
    Batch,
    Delta,
    Dialect,
    EngineCounts,
    EngineWork,
    GenerationRequest,
    Receiver,
    Write,
)
from smgd.engine import ranks
from smgd.engine.events import AbortForeign, ReceiverBroke, Send, SessionEvent
from smgd.engine.handshake import Rank
from smgd.engine.liveness import Silence
from smgd.engine.roster import Roster
from smgd.errors import EngineLostError, LocalProtocolError, RemoteProtocolError
from smgd.wire import vllm as wire

# How many ids of a former life are remembered as aborted; engines run some hundreds at a time.
MAX_FOREIGN = 4096

_LEAVING = "it has aborted a request, as engines do that stop"


class _Call:
    """One request in flight. `over`: its receiver must not be called any more.

    `unread` is its prompt's length in tokens until the engine has said anything about it. `before`
    is how many tokens its receiver had from other engines.
    """

    __slots__ = ("before", "id", "over", "rank", "receiver", "touched", "unread")

    def __init__(self, request: GenerationRequest, receiver: Receiver, rank: Rank) -> None:
        self.id = request.id
        self.receiver = receiver
        self.rank = rank
        self.unread = len(request.prompt_ids)
        self.before = receiver.received
        self.touched = False
        self.over = False


class Session:
    """The requests that run on the engines of a worker, which are in its `roster`.

    `init` is the payload that answers every HELLO, `is_ours` tells our request ids from those of a
    former life, `worker` is the URL, for texts. Calls are numbered from `first_call`.
    """

    def __init__(
        self,
        worker: str,
        dialect: Dialect,
        init: bytes,
        is_ours: Callable[[str], bool],
        engines: int = 1,
        first_call: int = 1,
    ) -> None:
        self.counts = EngineCounts()
        self.roster = Roster(dialect, init, engines, first_call, self.counts, self._end)
        self.silence = Silence(self.roster, self._unread)
        self._worker = worker
        self._dialect = dialect
        self._is_ours = is_ours
        self._heard, self._worked = self.silence.heard, self.silence.worked  # for every message
        self._calls: dict[str, _Call] = {}
        self._touched: list[_Call] = []
        self._aborted: list[_Call] = []  # by the engine itself, in the message that is being read
        self._foreign: dict[str, None] = {}  # a set that keeps the order
        self._turn = 0
        self._wave = 0  # of a MoE group: the highest that was sent or seen

    def begin_waves(self, first: int) -> None:
        """Number the waves of MoE groups from `first`: above any that a former life has sent."""
        self._wave = max(self._wave, first - 1)

    @property
    def in_flight(self) -> int:
        """How many requests the engines have not finished."""
        return len(self._calls)

    @property
    def rank_work(self) -> list[EngineWork]:
        """What each engine has done, by rank. Tokens are counted here, not when they come."""
        works = [copy(rank.work) for rank in self.roster.ranks]
        for call in self._calls.values():
            works[call.rank.index].generated += call.receiver.received - call.before
        return works

    # ---------------------------------------------------------------------------- requests

    def submit(self, request: GenerationRequest, receiver: Receiver) -> list[Send]:
        """Register a request and return what to send for it; then `silence.note`.

        Raises `EngineLostError` if the session is not ready, and `LocalProtocolError` for an id
        that is in flight already (which would kill the engine) or that cannot be encoded.
        """
        roster = self.roster
        if roster.unready is not None:
            raise EngineLostError(self._worker, roster.unready)
        rank = self._choose(roster.serving)
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

    def _choose(self, serving: Sequence[Rank]) -> Rank:
        if len(serving) == 1:
            return serving[0]
        scores = [ranks.score(len(rank.in_flight), rank.load) for rank in serving]
        chosen = ranks.lowest(scores, self._turn)
        self._turn = chosen + 1
        return serving[chosen]

    def _wake_others(self, target: Rank) -> list[Send]:
        """Wake the parked ranks of a MoE model: alone, the target would never answer.

        A wave number must be higher than any that was sent or seen, or it is ignored silently.
        """
        self._wave += 1
        frames = wire.encode_start_dp_wave(self._wave, target.index)
        return [Send(rank.identity, frames) for rank in self.roster.ranks if rank is not target]

    def _leave(self, call: _Call) -> None:
        del self._calls[call.id]
        call.rank.work.generated += call.receiver.received - call.before
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
            return self.roster.not_decoded(error)
        if batch.dead:
            return self.roster.said_dead()
        events = self._note(batch)
        calls, touched = self._calls, self._touched
        for request_id, delta in batch.deltas:
            call = calls.get(request_id)
            if call is None:
                events += self._stray(request_id, delta, batch.engine_index)
                continue
            call.unread = 0
            if delta.finish is not None:
                self._leave(call)
                call.rank.work.generated += len(delta.ids)
                if delta.finish == "abort":
                    self._aborted.append(call)
                    continue
            try:
                call.receiver.deliver(delta)
            except Exception as error:  # noqa: BLE001 - a broken stream must not break the others
                events += self._broke(call, error)
                continue
            if not call.touched:
                call.touched = True
                touched.append(call)
        if self._aborted:
            events += self.roster.lose(_LEAVING, self._aborted[0].rank.identity)
        return events

    def flush(self) -> Sequence[SessionEvent]:
        """Flush every receiver that was delivered to since the last call, once each.

        All of them render before the first writes: interpreter and kernel drive each other's code
        out of the processor's caches, which would cost a tenth more for every write in between.
        """
        touched, self._touched = self._touched, []
        events: list[SessionEvent] = []
        writes: list[tuple[_Call, Write]] = []
        for call in touched:
            call.touched = False
            if call.over:
                continue
            try:
                write = call.receiver.flush()
            except Exception as error:  # noqa: BLE001 - a broken stream must not break the others
                events += self._broke(call, error)
            else:
                if write is not None:
                    writes.append((call, write))
        for call, write in writes:
            try:
                write()
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
        roster = self.roster
        roster.undecodable = 0
        if not 0 <= batch.engine_index < len(roster.ranks):
            return []
        rank = roster.ranks[batch.engine_index]
        if batch.wave_complete is not None:
            self._wave = max(self._wave, batch.wave_complete)
        self._heard.add(rank)
        if batch.reply is not None:
            return roster.answered(rank, batch.reply)
        self._worked.add(rank)
        if batch.load is not None:
            rank.load = batch.load
        if batch.prefix_queries:
            rank.work.prefix_queries += batch.prefix_queries
            rank.work.prefix_hits += batch.prefix_hits
        return [] if roster.answers else roster.spoke(rank)

    def _stray(self, request_id: str, delta: Delta, engine_index: int) -> list[SessionEvent]:
        known = request_id in self._foreign or self._is_ours(request_id)
        if known or delta.finish is not None or not 0 <= engine_index < len(self.roster.ranks):
            return []
        if len(self._foreign) >= MAX_FOREIGN:
            del self._foreign[next(iter(self._foreign))]
        self._foreign[request_id] = None
        frames = self._aborting([request_id])
        return [AbortForeign(self.roster.ranks[engine_index].identity, frames, [request_id])]

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

    def _end(self, lost: Sequence[Rank], reason: str) -> list[SessionEvent]:
        """Fail what runs on engines that are lost, and abort it in case that they do live."""
        events = [*self.flush()]  # what came before the loss is not lost
        calls = [call for call in self._calls.values() if call.rank in lost]
        events += [
            Send(rank.identity, self._aborting(sorted(rank.in_flight)))
            for rank in lost
            if rank.in_flight
        ]
        # Nothing is in flight there any more when the receivers hear of it: they may call us.
        for call in calls:
            self._leave(call)
        aborted, self._aborted = self._aborted, []
        error = EngineLostError(self._worker, reason)
        for call in (*aborted, *calls):
            events += self._fail(call, error)
        return events

    def _unread(self, rank: Rank) -> int:
        return sum(call.unread for call in self._calls.values() if call.rank is rank)
