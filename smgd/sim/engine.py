"""The trio shell of the simulated engine: handshake, sockets, clock, signals.

One engine is one reader per input socket and one stepper; both call the core, which is synchronous,
and perform its effects at once. A breakdown that needs time (the farewell must leave the process
before the socket is closed) runs as a task of its own, while the engine is already silent.

As a vLLM engine, it dials and retries for ever, says HELLO once in its life, and outlives its front
end: the sockets reconnect by themselves and queue what cannot be sent.
"""

from __future__ import annotations

import logging
import math
import os
import signal
from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec
import trio

from smgd.engine.zmqio import ZmqContext, ZmqSocket
from smgd.errors import SmgdError
from smgd.sim.core import BreakdownKind, Effect
from smgd.sim.faults import MainLoopError
from smgd.sim.scheduler import Message
from smgd.sim.wire import Init, decode_init, encode_handshake, identity
from smgd.wire.vllm import ENGINE_CORE_DEAD

log = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILED = 0, 1

# How long vLLM waits for INIT, in seconds.
INIT_TIMEOUT = 300.0
# Seconds that libzmq gets to write what was just sent, before its socket is closed.
_FLUSH = 0.1


class Core(Protocol):
    """What the shell drives: `EngineCore` or `FloodCore`."""

    clients: int

    def receive(self, frames: list[bytes], now: float) -> list[Effect]:
        """Take one message from an input socket."""
        ...

    def next_step_at(self) -> float | None:
        """Return when `step` is due, possibly in the past, or None if there is nothing to do."""
        ...

    def step(self, now: float) -> list[Effect]:
        """Give every running request its next tokens."""
        ...

    def shutdown(self, now: float) -> list[Effect]:
        """End all requests."""
        ...

    @property
    def is_idle(self) -> bool:
        """Tell whether no request is alive."""
        ...


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine comes and goes: where it dials, and seconds.

    `startup` is spent between INIT and READY, as if a model were loaded; `exit_delay` between an
    engine's last word and the end of its connections.
    """

    handshake: str
    startup: float = 0.0
    exit_delay: float = 4.0
    init_timeout: float = INIT_TIMEOUT


class Engine:
    """One engine process's worth of simulation, from HELLO to its exit status."""

    def __init__(self, core: Core, life: Life, engine_index: int, registration: bytes) -> None:
        self._core = core
        self._life = life
        self._identity = identity(engine_index)
        self._registration = registration
        self._name = f"engine {engine_index}"
        self._inputs: list[ZmqSocket] = []
        self._outputs: list[ZmqSocket] = []
        self._scope = trio.CancelScope()
        self._wake = trio.Event()
        self._ending = trio.Event()  # from here on nothing is answered; what comes is dropped
        self._end: BreakdownKind | Literal["leave"] = "exit"

    async def run(self) -> int:
        """Live, and return the exit status.

        Raises `WorkerError` for an address of no use, `MainLoopError` if the handshake fails.
        """
        with ZmqContext() as context, self._scope:
            handshake = context.socket("dealer", identity=self._identity)
            self._connect(context, await self._greet(handshake))
            await trio.sleep(self._life.startup)
            self._register(handshake)
            async with trio.open_nursery() as tasks:
                tasks.start_soon(_close_later, handshake)  # vLLM closes it, too
                for socket in self._inputs:
                    tasks.start_soon(self._read, socket)
                tasks.start_soon(self._step)
                await self._ending.wait()
                await self._farewell()
                tasks.cancel_scope.cancel()
        return EXIT_FAILED if self._end == "dead" else EXIT_OK

    def leave(self) -> None:
        """End all requests, and then the engine; at once if it is idle or was asked before."""
        if self._ending.is_set() or self._core.is_idle:
            self._scope.cancel(reason="the engine was asked to leave")
        else:
            self._perform(self._core.shutdown(trio.current_time()))
            self._end = "leave"
            self._ending.set()

    async def _greet(self, handshake: ZmqSocket) -> Init:
        handshake.connect(self._life.handshake)
        await handshake.send([encode_handshake("HELLO")])
        log.info("sim hello %s at %s", self._name, self._life.handshake)
        with trio.move_on_after(self._life.init_timeout):
            (message, *_) = await handshake.recv_batch(1)
            return decode_init(message[0])
        raise MainLoopError(f"{self._name}: no INIT in {self._life.init_timeout:g} s after HELLO")

    def _connect(self, context: ZmqContext, init: Init) -> None:
        for address in init.addresses.inputs:
            self._inputs.append(context.socket("dealer", identity=self._identity))
            self._inputs[-1].connect(address)
        for address in init.addresses.outputs:
            self._outputs.append(context.socket("push"))
            self._outputs[-1].connect(address)
        self._core.clients = len(self._outputs)

    def _register(self, handshake: ZmqSocket) -> None:
        for socket in self._inputs:
            socket.send_nowait([self._registration])
        handshake.send_nowait([encode_handshake("READY")])
        log.info("sim ready %s", self._name)

    async def _read(self, socket: ZmqSocket) -> None:
        try:
            while self._end != "hang":
                for frames in await socket.recv_batch():
                    if self._inputs and not self._ending.is_set():
                        self._perform(self._core.receive(frames, trio.current_time()))
                self._wake.set()
        except trio.ClosedResourceError:
            log.info("sim %s reads no more", self._name)

    async def _step(self) -> None:
        has_rested = True
        while not self._ending.is_set():
            now = trio.current_time()
            due = self._core.next_step_at()
            if due is None or due > now:
                await self._rest(due)
                has_rested = True
                continue
            if has_rested:
                self._perform(self._core.step(now))
            else:
                await trio.lowlevel.checkpoint()
            has_rested = not has_rested

    async def _rest(self, until: float | None) -> None:
        """Wait for a message, or until a time."""
        self._wake = trio.Event()
        with trio.move_on_at(math.inf if until is None else until):
            await self._wake.wait()

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Message):
                if self._outputs:  # else class Y
                    self._outputs[effect.client].send_nowait(effect.frames)
                continue
            log.error("sim %s broke down (%s): %s", self._name, effect.kind, effect.reason)
            if effect.kind == "input":
                _close(self._inputs)
            elif effect.kind == "output":
                _close(self._outputs)
            else:
                self._end = effect.kind
                self._ending.set()

    async def _farewell(self) -> None:
        """Go the way that the end demands; the last message is already on its way."""
        if self._end == "hang":
            await trio.sleep_forever()
        if self._end == "dead":
            for socket in self._outputs:
                socket.send_nowait([ENGINE_CORE_DEAD])
        await trio.sleep(_FLUSH)
        if self._end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._end == "dead":
            _close(self._outputs)
        if self._end in ("dead", "leave"):
            await trio.sleep(self._life.exit_delay)


async def _close_later(socket: ZmqSocket) -> None:
    await trio.sleep(_FLUSH)
    socket.close()


def _close(sockets: list[ZmqSocket]) -> None:
    for socket in sockets:
        socket.close()
    sockets.clear()


async def run(engines: Sequence[Engine]) -> int:
    """Run engines until all have ended; return the highest exit status.

    SIGTERM and SIGINT make them leave; so does the end of any of them, as in vLLM, where the parent
    stops the other ranks.
    """
    statuses: list[int] = []

    async def live(engine: Engine) -> None:
        try:
            statuses.append(await engine.run())
        except SmgdError as error:
            log.error("sim failed: %s", error)  # noqa: TRY400 - the text says it all
            statuses.append(EXIT_FAILED)
        for other in engines:
            other.leave()

    async with trio.open_nursery() as nursery:
        await nursery.start(_watch_signals, engines)
        async with trio.open_nursery() as lives:
            for engine in engines:
                lives.start_soon(live, engine)
        nursery.cancel_scope.cancel()
    return max(statuses)


async def _watch_signals(
    engines: Sequence[Engine], task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for _ in signals:
            for engine in engines:
                engine.leave()
