"""A client that leaves frees the engine, however and whenever it leaves.

That smgd's own books are empty proves little: the engine's log must say that it runs nothing.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.engine.rig import HOST, MAX_NUM_SEQS, Engine, Gateway, chat_body, wait_until

# For the engine to notice; it is one step late, of 20 to 100 ms, when many requests run.
WITHIN = 2.0
# Would run for half a minute.
LONG = {"ignore_eos": True, "max_tokens": 1500, "temperature": 1}


@contextmanager
def client(gateway: Gateway, **fields: Any) -> Iterator[socket.socket]:
    """Send a long request; what is done with the socket is the test's."""
    body = json.dumps(chat_body("Tell me a story.", **(LONG | fields))).encode()
    port = int(gateway.url.rpartition(":")[2])
    with socket.create_connection((HOST, port), timeout=10) as sock:
        sock.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: test\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        yield sock


def read_until(sock: socket.socket, mark: bytes, count: int = 1) -> bytes:
    """Read of a 200 until `mark` has come `count` times."""
    data = b""
    while data.count(mark) < count:
        more = sock.recv(65536)
        assert more, data
        data += more
        assert data.startswith(b"HTTP/1.1 200 "), data
    return data


def check_freed(engine: Engine, gateway: Gateway, left: float) -> None:
    """Check that the engine ran out of work soon after `left`, and that the gauges say so."""
    seconds = engine.idle_since(left, WITHIN)
    print(f"the engine was idle {seconds * 1000:.0f} ms after the client had left")
    assert seconds < WITHIN
    gauges = (
        "smg_engine_running_requests",
        "smg_engine_waiting_requests",
        "smg_worker_requests_active",
    )
    assert {name: gateway.gauge(name) for name in gauges} == dict.fromkeys(gauges, 0)


def aborts(gateway: Gateway) -> float:
    """Return how many requests the engine was told to abort so far."""
    return gateway.gauge("smg_engine_aborts_total")


def reset(sock: socket.socket) -> None:
    """Have the kernel send RST in place of FIN."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("choices", [1, 3])
def test_leaving_a_stream(how: str, choices: int, engine: Engine, gateway: Gateway) -> None:
    before = aborts(gateway)
    with client(gateway, stream=True, n=choices) as sock:
        read_until(sock, b'"content":', 5 * choices)
        if how == "reset":
            reset(sock)
    check_freed(engine, gateway, time.time())
    assert aborts(gateway) - before == choices


@pytest.mark.parametrize("choices", [1, 3])
def test_leaving_before_the_answer(choices: int, engine: Engine, gateway: Gateway) -> None:
    before = aborts(gateway)
    with client(gateway, n=choices):
        gateway.wait_running(choices)
    check_freed(engine, gateway, time.time())
    assert aborts(gateway) - before == choices


def test_leaving_while_requests_wait_in_the_engine(engine: Engine, gateway: Gateway) -> None:
    with ExitStack() as stack:
        socks = [stack.enter_context(client(gateway, stream=True)) for _ in range(MAX_NUM_SEQS + 4)]
        wait_until(
            lambda: gateway.gauge("smg_engine_waiting_requests") == 4, 10, "requests that wait"
        )
        read_until(socks[0], b'"content":', 2)
    check_freed(engine, gateway, time.time())


def test_leaving_during_the_prompt(engine: Engine, gateway: Gateway) -> None:
    """The engine computes a prompt in one step, and hears of the ABORT after it."""
    content = f"{time.time_ns()}" + " hi" * 300
    with client(gateway, messages=[{"role": "user", "content": content}]):
        wait_until(lambda: gateway.gauge("smg_worker_requests_active") == 1, 10, "the request")
    check_freed(engine, gateway, time.time())


def test_those_who_stay_are_not_disturbed(engine: Engine, gateway: Gateway) -> None:
    """And the engine's own count is of them alone, which smgd could not make up."""
    with client(gateway, stream=True, max_tokens=60) as stays:
        with client(gateway, stream=True) as leaves:
            read_until(leaves, b'"content":', 3)
            gateway.wait_running(2)
        left = time.monotonic()
        gateway.wait_running(1)
        assert time.monotonic() - left < WITHIN
        assert b'"finish_reason":"length"' in read_until(stays, b"data: [DONE]")
    assert gateway.gauge("smg_worker_requests_active") == 0


def test_leaving_after_the_answer_aborts_nothing(engine: Engine, gateway: Gateway) -> None:
    before = aborts(gateway)
    with client(gateway, stream=True, max_tokens=3) as sock:
        read_until(sock, b"data: [DONE]")
    assert gateway.chat(max_tokens=1).status_code == 200
    assert aborts(gateway) == before
    assert gateway.gauge("smg_worker_requests_active") == 0
