"""smgd dies and is started again: the engine does not notice, and serves on.

With an smgd and an engine of its own, since the ones that the other tests share must not end.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

import pytest

from tests.engine.rig import Engine, Gateway, start_engine, wait_until
from tests.engine.test_hangups import client, read_until

STREAMS = 8
# From the moment at which the sockets are bound to the first new answer.
WITHIN = 2.0


class Lives:
    """One smgd after another on the same sockets, with the engine that outlives them."""

    def __init__(self, directory: Path, model: Path, python: Path) -> None:
        self._directory = directory
        self._model = model
        self._count = 0
        self.gateway = self._begin(None)
        self.engine = Engine(python, model, self.gateway.engine_port, directory / "engine.log")

    def _begin(self, socket_path: Path | None) -> Gateway:
        self._count += 1
        directory = self._directory / str(self._count)
        directory.mkdir()
        return Gateway(directory, self._model, socket_path)

    def kill(self) -> None:
        """End smgd as a crash does."""
        os.kill(self.gateway.family.process.pid, signal.SIGKILL)
        self.gateway.family.kill()
        self.gateway.http.close()

    def restart(self) -> None:
        """Start smgd again."""
        self.gateway = self._begin(self.gateway.socket_path)

    def bound_at(self) -> float:
        """Return when smgd bound the sockets, as seconds of `time.time`."""
        [line] = [
            line
            for event in ("looking for engines of a former life", "Binding ZMQ client")
            for line in self.gateway.logged(event)
        ]
        return datetime.fromisoformat(line["timestamp"]).timestamp()

    def close(self) -> None:
        self.gateway.http.close()
        self.engine.stop()
        self.gateway.family.kill()


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory, model: Path, python: Path) -> Iterator[Lives]:
    lives = Lives(tmp_path_factory.mktemp("lives"), model, python)
    try:
        start_engine(lives.engine, lives.gateway)
        yield lives
    finally:
        lives.close()


def first_answer(gateway: Gateway) -> float:
    """Ask until there is an answer; return when it came."""

    def answered() -> float | None:
        gateway.family.check()
        response = gateway.chat("What is the capital of France?", max_tokens=1)
        return time.time() if response.status_code == 200 else None

    return float(wait_until(answered, 30, "an answer through the new smgd"))


def streams(gateway: Gateway, stack: ExitStack) -> list[socket.socket]:
    """Open streams that have begun."""
    socks = [stack.enter_context(client(gateway, stream=True)) for _ in range(STREAMS)]
    for sock in socks:
        read_until(sock, b'"content"', 2)
    return socks


def test_a_killed_smgd_in_the_middle_of_streams(lives: Lives) -> None:
    core = lives.engine.core_pid()
    processes = set(lives.engine.family.members())
    with ExitStack() as stack:
        streams(lives.gateway, stack)
        lives.gateway.wait_running(STREAMS)
        lives.kill()
        killed = time.time()
    lives.restart()
    answered = first_answer(lives.gateway)
    bound = lives.bound_at()
    print(
        f"killed {bound - killed:.2f} s before the sockets were bound again; "
        f"first answer {answered - bound:.3f} s after that"
    )
    assert answered - bound < WITHIN
    assert lives.engine.core_pid() == core
    assert set(lives.engine.family.members()) == processes, "the engine was not reloaded"
    [adopted] = lives.gateway.logged("engine adopted")
    print(f"adopted {adopted['seconds_since_bound']} s after the sockets were bound")
    lives.gateway.wait_running(0)
    assert lives.gateway.gauge("smg_engine_aborts_total") == STREAMS
    idle = lives.engine.idle_since(bound, 10)
    print(f"the engine had nothing left to run {idle:.3f} s after the sockets were bound")


def test_an_answer_is_the_same_through_the_new_smgd(lives: Lives) -> None:
    text = lives.gateway.chat("What is the capital of France?").json()
    assert text["choices"][0]["message"]["content"] == "The capital of France is Paris."


def test_a_restart_in_order_leaves_the_engine_and_is_found_again(lives: Lives) -> None:
    core = lives.engine.core_pid()
    assert lives.gateway.close() == 0
    lives.restart()
    answered = first_answer(lives.gateway)
    print(f"first answer {answered - lives.bound_at():.3f} s after the sockets were bound")
    assert answered - lives.bound_at() < WITHIN
    assert lives.engine.core_pid() == core


def test_an_smgd_killed_while_the_engine_loads(lives: Lives) -> None:
    """INIT came from one life, READY and registration go to the next."""
    lives.engine.start()
    wait_until(
        lambda: lives.gateway.logged("engine session ended"), 60, "the loss of the old engine"
    )
    lives.engine.family.check()
    wait_until(lambda: _greeted(lives), 60, "HELLO of the new engine")
    lives.kill()
    assert lives.engine.idle_times() == [], "it was still loading"
    lives.restart()
    answered = wait_until(
        lambda: lives.gateway.chat(max_tokens=1).status_code == 200, 120, "an answer"
    )
    assert answered
    assert lives.gateway.logged("engine adopted") == []
    [ready] = lives.gateway.logged("engine ready")
    print(f"served {ready['timestamp']} without a HELLO to this smgd")


def _greeted(lives: Lives) -> bool:
    """Tell whether INIT was sent: what the engine had said before is no longer on record."""
    return not lives.gateway.socket_path.with_name(
        f"{lives.gateway.socket_path.name}.engine.json"
    ).exists()
