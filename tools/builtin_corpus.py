"""The text on which the built-in tokenizer is trained, made by a small grammar and by hand.

The grammar combines the word lists of `builtin_words.txt` into sentences, so that the vocabulary is
that of plain English; the prose of the simulated model makes sure that it says much with few
tokens; `builtin_samples.txt` shows what else prompts contain: code, JSON, numbers, other scripts.
All of it is written for this purpose. The same call gives the same text, on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from smgd.sim.prose import SENTENCES

_HERE = Path(__file__).parent

_FRAMES = (
    "The {a} {n} {p} the {n2}, and the {a2} {n3} {p2} it {g}.",
    "A {n} that {s} is more {a} than a {n2} that {s2}.",
    "In {c} the {ns} are {a}, {a2} and rarely {v}.",
    "{w} {p} a {n} in {c}, {g} it was the {a} {n2} of the {n3}.",
    "We {v} the {ns} {g} {i} them, which {s} the {n2}.",
    "{g} the {n} was {i}, {w} could {v} {a} {ns} and {n2s}.",
    "It is {a} to {v} the {n}, but {a2} to {v2} its {n2}.",
    "{w} asked {w2} whether {i} the {n} would {v} the {ns}.",
    "You should {v} {g} you {v2}: {ns} {v3} {d}.",
    "What is the {n} of {c}? {w} {s} that it is a {a} {n2}.",
    "How do I {v} a {n} without {i} the {a} {ns}?",
    "Please {v} a {a} {n} about {ns} and {n2s}, {d} and in {k} words.",
    "The {n} {s} {k} {ns} per {n2}, {d} more than the {n3}.",
)

_NUMBERS = ("two", "three", "five", "ten", "12", "40", "100", "2500")

_SEED = 20240117
_GENERATED_SENTENCES = 6000
# What was written by hand is shown several times, so that the grammar's bulk does not drown it.
_PROSE_WEIGHT = 6
_SAMPLES_WEIGHT = 8


def corpus() -> Iterator[str]:
    """Yield the training text, line by line, each with its line end."""
    samples = _HERE.joinpath("builtin_samples.txt").read_text(encoding="utf-8")
    for _ in range(_PROSE_WEIGHT):
        yield from (line + "\n" for line in SENTENCES)
    for _ in range(_SAMPLES_WEIGHT):
        yield from samples.splitlines(keepends=True)
    yield from _sentences(_word_lists())


def _word_lists() -> dict[str, list[str]]:
    words: dict[str, list[str]] = {}
    for line in _HERE.joinpath("builtin_words.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            current = words.setdefault(line.strip("[]"), [])
        else:
            current.extend(line.split())
    return words


def _sentences(words: dict[str, list[str]]) -> Iterator[str]:
    pick = random.Random(_SEED).choice  # noqa: S311 - the same text each time

    def noun() -> str:
        return pick(words["nouns"])

    def verb() -> str:
        return pick(words["verbs"])

    def adjective() -> str:
        return pick(words["adjectives"])

    for _ in range(_GENERATED_SENTENCES):
        text = pick(_FRAMES).format(
            n=noun(), n2=noun(), n3=noun(), ns=_plural(noun()), n2s=_plural(noun()),
            v=verb(), v2=verb(), v3=verb(), s=_third(verb()), s2=_third(verb()),
            p=_past(verb()), p2=_past(verb()), i=_gerund(verb()),
            a=adjective(), a2=adjective(), d=_adverb(adjective()),
            g=pick(words["glue"]), c=pick(words["places"]),
            w=pick(words["names"]), w2=pick(words["names"]), k=pick(_NUMBERS),
        )  # fmt: skip
        yield text[0].upper() + text[1:] + "\n"


# Regular forms only: a tokenizer does not mind "breaked".


def _plural(noun: str) -> str:
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    return noun[:-1] + "ies" if noun.endswith("y") and noun[-2] not in "aeou" else noun + "s"


def _third(verb: str) -> str:
    return _plural(verb)


def _past(verb: str) -> str:
    if verb.endswith("e"):
        return verb + "d"
    return verb[:-1] + "ied" if verb.endswith("y") and verb[-2] not in "aeou" else verb + "ed"


def _gerund(verb: str) -> str:
    return verb[:-1] + "ing" if verb.endswith("e") and not verb.endswith("ee") else verb + "ing"


def _adverb(adjective: str) -> str:
    return adjective[:-1] + "ily" if adjective.endswith("y") else adjective + "ly"
