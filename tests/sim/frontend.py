"""A front end of a hundred lines, for one engine or several, on real sockets."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import trio

from smgd.engine.transport import PeerEvent
from smgd.engine.zmqio import ZmqContext, ZmqMonitor, ZmqSocket
from smgd.sim.wire import identity
from tests.support import PATIENCE

_pack = msgspec.msgpack.encode
_decoder = msgspec.msgpack.Decoder()


class FrontEnd(AbstractContextManager["FrontEnd"]):
    """Binds the three sockets; its methods are what a gateway does, one step each."""

    def __init__(self, directory: Path, clients: int = 1) -> None:
        self._context = ZmqContext()
        self._calls = itertools.count(1)
        self.address = "tcp://127.0.0.1:*"
        self.bind_handshake()
        self.input_addresses = [f"ipc://{directory}/in-{i}.sock" for i in range(clients)]
        self.output_addresses = [f"ipc://{directory}/out-{i}.sock" for i in range(clients)]
        self.bind()

    def bind_handshake(self) -> None:
        """Listen for engines, always at the same address."""
        self.handshake = self._context.socket("router")
        self.address = self.handshake.bind(self.address)

    async def close_handshake(self) -> None:
        """Listen no more; libzmq does it in the background, and an engine must not slip in."""
        self.handshake.close()
        host, _, port = self.address.removeprefix("tcp://").rpartition(":")
        with trio.fail_after(PATIENCE), suppress(OSError):
            while True:
                await (await trio.open_tcp_stream(host, int(port))).aclose()

    def bind(self) -> None:
        """Bind the data sockets, anew after `close_data`."""
        self.inputs = [self._bound("router", a) for a in self.input_addresses]
        self.outputs = [self._bound("pull", a) for a in self.output_addresses]
        self.input_monitor = self.inputs[0].monitor()
        self.output_monitor = self.outputs[0].monitor()

    def _bound(self, kind: Any, address: str) -> ZmqSocket:
        socket = self._context.socket(kind)
        socket.bind(address)
        return socket

    def close_data(self) -> None:
        """Go away, as a front end does that is restarted."""
        for socket in [*self.inputs, *self.outputs]:
            socket.close()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._context.destroy()

    async def greet(self, engines: int = 1) -> dict[bytes, dict[str, Any]]:
        """Do the handshake with so many engines; return their registrations by identity."""
        registrations: dict[bytes, dict[str, Any]] = {}
        with trio.fail_after(PATIENCE):
            for _ in range(2 * engines):
                ((peer, payload),) = await self.handshake.recv_batch(1)
                if _decoder.decode(payload)["status"] == "HELLO":
                    await self.handshake.send([peer, _pack(self.init())])
            for socket in self.inputs:
                for _ in range(engines):
                    ((peer, payload),) = await socket.recv_batch(1)
                    registrations[peer] = _decoder.decode(payload)
        return registrations

    def init(self) -> dict[str, Any]:
        """Return INIT."""
        addresses = {"inputs": self.input_addresses, "outputs": self.output_addresses}
        return {"addresses": addresses, "parallel_config": {}}

    async def send(self, kind: bytes, payload: bytes, rank: int = 0, client: int = 0) -> None:
        """Send a message to an engine. Raises `PeerGoneError`."""
        await self.inputs[client].send([identity(rank), kind, payload])

    async def add(
        self,
        request_id: str,
        ids: list[int],
        tail: Iterable[Any] = (),
        rank: int = 0,
        **sampling: Any,
    ) -> None:
        """Submit a request; `tail` are the elements from index 9 on."""
        fields = [request_id, ids, None, sampling, None, 1.7e9, None, None, None, *tail]
        await self.send(b"\x00", _pack(fields), rank)

    async def abort(self, *request_ids: str) -> None:
        """Abort requests."""
        await self.send(b"\x01", _pack(request_ids))

    async def call(self, method: str, *args: Any, rank: int = 0) -> list[Any]:
        """Make a utility call; return its answer and drop everything that comes before it."""
        call_id = next(self._calls)
        await self.send(b"\x03", _pack([0, call_id, method, args]), rank)
        while True:
            message = await self.receive()
            if message[4] is not None and message[4][0] == call_id:
                answer: list[Any] = message[4]
                return answer

    async def receive_frames(self, client: int = 0) -> list[bytes]:
        """Return the next message as it is."""
        with trio.fail_after(PATIENCE):
            (frames,) = await self.outputs[client].recv_batch(1)
        return frames

    async def receive(self, client: int = 0) -> Any:
        """Return the next message, decoded."""
        return _decoder.decode((await self.receive_frames(client))[0])

    async def collect(self, *request_ids: str) -> dict[str, Collected]:
        """Receive until all these requests have finished."""
        results = {request_id: Collected() for request_id in request_ids}
        while any(result.finish is None for result in results.values()):
            for output in (await self.receive())[1]:
                if output[0] in results:
                    results[output[0]].take(output)
        return results


class Collected:
    """What came for one request."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.outputs: list[list[Any]] = []
        self.finish: int | None = None
        self.stop_reason: int | str | None = None

    def take(self, output: list[Any]) -> None:
        """Add one output."""
        self.ids += output[1]
        self.outputs.append(output)
        self.finish, self.stop_reason = output[5], output[6]


async def wait_disconnected(monitor: ZmqMonitor) -> float:
    """Wait until a connection has ended; return when."""
    with trio.fail_after(PATIENCE):
        while not any(_has_ended(event) for event in await monitor.recv()):
            pass
    return trio.current_time()


def _has_ended(event: PeerEvent) -> bool:
    return event.kind == "disconnected"
