"""Engines die; smgd does not, and nobody has to touch it when they come back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Semaphore
from typing import Any

import openai

from tests.engine.rig import MODEL_NAME, START_SECONDS, Engine, Gateway, RigError, wait_until

LONG: dict[str, Any] = {
    "model": MODEL_NAME,
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "max_tokens": 1500,
    "extra_body": {"ignore_eos": True},
}
# How long after the end of the engine its requests may still wait for theirs.
AT_ONCE = 1.0


class Failed:
    """How a request ended: the error, how many frames of text had come before it, and when."""

    def __init__(self, client: openai.OpenAI, began: Semaphore, choices: int | None) -> None:
        """Ask for `choices` streamed, or for one whole answer, until that fails."""
        self.frames = 0
        try:
            self._ask(client, began, choices)
        except openai.APIError as error:
            self.error = error
        else:
            raise AssertionError("an engine that was ended has answered")
        self.at = time.monotonic()

    def _ask(self, client: openai.OpenAI, began: Semaphore, choices: int | None) -> None:
        if choices is None:
            client.chat.completions.create(**LONG)
            return
        for chunk in client.chat.completions.create(**LONG, n=choices, stream=True):
            self.frames += bool(chunk.choices[0].delta.content)
            if self.frames == choices:
                began.release()


def fail_in_flight(
    client: openai.OpenAI, gateway: Gateway, end: Callable[[], None]
) -> tuple[list[Failed], float]:
    """Have requests run, then `end` the engine; return how they failed, and when the end was."""
    began = Semaphore(0)
    streams = (1, 3)
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(Failed, client, began, n) for n in (None, None, *streams)]
        for _ in streams:
            assert began.acquire(timeout=30)
        gateway.wait_running(6, 30, lambda: _check_asked(running))
        end()
        ended = time.monotonic()
        return [future.result() for future in running], ended


def _check_asked(asked: Sequence[Future[Failed]]) -> None:
    for future in asked:
        if future.done():
            raise RigError(f"a request has failed before its engine: {future.result().error}")


def check_failed(failed: list[Failed], ended: float) -> None:
    """Check that all failed at once and say why: as a status, or in a stream that had begun."""
    seconds = [round(f.at - ended, 3) for f in failed]
    print(f"requests failed {seconds} s after the end of the engine")
    assert len(failed) == 4
    assert max(seconds) < AT_ONCE
    for one in failed:
        assert one.error.code == "engine_lost"
        if not one.frames:
            assert isinstance(one.error, openai.InternalServerError)
            assert one.error.status_code == 503
            assert one.error.response.headers["retry-after"] == "1"


def check_not_ready(gateway: Gateway) -> None:
    """Check that smgd says so, and that nobody waits for an engine that is not there."""
    response = gateway.http.get("/readiness")
    assert response.status_code == 503
    assert response.json()["reason"] == "insufficient healthy workers"
    began = time.monotonic()
    refused = gateway.chat()
    assert time.monotonic() - began < 0.5
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "no_available_workers"
    assert refused.headers["retry-after"] == "1"
    assert gateway.gauge("smg_worker_requests_active") == 0
    assert gateway.gauge("smg_worker_health") == 0


def check_served_again(engine: Engine, gateway: Gateway) -> None:
    """Start the engine anew, and check how long after its READY the first answer came."""
    engine.start()

    def answered() -> float | None:
        engine.family.check()
        response = gateway.chat("What is the capital of France?", max_tokens=1)
        return time.time() if response.status_code == 200 else None

    served = wait_until(answered, START_SECONDS, "an answer of the new engine")
    seconds = served - engine.idle_times()[0]
    print(f"answered {seconds:.3f} s after the READY of the new engine")
    assert seconds < 1.0
    assert gateway.ready()
    text = gateway.chat("What is the capital of France?").json()["choices"][0]["message"]["content"]
    assert text == "The capital of France is Paris."


def test_a_killed_engine(engine: Engine, gateway: Gateway, client: openai.OpenAI) -> None:
    def kill() -> None:
        os.killpg(engine.family.process.pid, signal.SIGKILL)

    failed, ended = fail_in_flight(client, gateway, kill)
    check_failed(failed, ended)
    check_not_ready(gateway)
    check_served_again(engine, gateway)


def test_a_core_that_is_told_to_end(
    engine: Engine, gateway: Gateway, client: openai.OpenAI
) -> None:
    """It aborts what runs, says nothing more, and closes its connections seconds later."""

    def terminate() -> None:
        os.kill(engine.core_pid(), signal.SIGTERM)

    failed, ended = fail_in_flight(client, gateway, terminate)
    check_failed(failed, ended)
    check_not_ready(gateway)
    check_served_again(engine, gateway)


def test_an_engine_that_is_stopped(engine: Engine, gateway: Gateway, client: openai.OpenAI) -> None:
    """As an operator or systemd does it: its parent process is told to end."""
    failed, ended = fail_in_flight(client, gateway, engine.family.process.terminate)
    check_failed(failed, ended)
    check_not_ready(gateway)
