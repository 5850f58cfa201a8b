"""Token ids of words, remembered: a prompt that is new is seldom made of new words.

For tokenizers whose texts may be cut into words (`cuts` proves that from their own description) the
ids of a word are kept, and only the rest of a text is encoded. For all others there is no cache.

What has to be encoded is joined with an added token between, by which the ids are told apart: one
call for all, and about the time of a token for each gap. A word is learned when it is missed again:
where it stood alone between known ones, or encoded once more, which only some words of a text are.
Where most words are unknown, stretches of the text are not even looked at. So a text of nothing but
unknown words takes little longer than without a cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tokenizers import Tokenizer

from smgd.text.cuts import PIECES, divide, separator_of
from smgd.text.segments import cut_tokens

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
# Characters that are looked up at one go: about a quarter of a millisecond.
TURN = 4096


class WordCache:
    """The ids of words of one tokenizer. `tokens` are those that texts are cut at before.

    `separator` is one of these that no other overlaps with. Belongs to one thread.
    """

    def __init__(self, tokens: Mapping[str, int], separator: str) -> None:
        self.separator = separator
        self.separator_id = tokens[separator]
        self._tokens = {text: (token_id,) for text, token_id in tokens.items()}
        self._known: dict[str, tuple[int, ...]] = {}
        self._old: dict[str, tuple[int, ...]] = {}
        self._seen: set[str] = set()

    def __len__(self) -> int:
        return len(self._known) + len(self._old)

    def look_up(self, draft: Draft, texts: Sequence[str]) -> Iterator[None]:
        """Put texts into a draft, as `SegmentCache` has cut them; yield after each `TURN`."""
        done = 0
        for text in texts:
            ids = self._tokens.get(text)
            if ids is not None:
                draft.parts.append(ids)
            else:
                for length in self._walk(draft, text):
                    done += length
                    if done >= TURN:
                        done = 0
                        yield
            draft.ends.append(len(draft.parts))

    def _walk(self, draft: Draft, text: str) -> Iterator[int]:
        """Put a text into a draft slice by slice, giving the length of each that is looked up.

        Where hardly anything is known, ever longer stretches go unseen; where no cut is in sight,
        all the rest.
        """
        start, skipped = 0, 4 * SLICE
        while start < len(text):
            end = _cut_after(text, start + SLICE)
            if end - start > 2 * SLICE:
                draft.miss(text[start:])
                return
            is_known = self._add(draft, text, start, end)
            yield end - start
            start = end
            if is_known:
                skipped = SLICE
            elif start < len(text):
                end = _cut_after(text, start + skipped)
                draft.miss(text[start:end])
                start = end
                skipped *= 2

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

    `parts` holds the ids of words in order, with a gap for each run of words that are not known;
    `ends` tells where each text ends in it; `extra` are words to encode for the cache alone.
    """

    __slots__ = ("_cache", "_gaps", "_learned", "_units", "ends", "extra", "parts")

    def __init__(self, cache: WordCache) -> None:
        self._cache = cache
        self._gaps: list[int] = []
        self._units: list[str] = []
        self.parts: list[Sequence[int]] = []
        self.ends: list[int] = []
        self.extra: dict[str, None] = {}
        self._learned: list[int] = []

    def miss(self, unit: str, is_learned: bool = False) -> None:
        """Leave a gap for the ids of a unit, which is a single word if it is learned."""
        if is_learned:
            self._learned.append(len(self._units))
        self._gaps.append(len(self.parts))
        self.parts.append(())
        self._units.append(unit)

    @property
    def unknown(self) -> str:
        """The text to encode; empty if all is known."""
        return self._cache.separator.join([*self._units, *self.extra])

    def finish(self, ids: list[int]) -> list[list[int]]:
        """Return the ids of each text, given those of `unknown`, and remember what is learned."""
        if self._units:
            found = divide(ids, self._cache.separator_id)
            for gap, unit_ids in zip(self._gaps, found, strict=False):
                self.parts[gap] = unit_ids
            for place in self._learned:
                self._cache.learn(self._units[place], found[place])
            for word, word_ids in zip(self.extra, found[len(self._gaps) :], strict=True):
                self._cache.learn(word, word_ids)
        texts = []
        start = 0
        for end in self.ends:
            text_ids: list[int] = []
            for part in self.parts[start:end]:  # faster than itertools.chain
                text_ids += part
            texts.append(text_ids)
            start = end
        return texts


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
    """Return the next cut after a place, or the end of the text if none is less than `SLICE` away.

    What ends a piece is a cut wherever the search begins.
    """
    limit = place + SLICE
    match = PIECES.match(text, place, limit)
    return match.end() if match and match.end() < limit else len(text)


def word_cache(backend: Tokenizer) -> WordCache | None:
    """Return a cache for a tokenizer, or None for one whose words depend on what is around them."""
    tokens = cut_tokens(backend)
    separator = separator_of(backend, tokens)
    return None if separator is None else WordCache(tokens, separator)
