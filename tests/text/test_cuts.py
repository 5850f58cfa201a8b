"""Whatever added tokens there are: with a cache texts are encoded as without, or there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers

from smgd.text import cuts, segments, words
from smgd.text.segments import has_border, overlap
from smgd.text.stage import TextStage
from smgd.text.tokenizer import Tokenizer as SmgdTokenizer
from smgd.text.words import word_cache
from tests.text.test_words import make

CHARS = "ab*|_éK"
FLAGS = ("single_word", "lstrip", "rstrip")
# Few characters, so that tokens overlap with themselves and with each other. None is a space:
# tokens that begin with one beside others that take spaces make the library itself fail.
CONTENTS = st.sampled_from(["ab*", "*|", "|_a", CHARS]).flatmap(
    lambda alphabet: st.text(alphabet=alphabet, min_size=1, max_size=5)
)


def tokens(*flags: str) -> st.SearchStrategy[list[AddedToken]]:
    """Return a strategy of added tokens, some of which have some of these flags."""
    some = st.sets(st.sampled_from(flags)) if flags else st.just(set[str]())
    token = st.builds(
        lambda content, normalized, special, given: AddedToken(
            content, normalized=normalized, special=special, **dict.fromkeys(given, True)
        ),
        CONTENTS,
        st.sampled_from([False, False, True]),
        st.booleans(),
        some | st.just(set()),
    )
    proven = st.just(AddedToken("<|e|>", normalized=False, special=True))
    return st.lists(token | proven, min_size=1, max_size=5)


def characters() -> Tokenizer:
    vocab = {char: index for index, char in enumerate(f"{CHARS}<e> \n.")}
    return Tokenizer(models.BPE(vocab, []))


def lowering() -> Tokenizer:
    backend = characters()
    backend.normalizer = normalizers.Lowercase()
    return backend


BASES: dict[str, Callable[[], Tokenizer]] = {
    "characters": characters,
    "lower case": lowering,
    "bytes": lambda: make(special=[]),
    "bytes with NFC": lambda: make(special=[], normalizer=normalizers.NFC()),
}


def build(base: str, added: Sequence[AddedToken]) -> SmgdTokenizer:
    backend = BASES[base]()
    for token in added:
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
    return SmgdTokenizer(backend, {})


@st.composite
def texts_of(draw: st.DrawFn, added: Sequence[AddedToken]) -> list[str]:
    """Return texts of tokens, what is left of them without an end, and words between."""
    contents = [token.content for token in added]
    parts = [*contents, *[c[1:] for c in contents], *[c[:-1] for c in contents]]
    piece = st.sampled_from([*parts, *CHARS, " ", " a", "\n", ".", "\u212a", " ab", "A"])
    return draw(st.lists(st.lists(piece, max_size=12).map("".join), min_size=1, max_size=4))


async def check(tokenizer: SmgdTokenizer, texts: list[str]) -> None:
    """Encode texts again and again, so that what was learned from one is used for the others."""
    cache = tokenizer.segments
    assert cache is not None
    for text in [*texts, "".join(texts), *reversed(texts), *texts]:
        expected = tokenizer.backend.encode(text, add_special_tokens=False).ids
        assert await TextStage().encode(tokenizer, text) == expected
        cache._ids.clear()  # so that words are looked up
        assert await TextStage().encode(tokenizer, text) == expected


@pytest.mark.parametrize("base", BASES)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
async def test_added_tokens_of_any_kind(base: str, data: st.DataObject) -> None:
    added = data.draw(tokens(*FLAGS))
    tokenizer = build(base, added)
    assume(tokenizer.segments is not None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "BLOCK", data.draw(st.sampled_from([2, segments.BLOCK])))
        await check(tokenizer, data.draw(texts_of(added)))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
async def test_plain_tokens_that_overlap(data: st.DataObject) -> None:
    added = data.draw(tokens())
    tokenizer = build("bytes", added)
    assume(tokenizer.words is not None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "SLICE", data.draw(st.sampled_from([5, words.SLICE])))
        patch.setattr(words, "WORTH", data.draw(st.sampled_from([1, words.WORTH])))
        await check(tokenizer, data.draw(texts_of(added)))


@settings(max_examples=60, deadline=None)
@given(content=CONTENTS, data=st.data())
async def test_the_only_token_is_separator_unless_it_overlaps_with_itself(
    content: str, data: st.DataObject
) -> None:
    added = [AddedToken(content, normalized=False)]
    tokenizer = build("bytes", added)
    # Beyond ASCII a character of so low a number spells another byte.
    is_separator = content.isascii() and not has_border(content)
    assert (tokenizer.words is not None) is (is_separator and content not in cuts._SAMPLE)
    await check(tokenizer, data.draw(texts_of(added)))


def test_a_token_that_looks_across_the_cut() -> None:
    word = AddedToken("abc", single_word=True, normalized=False)
    backend = make(special=["END"], added=[word])
    whole = backend.encode("ENDabc", add_special_tokens=False).ids
    assert whole[1:] != backend.encode("abc", add_special_tokens=False).ids  # the reason
    assert SmgdTokenizer(backend, {}).segments is None
    assert SmgdTokenizer(make(special=["<END>"], added=[word]), {}).segments is not None


@pytest.mark.parametrize(
    ("token", "expected"),
    [("***", True), ("aa", True), ("|x|", True), ("abXab", True), ("<|a|>", False), ("a", False)],
)
def test_tokens_that_overlap_with_themselves(token: str, expected: bool) -> None:
    assert has_border(token) is expected


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("ab", "bc", True),
        ("abc", "b", True),
        ("ab", "ab", True),
        ("abc", "xabc", True),
        ("ab", "cd", False),
        ("<|a|>", "<|b|>", False),
    ],
)
def test_tokens_that_overlap(one: str, other: str, expected: bool) -> None:
    assert overlap(one, other) is expected
    assert overlap(other, one) is expected


def test_no_separator_among_tokens_that_overlap() -> None:
    assert word_cache(make(special=["a|", "|b"])) is None
    assert word_cache(make(special=["<a>", "a"])) is None
    assert word_cache(make(special=["<a>", "<b>"])) is not None
