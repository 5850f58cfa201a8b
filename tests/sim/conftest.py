"""What many tests of the simulator need: the model, and a core that is called by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from smgd.sim.model import Model
from smgd.text.hub import BUILTIN_DIRECTORY
from smgd.text.tokenizer import Tokenizer
from tests.sim.bench import BIG_VOCABULARY

SHAPES = Path(__file__).parent.parent / "data" / "sim-shapes.json"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The built-in tokenizer."""
    return Tokenizer.from_directory(BUILTIN_DIRECTORY)


@pytest.fixture(scope="session")
def model(tokenizer: Tokenizer) -> Model:
    """The model that speaks with it."""
    return Model(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.eos_token_id)


@pytest.fixture(scope="session")
def big_model(tokenizer: Tokenizer) -> Model:
    """The same with as many ids as the model has with which frames were recorded."""
    return Model(tokenizer, vocab_size=BIG_VOCABULARY, eos_token_id=tokenizer.eos_token_id)


@pytest.fixture(scope="session")
def recorded() -> dict[str, dict[str, Any]]:
    """Recorded frames as bytes: version, case, "sent" or "received", message, frame."""
    cases: dict[str, dict[str, Any]] = json.loads(SHAPES.read_text())
    del cases["about"]
    for version in cases.values():
        for case in version.values():
            for direction in ("sent", "received"):
                case[direction] = [[bytes.fromhex(f) for f in m] for m in case[direction]]
    return cases
