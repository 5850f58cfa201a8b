"""The oldest engine that is served, in place of the newest, with the same smgd and no setting.

Its wire is the one of `tests/data`; here is only what differs between the versions when it runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.conftest import OLDER
from tests.engine.rig import Engine, Gateway, start_engine, wait_until

CAPITAL = "What is the capital of France?"


@pytest.fixture(scope="module")
def older(
    engine_process: Engine, gateway: Gateway, older_python: Path, rig_directory: Path, model: Path
) -> Iterator[Engine]:
    """The older engine, served, where the other one was."""
    engine_process.stop()
    older = Engine(older_python, model, gateway.engine_port, rig_directory / "older.log")
    try:
        print(f"vLLM {OLDER} was served {start_engine(older, gateway):.1f} s after its start")
        yield older
    finally:
        older.stop()


def test_it_is_the_older_one(older: Engine, gateway: Gateway) -> None:
    assert gateway.logged("engine ready")[-1]["version"] == OLDER


def test_greedy_whole_and_streamed(older: Engine, gateway: Gateway) -> None:
    whole = gateway.chat(CAPITAL, logprobs=True).json()
    [choice] = whole["choices"]
    assert choice["message"]["content"] == "The capital of France is Paris."
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert len(choice["logprobs"]["content"]) == whole["usage"]["completion_tokens"] == 8
    streamed = gateway.chat(CAPITAL, stream=True).text
    assert '"content":" Paris"' in streamed
    assert streamed.endswith("data: [DONE]\n\n")


def test_min_tokens_holds_eos_back(older: Engine, gateway: Gateway) -> None:
    answer = gateway.chat(CAPITAL, min_tokens=20, max_tokens=40).json()
    assert answer["usage"]["completion_tokens"] >= 20


def test_stop_ids_penalties_and_seeds(older: Engine, gateway: Gateway) -> None:
    stopped = gateway.chat(CAPITAL, stop_token_ids=[7042]).json()["choices"][0]
    assert (stopped["message"]["content"], stopped["stop_reason"]) == (
        "The capital of France is",
        7042,
    )
    fields = {"temperature": 1.5, "seed": 3, "max_tokens": 6, "repetition_penalty": 1.1}
    texts = [gateway.chat("Tell me a story.", **fields).json()["choices"] for _ in range(2)]
    assert texts[0] == texts[1]


def test_a_stop_string_frees_the_engine(older: Engine, gateway: Gateway) -> None:
    wait_until(older.idle, 5, "an idle engine")
    began = time.time()
    gateway.chat(CAPITAL, stop="France is P", ignore_eos=True, max_tokens=1500)
    older.idle_since(began, within=2)
