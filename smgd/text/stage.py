"""Where tokenizing happens: small texts on the loop, large ones in a thread.

A thread costs 60 to 190 us per call, and encoding 0.6 us per token: below some thousand tokens the
thread is the greater delay for everybody. Above, the loop would stand still for milliseconds.
What is counted is only what has to be encoded: known segments and words are looked up on the loop,
which gives way to streams after every few thousand characters.
`Tokenizer.encode` releases the GIL, without which a thread would gain nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import trio

from smgd.text.detok import Detokenizer
from smgd.text.tokenizer import Tokenizer
from smgd.text.words import Draft

T = TypeVar("T")

# Under 3000 tokens of English, 1 to 2 ms.
THRESHOLD_BYTES = 12_288
# Some 0.2 ms: a burst of such prompts gives way to streams by turns (`web/turns.py`), and a task
# switch for each would cost a fifth of the time.
QUICK_BYTES = 1024
# Ids of a prompt on which whoever works with them spends some 0.1 ms.
LONG_PROMPT = 4096
# Token ids that are decoded at one go, well under a millisecond.
DECODE_SLICE = 4096
# More threads than this only compete with the loop for cores.
THREADS = 2


class TextStage:
    """Encodes texts and loads models without holding up the loop.

    `threshold_bytes` is the longest text, in bytes of UTF-8, that is encoded on the loop.
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
            return await self._at_best(
                _weight(text), lambda: tokenizer.encode(text, add_special_tokens)
            )
        parts = cache.look_up(text)
        new = list(dict.fromkeys(part for part in parts if isinstance(part, str)))
        if not new:
            return cache.assemble(parts, {})
        found = await self._encode_all(tokenizer, new)
        ids = cache.assemble(parts, dict(zip(new, found, strict=True)))
        if len(ids) > LONG_PROMPT:
            # To put them together took a while, and to check and send them takes as long again.
            await trio.lowlevel.checkpoint()
        return ids

    async def _encode_all(self, tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
        if tokenizer.words is None:
            return await self._at_best(
                sum(map(_weight, texts)), lambda: tokenizer.encode_all(texts)
            )
        draft = Draft(tokenizer.words)
        for _ in tokenizer.words.look_up(draft, texts):
            await trio.lowlevel.checkpoint()
        unknown = draft.unknown
        if not unknown:
            return draft.finish([])
        return draft.finish(
            await self._at_best(_weight(unknown), lambda: tokenizer.encode(unknown))
        )

    async def _at_best(self, weight: int, fn: Callable[[], T]) -> T:
        """Run a function on the loop if its text is short, else in a thread."""
        if weight > self.threshold_bytes:
            return await self._run(fn)
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

    async def _run(self, fn: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(fn, abandon_on_cancel=True, limiter=self.limiter)


def _weight(text: str) -> int:
    # Bytes: other scripts than Latin have more tokens per character, about as many per byte.
    return len(text) if text.isascii() else len(text.encode(errors="replace"))
