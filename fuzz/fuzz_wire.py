"""Invariant: whatever engines send, a session gives events; it never raises and its books agree.

An input is a series of steps, `[what happens, length, length, bytes]`: structure has to be in the
input, since coverage cannot be seen inside msgspec. The corpus are recorded frames.
"""

from __future__ import annotations

from collections.abc import Iterator

from runner import run

from smgd.core import Delta, GenerationRequest, Sampling
from smgd.engine.dialects.vllm import VllmDialect
from smgd.engine.session import Session

# Two engines are expected: the third is one too many, the last no identity at all.
IDENTITIES = (b"\x00\x00", b"\x01\x00", b"\x02\x00", b"")


class Counting:
    """A receiver that counts how often it ends."""

    def __init__(self) -> None:
        self.endings = 0
        self.received = 0

    def deliver(self, delta: Delta) -> None:
        """Count a finish, and tokens."""
        self.received += len(delta.ids)
        self.endings += delta.finish is not None

    def flush(self) -> None:
        """Do nothing."""

    def fail(self, error: Exception) -> None:
        """Count a failure."""
        self.endings += 1


def steps(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Split an input."""
    at = 0
    while at + 3 <= len(data):
        end = at + 3 + int.from_bytes(data[at + 1 : at + 3], "little")
        yield data[at], data[at + 3 : end]
        at = end


def request(request_id: str) -> GenerationRequest:
    """Return the smallest request."""
    sampling = Sampling(max_tokens=1)
    return GenerationRequest(id=request_id, model="m", prompt_ids=[1], sampling=sampling)


def check(data: bytes) -> None:
    """Raise AssertionError, or whatever the session raises, if the invariant does not hold."""
    session = Session("w", VllmDialect(), b"INIT", lambda i: i.startswith("our"), engines=2)
    calls: dict[str, Counting] = {}
    aborted: set[str] = set()
    for step, payload in steps(data):
        identity, half = IDENTITIES[step & 3], len(payload) // 2
        match (step >> 2) % 6:
            case 0:
                session.roster.handshake(identity, payload)
            case 1:
                session.roster.registration(identity, payload)
            case 2:
                session.receive([payload])
            case 3:
                session.receive([payload[:half], payload[half:]])
            case 4 if session.roster.ready:
                request_id = f"our{len(calls)}"
                calls[request_id] = Counting()
                session.submit(request(request_id), calls[request_id])
            case 5 if calls:
                request_id = f"our{step % len(calls)}"
                if session.abort(request_id):
                    aborted.add(request_id)
            case _:
                session.roster.lose("a step of the input")
        session.flush()
        ended = {
            request_id: call.endings + (request_id in aborted) for request_id, call in calls.items()
        }
        assert max(ended.values(), default=0) <= 1, ended
        assert session.in_flight == sum(not endings for endings in ended.values()), ended


if __name__ == "__main__":
    run("wire", check)
