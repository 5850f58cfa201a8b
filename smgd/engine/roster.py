"""Who is there: the engines of one worker, without I/O and without what runs on them.

A worker has one socket set and one or several engines (ranks). What each of them is, is told in
`handshake`; here is which of them requests may go to. A rank can be used while it is ready, and so
is its whole family: ranks that stand and fall together are lost together, and used again together.

    waiting --every engine has been ready once--> ready: requests go to the ranks that can be used
    ready   --no rank is left that can be used--> waiting, until one can

A rank is lost with its family when its connection ends, it says HELLO again, it says that it is
dead, or the session finds a fault with it (`lose`); and all are lost with three unreadable messages
in a row. It comes back with a new handshake, or with the answer to a call that was made after the
loss: then it was only slow, or the daemon was restarted and not the engine (`recall`). `asks` has
those calls.

Whose connection has ended, nobody says. Unless there is one family and one connection too few, all
are asked: one that has no connection is lost, and once as many have answered as there are
connections, so are the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from smgd.core import Dialect, EngineCounts, EngineInfo, EngineLoad
from smgd.engine.events import (
    EngineReady,
    EnginesLost,
    Notice,
    Send,
    SendInit,
    SessionEvent,
    SessionLost,
    SessionReady,
)
from smgd.engine.handshake import Rank, Said, family, rank_of, read_message
from smgd.errors import RemoteProtocolError

# Undecodable messages in a row that end a session: one may be a fault, three are another language.
MAX_UNDECODABLE = 3

_DEAD = "the engine said that it is dead (ENGINE_CORE_DEAD)"
_CLOSED = "its connection was closed"
_DOUBLE = (
    "duplicate HELLO of engine {0}, which is still connected: if it was not started anew, two "
    "engines with index {0} dial the same address, and only the later one is used: end one of them"
)
_SILENT = "no engine has dialled in yet"
_RECALLED = "an engine was here before, and has not answered yet"

# Is told which engines are lost and why, once they are given nothing more; returns what follows.
OnLost: TypeAlias = Callable[[Sequence[Rank], str], list[SessionEvent]]


class Roster:
    """The engines of a worker: `ranks` are all of them, `serving` those that take requests.

    `answers` is whether engines answer calls, which are numbered from `first_call`. `undecodable`
    is how many messages in a row could not be read: whoever reads one sets it to 0. `init` is the
    payload that answers every HELLO.
    """

    def __init__(
        self,
        dialect: Dialect,
        init: bytes,
        engines: int,
        first_call: int,
        counts: EngineCounts,
        on_lost: OnLost,
    ) -> None:
        self.ranks = [Rank(index) for index in range(engines)]
        self.serving: list[Rank] = []
        self.answers = dialect.heartbeat(0) is not None
        self.undecodable = 0
        self._dialect = dialect
        self._init = init
        self._counts = counts
        self._on_lost = on_lost
        self._complete = False  # whether every engine has been ready once
        self._next_call = first_call
        self._no_connection = False  # is left, since the last engine was found
        self._left: int | None = None  # connections that are left, while it is open whose
        self._reason = ""  # why nobody can be used, until something is heard that changes it

    @property
    def ready(self) -> bool:
        """Whether requests may be submitted."""
        return bool(self.serving)

    @property
    def unready(self) -> str | None:
        """Why requests may not be submitted, None if they may.

        It is what the last engine was lost by, or what is waited for if engines are on their way.
        """
        if self.serving:
            return None
        return self._reason or (f"waiting for {self.awaited}" if self.seen else _SILENT)

    @property
    def deserted(self) -> bool:
        """Whether engines that have served were seen to leave, and none is still looked for.

        One that is lost because it is silent has not left, nor has one that has not answered yet.
        """
        looked_for = any(rank.recalled for rank in self.ranks)
        served = any(rank.served for rank in self.ranks)
        return self._no_connection and served and not looked_for

    @property
    def info(self) -> EngineInfo | None:
        """What the first engine that can be used said of itself."""
        return self.serving[0].info if self.serving else None

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
        return [rank.load for rank in self.ranks]

    @property
    def usable(self) -> list[int]:
        """Which ranks take requests."""
        return [rank.index for rank in self.serving]

    @property
    def seen(self) -> list[str]:
        """What of the handshakes has come, for people: one text for each engine that was heard."""
        return [f"{r.seen} of engine {r.index}" for r in self.ranks if r.seen]

    @property
    def awaited(self) -> str:
        """What it waits for to have every engine, for people; empty if it has."""
        return ", ".join(f"{r.awaited} of engine {r.index}" for r in self.ranks if not r.ready)

    @property
    def step(self) -> str:
        """The first message of a handshake that any engine owes; empty if none does."""
        awaited = self.awaited
        return next((word for word in ("HELLO", "READY", "registration") if word in awaited), "")

    # --------------------------------------------------------------------------- handshake

    def handshake(self, identity: bytes, payload: bytes) -> list[SessionEvent]:
        """Take a message from the handshake socket."""
        try:
            rank = rank_of(self.ranks, identity)
            message = read_message(rank, payload)
        except RemoteProtocolError as error:
            return [Notice(str(error))]
        if message.status == "READY":
            self._reason = ""
            rank.said_ready = True
            rank.lockstep = rank.lockstep or message.parallel_config_hash is not None
            return self._progress(rank)
        reason = f"engine {rank.index} was started anew"
        # One in use whose end would have been heard of by now: its connections stand.
        is_double = rank.ready and not rank.proof
        events = self._lose(family(self.ranks, rank) if rank.ready else [rank], reason)
        if is_double:
            events.append(Notice(_DOUBLE.format(rank.index)))
        if rank.recalled:
            events.append(Notice(f"{reason}: its record is void"))
        self._reason = ""
        rank.forget()
        rank.greeted = True
        return [*events, SendInit(identity, self._init)]

    def registration(self, identity: bytes, payload: bytes) -> list[SessionEvent]:
        """Take a message from the input socket: engines send nothing else there."""
        try:
            rank = rank_of(self.ranks, identity)
            rank.info = self._dialect.read_registration(payload)
        except RemoteProtocolError as error:
            return [Notice(str(error))]
        self._reason = ""
        rank.registration = payload
        rank.lockstep = rank.told().data_parallel_size > 1
        # It may turn out to be of the family of one that serves, and is not ready itself.
        return [*self._settle(), *self._progress(rank)]

    def _progress(self, rank: Rank) -> list[SessionEvent]:
        return [] if rank.ready or not (rank.said_ready and rank.known) else self._found(rank)

    def recall(self, said: Iterable[Said]) -> None:
        """Know engines as a former life of the daemon knew them; `asks` finds out who is there.

        Raises `RemoteProtocolError`, knowing none, if that cannot be read.
        """
        infos = [(one, self._dialect.read_registration(one.registration)) for one in said]
        for one, info in infos:
            self.ranks[one.index].recall(one, info, self._next_call)
            self._reason = _RECALLED
        self._complete = all(rank.known for rank in self.ranks)

    @property
    def said(self) -> list[Said]:
        """What the engines have said in their handshakes, for `recall` in a later life."""
        return [rank.said for rank in self.ranks if rank.known]

    # ------------------------------------------------------------------ who can be used

    def asks(self) -> list[Send]:
        """Return a call to each engine that is known but lost, or in use and in doubt.

        Whoever answers can be used. Where engines do not answer, it is an ABORT of nothing; tell
        `delivered` if it was sent, `undelivered` if there was no connection.
        """
        asked = [rank for rank in self.ranks if rank.known and (rank.proof or not rank.ready)]
        return self.call(asked) if asked else []

    def delivered(self, identity: bytes) -> list[SessionEvent]:
        """Hear that a message of `asks` has found a connection: all there is of a silent kind."""
        rank = rank_of(self.ranks, identity)
        if self.answers:
            return []
        if rank.ready:
            rank.proof = 0
            return []
        return self._found(rank) if rank.recalled else []

    def undelivered(self, identity: bytes) -> list[SessionEvent]:
        """Hear that a message of `asks` has found no connection: one that was in use is lost."""
        rank = rank_of(self.ranks, identity)
        return self.lose(_CLOSED, identity) if rank.ready else []

    def call(self, called: Iterable[Rank]) -> list[Send]:
        """Return a call to each of some engines, whose answer is a sign of life."""
        frames = self._dialect.heartbeat(self._next_call) or self._dialect.encode_abort([])
        self._next_call += 1
        return [Send(rank.identity, frames) for rank in called]

    def answered(self, rank: Rank, call_id: int) -> list[SessionEvent]:
        """Take the answer to a call."""
        if not rank.proof <= call_id < self._next_call:
            return []
        rank.proof = 0
        if rank.known and not rank.ready:
            return self._found(rank)
        return self._tell_apart()

    def spoke(self, rank: Rank) -> list[SessionEvent]:
        """Take an output where engines do not answer: any is the proof of life."""
        return self._found(rank) if rank.known and not rank.ready else []

    def _found(self, rank: Rank) -> list[SessionEvent]:
        self._reason = ""
        self._no_connection = False
        how = rank.found()
        self._counts.adoptions += how == "adopted"
        events: list[SessionEvent] = [EngineReady(rank.index, rank.told(), how)]
        self._complete = self._complete or all(other.ready for other in self.ranks)
        return [*events, *self._settle()]

    def _settle(self) -> list[SessionEvent]:
        """Work out who can be used; tell if that is somebody now, or nobody any more."""
        was_ready = self.ready
        self._find_serving()
        if was_ready == self.ready:
            return []
        if was_ready:
            return [SessionLost(f"waiting for {self.awaited}", 0)]
        self.undecodable = 0
        return [SessionReady()]

    def _find_serving(self) -> None:
        self.serving = [
            rank
            for rank in self.ranks
            if self._complete and all(other.ready for other in family(self.ranks, rank))
        ]

    def disconnected(self, reason: str, left: int) -> list[SessionEvent]:
        """Hear that a connection of a data socket has ended and how many are `left` on it.

        Whose it was may be open then: `asks` finds out.
        """
        self._no_connection = left == 0
        living = [rank for rank in self.ranks if rank.ready]
        is_short = left < len(living)
        if is_short and self._is_one_family(living):
            return self._lose(living, reason)
        # Even if enough are left, one may be of an engine that another has taken the place of.
        for rank in living:
            rank.proof = self._next_call
        if is_short:
            self._left = left
        return []

    def _is_one_family(self, members: Sequence[Rank]) -> bool:
        return not members or set(members) <= set(family(self.ranks, members[0]))

    def _tell_apart(self) -> list[SessionEvent]:
        """Give up those that have not answered, once as many have as there are connections."""
        if self._left is None:
            return []
        silent = [rank for rank in self.ranks if rank.ready and rank.proof]
        living = sum(rank.ready for rank in self.ranks)
        if living - len(silent) < self._left:
            return []
        self._left = None
        events: list[SessionEvent] = []
        for rank in silent:
            events += self._lose(family(self.ranks, rank), _CLOSED)
        return events

    # -------------------------------------------------------------------------------- loss

    def lose(self, reason: str, identity: bytes | None = None) -> list[SessionEvent]:
        """Count an engine with its family as lost, or all of them, until they show that they live.

        What runs there ends, through `on_lost`.
        """
        if identity is None:
            return self._lose(self.ranks, reason)
        return self._lose(family(self.ranks, rank_of(self.ranks, identity)), reason)

    def said_dead(self) -> list[SessionEvent]:
        """Hear that one of the engines is dead, in its own words."""
        if not self._is_one_family([rank for rank in self.ranks if rank.ready]):
            # It does not say who it is, but it closes its connection next.
            return [Notice("an engine said that it is dead (ENGINE_CORE_DEAD)")]
        return self.lose(_DEAD)

    def not_decoded(self, error: RemoteProtocolError) -> list[SessionEvent]:
        """Hear that an output message cannot be read."""
        self.undecodable += 1
        if self.undecodable > MAX_UNDECODABLE:
            return []
        events: list[SessionEvent] = [Notice(f"output skipped: {error}")]
        if self.undecodable == MAX_UNDECODABLE:
            events += self.lose(f"{MAX_UNDECODABLE} outputs in a row could not be decoded")
        return events

    def _lose(self, lost: Sequence[Rank], reason: str) -> list[SessionEvent]:
        hit = [rank for rank in lost if rank.ready]
        for rank in lost:
            if rank.known:
                rank.ready, rank.proof = False, self._next_call
        if not hit:
            self._note(lost, reason)
            return []
        self._counts.losses += len(hit)
        return self._changed(hit, reason) + self._on_lost(hit, reason)

    def _note(self, missing: Iterable[Rank], reason: str) -> None:
        """Keep a reason why engines that were not in use cannot be: of several, the first counts.

        Those that have been in use were lost before, and this follows from it.
        """
        is_news = any(rank.known and not rank.served for rank in missing)
        if is_news and not self.serving and self._reason in ("", _RECALLED):
            self._reason = reason

    def _changed(self, hit: Sequence[Rank], reason: str) -> list[SessionEvent]:
        was_ready = self.ready
        self._find_serving()
        failed = sum(len(rank.in_flight) for rank in hit)
        if self.serving:
            return [EnginesLost([rank.index for rank in hit], reason, failed)]
        self._reason = reason
        return [SessionLost(reason, failed)] if was_ready else []
