"""Token ids of a prompt's segments, remembered: later turns of a chat cost only what is new.

A tokenizer cuts a text at its added tokens before it does anything else, and works on each piece
between them alone. So where a chat template puts such tokens between messages, the ids of a message
do not depend on its neighbours and can be kept. That is a property of most tokenizers, not of all:
`splitter` proves it for the one at hand from its own description, and compares on a sample; where
either fails there is no cache.

Three things break it. Metaspace with `prepend_scheme: first` treats the start of the whole text
apart. An added token that is not one we cut at (since it swallows spaces beside it, say) may
overlap with one that is. And such a token may look across a cut: for a character of a word where it
has to be a word of its own, for spaces where it swallows them.

A text comes in blocks: however long it is, and of however many pieces, each step on the loop is
short, and what is held beside the ids is a block's.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from smgd.text.description import steps

# Bytes of keys and ids together. A conversation of 8,000 tokens takes about 70 KB.
CACHE_BYTES = 32 * 1024 * 1024
# More pieces than this are not kept: once in a while they are moved to a larger table at one go.
ENTRIES = 32_768
# A single piece that would take more than this share of the cache is not kept.
LARGEST_SHARE = 8
# Characters and pieces of a block. In a thread one takes some 10 ms, and up to a millisecond to
# hand its ids over, which holds the GIL; pieces that are known take a quarter of one on the loop.
BLOCK = 65_536
MOST_PIECES = 384
# Ids that are copied at one go.
STRIDE = 16_384

_SAMPLE = ("user\nHello,  world!\n", " ", "\n", "x", "  indented\tline ", "Zürich 12,345 漢字🙂")


def splitter(backend: Tokenizer) -> re.Pattern[str] | None:
    """Return a pattern for the tokens at which texts may be cut, or None if none is proven."""
    cuts = cut_tokens(backend)
    added = backend.get_added_tokens_decoder()
    others = [token for token in added.values() if token.content not in cuts]
    if not cuts or any(map(_looks_at_start, steps(backend.pre_tokenizer, "pretokenizers"))):
        return None
    if any(_disturbs(other, added[cut]) for cut in cuts.values() for other in others):
        return None
    # The search in the backend prefers the longest of the tokens that begin at a place.
    longest_first = sorted(cuts, key=len, reverse=True)
    pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
    return pattern if _agrees(backend, pattern, longest_first) else None


def cut_tokens(backend: Tokenizer) -> dict[str, int]:
    """Return the added tokens that are found wherever they stand and take nothing else.

    Those marked `normalized` are searched for after the others, in what the normalizer makes of
    the rest: where there is none, it is all the same unless they overlap.
    """
    added = backend.get_added_tokens_decoder()
    first = [token.content for token in added.values() if not token.normalized]
    is_silent = not steps(backend.normalizer, "normalizers")
    return {
        token.content: token_id
        for token_id, token in added.items()
        if _is_plain(token)
        and (not token.normalized or (is_silent and not overlaps(token.content, first)))
    }


def _is_plain(token: AddedToken) -> bool:
    return bool(token.content) and not (token.lstrip or token.rstrip or token.single_word)


def _disturbs(other: AddedToken, cut: AddedToken) -> bool:
    """Tell whether the other token may claim, or look at, what a cut would take out of sight."""
    if cut.normalized == other.normalized and overlap(cut.content, other.content):
        return True
    ends = (cut.content[0], cut.content[-1])
    if other.single_word and any(map(_may_be_of_word, ends)):
        return True
    # Spaces taken by a token are gone from a search after it.
    return (other.lstrip or other.rstrip) and any(map(str.isspace, ends))


def _may_be_of_word(char: str) -> bool:
    # Rust's idea of a word's characters is wider than Python's, but has no more of ASCII.
    return char.isalnum() or char == "_" or not char.isascii()


def _looks_at_start(step: dict[str, Any]) -> bool:
    return step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first"


def overlaps(token: str, others: Iterable[str]) -> bool:
    """Tell whether a token can claim the same characters as any of the others."""
    return any(overlap(token, other) for other in others)


def overlap(one: str, other: str) -> bool:
    """Tell whether two tokens can claim the same characters."""
    if one in other or other in one:
        return True
    return _continues(one, other) or _continues(other, one)


def has_border(token: str) -> bool:
    """Tell whether a token begins as it ends, so that it can overlap with itself."""
    return _continues(token, token)


def _continues(one: str, other: str) -> bool:
    """Tell whether the other token can begin within the first, and end after it."""
    return any(one.endswith(other[:length]) for length in range(1, min(len(one), len(other))))


def _agrees(backend: Tokenizer, pattern: re.Pattern[str], cuts: list[str]) -> bool:
    """Compare piecewise encoding with that of the whole, around every token we cut at."""
    for cut in cuts[:64]:
        for text in (cut.join(_SAMPLE), f"{cut}{cut} {cut}\n{cut}", f"a{cut}", f"{cut} a"):
            whole = backend.encode(text, add_special_tokens=False).ids
            pieces = [
                backend.encode(p, add_special_tokens=False).ids for p in cut_at(pattern, text)
            ]
            if whole != [token for piece in pieces for token in piece]:
                return False
    return True


def cut_at(pattern: re.Pattern[str], text: str) -> list[str]:
    """Cut a text into pieces that are encoded alone: those tokens, and what is between them."""
    return [piece for piece in pattern.split(text) if piece]


def segment_cache(backend: Tokenizer) -> SegmentCache | None:
    """Return a cache for a tokenizer, or None for one whose pieces depend on their neighbours."""
    pattern = splitter(backend)
    return None if pattern is None else SegmentCache(pattern, cut_tokens(backend))


class SegmentCache:
    """The ids of pieces, least recently used first out; bounded in bytes.

    `pattern` matches the `tokens` that texts are cut at, whose ids are always known. `hits` and
    `misses` count the pieces between them. Belongs to one thread.
    """

    def __init__(
        self, pattern: re.Pattern[str], tokens: Mapping[str, int], limit: int = CACHE_BYTES
    ) -> None:
        self._pattern = pattern
        self._tokens = {text: (token_id,) for text, token_id in tokens.items()}
        self._longest = max(map(len, tokens))
        self._limit = limit
        self._ids: OrderedDict[str, array[int]] = OrderedDict()
        self.size = 0
        self.hits = 0
        self.misses = 0

    def look_up(self, text: str) -> Iterator[list[str | Sequence[int]]]:
        """Yield a text's pieces in order and in blocks, each piece as its ids if they are known.

        A text of at most `BLOCK` characters and few pieces is one block. One may be empty: then a
        long piece was not at its end yet.
        """
        tokens, find = self._tokens, self._find
        if len(text) <= BLOCK:  # the same at half the cost, and nearly every text is one
            splits = MOST_PIECES // 2
            pieces = self._pattern.split(text, splits)
            if len(pieces) <= 2 * splits:  # else there may be more
                yield [
                    tokens[piece] if place % 2 else find(piece)
                    for place, piece in enumerate(pieces)
                    if piece
                ]
                return
        parts: list[str | Sequence[int]] = []
        start = place = 0  # of the piece, and of the search
        while place < len(text):
            limit = place + BLOCK
            # A token that begins before the limit is in sight as a whole.
            for match in self._pattern.finditer(text, place, limit + self._longest):
                begin, end = match.span()
                if begin >= limit:
                    break
                if begin > start:
                    parts.append(find(text[start:begin]))
                parts.append(tokens[text[begin:end]])
                start = end
                if len(parts) >= MOST_PIECES:
                    yield parts
                    parts = []
            place = max(limit, start)
            if place < len(text):
                yield parts
                parts = []
        if start < len(text):
            parts.append(find(text[start:]))
        yield parts

    def _find(self, piece: str) -> str | array[int]:
        ids = self._ids.get(piece)
        if ids is None:
            self.misses += 1
            return piece
        self.hits += 1
        self._ids.move_to_end(piece)
        return ids

    def assemble(
        self,
        parts: Iterable[str | Sequence[int]],
        new: Mapping[str, Sequence[int]],
        ids: list[int],
    ) -> Iterator[None]:
        """Append the ids of a block, given those of its `new` pieces, and remember these.

        Yields after each `STRIDE` of a long piece.
        """
        for part in parts:
            found = new[part] if isinstance(part, str) else part
            if len(found) <= STRIDE:
                ids += found
                continue
            for start in range(0, len(found), STRIDE):
                ids += found[start : start + STRIDE]
                yield
        for piece, piece_ids in new.items():
            if _size(piece, piece_ids) <= self._limit // LARGEST_SHARE:
                packed = array("I", piece_ids[:STRIDE])
                for start in range(STRIDE, len(piece_ids), STRIDE):
                    yield
                    packed.extend(piece_ids[start : start + STRIDE])
                self._remember(piece, packed)

    def _remember(self, piece: str, ids: array[int]) -> None:
        if piece in self._ids:  # another request was faster
            return
        self._ids[piece] = ids
        self.size += _size(piece, ids)
        while self.size > self._limit or len(self._ids) > ENTRIES:
            self.size -= _size(*self._ids.popitem(last=False))


def _size(piece: str, ids: Sequence[int]) -> int:
    # Bytes of the entry itself, of the text, and of the ids.
    return 250 + len(piece) * (1 if piece.isascii() else 4) + 4 * len(ids)
