r"""Token ids of words, remembered: a prompt that is new is seldom made of new words.

A byte-level BPE tokenizer first cuts a text into pre-tokens by a regular expression, and then works
on each alone. Where a pre-token ends *whatever stands around*, the text may be cut beforehand, the
ids of what is between two cuts be kept, and only the rest be encoded. `word_cache` proves that from
the tokenizer's own description, for the expressions listed below, and compares on a sample; for all
else there is no cache.

Cuts are made at these places; `PIECES` matches what is between them:

1. between an ASCII letter and an ASCII character that is neither a letter nor an apostrophe;
2. between a character that is no white space and a space;
3. between white space and a space that is followed by a visible ASCII character but no digit.

Why they are safe. In no alternative of the expressions can a letter be followed by anything but
letters, marks or an apostrophe (1), nor what is not white space by a space (2): no match crosses
such a cut, and a class that ends there ends at the end of a text as well. The one look-ahead,
`\s+(?!\S)`, looks a character beyond white space, which is before the cut, since white space is not
what stands at its left. At (3) it gives back exactly the last space, and ends where it would if the
text did; white space up to a line break ends at that break either way. No expression looks behind,
so what follows a cut never matters to it. White space is always matched, and so are letters: text
that nothing matches (which the splitter makes one piece) cannot go across. Digits or CJK characters
that an earlier step splits off are not at both sides of a cut; that (3) excludes digits is due to
them, for they would leave the space at the end. NFC composes nothing with an ASCII character that
follows, and makes neither white space nor letters of what was none at a cut.

What has to be encoded is joined with an added token between, by which the ids are told apart: one
call for all, and about the time of a token for each gap. A word is learned when it is missed again:
where it stood alone between known ones, or encoded once more, which only some words of a text are.
Where most words are unknown, stretches of the text are not even looked at. So a text of nothing but
unknown words takes little longer than without a cache.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any

from tokenizers import Tokenizer, models

from smgd.text.segments import cut_tokens, overlaps, steps

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

_ODD = r"[^\0-&(-\x7f]"  # an apostrophe, or not ASCII: a letter before it is no place to cut
_GAP = r"[^ A-Za-z]*+(?:(?<=[\s\u180e]) +(?![!-/:-~])[^ A-Za-z]*+)*"  # up to a letter or a cut
_REST = rf"{_GAP}(?:[A-Za-z]++{_ODD}{_GAP})*(?:[A-Za-z]++)?"  # all up to the next cut
_LETTERS = rf"[A-Za-z]++(?:{_ODD}{_REST})?"
PIECES = re.compile(rf" ?{_LETTERS}| ?[!-@\[-`{{-~]++(?:{_LETTERS}|[^ -~]{_REST})?|[^!-~]{_REST}")

_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WHITE = r"\s+(?!\S)|\s+"
_OTHER = r" ?[^\s\p{L}\p{N}]+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|%s|"
    rf"{_OTHER}[\r\n/]*|\s*[\r\n]+|{_WHITE}"
)
_CL100K = rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|%s|{_OTHER}[\r\n]*|\s*[\r\n]+|{_WHITE}"
_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""

# Expressions that end a pre-token at every cut.
PATTERNS: Mapping[str, str] = {
    "gpt2": rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{_OTHER}|{_WHITE}",
    "llama3": _CL100K % r"\p{N}{1,3}",
    "qwen2": _CL100K % r"\p{N}",
    "qwen3.5": (
        rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
        rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_WHITE}"
    ),
    "o200k": _CASED % (f"{_SUFFIX}?", f"{_SUFFIX}?", r"\p{N}{1,3}"),
    "tekken": _CASED % ("", "", r"\p{N}"),
    "deepseek": (
        rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+|"
        rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|{_WHITE}"
    ),
}
# Expressions that split off what is never at both sides of a cut, and leave the rest to others.
PARTIAL_PATTERNS = (r"\p{N}{1,3}", r"\p{N}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+")

_SAMPLE = (
    "The quick brown foxes can't jump, they'LL fall (twice)!\n\n  - 12 items,\t3.5 % off:\r\n"
    "def main(self, *args):\n        return x[1:] + ' 7'\n \n 8  Zürich's naïve 漢字 слово e\u0301"
    " \u00a0a\u3000 b. \n/ path/to http://a.b/c?d=e  \n\n\nEND   \n\t\tof_it  HTMLParser\u2019s 🙂 "
)


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
            found = _divide(ids, self._cache.separator_id)
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


def _divide(ids: list[int], separator: int) -> list[list[int]]:
    divided = []
    start = 0
    with suppress(ValueError):  # there is no further one
        while True:
            end = ids.index(separator, start)
            divided.append(ids[start:end])
            start = end + 1
    return [*divided, ids[start:]]


# ----------------------------------------------------------------------------------- the proof


def word_cache(backend: Tokenizer) -> WordCache | None:
    """Return a cache for a tokenizer whose texts may be cut at added tokens, if words may as well.

    `smgd.text.segments.splitter` tells about the former.
    """
    tokens = cut_tokens(backend)
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    # A token that is no cut would split words, or stand for white space beside it.
    if added != tokens.keys() or not _is_independent(backend):
        return None
    separator = next((token for token in tokens if _is_separate(token, added)), None)
    if separator is None or not _agrees(backend, separator, tokens[separator]):
        return None
    return WordCache(tokens, separator)


def _is_separate(token: str, added: Set[str]) -> bool:
    """Tell whether a token is found between any texts, and its id never stands for another."""
    # Bytes are spelt by characters up to U+0143, of which only ASCII stand for themselves.
    is_unique = token.isascii() or max(token) > "\u0143"
    return is_unique and not overlaps(token, added - {token})


def _is_independent(backend: Tokenizer) -> bool:
    """Tell whether the tokenizer's steps are all known to work on each side of a cut alone."""
    model = backend.model
    return (
        isinstance(model, models.BPE)
        and not (model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix)
        and backend.truncation is None
        and backend.padding is None
        and all(step == {"type": "NFC"} for step in steps(backend.normalizer, "normalizers"))
        and _cuts(steps(backend.pre_tokenizer, "pretokenizers"))
    )


def _cuts(pre_tokenizers: list[dict[str, Any]]) -> bool:
    """Tell whether pre-tokenizers together end a pre-token at every cut.

    ByteLevel comes last and only there: what follows it would see other characters.
    """
    kinds = list(map(_kind, pre_tokenizers))
    are_bytes = [step["type"] == "ByteLevel" for step in pre_tokenizers]
    return are_bytes.count(True) == 1 and are_bytes[-1] and None not in kinds and "cuts" in kinds


def _kind(step: dict[str, Any]) -> str | None:
    """Return what is known of a pre-tokenizer: it "cuts", is "neutral" to cuts, or None."""
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": bool(use_regex)}:
            return "cuts" if use_regex else "neutral"
        case {"type": "Digits"}:
            return "neutral"
        case {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }:
            if pattern in PARTIAL_PATTERNS:
                return "neutral"
            return "cuts" if pattern in PATTERNS.values() else None
    return None


def _agrees(backend: Tokenizer, separator: str, separator_id: int) -> bool:
    """Compare with plain encoding: each word of the sample alone, and all of them joined."""
    words = PIECES.findall(_SAMPLE)
    whole = backend.encode(_SAMPLE, add_special_tokens=False).ids
    alone = [backend.encode(word, add_special_tokens=False).ids for word in words]
    joined = backend.encode(separator.join(words), add_special_tokens=False).ids
    in_one = [token_id for ids in alone for token_id in ids]
    return in_one == whole and _divide(joined, separator_id) == alone
