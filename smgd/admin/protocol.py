"""What goes over the admin socket: one JSON object a line, a request and its answer in turn.

    {"command": "workers show", "args": {"worker": "ipc:///run/smgd/engines/0"}}
    {"result": {...}}   or   {"error": "...", "kind": "failed"}

Any number of requests may follow each other on one connection. A shell can speak it as well:
`echo '{"command": "status"}' | socat - UNIX-CONNECT:/run/smgd/smgd.sock`.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

import msgspec

# Where systemd's smgd.socket puts it.
DEFAULT_SOCKET: Final = "/run/smgd/smgd.sock"

# Bytes; a line is a worker's spec at the most. Answers are not limited.
MAX_REQUEST: Final = 1 << 20

# failed: it cannot be done, and `error` says why; usage: there is no such command or argument;
# denied: the caller may not use this socket.
Kind: TypeAlias = Literal["failed", "usage", "denied"]


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A command, as `smgctl` names it, and its arguments."""

    command: str
    args: dict[str, Any] = {}


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of a command, or why there is none."""

    result: Any = None
    error: str = ""
    kind: Kind | None = None


_encoder = msgspec.json.Encoder()


def encode(message: Request | Answer) -> bytes:
    """Return a message as a line."""
    return _encoder.encode(message) + b"\n"


decode_request = msgspec.json.Decoder(Request).decode
decode_answer = msgspec.json.Decoder(Answer).decode
