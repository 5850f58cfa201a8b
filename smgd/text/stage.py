"""Where tokenizing happens: small texts on the loop, large ones in a thread.

A thread costs 60 to 190 us per call, and encoding 0.6 us per token: below some thousand tokens the
thread is the greater delay for everybody. Above, the loop would stand still for milliseconds.
What is counted is only what has to be encoded: known segments and words are looked up on the loop,
which gives way to streams after every few thousand characters. A text is worked off block by block,
so that one of any length, or of nothing but special tokens, is many short steps.
`Tokenizer.encode` releases the GIL, without which a thread would gain nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import trio

from smgd.text.detok import Detokenizer
from smgd.text.tokenizer import Tokenizer
from smgd.text.words import LONGEST_UNIT, Draft

T = TypeVar("T")

# Under 3000 tokens of English, 1 to 4 ms in all.
THRESHOLD_BYTES = 12_288
# Some 0.2 ms: a burst of such prompts gives way to streams by turns (`web/turns.py`), and a task
# switch for each would cost a fifth of the time.
QUICK_BYTES = 1024
# Bytes of units that are encoded on the loop at one go, in about a millisecond, and odd text in two
# or three; what a gap between two costs in such bytes.
GO_BYTES = 4096
GAP_BYTES = 12
# Ids of a prompt on which whoever works with them spends some 0.1 ms.
LONG_PROMPT = 4096
# Token ids that are decoded at one go, well under a millisecond.
DECODE_SLICE = 4096
# More threads than this only compete with the loop for cores.
THREADS = 2


class TextStage:
    """Encodes texts and loads models without holding up the loop.

    `threshold_bytes` is how much of a text, in bytes of UTF-8, is encoded on the loop at most: a
    text of which more is unknown goes to a thread.
    """

    def __init__(
        self, threshold_bytes: int = THRESHOLD_BYTES, limiter: trio.CapacityLimiter | None = None
    ) -> None:
        self.threshold_bytes = threshold_bytes
        self.limiter = limiter or trio.CapacityLimiter(THREADS)

    async def encode(
        self, tokenizer: Tokenizer, text: str, add_special_tokens: bool = False
    ) -> list[int]:
        """Return the ids of a text; a checkpoint only if that takes long.

        On cancellation a thread's work is abandoned, not awaited.
        """
        cache = tokenizer.segments
        if cache is None or add_special_tokens:
            return await self.at_best(
                _weight(text), lambda: tokenizer.encode(text, add_special_tokens)
            )
        ids: list[int] = []
        rest = _Rest(self, tokenizer)
        for place, parts in enumerate(cache.look_up(text)):
            if place:
                await trio.lowlevel.checkpoint()
            new = list(dict.fromkeys([part for part in parts if isinstance(part, str)]))
            found = await rest.encode(new) if new else ()
            for _ in cache.assemble(parts, dict(zip(new, found, strict=True)), ids):
                await trio.lowlevel.checkpoint()
        if len(ids) > LONG_PROMPT:
            # To put them together took a while, and to check and send them takes as long again.
            await trio.lowlevel.checkpoint()
        return ids

    async def at_best(self, weight: int, fn: Callable[[], T]) -> T:
        """Run a function on the loop if its text is short, else in a thread."""
        if weight > self.threshold_bytes:
            return await self.in_thread(fn)
        if weight > QUICK_BYTES:
            # A burst of requests gives way to running streams between one prompt and the next.
            await trio.lowlevel.checkpoint()
        return fn()

    async def decode(
        self, tokenizer: Tokenizer, ids: Sequence[int], *, skip_special_tokens: bool
    ) -> str:
        """Return the text of ids, giving way to streams every so often: decoding holds the GIL."""
        detokenizer = Detokenizer(tokenizer.vocabulary, skip_special_tokens)
        parts = []
        for start in range(0, len(ids), DECODE_SLICE):
            await trio.lowlevel.checkpoint()
            parts.append(detokenizer.feed(ids[start : start + DECODE_SLICE]))
        return "".join(parts) + detokenizer.finish()

    async def load(self, fn: Callable[[], T]) -> T:
        """Run a blocking function in a thread; for models. Abandoned on cancellation."""
        # Not under the limiter of `encode`: a download must not keep prompts waiting.
        return await trio.to_thread.run_sync(fn, abandon_on_cancel=True)

    async def in_thread(self, fn: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(fn, abandon_on_cancel=True, limiter=self.limiter)


class _Rest:
    """What of a text is in no segment that is known: looked up word by word, or encoded.

    All that is encoded of one text counts for where: a long prompt that comes in many blocks is not
    many short ones. Only a little at a time is worth no thread even then.
    """

    __slots__ = ("_left", "_stage", "_tokenizer")

    def __init__(self, stage: TextStage, tokenizer: Tokenizer) -> None:
        self._stage = stage
        self._tokenizer = tokenizer
        self._left = stage.threshold_bytes

    async def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of texts without added tokens."""
        words = self._tokenizer.words
        if words is None:
            return await self._encode_units(texts)
        draft = Draft(words)
        for is_full in words.look_up(draft, texts):
            if is_full:
                draft.settle(await self._encode_units(draft.units))
            await trio.lowlevel.checkpoint()
        draft.settle(await self._encode_units(draft.units))
        return draft.texts

    async def _encode_units(self, units: list[str]) -> list[list[int]]:
        """Encode units: in a thread, or on the loop a few at a time."""
        if not units:
            return []
        stage, tokenizer = self._stage, self._tokenizer
        weight = sum(map(_weight, units)) + GAP_BYTES * (len(units) - 1)
        self._left -= weight
        if weight <= GO_BYTES:
            return await stage.at_best(weight, lambda: tokenizer.encode_units(units))
        # A long one has no place to cut: no usual text, which may take several times as long.
        is_odd = tokenizer.words is not None and max(map(len, units)) > LONGEST_UNIT
        if is_odd or self._left < 0:
            return await stage.in_thread(lambda: tokenizer.encode_units(units))
        found: list[list[int]] = []
        for go in _goes(units):
            await trio.lowlevel.checkpoint()
            found += tokenizer.encode_units(go)
        return found


def _goes(units: list[str]) -> Iterator[list[str]]:
    """Divide units into lists of at most `GO_BYTES`, or of one unit."""
    start = weight = 0
    for place, unit in enumerate(units):
        weight += _weight(unit) + GAP_BYTES
        if weight > GO_BYTES and place > start:
            yield units[start:place]
            start, weight = place, _weight(unit) + GAP_BYTES
    yield units[start:]


def _weight(text: str) -> int:
    # Bytes: other scripts than Latin have more tokens per character, about as many per byte.
    return len(text) if text.isascii() else len(text.encode(errors="replace"))
