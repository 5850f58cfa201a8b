"""The handshake of one worker's engines, without I/O.

An engine says HELLO, gets INIT, loads its model, then says READY on the handshake socket and
registers on the input socket, in either order; both make it ready. Only HELLO needs an answer, and
the addresses in it never change; so READY and registration count even if the HELLO was heard by a
former life of this daemon.

    silent --HELLO / INIT--> greeted --READY, registration--> ready
    any state --HELLO / INIT--> greeted      (the engine has been started anew)

An engine is known by its routing identity: its index (rank) as two bytes, little endian. All
dialects share this handshake; only the registration is theirs.
"""

from __future__ import annotations

from smgd.core import EngineInfo, EngineLoad
from smgd.errors import RemoteProtocolError
from smgd.wire import vllm as wire

_IDENTITY_BYTES = 2


class Rank:
    """What is known of one engine. `in_flight` are the ids of our requests that run on it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.identity = index.to_bytes(_IDENTITY_BYTES, "little")
        self.in_flight: set[str] = set()
        self.forget()

    def forget(self) -> None:
        """Return to `silent`."""
        self.greeted = False
        self.said_ready = False
        self.info: EngineInfo | None = None
        self.load = EngineLoad()
        self.lockstep = False  # ranks of a MoE model step together and have to be woken together

    @property
    def ready(self) -> bool:
        """Whether the handshake is complete."""
        return self.said_ready and self.info is not None

    @property
    def seen(self) -> str:
        """What of the handshake has come, for people; empty if nothing has."""
        came = {"HELLO": self.greeted, "READY": self.said_ready, "registration": bool(self.info)}
        return " and ".join(word for word, has_come in came.items() if has_come)

    @property
    def awaited(self) -> str:
        """What the handshake waits for, for people; empty if it is complete."""
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


def read_message(rank: Rank, payload: bytes) -> wire.HandshakeMessage:
    """Return an engine's HELLO or READY. Raises `RemoteProtocolError` for anything else."""
    message = wire.decode_handshake(payload)
    if message.status not in ("HELLO", "READY"):
        raise RemoteProtocolError(
            f"engine {rank.index} said {message.status[:40]!r} where HELLO or READY was expected"
        )
    return message
