"""Piecewise encoding equals plain encoding, or there is none."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from smgd.text import segments
from smgd.text.model import load_model
from smgd.text.segments import SegmentCache, cut_tokens, splitter
from smgd.text.stage import TextStage
from smgd.text.tokenizer import Tokenizer as SmgdTokenizer

CHARS = "abcdefghijklmnopqrstuvwxyz ,.\n▁é漢<|>"
SPECIALS = ["<|a|>", "<|ab|>", "<|b|>"]


def make(adjust: Callable[[Tokenizer], None] = lambda _: None) -> Tokenizer:
    """Return a tokenizer of single characters, with special tokens that begin alike."""
    vocab = {char: i for i, char in enumerate(CHARS)}
    backend = Tokenizer(models.BPE(vocab, [], unk_token=None, ignore_merges=True))
    adjust(backend)
    backend.add_special_tokens(SPECIALS)
    return backend


def metaspace(scheme: str) -> Callable[[Tokenizer], None]:
    def adjust(backend: Tokenizer) -> None:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)

    return adjust


def nested_first(backend: Tokenizer) -> None:
    first = pre_tokenizers.Metaspace(prepend_scheme="first")
    whitespace = pre_tokenizers.Split("\n", "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([whitespace, first])


def prepending(backend: Tokenizer) -> None:
    backend.normalizer = normalizers.Prepend("▁")


def adding(*tokens: AddedToken) -> Callable[[Tokenizer], None]:
    def adjust(backend: Tokenizer) -> None:
        backend.add_tokens(list(tokens))

    return adjust


def plain(text: str) -> AddedToken:
    return AddedToken(text, normalized=False)


PROVEN = {
    "characters": make(),
    "metaspace always": make(metaspace("always")),
    "metaspace never": make(metaspace("never")),
    "prepending normalizer": make(prepending),
    "further tokens that swallow spaces": make(adding(AddedToken("xy", lstrip=True, rstrip=True))),
    "further tokens after the normalizer": make(adding(AddedToken("<|a", normalized=True))),
    "normalized tokens, nothing normal": make(adding(AddedToken("xy", normalized=True))),
    "normalized tokens that overlap": make(adding(AddedToken("|>x", normalized=True))),
    "built-in": load_model("smgd-sim").tokenizer.backend,
}

UNPROVEN = {
    "no token to cut at": Tokenizer(models.BPE({"a": 0}, [])),
    "metaspace first": make(metaspace("first")),
    "metaspace first, nested": make(nested_first),
    "a token that contains one and swallows": make(
        adding(AddedToken("<|a|>\n", normalized=False, rstrip=True))
    ),
    "a token that swallows overlaps one marked normalized": make(
        adding(AddedToken("xy", normalized=True), AddedToken("yx", normalized=True, lstrip=True))
    ),
    "a token that overlaps one and swallows": make(
        adding(AddedToken("x<|", normalized=False, lstrip=True))
    ),
}


@pytest.mark.parametrize("name", PROVEN)
def test_proven(name: str) -> None:
    assert splitter(PROVEN[name]) is not None


@pytest.mark.parametrize("name", UNPROVEN)
def test_unproven_tokenizers_have_no_cache(name: str) -> None:
    assert splitter(UNPROVEN[name]) is None


TOKENIZERS = {name: SmgdTokenizer(backend, {}) for name, backend in PROVEN.items()}

texts = st.lists(
    st.sampled_from([*SPECIALS, "<|im_start|>", "<|im_end|>", "xy", "<|a", " ", "\n"])
    | st.text(alphabet=CHARS, max_size=6)
    | st.text(max_size=6)
).map("".join)


@pytest.mark.parametrize("name", PROVEN)
@settings(max_examples=50)
@given(conversation=st.lists(texts, max_size=4))
async def test_equal_to_plain_encoding_cold_and_warm(name: str, conversation: list[str]) -> None:
    backend = PROVEN[name]
    tokenizer = TOKENIZERS[name]
    tokenizer.segments = SegmentCache(splitter(backend) or pytest.fail("unproven"))
    stage = TextStage()
    for text in [*conversation, "".join(conversation), *conversation]:
        expected = backend.encode(text, add_special_tokens=False).ids
        assert await stage.encode(tokenizer, text) == expected


def test_tokens_marked_normalized_are_cut_at_if_nothing_is() -> None:
    tokens = adding(AddedToken("xy", normalized=True), AddedToken("|>x", normalized=True))

    def lowering(backend: Tokenizer) -> None:
        backend.normalizer = normalizers.Lowercase()
        tokens(backend)

    assert cut_tokens(make(tokens)).keys() == {*SPECIALS, "xy"}
    assert cut_tokens(make(lowering)).keys() == set(SPECIALS)


async def test_half_of_a_surrogate_pair() -> None:
    tokenizer = SmgdTokenizer(make(), {})
    assert tokenizer.words is None
    text = "<|a|>one \ud83d<|b|>"
    assert await TextStage().encode(tokenizer, text) == tokenizer.encode(text)


async def test_what_is_known_is_not_encoded_again() -> None:
    tokenizer = SmgdTokenizer(make(), {})
    encoded: list[str] = []
    encode_all = tokenizer.encode_all

    def spy(pieces: list[str]) -> list[list[int]]:
        encoded.extend(pieces)
        return encode_all(pieces)

    tokenizer.encode_all = spy  # type: ignore[method-assign, assignment]
    stage = TextStage()
    await stage.encode(tokenizer, "<|a|>one<|b|>two<|b|>one")
    assert encoded == ["<|a|>", "one", "<|b|>", "two"]
    encoded.clear()
    await stage.encode(tokenizer, "<|a|>one<|b|>two<|b|>three")
    assert encoded == ["three"]
    encoded.clear()
    await stage.encode(tokenizer, "<|a|>one<|b|>two<|b|>three")
    assert encoded == []


async def test_lookups_are_those_of_texts_between_the_tokens() -> None:
    tokenizer = SmgdTokenizer(make(), {})
    cache, stage = tokenizer.segments, TextStage()
    assert cache is not None
    await stage.encode(tokenizer, "<|a|>one<|b|><|b|>two<|b|>one")
    assert (cache.hits, cache.misses) == (0, 3)  # what is new is new until it has been encoded
    await stage.encode(tokenizer, "<|a|>one<|b|>three<|b|>")
    assert (cache.hits, cache.misses) == (1, 4)
    await stage.encode(tokenizer, "one")
    assert (cache.hits, cache.misses) == (2, 4)
    await stage.encode(tokenizer, "")
    await stage.encode(tokenizer, "<|a|><|b|>")
    assert (cache.hits, cache.misses) == (2, 4)


async def test_pieces_forgotten_while_others_are_encoded_are_no_problem() -> None:
    tokenizer = SmgdTokenizer(make(), {})
    tokenizer.segments = SegmentCache(
        splitter(tokenizer.backend) or pytest.fail("unproven"), limit=2048
    )
    stage = TextStage(threshold_bytes=0)  # every new piece is encoded in a thread
    results: dict[str, list[int]] = {}

    async def ask(text: str) -> None:
        results[text] = await stage.encode(tokenizer, text)

    async with trio.open_nursery() as nursery:
        for i in range(50):
            nursery.start_soon(ask, f"<|a|>{'abcdefgh'[i % 8] * (i % 7 + 1)}<|b|>xyz")
    assert results == {text: tokenizer.encode(text) for text in results}


def test_the_cache_is_bounded_and_forgets_the_oldest() -> None:
    pattern = splitter(make())
    assert pattern is not None
    cache = SegmentCache(pattern, limit=10_000)
    for i in range(1000):
        piece = f"text {i}"
        assert cache.assemble(cache.look_up(piece), {piece: [i] * 10}) == [i] * 10
        assert cache.size <= 10_000
    assert cache.look_up("text 999") == [array("I", [999] * 10)]
    assert cache.look_up("text 0") == ["text 0"]


def test_a_piece_too_large_is_not_kept() -> None:
    pattern = splitter(make())
    assert pattern is not None
    cache = SegmentCache(pattern, limit=10_000)
    huge = "x" * (10_000 // segments.LARGEST_SHARE + 1)
    cache.assemble([huge], {huge: [1]})
    assert cache.look_up(huge) == [huge]
    assert cache.size == 0
