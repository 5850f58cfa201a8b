"""Chat requests whose last message is drawn anew each time, in pieces that are joined fast.

Sentences are the simulated engine's prose in random order, each time behind a new number. So a long
prompt is as long every time, hardly ever begins as another one, and costs the load generator one
join. `load.lua` puts together the same pieces for wrk.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any, Literal

import msgspec

from smgd.sim.prose import SENTENCES
from smgd.text.hub import BUILTIN_DIRECTORY
from smgd.text.tokenizer import Tokenizer

Kind = Literal["short", "2k", "2k-same", "30k", "chat"]

STOP_STRINGS = ["\nUser:", "###"]
# Tokens of the last message, about; a chat has nine more turns of twice this before it.
TOKENS: dict[Kind, int] = {"short": 20, "2k": 2000, "2k-same": 2000, "30k": 30000, "chat": 100}
CHAT_TURNS = 10
# Between the head and the sentences stands this, filled in with the request's number.
NUMBER = "%d. "
_GAP = "<gap>"

ESCAPED = [json.dumps(sentence + " ", ensure_ascii=False)[1:-1] for sentence in SENTENCES]


class Prompt(msgspec.Struct, frozen=True):
    """The pieces of a body: `head`, a number, `sentences` sentences, `tail`, max_tokens, `}`.

    Without sentences, what is in `head` is all, and every body is the same.
    """

    head: str
    sentences: int
    tail: str

    def body(self, number: int, rng: Random, max_tokens: int) -> bytes:
        """Return one request's body."""
        text = ""
        if self.sentences:
            text = NUMBER % number + "".join(rng.choices(ESCAPED, k=self.sentences))
        return f"{self.head}{text}{self.tail}{max_tokens}}}".encode()


class Prompts:
    """Makes prompts for one model, given by its directory."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.tokenizer = Tokenizer.from_directory(model)
        self._per_sentence = len(self.tokenizer.encode(" ".join(SENTENCES))) / len(SENTENCES)

    def make(self, kind: Kind, *, stream: bool, stop: bool = False) -> Prompt:
        """Return the pieces of a kind's requests."""
        count = max(1, round(TOKENS[kind] / self._per_sentence))
        body: dict[str, Any] = {"model": str(self.model), "stream": stream}
        body["messages"] = [*self._earlier(kind, count), {"role": "user", "content": _GAP}]
        if stop:
            body["stop"] = STOP_STRINGS
        body["max_tokens"] = 0
        head, tail = json.dumps(body, ensure_ascii=False)[: -len("0}")].split(_GAP, 1)
        if kind == "2k-same":
            return Prompt(head + "".join(Random(1).choices(ESCAPED, k=count)), 0, tail)
        return Prompt(head, count, tail)

    def _earlier(self, kind: Kind, count: int) -> list[dict[str, str]]:
        if kind != "chat":
            return []
        rng = Random(2)
        roles = ["user", "assistant"] * (CHAT_TURNS - 1)
        return [{"role": r, "content": " ".join(rng.choices(SENTENCES, k=count))} for r in roles]


def model_name(model: Path) -> str:
    """Return how a report calls a model."""
    return "built-in (smgd-sim)" if model == BUILTIN_DIRECTORY else model.name
