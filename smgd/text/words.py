"""Token ids of words, remembered: a prompt that is new is seldom made of new words.

For tokenizers whose texts may be cut into words (`cuts` proves that from their own description) the
ids of a word are kept, and only the rest of a text is encoded. For all others there is no cache.

What has to be encoded is joined with an added token between, by which the ids are told apart: one
call for all, and about the time of a token for each gap. A word is learned when it is missed again:
where it stood alone between known ones, or encoded once more, which only some words of a text are.
Where most words are unknown, stretches of the text are not even looked at. So a text of nothing but
unknown words takes little longer than without a cache.

A draft is settled whenever it holds a block of text, and holds nothing after. So each step is short
and memory bounded, however long the texts are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from tokenizers import Tokenizer

from smgd.text.cuts import PIECES, separator_of
from smgd.text.segments import BLOCK, cut_tokens

# Words are forgotten by generations of this many, two of which are kept. A word takes about 210
# bytes, and 520 at most: 13 MB of the usual ones, 34 MB of the worst.
GENERATION = 32_768
# Words that were missed once, kept to tell which are missed again; then all are forgotten.
SEEN = 16_384
# In characters and in ids: the longest word that is kept.
LONGEST_WORD = 32
MOST_IDS = 6
# Unknown words of a slice that are taken note of, and characters for which one is learned apart.
NOTED = 128
LEARNED_EACH = 64
# A slice with more than one unknown word in this many is encoded as a whole: each gap costs as much
# as a word or two.
WORTH = 3
# Characters that are looked up before it is decided how to go on.
SLICE = 1024
# Slices of an unseen stretch that are a unit, with what there is up to the next cut. A longer unit
# has none.
UNSEEN = 2
LONGEST_UNIT = (UNSEEN + 1) * SLICE
# Characters that are looked up at one go: about a quarter of a millisecond. A text costs as much as
# so many characters on top of its own.
TURN = 4096
EACH = 64


class WordCache:
    """The ids of words of one tokenizer. Belongs to one thread.

    `separator`, an added token that nothing overlaps with, stands between units that are encoded at
    one go; `separator_id` tells their ids apart.
    """

    def __init__(self, separator: str, separator_id: int) -> None:
        self.separator = separator
        self.separator_id = separator_id
        self._known: dict[str, tuple[int, ...]] = {}
        self._old: dict[str, tuple[int, ...]] = {}
        self._seen: set[str] = set()

    def __len__(self) -> int:
        return len(self._known) + len(self._old)

    def look_up(self, draft: Draft, texts: Iterable[str]) -> Iterator[bool]:
        """Put texts that are not empty and have no added tokens into a draft.

        Yields after each `TURN`: whether the draft has to be settled before this goes on.
        """
        done = held = 0
        for text in texts:
            draft.begin()
            done += EACH
            for length in self._walk(draft, text):
                done += length
                if done >= TURN:
                    held += done
                    done = 0
                    yield held >= BLOCK
                    held %= BLOCK

    def _walk(self, draft: Draft, text: str) -> Iterator[int]:
        """Put a text into a draft slice by slice, giving the length of each.

        Where hardly anything is known, ever longer stretches go unseen; and so does a stretch
        without a cut.
        """
        start, unseen, skipped = 0, 0, 4 * SLICE
        while start < len(text):
            if unseen > 0:
                end = _cut_after(text, start + min(unseen, UNSEEN * SLICE))
                draft.miss(text[start:end])
                unseen -= end - start
            else:
                end = _cut_after(text, start + SLICE)
                if end - start > 2 * SLICE:
                    draft.miss(text[start:end])
                elif self._add(draft, text, start, end):
                    skipped = SLICE
                else:
                    unseen = skipped
                    skipped *= 2
            yield end - start
            start = end

    def _add(self, draft: Draft, text: str, start: int, end: int) -> bool:
        """Add what is between two cuts; tell whether most of the words are known."""
        words = PIECES.findall(text, start, end)
        found = list(map(self._known.get, words))
        if None not in found:
            draft.parts += found  # type: ignore[arg-type]
            return True
        missing = [place for place, ids in enumerate(found) if ids is None]
        if self._old:
            missing = self._recall(words, found, missing)
        again = self._missed_again([words[place] for place in missing[:NOTED]])
        is_known = len(missing) * WORTH <= len(words)
        if not is_known and len(words) > 1:
            draft.miss(text[start:end])
        elif missing:
            _fill(draft, words, found, missing, again)
        else:
            draft.parts += found  # type: ignore[arg-type]
        draft.extra.update(dict.fromkeys(list(again)[: 1 + (end - start) // LEARNED_EACH]))
        return is_known

    def _recall(
        self, words: list[str], found: list[tuple[int, ...] | None], missing: list[int]
    ) -> list[int]:
        """Fill in words of the older generation, which live on; return what is still missing."""
        old = self._old
        for place in [place for place in missing if words[place] in old]:
            ids = found[place] = old[words[place]]
            self._keep(words[place], ids)
        return [place for place in missing if found[place] is None]

    def _missed_again(self, unknown: list[str]) -> dict[str, None]:
        """Return those of the words that have been missed before, and take note of all."""
        unknown = [word for word in unknown if len(word) <= LONGEST_WORD]
        again = dict.fromkeys([word for word in unknown if word in self._seen])
        if len(self._seen) > SEEN:
            self._seen = set()
        self._seen.update(unknown)
        return again

    def learn(self, word: str, ids: Sequence[int]) -> None:
        """Remember the ids of a word."""
        self._seen.discard(word)
        if len(ids) <= MOST_IDS:
            self._keep(word, tuple(ids))

    def _keep(self, word: str, ids: tuple[int, ...]) -> None:
        if len(self._known) >= GENERATION:
            self._known, self._old = {}, self._known
        self._known[word] = ids


class Draft:
    """The ids of some texts, as far as they are known, and what has to be encoded.

    `texts` has the ids of each text that was begun, as far as they are settled; `units` is what has
    to be encoded to settle the rest. `extra` are words to encode for the cache alone.
    """

    __slots__ = ("_cache", "_gaps", "_learned", "_missed", "_starts", "extra", "parts", "texts")

    def __init__(self, cache: WordCache) -> None:
        self._cache = cache
        self.texts: list[list[int]] = []
        self._clear()

    def _clear(self) -> None:
        # The ids of words in order, with a gap for each unit; and where in them texts begin.
        self.parts: list[Sequence[int]] = []
        self._starts: list[int] = []
        self._gaps: list[int] = []
        self._missed: list[str] = []
        self._learned: list[int] = []
        self.extra: dict[str, None] = {}

    def begin(self) -> None:
        """Begin a text: the ids of another are complete."""
        self._starts.append(len(self.parts))

    def miss(self, unit: str, is_learned: bool = False) -> None:
        """Leave a gap for the ids of a unit, which is a single word if it is learned."""
        if is_learned:
            self._learned.append(len(self._missed))
        self._gaps.append(len(self.parts))
        self.parts.append(())
        self._missed.append(unit)

    @property
    def units(self) -> list[str]:
        """What has to be encoded; empty if all is known."""
        return [*self._missed, *self.extra]

    def settle(self, found: Sequence[Sequence[int]]) -> None:
        """Take the ids of each of the `units`: add all ids to `texts`, remember what is learned."""
        if found:
            count = len(self._gaps)
            for gap, unit_ids in zip(self._gaps, found[:count], strict=True):
                self.parts[gap] = unit_ids
            for place in self._learned:
                self._cache.learn(self._missed[place], found[place])
            for word, word_ids in zip(self.extra, found[count:], strict=True):
                self._cache.learn(word, word_ids)
        # Before the first start, parts are of the text that was the last to begin.
        bounds = [*self._starts, len(self.parts)]
        if bounds[0]:
            self._extend(0, bounds[0])
        for start, end in pairwise(bounds):
            self.texts.append([])
            self._extend(start, end)
        self._clear()

    def _extend(self, start: int, end: int) -> None:
        text_ids = self.texts[-1]
        for part in self.parts[start:end]:  # faster than itertools.chain
            text_ids += part


def _fill(
    draft: Draft,
    words: list[str],
    found: list[tuple[int, ...] | None],
    missing: list[int],
    again: dict[str, None],
) -> None:
    """Add words that are mostly known; `again` loses those that will be learned on the way."""
    done = 0
    for start, end in _runs(missing):
        draft.parts += found[done:start]  # type: ignore[arg-type]
        is_learned = end - start == 1 and words[start] in again
        if is_learned:
            del again[words[start]]
        draft.miss("".join(words[start:end]), is_learned)
        done = end
    draft.parts += found[done:]  # type: ignore[arg-type]


def _runs(places: list[int]) -> Iterator[tuple[int, int]]:
    start = places[0]
    end = start + 1
    for place in places[1:]:
        if place > end:
            yield start, end
            start = place
        end = place + 1
    yield start, end


def _cut_after(text: str, place: int) -> int:
    """Return the next cut after a place; where none is less than `SLICE` away, after a later one.

    What ends a piece is a cut wherever the search begins. A text's end is one as well.
    """
    further = BLOCK
    while place < len(text):
        limit = place + SLICE
        match = PIECES.match(text, place, limit)
        if match and match.end() < limit:
            return match.end()
        place += further
        further *= 2  # of a text without cuts only a few places are looked at
    return len(text)


def word_cache(backend: Tokenizer) -> WordCache | None:
    """Return a cache for a tokenizer, or None for one whose words depend on what is around them.

    It has to be one with a `segment_cache`.
    """
    tokens = cut_tokens(backend)
    separator = separator_of(backend, tokens)
    return None if separator is None else WordCache(separator, tokens[separator])
