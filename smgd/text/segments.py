"""Token ids of a prompt's segments, remembered: later turns of a chat cost only what is new.

A tokenizer cuts a text at its added tokens before it does anything else, and works on each piece
between them alone. So where a chat template puts such tokens between messages, the ids of a message
do not depend on its neighbours and can be kept. That is a property of most tokenizers, not of all:
`splitter` proves it for the one at hand from its own description, and compares on a sample; where
either fails there is no cache.

Two things break it. Metaspace with `prepend_scheme: first` treats the start of the whole text
apart. And an added token that takes part in the same search but is not one we cut at (since it
swallows spaces beside it, say) may overlap with one that is.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from smgd.text.description import steps

# Bytes of keys and ids together. A conversation of 8,000 tokens takes about 70 KB.
CACHE_BYTES = 32 * 1024 * 1024
# A single piece that would take more than this share of the cache is not kept.
LARGEST_SHARE = 8

_SAMPLE = ("user\nHello,  world!\n", " ", "\n", "x", "  indented\tline ", "Zürich 12,345 漢字🙂")


def splitter(backend: Tokenizer) -> re.Pattern[str] | None:
    """Return a pattern for the tokens at which texts may be cut, or None if none is proven."""
    cuts = cut_tokens(backend)
    added = backend.get_added_tokens_decoder()
    others = [token for token in added.values() if token.content not in cuts]
    if not cuts or any(map(_looks_at_start, steps(backend.pre_tokenizer, "pretokenizers"))):
        return None
    if any(_compete(added[cut], other) for cut in cuts.values() for other in others):
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


def _compete(cut: AddedToken, other: AddedToken) -> bool:
    """Tell whether a search may find the other token where the text would be cut."""
    return cut.normalized == other.normalized and overlap(cut.content, other.content)


def _looks_at_start(step: dict[str, Any]) -> bool:
    return step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first"


def overlaps(token: str, others: Iterable[str]) -> bool:
    """Tell whether a token can claim the same characters as any of the others."""
    return any(overlap(token, other) for other in others)


def overlap(one: str, other: str) -> bool:
    """Tell whether two tokens can claim the same characters."""
    if one in other or other in one:
        return True
    return any(
        a.endswith(b[:length])
        for a, b in ((one, other), (other, one))
        for length in range(1, min(len(a), len(b)))
    )


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


class SegmentCache:
    """The ids of pieces, least recently used first out; bounded in bytes.

    `hits` and `misses` count the pieces between the tokens that texts are cut at. These tokens are
    always found, and would hide how the others fare.
    """

    def __init__(self, pattern: re.Pattern[str], limit: int = CACHE_BYTES) -> None:
        self._pattern = pattern
        self._limit = limit
        self._ids: OrderedDict[str, array[int]] = OrderedDict()
        self.size = 0
        self.hits = 0
        self.misses = 0

    def look_up(self, text: str) -> list[str | array[int]]:
        """Return a text's pieces in order, each as its ids if they are known."""
        known = self._ids
        parts: list[str | array[int]] = []
        for place, piece in enumerate(self._pattern.split(text)):
            if not piece:
                continue
            is_between = place % 2 == 0
            ids = known.get(piece)
            if ids is None:
                self.misses += is_between
                parts.append(piece)
            else:
                self.hits += is_between
                known.move_to_end(piece)
                parts.append(ids)
        return parts

    def assemble(self, parts: Iterable[str | array[int]], new: dict[str, list[int]]) -> list[int]:
        """Return the ids of looked-up pieces, given those of the `new` ones, and remember these."""
        ids: list[int] = []
        for part in parts:
            ids += new[part] if isinstance(part, str) else part
        for piece, piece_ids in new.items():
            self._remember(piece, piece_ids)
        return ids

    def _remember(self, piece: str, ids: list[int]) -> None:
        size = _size(piece, ids)
        if piece in self._ids or size > self._limit // LARGEST_SHARE:
            return
        self._ids[piece] = array("I", ids)
        self.size += size
        while self.size > self._limit:
            self.size -= _size(*self._ids.popitem(last=False))


def _size(piece: str, ids: Sequence[int]) -> int:
    # Bytes of the entry itself, of the text, and of the ids.
    return 250 + len(piece) * (1 if piece.isascii() else 4) + 4 * len(ids)
