"""Small implementations of the seams that tests stand on."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import trio

from smgd.core import (
    Delta,
    EngineCounts,
    EngineInfo,
    EngineLoad,
    EngineWork,
    FinishReason,
    GenerationRequest,
    Receiver,
    Sampling,
    TokenLogprobs,
    WorkerState,
)
from smgd.errors import EngineLostError

# Seconds; what takes longer is broken. Generous: the machine of a test may stand still for some.
PATIENCE = 30.0

# By this, coverage measures the Python programs that a test starts.
MEASURING = "COVERAGE_PROCESS_CONFIG"


def unmeasured() -> dict[str, str]:
    """Return the environment for a program that may write no file where coverage wants one."""
    return {name: value for name, value in os.environ.items() if name != MEASURING}


@contextmanager
def full_queue(server: socket.socket) -> Iterator[None]:
    """Have a Unix socket that is bound listen, with as many clients as may wait for it."""
    server.listen(0)
    with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as two:
        for client in (one, two):
            client.setblocking(False)
            with suppress(BlockingIOError):
                client.connect(server.getsockname())
        yield


@contextmanager
def no_collector() -> Iterator[None]:
    """Let no collection run: what is freed has no cycle in it."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class SteadyClock(trio.abc.Clock):
    """The real clock without the stalls of the machine: so much counts at most of one of them.

    Whatever waits in the loop of a test then gets its turn before a deadline in the same loop has
    passed, as on a machine that does not stall.
    """

    STALL = 0.05

    def __init__(self) -> None:
        self._seen = time.perf_counter()
        self._time = 0.0

    def start_clock(self) -> None:
        self._seen = time.perf_counter()

    def current_time(self) -> float:
        now = time.perf_counter()
        self._time += min(now - self._seen, self.STALL)
        self._seen = now
        return self._time

    def deadline_to_sleep_time(self, deadline: float) -> float:
        # Woken so often, it never takes a wait of the loop for a stall. (The cushion of trio's
        # `wait_all_tasks_blocked` has to be shorter, or that waits for ever.)
        return min(deadline - self.current_time(), self.STALL / 2)


@contextmanager
def real_deadline(seconds: float) -> Iterator[None]:
    """Do what `trio.fail_after` does, by the real clock whatever clock trio has."""
    scope = trio.CancelScope()
    token = trio.lowlevel.current_trio_token()
    timer = threading.Timer(seconds, token.run_sync_soon, [scope.cancel])
    timer.daemon = True
    timer.start()
    try:
        with scope:
            yield
    finally:
        timer.cancel()
    if scope.cancelled_caught:
        raise trio.TooSlowError


def request(request_id: str = "r1", *, model: str = "m", max_tokens: int = 16) -> GenerationRequest:
    """Return the smallest request."""
    return GenerationRequest(
        id=request_id, model=model, prompt_ids=[1, 2, 3], sampling=Sampling(max_tokens=max_tokens)
    )


class MemoryWorker:
    """A worker without an engine: the test is the engine, through `send`."""

    def __init__(self, url: str = "ipc:///m/e0", model_id: str = "m") -> None:
        self.id = self.url = url
        self.model_id = model_id
        self.state: WorkerState = "ready"
        self.load = EngineLoad()
        self.rank_loads = [self.load]
        self.rank_work = [EngineWork()]
        self.usable = [0]
        self.counts = EngineCounts()
        self.info: EngineInfo | None = EngineInfo(max_model_len=128)
        self.running: dict[str, Receiver] = {}
        self.submitted: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self.checked: list[str] = []

    @property
    def requests_active(self) -> int:
        return len(self.running)

    def check(self, request: GenerationRequest) -> None:
        self.checked.append(request.id)

    def submit_nowait(self, request: GenerationRequest, receiver: Receiver) -> None:
        if self.state != "ready":
            raise EngineLostError(self.url, "not connected")
        self.submitted.append(request)
        self.running[request.id] = receiver

    def abort_nowait(self, request_id: str) -> None:
        if self.running.pop(request_id, None) is not None:
            self.aborted.append(request_id)

    def send(
        self,
        request_id: str,
        *ids: int,
        finish: FinishReason | None = None,
        stop_reason: int | str | None = None,
        cached: int | None = None,
        logprobs: list[TokenLogprobs] | None = None,
    ) -> None:
        """Do what an engine's reader does with one output."""
        receiver = self.running[request_id]
        if finish is not None:
            del self.running[request_id]
        receiver.deliver(
            Delta(
                list(ids),
                finish=finish,
                stop_reason=stop_reason,
                cached_tokens=cached,
                logprobs=logprobs,
            )
        )
        receiver.flush()

    def lose(self) -> None:
        """Lose the engine, as a session does."""
        self.state = "not_ready"
        running, self.running = self.running, {}
        for receiver in running.values():
            receiver.fail(EngineLostError(self.url, "connection lost"))


class FirstPolicy:
    """Takes the first candidate and keeps what it is told."""

    name = "first"

    def __init__(self) -> None:
        self.active: list[tuple[str, str]] = []

    def pick(self, candidates: list[MemoryWorker], request: GenerationRequest) -> MemoryWorker:
        return candidates[0]

    def started(self, worker: MemoryWorker, request: GenerationRequest) -> None:
        self.active.append((worker.url, request.id))

    def ended(self, worker: MemoryWorker, request: GenerationRequest) -> None:
        self.active.remove((worker.url, request.id))
