"""The simulated model: an n-gram automaton over `prose`, for any tokenizer.

Every sentence of the prose is encoded with the tokenizer at hand; what followed two tokens there
may follow them again, so the output is readable whatever the vocabulary. Which of the possible
tokens comes next is decided by a hash of *all* ids so far, prompt and output alike, and of the
seeds. So a sequence that was cut anywhere, and whose ids so far are submitted as a new prompt,
continues with the same tokens: that is what makes migration between engines testable.

For the same reason the end must follow from the ids alone. The model ends a text only after a
sentence, and only if the last `MIN_RUN` ids are what it would have said itself: a prompt is hardly
ever that, so an answer has at least `MIN_RUN` tokens.

Log-probabilities follow Zipf's law over a total order of the vocabulary: the likely tokens first,
then all others. They sum to one, and depend on the ids so far alone, like the order.
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Container, Iterator
from itertools import chain, islice, pairwise
from typing import Protocol, TypeAlias

import msgspec

from smgd.sim.prose import SENTENCES

# Tokens that an answer has at least, and that the model looks back to tell whether it is speaking.
MIN_RUN = 16

# Tokens that are offered in one context; sampling chooses among them at any temperature.
_MAX_LIKELY = 8
# One in so many sentence ends is the end of the text, and of the others, of the line.
_END_ONE_IN = 4
_LINE_ONE_IN = 8
# Zipf exponents: between an open question (p(1) = 0.44) and a sure thing (0.92).
_EXPONENTS = (1.6, 2.2, 3.0, 4.0)

_MASK = 0xFFFFFFFFFFFFFFFF
_START = -1  # stands for what comes before a sentence
_END_SALT, _LINE_SALT, _REST_SALT, _EXPONENT_SALT = 1, 2, 3, 4


class Codec(Protocol):
    """What the model needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without any token in front or behind."""
        ...

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids."""
        ...


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """How one request wants its tokens chosen. The penalties have no effect on this model."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    bias: dict[int, float] = {}
    allowed: list[int] = []
    bad_words: list[list[int]] = []


LogprobRow: TypeAlias = tuple[list[int], list[float], int]


class Distribution:
    """The probabilities of the next token in one context; ranks count from 1."""

    __slots__ = ("_exponent", "_model", "_offset", "likely")

    def __init__(self, model: Model, likely: tuple[int, ...], digest: int) -> None:
        self._model = model
        self._offset = _mix(digest ^ _REST_SALT) % model.vocab_size
        self._exponent = _EXPONENTS[_mix(digest ^ _EXPONENT_SALT) % len(_EXPONENTS)]
        self.likely = likely

    def ids(self) -> Iterator[int]:
        """Yield the whole vocabulary, the most likely token first."""
        rest = chain(range(self._offset, self._model.vocab_size), range(self._offset))
        return chain(self.likely, (token for token in rest if token not in self.likely))

    def rank(self, token: int) -> int:
        """Return the rank of a token."""
        if token in self.likely:
            return self.likely.index(token) + 1
        size = self._model.vocab_size
        place = (token - self._offset) % size
        moved = sum((other - self._offset) % size < place for other in self.likely)
        return len(self.likely) + place - moved + 1

    def score(self, rank: int) -> float:
        """Return the logit of a rank: the log-probability but for a constant."""
        return -self._exponent * math.log(rank)

    def logprob(self, rank: int) -> float:
        """Return the log-probability of a rank."""
        return self.score(rank) - self._model.log_norm(self._exponent)

    def row(self, token: int, count: int) -> LogprobRow:
        """Return ids, log-probabilities and rank: of `token`, then of the `count` best tokens."""
        rank = self.rank(token)
        best = list(islice(self.ids(), count))
        logprobs = [self.logprob(rank), *map(self.logprob, range(1, len(best) + 1))]
        return [token, *best], logprobs, rank

    def row_of(self, token: int, others: list[int]) -> LogprobRow:
        """Return a row like `row` does, but with these tokens in place of the best."""
        ranks = [self.rank(token), *map(self.rank, others)]
        return [token, *others], [self.logprob(rank) for rank in ranks], ranks[0]


class Model:
    """What was learned from the prose with one tokenizer; shared by all sequences."""

    def __init__(
        self, codec: Codec, *, vocab_size: int, eos_token_id: int | None, seed: int = 0
    ) -> None:
        self.codec = codec
        self.vocab_size = vocab_size
        self.eos_token_id = eos_token_id
        self.seed = seed & _MASK
        self._norms: dict[float, float] = {}
        self._pairs: dict[tuple[int, int], tuple[int, ...]] = {}
        self._singles: dict[int, tuple[int, ...]] = {}
        self._openings: tuple[int, ...] = ()  # first tokens of a text or a line
        self._followings: tuple[int, ...] = ()  # first tokens after another sentence
        self.ends: frozenset[int] = frozenset()
        self._newline = next((ids[0] for ids in [codec.encode("\n")] if len(ids) == 1), None)
        self._learn()

    def _learn(self) -> None:
        codec = self.codec
        pairs: dict[tuple[int, int], dict[int, None]] = {}
        singles: dict[int, dict[int, None]] = {}
        starts: tuple[dict[int, None], dict[int, None]] = ({}, {})
        ends = set()
        for sentence in SENTENCES:
            for kind, text in enumerate((sentence, " " + sentence)):
                ids = codec.encode(text)
                starts[kind][ids[0]] = None
                ends.add(ids[-1])
                ids.insert(0, _START)
                for first, second in pairwise(ids[1:]):
                    singles.setdefault(first, {})[second] = None
                for first, second, third in zip(ids, ids[1:], ids[2:], strict=False):
                    pairs.setdefault((first, second), {})[third] = None
        self._pairs = {key: tuple(value) for key, value in pairs.items()}
        # A token that is a part of a character says too little: its successors may not fit.
        self._singles = {
            key: tuple(value)
            for key, value in singles.items()
            if "\ufffd" not in codec.decode([key])
        }
        self._openings, self._followings = tuple(starts[0]), tuple(starts[1])
        self.ends = frozenset(ends)

    def likely(self, previous: int, last: int, digest: int) -> tuple[int, ...]:
        """Return what may follow two tokens, the likeliest first."""
        known = self._pairs.get((previous, last))
        if known is None:
            if last in self.ends:
                known = self._followings
                if self._newline is not None and _mix(digest ^ _LINE_SALT) % _LINE_ONE_IN == 0:
                    known = (self._newline,)
            else:
                known = self._pairs.get((_START, last)) or self._singles.get(last, self._openings)
        turn = digest % len(known)
        return (known[turn:] + known[:turn])[:_MAX_LIKELY]

    def log_norm(self, exponent: float) -> float:
        """Return the logarithm of the sum of `rank ** -exponent` over the vocabulary."""
        norm = self._norms.get(exponent)
        if norm is None:
            norm = math.log(math.fsum(rank**-exponent for rank in range(1, self.vocab_size + 1)))
            self._norms[exponent] = norm
        return norm


class Sequence:
    """One text in the making: the ids so far and what the model would add to them."""

    def __init__(self, model: Model, ids: list[int], rules: Rules, *, whole: bool = False) -> None:
        self._model = model
        self._rules = rules
        self._noise = model.seed
        if rules.temperature > 0 and rules.seed is not None:
            self._noise = _mix(model.seed ^ _mix(rules.seed & _MASK))
        # Only the last ids matter to the state, unless all distributions are wanted.
        skipped = 0 if whole else max(0, len(ids) - MIN_RUN)
        self.ids = ids[:skipped]
        self._checksum = zlib.crc32(array("I", self.ids).tobytes())
        self._run = 0
        self.passed: list[tuple[int, Distribution]] = []
        self._advance()
        for token in ids[skipped:]:
            if whole:
                self.passed.append((token, self.distribution()))
            self.append(token)

    def append(self, token: int) -> None:
        """Add a token, whoever has chosen it."""
        self._run = min(self._run + 1, MIN_RUN) if token == self._choice else 0
        self.ids.append(token)
        self._checksum = zlib.crc32(array("I", (token,)).tobytes(), self._checksum)
        self._advance()

    def _advance(self) -> None:
        self._digest = _mix(self._checksum ^ _mix(self._model.seed))
        last = self.ids[-1] if self.ids else _START
        previous = self.ids[-2] if len(self.ids) > 1 else _START
        self._likely = self._model.likely(previous, last, self._digest)
        self._choice = self._choose(self._plain(), ())

    def _plain(self) -> Distribution:
        return Distribution(self._model, self._likely, self._digest)

    def _may_end(self) -> bool:
        return (
            self._run >= MIN_RUN
            and self.ids[-1] in self._model.ends
            and _mix(self._digest ^ _END_SALT) % _END_ONE_IN == 0
        )

    def distribution(self) -> Distribution:
        """Return the probabilities of the next token."""
        eos = self._model.eos_token_id
        if eos is None or not self._may_end():
            return self._plain()
        return Distribution(self._model, (eos, *self._likely), self._digest)

    def propose(self, masked: Container[int] = ()) -> int:
        """Return the next token, none of those that are masked."""
        if self._may_end() or masked:
            return self._choose(self.distribution(), masked)
        return self._choice

    def _choose(self, distribution: Distribution, masked: Container[int]) -> int:
        rules = self._rules

        def usable(token: int) -> bool:
            return token not in masked and not self._completes_bad_word(token)

        if rules.allowed:
            candidates = list(filter(usable, rules.allowed))
        else:
            candidates = self._truncated(list(filter(usable, distribution.likely)), distribution)
            candidates += [token for token in rules.bias if usable(token)]
        if rules.bias or not candidates:
            candidates += islice(
                (t for t in distribution.ids() if usable(t) and t not in rules.bias), 1
            )
        return max(candidates, key=lambda token: self._weight(token, distribution))

    def _truncated(self, candidates: list[int], distribution: Distribution) -> list[int]:
        rules = self._rules
        if rules.top_k > 0:
            candidates = candidates[: rules.top_k]
        if rules.top_p == 1.0 and rules.min_p == 0.0:
            return candidates
        best = distribution.logprob(1)
        kept: list[int] = []
        total = 0.0
        for token in candidates:
            logprob = distribution.logprob(distribution.rank(token))
            if kept and (total >= rules.top_p or math.exp(logprob - best) < rules.min_p):
                break
            kept.append(token)
            total += math.exp(logprob)
        return kept

    def _weight(self, token: int, distribution: Distribution) -> float:
        """Return what the chosen token has most of: its logit, with noise that makes it a draw."""
        rules = self._rules
        logit = distribution.score(distribution.rank(token)) + rules.bias.get(token, 0.0)
        if rules.temperature == 0:
            return logit
        uniform = (_mix(self._noise ^ self._digest ^ _mix(token)) + 1) / (_MASK + 2)
        return logit / rules.temperature - math.log(-math.log(uniform))

    def _completes_bad_word(self, token: int) -> bool:
        return any(
            word[-1] == token and (len(word) == 1 or self.ids[1 - len(word) :] == word[:-1])
            for word in self._rules.bad_words
        )


def _mix(value: int) -> int:
    """Return 64 well-mixed bits (the finalizer of SplitMix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
