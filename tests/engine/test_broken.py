"""Engines whose processes all live, and that are of no use: frozen, or one of their threads died.

What an engine dies of in part never passes smgd's guard, so the smgd that is to send it is started
by a few lines that take the guard off, or address the answer to a front end that is not there. One
engine serves all tests, and finds one smgd after another on the same sockets.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.engine.rig import (
    Engine,
    Gateway,
    RigError,
    free_socket_path,
    start_engine,
    wait_until,
)
from tests.engine.test_losses import (
    Failed,
    check_failed,
    check_not_ready,
    check_served_again,
    fail_in_flight,
)

HEARTBEAT = 3.0  # seconds; some thirty of the engine's longest steps
# Ten times what it should take: other programs may have the processor.
FROZEN_WITHIN = 10 * HEARTBEAT
THAWED_WITHIN = 10.0
IDLE_WITHIN = 2.0
# Longer than smgd waits between two questions whether a lost engine is there.
STAYS_LOST = 5.0

# `smgd` with the guard off.
UNGUARDED = """
import sys
from smgd.cli import main
from smgd.engine import guard
guard.check = lambda *args: None
sys.exit(main(sys.argv[1:]))
"""
# `smgd` that says of the requests with this seed that they come from front end 5, of which the
# engine has no address. Elements 9 and 10 of an ADD are prompt_embeds and prompt_is_token_ids.
ASTRAY_SEED = 5
ASTRAY = f"""
import sys
import msgspec
from smgd.cli import main
from smgd.wire import vllm
encode_add = vllm.encode_add
def encode_add_astray(request_id, prompt_ids, params, **fields):
    kind, body = encode_add(request_id, prompt_ids, params, **fields)
    if params.get("seed") == {ASTRAY_SEED}:
        add = msgspec.msgpack.decode(body)
        assert len(add) == 9
        body = msgspec.msgpack.encode([*add, None, None, 5])
    return [kind, body]
vllm.encode_add = encode_add_astray
sys.exit(main(sys.argv[1:]))
"""


class Bench:
    """An engine, and the sockets on which it looks for an smgd."""

    def __init__(self, directory: Path, model: Path, python: Path) -> None:
        self.directory = directory
        self._model = model
        self._socket_path, port = free_socket_path(directory)
        self.engine = Engine(python, model, port, directory / "engine.log")

    @contextmanager
    def smgd(self, name: str, **how: Any) -> Iterator[Gateway]:
        """Run an smgd that serves the engine; `how` are arguments of `Gateway`."""
        directory = self.directory / name
        directory.mkdir()
        gateway = Gateway(directory, self._model, self._socket_path, **how)
        try:
            self._serve(gateway)
            yield gateway
        finally:
            code = gateway.close()
        assert code == 0, gateway.family.tail()

    def _serve(self, gateway: Gateway) -> None:
        if self.engine.whole():  # unless a test has failed, it will be found
            with suppress(RigError):
                wait_until(gateway.ready, 5, "the engine of the test before")
                return
        start_engine(self.engine, gateway)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, model: Path, python: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("broken"), model, python)
    try:
        yield bench
    finally:
        bench.engine.stop()


@contextmanager
def client_of(gateway: Gateway) -> Iterator[openai.OpenAI]:
    """Give OpenAI's own client; it does not try again, or it would hide what is tested."""
    with openai.OpenAI(
        base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


def check_reason(gateway: Gateway, reason: str) -> None:
    """Check that the engine was lost once, and why."""
    assert [line["reason"] for line in gateway.logged("engine session ended")] == [reason]


def test_a_frozen_engine(bench: Bench) -> None:
    """Nothing is closed and nothing is said: only the heartbeat can tell."""
    config = bench.directory / "smgd.toml"
    config.write_text(f"[timeouts]\nheartbeat = {HEARTBEAT}\n")
    with bench.smgd("frozen", flags=("--config", str(config))) as gateway:
        core = bench.engine.core_pid()
        with client_of(gateway) as client:
            failed, frozen = fail_in_flight(client, gateway, lambda: os.kill(core, signal.SIGSTOP))
        check_failed_late(failed, frozen)
        check_reason(gateway, f"no sign of life for {HEARTBEAT:g}s with requests in flight")
        check_stays_lost(bench.engine, gateway)
        thawed = time.time()  # before, since it takes the processor from us
        os.kill(core, signal.SIGCONT)
        check_thawed(bench.engine, gateway, thawed)
        assert bench.engine.core_pid() == core
        assert gateway.logged("engine session ended")[1:] == []


def check_failed_late(failed: list[Failed], frozen: float) -> None:
    """Check that all have failed for the same reason, not before the heartbeat was overdue."""
    seconds = [round(f.at - frozen, 3) for f in failed]
    print(f"requests failed {seconds} s after the engine was frozen, heartbeat {HEARTBEAT:g} s")
    assert len(failed) == 4
    assert HEARTBEAT / 2 < min(seconds) <= max(seconds) < FROZEN_WITHIN
    assert [f.error.code for f in failed] == ["engine_lost"] * 4
    whole = [f.error for f in failed if not f.frames]
    assert len(whole) == 2
    for error in whole:
        assert isinstance(error, openai.InternalServerError)
        assert error.status_code == 503


def check_thawed(engine: Engine, gateway: Gateway, thawed: float) -> None:
    """Check that it is served again, without what it ran before."""
    wait_until(gateway.ready, THAWED_WITHIN, "the engine that runs again")
    print(f"ready {time.time() - thawed:.3f} s after the engine could go on")
    idle = engine.idle_since(thawed, THAWED_WITHIN)
    print(f"the engine had dropped its old requests {idle:.3f} s after it could go on")
    text = gateway.chat("What is the capital of France?").json()
    assert text["choices"][0]["message"]["content"] == "The capital of France is Paris."


def lose_a_thread(gateway: Gateway, **fatal: Any) -> float:
    """Have requests run, send a fatal one, and check how all of them end.

    Returns when it was sent, as seconds of `time.time`.
    """
    sent: list[tuple[float, Future[httpx2.Response]]] = []
    with ThreadPoolExecutor() as pool, client_of(gateway) as client:
        failed, ended = fail_in_flight(
            client,
            gateway,
            lambda: sent.append((time.time(), pool.submit(gateway.chat, **fatal))),
        )
        check_failed(failed, ended)
        [(at, answer)] = sent
        response = answer.result(timeout=1)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_lost"
    assert response.headers["retry-after"] == "1"
    return at


def check_stays_lost(engine: Engine, gateway: Gateway) -> None:
    """Check that nobody waits for it, though all of its processes live on."""
    deadline = time.monotonic() + STAYS_LOST
    while time.monotonic() < deadline:
        check_not_ready(gateway)
        time.sleep(0.5)
    assert engine.whole()


def test_an_input_thread_that_died(bench: Bench) -> None:
    """The engine checks ranges while it decodes, in the thread that reads, and so loses it."""
    with bench.smgd("input", program=("-c", UNGUARDED)) as gateway:
        lose_a_thread(gateway, temperature=3.0)
        check_reason(gateway, "the input connection was closed")
        check_stays_lost(bench.engine, gateway)
        check_served_again(bench.engine, gateway)


def test_an_output_thread_that_died(bench: Bench) -> None:
    """The engine still takes everything and computes it, and cannot say a word."""
    with bench.smgd("output", program=("-c", ASTRAY)) as gateway:
        sent = lose_a_thread(gateway, seed=ASTRAY_SEED)
        check_reason(gateway, "the output connection was closed")
        check_stays_lost(bench.engine, gateway)
        # It still hears, so what would run for half a minute is aborted.
        idle = bench.engine.idle_since(sent, 0)
        print(f"the engine had dropped its requests {idle:.3f} s after the fatal one was sent")
        assert idle < IDLE_WITHIN
        check_served_again(bench.engine, gateway)
