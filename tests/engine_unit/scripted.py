"""An engine that does what a test says, and the receivers and requests that tests share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import trio

from smgd.core import Delta, GenerationRequest, Sampling
from smgd.engine.zmqio import ZmqContext, ZmqSocket
from smgd.wire import vllm as wire

pack = msgspec.msgpack.Encoder().encode
unpack = msgspec.msgpack.Decoder().decode

HELLO = pack({"status": "HELLO", "local": False, "headless": True})
READY = pack({"status": "READY", "local": False, "headless": True})


def registration(**changes: Any) -> bytes:
    """Return the registration of a small engine."""
    fields = {
        "max_model_len": 2048,
        "vllm_version": "0.32.0",
        "instance_id": "1",
        "max_num_seqs": 8,
    }
    return pack(fields | changes)


def outputs(
    *items: tuple[str, list[int], int | None],
    engine: int = 0,
    stats: dict[str, Any] | None = None,
    reply: list[Any] | None = None,
    wave_complete: int | None = None,
) -> bytes:
    """Return an output message; `items` are request id, new token ids, finish code."""
    rows = [
        [request_id, ids, None, None, None, finish, None, None, None, None, None, None, None, 0]
        for request_id, ids, finish in items
    ]
    return pack([engine, rows, stats, 1.0, reply, None, wave_complete, None])


def request(request_id: str = "0000000100000001", **changes: Any) -> GenerationRequest:
    """Return a request for three tokens."""
    fields: dict[str, Any] = {"prompt_ids": [1, 2, 3], "sampling": Sampling(max_tokens=3)}
    return GenerationRequest(id=request_id, model="m", **(fields | changes))


class Inbox:
    """A receiver that keeps all it hears, and whose `flushed` can be awaited."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.flushes = 0
        self.errors: list[Exception] = []
        self.heard = trio.Event()

    @property
    def ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.ids]

    @property
    def received(self) -> int:
        return len(self.ids)

    @property
    def finishes(self) -> int:
        return sum(delta.finish is not None for delta in self.deltas)

    @property
    def endings(self) -> int:
        return self.finishes + len(self.errors)

    def deliver(self, delta: Delta) -> None:
        self.deltas.append(delta)

    def flush(self) -> None:
        self.flushes += 1
        self._wake()

    def fail(self, error: Exception) -> None:
        self.errors.append(error)
        self._wake()

    async def ended(self) -> None:
        while not self.endings:
            await self.heard.wait()

    def _wake(self) -> None:
        self.heard.set()
        self.heard = trio.Event()


class ScriptedEngine:
    """The engine's three sockets; every step of its life is a method."""

    def __init__(self, context: ZmqContext, index: int = 0) -> None:
        self.identity = index.to_bytes(2, "little")
        self.context = context
        self._handshake: ZmqSocket | None = None
        self._input: ZmqSocket | None = None
        self._output: ZmqSocket | None = None

    @property
    def input(self) -> ZmqSocket:
        assert self._input is not None
        return self._input

    @property
    def output(self) -> ZmqSocket:
        assert self._output is not None
        return self._output

    def dial(self, address: str) -> ZmqSocket:
        """Connect to the handshake address."""
        self._handshake = self.context.socket("dealer", identity=self.identity)
        self._handshake.connect(address)
        return self._handshake

    async def hello(self, address: str) -> dict[str, Any]:
        """Dial the handshake address, say HELLO and return the addresses of INIT."""
        handshake = self.dial(address)
        await handshake.send([HELLO])
        ((payload,),) = await handshake.recv_batch()
        addresses: dict[str, Any] = unpack(payload)["addresses"]
        return addresses

    def connect(self, input_address: str, output_address: str) -> None:
        """Connect the data sockets."""
        self._input = self.context.socket("dealer", identity=self.identity)
        self._input.connect(input_address)
        self._output = self.context.socket("push")
        self._output.connect(output_address)

    async def register(self, payload: bytes | None = None) -> None:
        """Send the registration."""
        await self.input.send([registration() if payload is None else payload])

    async def ready(self, payload: bytes = READY) -> None:
        """Say READY."""
        assert self._handshake is not None
        await self._handshake.send([payload])

    async def start(self, address: str) -> None:
        """Go through the whole handshake in the usual order."""
        addresses = await self.hello(address)
        self.connect(addresses["inputs"][0], addresses["outputs"][0])
        await self.register()
        await self.ready()

    async def take(self) -> list[tuple[bytes, Any]]:
        """Wait for messages of the front end and return them as type and decoded payload."""
        return [(frames[0], unpack(frames[1])) for frames in await self.input.recv_batch()]

    async def take_ids(self, kind: bytes = wire.ADD) -> list[str]:
        """Wait for the next messages; return the ids of those that are of a kind."""
        messages = await self.take()
        if kind == wire.ABORT:
            return [i for got, payload in messages if got == kind for i in payload]
        return [payload[0] for got, payload in messages if got == kind]

    async def say(self, *payloads: bytes) -> None:
        """Send output messages."""
        for payload in payloads:
            await self.output.send([payload])

    def die(self) -> None:
        """Drop all connections, as SIGKILL does."""
        for socket in self._sockets():
            socket.close()

    def _sockets(self) -> Iterable[ZmqSocket]:
        return [s for s in (self._handshake, self._input, self._output) if s is not None]
