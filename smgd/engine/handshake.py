"""The handshake of one worker's engines, without I/O, and what is known of each of them.

An engine says HELLO, gets INIT, loads its model, then says READY on the handshake socket and
registers on the input socket, in either order; both make it ready. Only HELLO needs an answer, and
the addresses in it never change; so READY and registration count even if the HELLO was heard by a
former life of this daemon.

    silent --HELLO / INIT--> greeted --READY, registration--> ready
    any state --HELLO / INIT--> greeted      (the engine has been started anew)
    ready --lost--> known --an answer to a call that was made after the loss--> ready
    silent --recalled: a former life has written down what it said--> known
    silent --registration--> known           (a former life has heard its HELLO)

An engine is known by its routing identity: its index (rank) as two bytes, little endian. All
dialects share this handshake; only the registration is theirs.
"""

from __future__ import annotations

import msgspec

from smgd.core import EngineInfo, EngineLoad, EngineWork
from smgd.engine.events import Found
from smgd.errors import LocalProtocolError, RemoteProtocolError
from smgd.wire import vllm as wire

_IDENTITY_BYTES = 2


class Said(msgspec.Struct, frozen=True):
    """What an engine has said in its handshake: all that a later life of the daemon has to know.

    `registration` is the message as it came; `lockstep` tells a rank of a MoE model.
    """

    index: int
    registration: bytes
    lockstep: bool = False


class Rank:
    """What is known of one engine. `in_flight` are the ids of our requests that run on it.

    `work` is what it has done, but for the tokens of those in flight.

    `ready` is whether its handshake is complete and nothing speaks against it since. `proof` is the
    first call whose answer shows that it lives, 0 where that is sure. `heard_at` is when it said
    anything, `worked_at` when that was about requests (seconds, on the owner's clock); `called` is
    whether it was asked for a sign of life since.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.identity = index.to_bytes(_IDENTITY_BYTES, "little")
        self.in_flight: set[str] = set()
        self.work = EngineWork()
        self.proof = 0
        self.heard_at = self.worked_at = 0.0
        self.called = False
        self.forget()

    def forget(self) -> None:
        """Return to `silent`."""
        self.greeted = False
        self.said_ready = False
        self.registration = b""
        self.info: EngineInfo | None = None
        self.load = EngineLoad()
        self.lockstep = False  # ranks of a MoE model step together and have to be woken together
        self.recalled = False
        self.served = False  # whether it has been ready
        self.ready = False

    def recall(self, said: Said, info: EngineInfo, proof: int) -> None:
        """Know what it said to a former life of the daemon, as `info`; whether it lives is open."""
        self.said_ready = self.recalled = True
        self.registration, self.info, self.lockstep = said.registration, info, said.lockstep
        self.proof = proof

    def found(self) -> Found:
        """Be ready; return what has brought that about."""
        how: Found = "adopted" if self.recalled else "recovered" if self.served else "handshake"
        self.said_ready = self.served = self.ready = True
        self.recalled, self.proof = False, 0
        return how

    def told(self) -> EngineInfo:
        """Return what it said when it registered. Raises `LocalProtocolError` before that."""
        if self.info is None:
            raise LocalProtocolError(f"engine {self.index} has not registered")
        return self.info

    @property
    def known(self) -> bool:
        """Whether the engine can be used if it lives: READY and registration have come.

        READY may have been said to nobody, between two lives of the daemon. An engine that has
        registered and was not greeted by this one is such a case, or is about to say it.
        """
        return self.info is not None and (self.said_ready or not self.greeted)

    @property
    def said(self) -> Said:
        """What is to be written down of an engine that is known."""
        return Said(self.index, self.registration, self.lockstep)

    @property
    def seen(self) -> str:
        """What of the handshake has come, for people; empty if nothing has."""
        if self.recalled:
            return "record"
        came = {"HELLO": self.greeted, "READY": self.said_ready, "registration": bool(self.info)}
        return " and ".join(word for word, has_come in came.items() if has_come)

    @property
    def awaited(self) -> str:
        """What it takes to use the engine, for people; empty if nothing is missing."""
        if self.ready:
            return ""
        if self.known:
            return "an answer or HELLO"
        if not (self.greeted or self.said_ready or self.info):
            return "HELLO"
        missing = {"READY": not self.said_ready, "registration": self.info is None}
        return " and ".join(word for word, is_missing in missing.items() if is_missing)


def rank_of(ranks: list[Rank], identity: bytes) -> Rank:
    """Return the engine with a routing identity. Raises `RemoteProtocolError` for one too many."""
    index = int.from_bytes(identity, "little")
    if len(identity) == _IDENTITY_BYTES and index < len(ranks):
        return ranks[index]
    raise RemoteProtocolError(
        f"an engine with identity {identity[:16].hex()} has dialled in, but this worker waits for "
        f"{len(ranks)} engine(s), with indices 0 to {len(ranks) - 1}: --zmq-engine-count must be "
        f"the engine's data parallel size, and no two workers may share a handshake address"
    )


def family(ranks: list[Rank], rank: Rank) -> list[Rank]:
    """Return the engines that stand and fall together with one of them, which is among them.

    Ranks of a MoE model compute each step together. Those of a dense model are independent, but
    the process that has started them ends all of them when it loses one; it is known by the
    instance id in their registrations.
    """
    if any(other.lockstep for other in ranks):
        return ranks
    if rank.info is None or not rank.info.instance_id:
        return [rank]
    instance = rank.info.instance_id
    return [r for r in ranks if r.info is not None and r.info.instance_id == instance]


def read_message(rank: Rank, payload: bytes) -> wire.HandshakeMessage:
    """Return an engine's HELLO or READY. Raises `RemoteProtocolError` for anything else."""
    message = wire.decode_handshake(payload)
    if message.status not in ("HELLO", "READY"):
        raise RemoteProtocolError(
            f"engine {rank.index} said {message.status[:40]!r} where HELLO or READY was expected"
        )
    return message
