r"""Where a text may be cut so that each piece is tokenized as it is in the whole.

A byte-level BPE tokenizer first cuts a text into pre-tokens by a regular expression, and then works
on each alone. Where a pre-token ends *whatever stands around*, the text may be cut beforehand.
`separator_of` proves that from the tokenizer's own description, for the expressions listed below,
and compares on a sample.

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
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from contextlib import suppress
from typing import Any

from tokenizers import Tokenizer, models

from smgd.text.description import steps
from smgd.text.segments import has_border, overlaps

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


def divide(ids: list[int], separator: int) -> list[list[int]]:
    """Return the ids of the units of a text that were encoded with a separator between them.

    Where the separator's id stands for other text as well, there are more than there were units.
    """
    divided = []
    start = 0
    with suppress(ValueError):  # there is no further one
        while True:
            end = ids.index(separator, start)
            divided.append(ids[start:end])
            start = end + 1
    return [*divided, ids[start:]]


def separator_of(backend: Tokenizer, tokens: Mapping[str, int]) -> str | None:
    """Return the added token that can stand between words, or None where words are not independent.

    The tokenizer has to be one whose texts may be cut at added tokens, about which
    `smgd.text.segments.splitter` tells; `tokens` are its `cut_tokens`.
    """
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    # A token that is no cut would split words, or stand for white space beside it.
    if added != tokens.keys() or not _is_independent(backend):
        return None
    separator = next((token for token in tokens if _is_separate(token, added)), None)
    if separator is None or not _agrees(backend, separator, tokens[separator]):
        return None
    return separator


def _is_separate(token: str, added: Set[str]) -> bool:
    """Tell whether a token is found just where it stands between any texts that have none.

    None may be found earlier that begins in the text before it, not even the token itself. And its
    id must not stand for another text.
    """
    # Bytes are spelt by characters up to U+0143, of which only ASCII stand for themselves.
    is_unique = token.isascii() or max(token) > "\u0143"
    return is_unique and not has_border(token) and not overlaps(token, added - {token})


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
    return in_one == whole and divide(joined, separator_id) == alone
