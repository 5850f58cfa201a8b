"""A core on the bench: requests go in, time is a number, messages come out decoded."""

from __future__ import annotations

from typing import Any

import msgspec

from smgd.sim.core import Breakdown, Effect, EngineCore
from smgd.sim.model import Model
from smgd.sim.poison import Limits
from smgd.sim.scheduler import Message, Options, Scheduler
from smgd.sim.wire import LAYOUTS

BIG_VOCABULARY = 49152
ADD, ABORT, WAVE, UTILITY = b"\x00", b"\x01", b"\x02", b"\x03"
EOS = 2

_pack = msgspec.msgpack.encode


class Bench:
    """An engine core and its clock, in seconds."""

    def __init__(
        self,
        model: Model,
        version: str = "0.32.0",
        max_model_len: int = 2048,
        clients: int = 1,
        **options: Any,
    ) -> None:
        self.layout = LAYOUTS[version]
        self.limits = Limits(max_model_len, model.vocab_size)
        self.scheduler = Scheduler(self.layout, model, self.limits, Options(**options))
        self.core = EngineCore(self.layout, self.scheduler)
        self.core.clients = clients
        self.now = 1000.0
        self.breakdowns: list[Breakdown] = []

    def receive(self, *frames: bytes) -> list[Any]:
        """Give the core a message; return what it sends at once."""
        return self.decoded(self.core.receive(list(frames), self.now))

    def add(
        self, request_id: str, ids: list[int], tail: tuple[Any, ...] = (), **sampling: Any
    ) -> Any:
        """Submit a request; `tail` are the elements from index 9 on."""
        fields = [request_id, ids, None, sampling, None, 1.7e9, None, None, None, *tail]
        return self.receive(ADD, _pack(fields))

    def abort(self, *ids: str) -> list[Any]:
        """Abort requests."""
        return self.receive(ABORT, _pack(ids))

    def call(self, method: str, *args: Any) -> list[Any]:
        """Make a utility call; return its answer, which must come alone and at once."""
        (message,) = self.receive(UTILITY, _pack([0, 7, method, args]))
        answer: list[Any] = message[4]
        return answer

    def step(self) -> list[Any]:
        """Let the clock run to the next step, and make it."""
        due = self.core.next_step_at()
        assert due is not None, "nothing to do"
        self.now = max(self.now, due)
        return self.decoded(self.core.step(self.now))

    def run(self, request_id: str) -> list[list[Any]]:
        """Make steps until a request has finished; return its outputs."""
        outputs: list[list[Any]] = []
        while not outputs or outputs[-1][5] is None:
            outputs += [o for message in self.step() for o in message[1] if o[0] == request_id]
        return outputs

    def decoded(self, effects: list[Effect]) -> list[Any]:
        """Return the messages among effects, decoded, and keep the breakdowns."""
        self.breakdowns += [e for e in effects if isinstance(e, Breakdown)]
        return [msgspec.msgpack.decode(e.frames[0]) for e in effects if isinstance(e, Message)]


def ids_of(outputs: list[list[Any]]) -> list[int]:
    """Return all ids of a request's outputs."""
    return [token for output in outputs for token in output[1]]


def shape(value: Any) -> Any:
    """Return a decoded message with the names of types in place of its values."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value]
    if isinstance(value, msgspec.msgpack.Ext):
        return ("ext", value.code, len(bytes(value.data)))
    return type(value).__name__
