"""`--flood`: the engine of the benchmarks, whose own cost per token must not be what they measure.

The bytes on the wire are as long, and decode to the same shapes, as those of `scheduler`; only, a
running request's output is put together from two pieces that were encoded before, and a step is one
walk over the requests and one join. First and last outputs are encoded as anywhere else.

Tokens are the prose, over and over, from a different place for each request; every request ends
with "length" at its `max_tokens`. Nothing is checked, logged or waited for, and there is no prefix
cache. `--control` lets a benchmark read the counters, and set the pace, without a message.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

import msgspec

from smgd.sim.core import Effect
from smgd.sim.model import Model
from smgd.sim.outputs import (
    EVENT_QUEUED,
    EVENT_SCHEDULED,
    FINISH_ABORT,
    FINISH_LENGTH,
    Output,
    encode_output,
    encode_outputs,
    prefill_stats,
    scheduler_stats,
)
from smgd.sim.pace import Cadence
from smgd.sim.prose import SENTENCES
from smgd.sim.scheduler import NUM_GPU_BLOCKS, Counters, Message
from smgd.sim.wire import Layout, decode_abort, decode_utility
from smgd.wire.vllm import ABORT, ADD, UTILITY

_pack = msgspec.msgpack.Encoder().encode
_FLOAT = struct.Struct(">Bd")  # msgpack's float64, with its type byte in front
_FLOAT_TYPE = 0xCB
# How far apart in the text two requests start, in tokens: no step shows all of them the same one.
_STRIDE = 97
_RESULTS = {"get_supported_tasks": ["generate"], "is_sleeping": False, "is_scheduler_paused": False}


class _Sampling(msgspec.Struct):
    max_tokens: int | None = 16


class _Add(msgspec.Struct, array_like=True):
    request_id: str
    prompt_token_ids: list[int]
    mm_features: msgspec.Raw
    sampling_params: _Sampling
    pooling_params: msgspec.Raw
    arrival_time: float
    lora_request: msgspec.Raw
    cache_salt: msgspec.Raw
    data_parallel_rank: msgspec.Raw


class _Stream:
    """A request: what all its outputs begin with, its place in the text, how many are left."""

    __slots__ = ("arrived", "head", "id", "is_new", "left", "place", "prompt_length")

    def __init__(self, add: _Add, head: bytes, place: int, now: float) -> None:
        self.id = add.request_id
        self.head = head + _pack(add.request_id)
        self.left = add.sampling_params.max_tokens or 1
        self.place = place
        self.prompt_length = len(add.prompt_token_ids)
        self.arrived = now
        self.is_new = True


class Control:
    """A file of native 64-bit numbers in memory, one for each of `FIELDS`; made if it is missing.

    The benchmark writes `interval_ns`, nanoseconds between two steps; the engine writes the rest.
    """

    FIELDS = ("interval_ns", "running", "adds", "aborts", "finished", "tokens", "steps")

    def __init__(self, path: Path) -> None:
        size = 8 * len(self.FIELDS)
        with path.open("ab") as file:
            file.truncate(size)
        with path.open("r+b") as file:
            self._numbers = memoryview(mmap.mmap(file.fileno(), size)).cast("Q")

    @property
    def interval(self) -> float:
        """Seconds between two steps."""
        return self._numbers[0] / 1e9

    @interval.setter
    def interval(self, seconds: float) -> None:
        self._numbers[0] = round(seconds * 1e9)

    def write(self, running: int, counters: Counters) -> None:
        """Show the counters."""
        numbers = self._numbers
        numbers[1] = running
        numbers[2] = counters.adds
        numbers[3] = counters.aborts
        numbers[4] = counters.finished
        numbers[5] = counters.tokens
        numbers[6] = counters.steps

    def read(self) -> dict[str, int]:
        """Return all numbers under their names."""
        return dict(zip(self.FIELDS, self._numbers, strict=True))


class FloodCore:
    """Stands in for `EngineCore`, for one front-end process. Times are monotonic seconds."""

    def __init__(
        self,
        layout: Layout,
        model: Model,
        interval: float,
        engine_index: int,
        control: Control | None = None,
    ) -> None:
        self._layout = layout
        self._engine_index = engine_index
        self._control = control
        self._interval = interval
        self._cadence = Cadence(interval)
        if control is not None:
            control.interval = interval
        self._decoder = msgspec.msgpack.Decoder(_Add)
        self._streams: dict[str, _Stream] = {}
        self._stats: dict[int, bytes] = {}
        self.counters = Counters()
        self.clients = 1
        self._ids = model.codec.encode(" ".join(SENTENCES))
        # An output without id and tokens, and a message without outputs: what is between comes in.
        output = encode_output(layout, Output(request_id=""))
        self._head, tail = output.split(b"\xa0\x90", 1)
        self._tokens = [b"\x91" + _pack(token) + tail for token in self._ids]
        message = encode_outputs(layout, engine_index, 0.0, from_step=True)[0]
        self._message_head, rest = message.split(b"\x90\xc0", 1)
        self._message_tail = rest[_FLOAT.size :]

    def receive(self, frames: list[bytes], now: float) -> list[Effect]:
        """Take one message from the input socket."""
        kind, payload = frames[0], frames[1]
        if kind == ADD:
            add = self._decoder.decode(payload)
            self.counters.adds += 1
            self.counters.prompt_tokens += len(add.prompt_token_ids)
            place = self.counters.adds * _STRIDE % len(self._ids)
            self._streams[add.request_id] = _Stream(add, self._head, place, now)
        elif kind == ABORT:
            for request_id in decode_abort(payload):
                self.counters.aborts += 1
                self._streams.pop(request_id, None)
        elif kind == UTILITY:
            return [self._utility(payload, now)]
        self._share()
        return []

    def _share(self) -> None:
        control = self._control
        if control is None:
            return
        control.write(len(self._streams), self.counters)
        if control.interval != self._interval:
            self._interval = control.interval
            self._cadence = Cadence(self._interval)

    def _utility(self, payload: bytes, now: float) -> Message:
        call = decode_utility(payload)
        result: object = _RESULTS.get(call.method)
        if call.method in ("sim_stats", "sim_counters"):
            result = {**self.counters.totals(), "running": len(self._streams), "waiting": 0}
        utility = (call.call_id, None, result)
        return Message(0, encode_outputs(self._layout, self._engine_index, now, utility=utility))

    def next_step_at(self) -> float | None:
        """Return when `step` is due, possibly in the past, or None if there is nothing to do."""
        return self._cadence.next(float("-inf")) if self._streams else None

    def step(self, now: float) -> list[Effect]:
        """Give every request its next token."""
        self._cadence.stepped(self._cadence.next(float("-inf")), now)
        tokens, size = self._tokens, len(self._tokens)
        parts = []
        ended = []
        for stream in self._streams.values():
            place = stream.place
            stream.place = place + 1 if place + 1 < size else 0
            stream.left -= 1
            if stream.left and not stream.is_new:
                parts.append(stream.head + tokens[place])
                continue
            parts.append(self._encode_whole(stream, place, now))
            stream.is_new = False
            if not stream.left:
                ended.append(stream.id)
        for request_id in ended:
            del self._streams[request_id]
        self.counters.steps += 1
        self.counters.tokens += len(parts)
        self.counters.finished += len(ended)
        self._share()
        effects: list[Effect] = [self._message(parts, now)]
        return effects if self._streams else [*effects, self._message([], now)]

    def _encode_whole(self, stream: _Stream, place: int, now: float) -> bytes:
        output = Output(request_id=stream.id, ids=[self._ids[place]])
        if not stream.left:
            output.finish = FINISH_LENGTH
        if stream.is_new:
            output.events = [(EVENT_QUEUED, stream.arrived), (EVENT_SCHEDULED, now)]
            output.prefill_stats = prefill_stats(stream.prompt_length, 0, 0)
        return encode_output(self._layout, output)

    def _message(self, parts: list[bytes], now: float) -> Message:
        frame = b"".join((
            self._message_head,
            _array_header(len(parts)),
            *parts,
            self._encoded_stats(),
            _FLOAT.pack(_FLOAT_TYPE, now),
            self._message_tail,
        ))  # fmt: skip
        return Message(0, [frame])

    def _encoded_stats(self) -> bytes:
        running = len(self._streams)
        if running not in self._stats:
            usage = min(1.0, running / NUM_GPU_BLOCKS)
            self._stats[running] = _pack(
                scheduler_stats(self._layout, running=running, waiting=0, kv_usage=usage)
            )
        return self._stats[running]

    def shutdown(self, now: float) -> list[Effect]:
        """End all requests with finish reason "abort"."""
        ids = [*self._streams]
        self._streams.clear()
        outputs = [Output(request_id=i, finish=FINISH_ABORT) for i in ids]
        return [
            Message(0, encode_outputs(self._layout, self._engine_index, now, outputs, finished=ids))
        ]

    @property
    def is_idle(self) -> bool:
        """Tell whether no request is alive."""
        return not self._streams


def _array_header(count: int) -> bytes:
    if count < 16:
        return bytes((0x90 | count,))
    return b"\xdc" + count.to_bytes(2, "big") if count < 65536 else b"\xdd" + count.to_bytes(4)
