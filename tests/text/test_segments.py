"""Piecewise encoding equals plain encoding, or there is none."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from smgd.text import segments
from smgd.text.model import load_model
from smgd.text.segments import SegmentCache, cut_tokens, segment_cache, splitter
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


def cache_of(backend: Tokenizer, limit: int = segments.CACHE_BYTES) -> SegmentCache:
    """Return an empty cache for a tokenizer that may have one."""
    pattern = splitter(backend)
    assert pattern is not None
    return SegmentCache(pattern, cut_tokens(backend), limit)


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
    "a token that is a word beside punctuation": make(
        adding(AddedToken("xy", normalized=False, single_word=True))
    ),
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
    "a token that is a word beside one that ends in a letter": make(
        adding(AddedToken("xy", normalized=False, single_word=True), plain("<|end"))
    ),
    "a token that is a word beside one that begins with a letter": make(
        adding(AddedToken("xy", normalized=False, single_word=True), plain("_>"))
    ),
    "a token that swallows before one that is spaces": make(
        adding(AddedToken("xy", normalized=False, rstrip=True), AddedToken(" a", normalized=True))
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
@settings(max_examples=50, deadline=None)
@given(
    conversation=st.lists(texts, max_size=4),
    block=st.sampled_from([1, 7, segments.BLOCK]),
    most=st.sampled_from([1, 3, segments.MOST_PIECES]),
    stride=st.sampled_from([1, 3, segments.STRIDE]),
)
async def test_equal_to_plain_encoding_cold_and_warm(
    name: str, conversation: list[str], block: int, most: int, stride: int
) -> None:
    backend = PROVEN[name]
    tokenizer = TOKENIZERS[name]
    tokenizer.segments = cache_of(backend)
    stage = TextStage()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "BLOCK", block)
        patch.setattr(segments, "MOST_PIECES", most)
        patch.setattr(segments, "STRIDE", stride)
        for text in [*conversation, "".join(conversation), *conversation]:
            expected = backend.encode(text, add_special_tokens=False).ids
            assert await stage.encode(tokenizer, text) == expected


@pytest.mark.parametrize("name", ["characters", "metaspace first"])
def test_there_is_a_cache_where_texts_may_be_cut(name: str) -> None:
    backend = (PROVEN | UNPROVEN)[name]
    assert (segment_cache(backend) is None) is (name in UNPROVEN)


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
    assert encoded == ["one", "two"]  # the tokens themselves are always known
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
    tokenizer.segments = cache_of(tokenizer.backend, limit=2048)
    stage = TextStage(threshold_bytes=0)  # every new piece is encoded in a thread
    results: dict[str, list[int]] = {}

    async def ask(text: str) -> None:
        results[text] = await stage.encode(tokenizer, text)

    async with trio.open_nursery() as nursery:
        for i in range(50):
            nursery.start_soon(ask, f"<|a|>{'abcdefgh'[i % 8] * (i % 7 + 1)}<|b|>xyz")
    assert results == {text: tokenizer.encode(text) for text in results}


def look_up(cache: SegmentCache, text: str) -> list[str | Sequence[int]]:
    return [part for block in cache.look_up(text) for part in block]


def assemble(cache: SegmentCache, piece: str, ids: list[int]) -> tuple[list[int], int]:
    """Learn a piece; return its ids as assembled, and in how many steps."""
    assembled: list[int] = []
    steps = sum(1 for _ in cache.assemble([piece], {piece: ids}, assembled))
    return assembled, steps + 1


def test_the_cache_is_bounded_and_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(make(), limit=10_000)
    for i in range(1000):
        assert assemble(cache, f"text {i}", [i] * 10) == ([i] * 10, 1)
        assert cache.size <= 10_000
    assert look_up(cache, "text 999") == [array("I", [999] * 10)]
    assert look_up(cache, "text 0") == ["text 0"]
    monkeypatch.setattr(segments, "ENTRIES", 3)
    for i in range(5):
        assemble(cache, f"more {i}", [i])
    assert list(cache._ids) == ["more 2", "more 3", "more 4"]
    assert cache.size == 3 * segments._size("more 0", [0])


def test_a_piece_too_large_is_not_kept() -> None:
    cache = cache_of(make(), limit=10_000)
    huge = "x" * (10_000 // segments.LARGEST_SHARE + 1)
    assemble(cache, huge, [1])
    assert look_up(cache, huge) == [huge]
    assert cache.size == 0


@pytest.mark.parametrize(
    "text",
    [
        "<|a|>" * 5000,
        "".join(f"<|a|>{i}" for i in range(5000)),
        "x" * 5 * segments.BLOCK,
        "x" * (segments.BLOCK - 3) + "<|ab|>x",
        ("x" * 999 + "<|b|>") * 200,
        "",
    ],
    ids=["tokens", "numbers", "long", "at the end of a block", "messages", "empty"],
)
def test_a_block_is_bounded_in_pieces_and_characters(text: str) -> None:
    cache = cache_of(make())
    blocks = list(cache.look_up(text))
    assert len(blocks) >= len(text) / (segments.BLOCK + 6)
    for block in blocks:
        assert len(block) <= segments.MOST_PIECES + 1
        # More only if the first piece began in a block before.
        assert sum(map(len, block[1:])) <= segments.BLOCK + 6
    back: dict[tuple[int, ...], str] = {cache._tokens[token]: token for token in SPECIALS}
    pieces = [p if isinstance(p, str) else back[tuple(p)] for block in blocks for p in block]
    assert "".join(pieces) == text
    assert len(pieces) == len(segments.cut_at(cache._pattern, text))


def test_ids_of_a_long_piece_are_assembled_in_strides() -> None:
    cache = cache_of(make())
    ids = list(range(5 * segments.STRIDE // 2))
    assert assemble(cache, "long", ids) == (ids, 6)  # three to assemble, two more to keep
    parts = look_up(cache, "long")
    assembled: list[int] = []
    lengths = [len(assembled) for _ in cache.assemble(parts, {}, assembled)]
    assert lengths == [segments.STRIDE, 2 * segments.STRIDE, len(ids)]
    assert assembled == ids


def test_what_is_half_assembled_is_not_kept() -> None:
    cache = cache_of(make())
    ids = list(range(3 * segments.STRIDE))
    steps = cache.assemble(["long"], {"long": ids}, [])
    for _ in range(4):
        next(steps)
        assert cache._ids == {}
    assert list(steps) == [None]
    assert cache._ids == {"long": array("I", ids)}
