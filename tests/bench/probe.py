"""Open-loop latencies: requests leave at their times, whatever has become of those before.

A gap ("itl") is the time between two reads that bring content. A gateway that merges tokens is
charged for the wait, and not credited with the tokens that came without any.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import trio

from tests.bench.prompts import Prompt
from tests.engine.rig import HOST

STALLED_TOKENS = 60_000
# Seconds in which a stalled reader's buffers fill up, and after which a burst comes.
STALL_SECONDS = 2.0
BURST_AT_SECONDS = 1.0
BURST_SECONDS = 20.0
_REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b"
)
_END = b"0\r\n\r\n"


class Probe:
    """Sends streams to one gateway and keeps their times, in seconds."""

    def __init__(self, port: int) -> None:
        self.first: list[float] = []
        self.gaps: list[float] = []
        self.errors = 0
        self._port = port
        self._idle: list[trio.SocketStream] = []
        self._rng = Random(11)
        self._numbers = itertools.count()

    async def arrivals(
        self, prompt: Prompt, tokens: int, rate: float, seconds: float, *, keep: bool = True
    ) -> None:
        """Start `rate` streams a second for some seconds; return when all have ended.

        With `keep` false they are only company for others.
        """
        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            for number in range(round(rate * seconds)):
                await trio.sleep_until(start + number / rate)
                body = prompt.body(next(self._numbers), self._rng, tokens)
                nursery.start_soon(self._stream, body, keep)

    async def _stream(self, body: bytes, keep: bool) -> None:
        if self._idle:
            stream = self._idle.pop()
        else:
            stream = await trio.open_tcp_stream(HOST, self._port)
        sent, last, first, gaps, end = time.perf_counter(), 0.0, 0.0, list[float](), b""
        await stream.send_all(request_bytes(body))
        while not end.endswith(_END):
            data = await stream.receive_some(65536)
            now = time.perf_counter()
            if not data:
                self.errors += 1
                return
            end = (end + data)[-len(_END) :]
            if data.count(b'"content":"') > data.count(b'"content":""'):
                if last:
                    gaps.append(now - last)
                else:
                    first = now - sent
                last = now
        self._idle.append(stream)
        if not first:
            self.errors += 1
        elif keep:
            self.first.append(first)
            self.gaps += gaps

    async def close(self) -> None:
        """Close the connections."""
        for stream in self._idle:
            await stream.aclose()

    def figures(self) -> dict[str, float]:
        """Return p50 and p99 in milliseconds, the longest gap, and the number of errors."""
        figures: dict[str, float] = {"errors": self.errors, "streams": len(self.first)}
        for name, values in ("ttft", self.first), ("itl", self.gaps):
            if len(values) > 1:
                cuts = statistics.quantiles(values, n=100, method="inclusive")
                figures[f"{name}_p50"] = cuts[49] * 1000
                figures[f"{name}_p99"] = cuts[98] * 1000
                figures[f"{name}_max"] = max(values) * 1000
        return figures


def measure(
    port: int,
    prompt: Prompt,
    *,
    tokens: int,
    rate: float,
    seconds: float,
    beside: tuple[Prompt, int, float] | None = None,
) -> dict[str, float]:
    """Measure streams at a rate; `beside` them others run: their prompt, tokens and rate."""
    probe = Probe(port)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(probe.arrivals, prompt, tokens, rate, seconds)
            if beside is not None:
                company = functools.partial(probe.arrivals, *beside, seconds, keep=False)
                nursery.start_soon(company)
        await probe.close()

    gc.collect()
    gc.disable()  # a pause of ours would be taken for one of theirs
    try:
        trio.run(main)
    finally:
        gc.enable()
    return probe.figures()


def request_bytes(body: bytes) -> bytes:
    """Return a whole HTTP request."""
    return _REQUEST % (len(body), body)


@contextlib.contextmanager
def stalled(port: int, count: int, prompt: Prompt) -> Iterator[None]:
    """Have so many clients that ask for a long stream and never read."""
    with contextlib.ExitStack() as stack:
        for number in range(count):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((HOST, port))
            client.sendall(request_bytes(prompt.body(number, Random(number), STALLED_TOKENS)))
        if count:
            time.sleep(STALL_SECONDS)
        yield


@contextlib.contextmanager
def burst(port: int, count: int, prompt: Prompt) -> Iterator[None]:
    """Have a process of its own send so many one-token requests at once, a second from now."""
    if not count:
        yield
        return
    command = [sys.executable, "-m", __spec__.name, str(port)]
    root = Path(__file__).parents[2]
    bodies = [prompt.body(number, Random(number), 1) for number in range(count)]
    with tempfile.TemporaryFile() as file:
        file.write(b"\n".join(bodies))
        file.seek(0)
        process = subprocess.Popen(command, cwd=root, stdin=file)
    try:
        yield
        if process.wait(BURST_SECONDS):
            raise RuntimeError("the burst was not answered")
    finally:
        process.kill()
        process.wait()


def send_at_once(port: int, bodies: Sequence[bytes]) -> None:
    """Connect, wait a little, send all requests one right after the other, and read the answers."""
    clients = [socket.create_connection((HOST, port)) for _ in bodies]
    time.sleep(BURST_AT_SECONDS)
    for client, body in zip(clients, bodies, strict=True):
        client.sendall(request_bytes(body))
    for client in clients:
        data = b""
        while not data.endswith(_END):
            data = data[-len(_END) :] + client.recv(65536)
        client.close()


if __name__ == "__main__":
    send_at_once(int(sys.argv[1]), sys.stdin.buffer.read().split(b"\n"))
