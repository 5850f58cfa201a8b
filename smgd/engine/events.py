"""What a session tells its owner: things to send, changes of state, and what to log."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from smgd.core import EngineInfo

# How an engine was found to be ready: it was `adopted` if only a former life of the daemon knew it,
# `recovered` if it was lost.
Found: TypeAlias = Literal["handshake", "adopted", "recovered"]


class SendInit(msgspec.Struct, frozen=True):
    """Answer a HELLO, on the handshake socket. What the engine has said before is void."""

    identity: bytes
    payload: bytes


class Send(msgspec.Struct, frozen=True):
    """Send a message on the input socket."""

    identity: bytes
    frames: list[bytes]


class AbortForeign(msgspec.Struct, frozen=True):
    """Abort what a former life of the daemon has left running; see `Session.not_aborted`."""

    identity: bytes
    frames: list[bytes]
    request_ids: list[str]


class EngineReady(msgspec.Struct, frozen=True):
    """One engine has completed its handshake, or has answered."""

    index: int
    info: EngineInfo
    how: Found = "handshake"


class SessionReady(msgspec.Struct, frozen=True):
    """Requests may be submitted."""


class EnginesLost(msgspec.Struct, frozen=True):
    """Some engines cannot be used any more, while others can; `failed` requests were running."""

    indices: list[int]
    reason: str
    failed: int


class SessionLost(msgspec.Struct, frozen=True):
    """Requests cannot be submitted any more; `failed` of them were running."""

    reason: str
    failed: int


class Notice(msgspec.Struct, frozen=True):
    """Something that an operator should read."""

    text: str


class ReceiverBroke(msgspec.Struct, frozen=True):
    """A receiver raised; its request is over, and nobody else's."""

    request_id: str
    error: Exception


SessionEvent: TypeAlias = (
    SendInit
    | Send
    | AbortForeign
    | EngineReady
    | SessionReady
    | EnginesLost
    | SessionLost
    | Notice
    | ReceiverBroke
)
