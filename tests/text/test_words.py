"""Encoding by words equals plain encoding, or there is none; and it is bounded."""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate, islice, product
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from smgd.text import cuts, segments, stage, words
from smgd.text.cuts import PARTIAL_PATTERNS, PATTERNS, PIECES
from smgd.text.model import load_model
from smgd.text.stage import TextStage
from smgd.text.tokenizer import Tokenizer as SmgdTokenizer
from smgd.text.words import Draft, word_cache
from tests.text import small

SMOLLM2 = Path("~/.cache/smgd-engine/models/smollm2-135m-instruct").expanduser()
SPECIALS = ["<|a|>", "<|end|>"]
# What merges are learned from, as one word each: many go across where texts are cut.
LESSONS = [
    "the end, of the line.\n  the next one (and the last)!\n\n\tit's 12 o'clock, they'LL see: ",
    "x = foo(bar) + 3\n        return x[1] if y else 'a b'\n    \n  12 3  4\t5 \n",
    "naïve e\u0301 слово и слово 漢字 かな 🙂 🙂\n \n  / path/to/it ./x \r\n \u00a0 a\u3000 b",
] * 2


@cache
def merges() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return a vocabulary and merges that mind no boundaries."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [lesson[i : i + 9] for lesson in LESSONS for i in range(len(lesson))],
        trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False),
    )
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def make(
    *steps: pre_tokenizers.PreTokenizer,
    normalizer: normalizers.Normalizer | None = None,
    added: Sequence[AddedToken] = (),
    special: Sequence[str] = SPECIALS,
    **options: Any,
) -> Tokenizer:
    """Return a tokenizer of these pre-tokenizers, a GPT-2 one if there are none."""
    vocab, pairs = merges()
    backend = Tokenizer(models.BPE(vocab, pairs, **options))
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(list(steps or (byte_level(True),)))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    backend.add_tokens(list(added))
    return backend


def byte_level(use_regex: bool = False, **options: Any) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(**({"add_prefix_space": False} | options), use_regex=use_regex)


def split(pattern: str, behavior: str = "isolated", **options: Any) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior, **options)


digits = pre_tokenizers.Digits
nfc = normalizers.NFC
DEEPSEEK = [split(PARTIAL_PATTERNS[0]), split(PARTIAL_PATTERNS[2]), split(PATTERNS["deepseek"])]

PROVEN: dict[str, Callable[[], Tokenizer]] = {
    **{name: partial(make, split(text), byte_level()) for name, text in PATTERNS.items()},
    "byte level": make,
    "digits": partial(make, digits(individual_digits=True), byte_level(True)),
    "digits together": partial(make, digits(individual_digits=False), byte_level(True)),
    "deepseek's sequence": partial(make, *DEEPSEEK, byte_level()),
    "qwen with NFC": partial(make, split(PATTERNS["qwen2"]), byte_level(), normalizer=nfc()),
    "empty normalizer": partial(make, normalizer=normalizers.Sequence([])),
    "NFC in a sequence": partial(make, normalizer=normalizers.Sequence([nfc()])),
    "whole words first": partial(make, ignore_merges=True),
    "normalized tokens, nothing normal": partial(
        make, added=[AddedToken("<the end>", normalized=True)]
    ),
    "DeepSeek's kind of tokens": partial(make, special=["<\uff5cend\u2581of\uff5c>"]),
    "further plain tokens": partial(make, added=[AddedToken("the end. ", normalized=False)]),
    "built-in": lambda: load_model("smgd-sim").tokenizer.backend,
    "SmolLM2": lambda: SmgdTokenizer.from_directory(SMOLLM2).backend,
}

UNPROVEN: dict[str, Callable[[], Tokenizer]] = {
    "Llama 2": small.llama,
    "Gemma": small.gemma,
    "Unigram": small.unigram,
    "WordPiece": small.word_piece,
    "CLIP": small.suffix_bpe,
    "tokens that swallow spaces": small.byte_level,
    "no pre-tokenizer": lambda: _without_pre_tokenizer(make()),
    "byte level without regex": partial(make, byte_level()),
    "prefix space": partial(make, byte_level(True, add_prefix_space=True)),
    "bytes before the split": partial(make, byte_level(), split(PATTERNS["gpt2"]), byte_level()),
    "bytes only before": partial(make, byte_level(), split(PATTERNS["gpt2"])),
    "no bytes": partial(make, split(PATTERNS["gpt2"])),
    "digits alone": partial(make, digits(), byte_level()),
    "partial split alone": partial(make, split(PARTIAL_PATTERNS[0]), byte_level()),
    "unknown pattern": partial(make, split(PATTERNS["gpt2"] + "|x y"), byte_level()),
    "plain string": partial(make, pre_tokenizers.Split("x", "isolated"), byte_level(True)),
    "merged": partial(make, split(PATTERNS["gpt2"], "merged_with_next"), byte_level()),
    "inverted": partial(make, split(PATTERNS["gpt2"], invert=True), byte_level()),
    "unknown step": partial(make, pre_tokenizers.Punctuation(), byte_level(True)),
    "NFKC": partial(make, normalizer=normalizers.NFKC()),
    "lower case": partial(make, normalizer=normalizers.Sequence([nfc(), normalizers.Lowercase()])),
    "replacing": partial(make, normalizer=normalizers.Replace(" ", "▁")),
    "dropout": partial(make, dropout=0.1),
    "prefix of subwords": lambda: _prefixed(make()),
    "padding": lambda: _padded(make()),
    "a token that the normalizer matters to": partial(
        make, normalizer=nfc(), added=[AddedToken("[42]", normalized=True)]
    ),
    "a token that overlaps with one": partial(
        make, added=[AddedToken("x <|", normalized=True), AddedToken("<|", normalized=False)]
    ),
    "only a token that spells a word": partial(make, special=["\u0120the"]),
    "a token that strips": partial(make, added=[AddedToken("[x]", lstrip=True)]),
    "a token that swallows": partial(make, added=[AddedToken("[x]", rstrip=True)]),
    "a token that is a word": partial(make, added=[AddedToken("abc", single_word=True)]),
    "no token without overlap": partial(
        make, added=[AddedToken(t, normalized=False) for t in ("<|end|>.", "|><", "|><|")]
    ),
    "only tokens that overlap with themselves": partial(make, special=["***", "||x||", "abXab"]),
}


def _without_pre_tokenizer(backend: Tokenizer) -> Tokenizer:
    backend.pre_tokenizer = None
    return backend


def _prefixed(backend: Tokenizer) -> Tokenizer:
    backend.model.continuing_subword_prefix = "##"
    return backend


def _padded(backend: Tokenizer) -> Tokenizer:
    backend.enable_padding(length=8)
    return backend


@cache
def proven(name: str) -> SmgdTokenizer:
    if name == "SmolLM2" and not (SMOLLM2 / "tokenizer.json").exists():
        pytest.skip("SmolLM2 is not there: `make engine-test` downloads it")
    return SmgdTokenizer(PROVEN[name](), {})


@pytest.mark.parametrize("name", PROVEN)
def test_proven(name: str) -> None:
    assert proven(name).words is not None


@pytest.mark.parametrize("name", UNPROVEN)
def test_other_tokenizers_have_no_cache(name: str) -> None:
    assert word_cache(UNPROVEN[name]()) is None


def test_the_sample_catches_what_the_description_does_not_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = make(split(r"\w+ \w+|" + PATTERNS["gpt2"]), byte_level())
    monkeypatch.setattr(cuts, "_is_independent", lambda _: True)
    assert word_cache(backend) is None


TEXTS = st.lists(
    st.sampled_from(
        [
            *SPECIALS, "<|im_end|>", "[42]", "<the end>", "the end. ", "<\uff5cend\u2581of\uff5c>",
             "the", " the", " a", "end", "'s", "'LL",
            "n't", "o'", " ", "  ", "\n", "\r\n", " \n", "\n\n", "\t", " 1", "12", "3.5", ".", ",",
            "(", ")!", " = ", "/", "//", "'", "\u2019s", "é", "e\u0301", "<\u0338", " \u0301", "_",
            "\u00a0", "\u3000", "\u180e", "\u2028", "\x85", "\x1c", "\x00", "\u200b", "\ufeff",
            "漢字", "かな", "слово", "한국", "🙂", "👨\u200d👩", "\u017f", "\u212a", "½", "²",
            "\u212b", "\u1fef", "__",
        ]
    )
    | st.text(alphabet="abT 1.\n'", max_size=8)
    | st.text(max_size=4),
    max_size=20,
).map("".join)  # fmt: skip


def utf8(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


@pytest.mark.parametrize("name", PROVEN)
@settings(max_examples=40, deadline=None)
@given(
    conversation=st.lists(TEXTS.map(utf8), min_size=1, max_size=4),
    slice_size=st.sampled_from([6, 30, words.SLICE]),
    generation=st.sampled_from([3, words.GENERATION]),
    worth=st.sampled_from([1, words.WORTH]),
    turn=st.sampled_from([1, 40, words.TURN]),
    go_bytes=st.sampled_from([0, 20, stage.GO_BYTES]),
)
async def test_equal_to_plain_encoding_whatever_is_known(
    name: str,
    conversation: list[str],
    slice_size: int,
    generation: int,
    worth: int,
    turn: int,
    go_bytes: int,
) -> None:
    tokenizer = proven(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "TURN", turn)
        patch.setattr(words, "BLOCK", turn)
        patch.setattr(segments, "BLOCK", turn)
        patch.setattr(stage, "GO_BYTES", go_bytes)
        patch.setattr(words, "SLICE", slice_size)
        patch.setattr(words, "GENERATION", generation)
        patch.setattr(words, "WORTH", worth)
        for text in [*conversation, "".join(conversation), *conversation]:
            expected = tokenizer.backend.encode(text, add_special_tokens=False).ids
            assert await encode(tokenizer, text) == expected


async def encode(tokenizer: SmgdTokenizer, text: str) -> list[int]:
    """Encode a text through the words alone, since whole segments would be known."""
    segments = tokenizer.segments
    assert segments is not None
    segments._ids.clear()
    return await TextStage().encode(tokenizer, text)


@pytest.mark.parametrize("name", PROVEN)
@settings(max_examples=40, deadline=None)
@given(text=TEXTS.map(utf8))
def test_every_cut_is_one(name: str, text: str) -> None:
    backend, segments = proven(name).backend, proven(name).segments
    assert segments is not None
    parts = enumerate(segments._pattern.split(text))
    pieces = [p for place, part in parts for p in ([part] if place % 2 else PIECES.findall(part))]
    assert "".join(pieces) == text
    alone = [backend.encode(piece, add_special_tokens=False).ids for piece in pieces]
    whole = backend.encode(text, add_special_tokens=False).ids
    assert [i for ids in alone for i in ids] == whole


@pytest.mark.parametrize("name", [*PATTERNS, "deepseek's sequence", "qwen with NFC", "digits"])
def test_every_character_beside_a_space(name: str) -> None:
    backend = proven(name).backend
    pre_tokenizer, normalizer = backend.pre_tokenizer, backend.normalizer
    assert pre_tokenizer is not None

    def pre_tokens(text: str) -> list[str]:
        normal = normalizer.normalize_str(text) if normalizer else text
        return [token for token, _ in pre_tokenizer.pre_tokenize_str(normal)]

    # All that is white space anywhere, and a sample of the rest.
    chars = [chr(i) for i in range(sys.maxunicode) if chr(i).isspace() or i < 0x250 or i % 997 == 0]
    for char in [*chars, "\u180e", "\u200b", "\ufeff"]:
        if unicodedata.category(char) != "Cs":
            for text in (f"{char} b", f"a{char} .", f"a {char} b", f".\n{char}  b"):
                alone = [token for piece in PIECES.findall(text) for token in pre_tokens(piece)]
                assert alone == pre_tokens(text), repr(text)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("the end, of it.", ["the", " end", ",", " of", " it", "."]),
        ("f(self):\n        return x", ["f", "(self", "):\n       ", " return", " x"]),
        ("don't o'Neil\u2019s", ["don't", " o'Neil\u2019s"]),
        ("a  b\n c", ["a", " ", " b", "\n", " c"]),
        (".\nNext x\nnext", [".\nNext", " x", "\nnext"]),
        ("слово и слово", ["слово", " и", " слово"]),
        (" 1  2", [" 1", "  2"]),
        ("snake_case42", ["snake", "_case", "42"]),
    ],
)
def test_where_texts_are_cut(text: str, pieces: list[str]) -> None:
    assert PIECES.findall(text) == pieces


async def test_a_text_without_cuts_is_not_looked_through() -> None:
    spy = Spy()
    cache = spy.tokenizer.words
    assert cache is not None
    long = "a'" * 2 * words.SLICE
    assert words._cut_after(long, 1) == len(long)
    for _ in range(2):
        assert await spy.units(f"the end {long}") == [f"the end {long}"]
        assert await spy.units(f"<|a|>{long}<|end|>") == [long]
    assert cache._seen == set()


def test_wherever_a_search_begins_it_finds_a_cut() -> None:
    text = "".join(LESSONS) + "漢" * 50 + " " * 40 + "x\n \n y" * 3
    cuts = set(accumulate(map(len, PIECES.findall(text))))
    for place in range(len(text)):
        end = words._cut_after(text, place)
        assert end > place
        assert end in cuts
    assert words._cut_after(text, len(text)) == len(text)


# ------------------------------------------------------------------------ what is encoded, and kept


class Spy:
    """A tokenizer that notes what it is asked to encode."""

    def __init__(self) -> None:
        self.tokenizer = SmgdTokenizer(make(), {})
        self.texts: list[str] = []
        self._encode = self.tokenizer.encode
        self.tokenizer.encode = self.encode  # type: ignore[method-assign, assignment]

    def encode(self, text: str) -> list[int]:
        self.texts.append(text)
        return self._encode(text)

    async def units(self, text: str) -> list[str]:
        """Encode a text, and return what of it the backend was given, checking the ids."""
        self.texts.clear()
        assert await encode(self.tokenizer, text) == self._encode(text)
        return [unit for asked in self.texts for unit in asked.split("<|a|>")]


async def test_a_word_is_learned_when_it_is_missed_again() -> None:
    spy = Spy()
    assert await spy.units("the end") == ["the end"]
    assert await spy.units("the end") == ["the end", "the"]
    assert await spy.units("the end") == ["the end", " end"]
    assert await spy.units("the end") == []


async def test_known_words_stay_out_of_what_is_encoded() -> None:
    spy = Spy()
    for word in (" a", " b", " c", " d"):
        for _ in range(2):
            await spy.units(word)
    assert await spy.units(" a b x c y z d") == [" a b x c y z d"]  # not worth the gaps
    assert await spy.units(" a b p c d a b q r c d") == [" p", " q r"]


async def test_words_between_known_ones_are_learned_on_the_way() -> None:
    spy = Spy()
    for word in (" a", " b", " c", " x", " y"):
        await spy.units(word)
    for word in (" a", " b", " c"):
        await spy.units(word)
    assert await spy.units(" a b x c a b") == [" x"]
    assert await spy.units(" a x b c y x") == [" y"]


async def test_added_tokens_are_not_encoded() -> None:
    spy = Spy()
    assert await spy.units("<|a|>x<|end|><|a|>y<|end|>") == ["x", "y"]
    assert spy.texts == ["x<|a|>y"]


def letters(count: int, start: int = 0) -> str:
    """Return a text of so many words that differ, from the given one on."""
    all_words = product("abcdefghijklmnopqrstuvwxyz", repeat=4)
    return "".join(f" {''.join(word)}" for word in islice(all_words, start, start + count))


async def test_of_an_unknown_text_little_is_looked_up() -> None:
    spy = Spy()
    text = letters(10_000)
    units = await spy.units(text)
    assert "".join(units) == text
    assert len(units) <= 32
    assert max(map(len, units)) <= words.LONGEST_UNIT
    cache = spy.tokenizer.words
    assert cache is not None
    assert len(cache._seen) < 1200


@pytest.mark.parametrize("alternating", [False, True])
async def test_little_more_is_encoded_than_the_text(alternating: bool) -> None:
    spy = Spy()
    for _ in range(2):
        await spy.units(" a")
    for number in range(8):
        text = letters(2000, number * 2000)
        text = text.replace(" ", " a ") if alternating else text
        units = await spy.units(text)
        assert len(units) < 12
        assert sum(map(len, units)) < 1.02 * len(text)


async def test_a_text_of_known_words_is_encoded_no_more() -> None:
    spy = Spy()
    text = letters(200) * 3
    counts = [sum(map(len, await spy.units(text))) for _ in range(30)]
    assert counts[0] >= len(text)
    assert counts[-1] == 0


async def test_what_is_long_is_not_kept() -> None:
    spy = Spy()
    cache = spy.tokenizer.words
    assert cache is not None
    long = "x" * (words.LONGEST_WORD + 1)
    for _ in range(3):
        assert await spy.units(long) == [long]
    assert cache._seen == set()
    many_ids = "qzj" * words.MOST_IDS
    for _ in range(3):
        assert await spy.units(many_ids) == [many_ids]
    assert len(cache) == 0


async def test_the_cache_is_bounded_and_keeps_what_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(words, "GENERATION", 10)
    monkeypatch.setattr(words, "SEEN", 20)
    spy = Spy()
    cache = spy.tokenizer.words
    assert cache is not None
    for _ in range(2):
        await spy.units(" the")
    for word in letters(100).split():
        for _ in range(2):
            await spy.units(f" the the {word}")
            assert len(cache) <= 20
            assert len(cache._seen) <= 21
    assert await spy.units(" the") == []
    assert await spy.units(" aaab") == [" aaab"]


async def test_words_seen_once_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "SEEN", 4)
    spy = Spy()
    for text in ("a", "b", "c", "d", "e", "f", "a"):
        assert await spy.units(text) == [text]
    cache = spy.tokenizer.words
    assert cache is not None
    assert len(cache) == 0


async def test_texts_longer_than_a_turn_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "TURN", words.SLICE)
    spy = Spy()
    text = letters(100) * (words.SLICE // 40)  # more than ten turns
    for _ in range(10):
        await spy.units(text)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        assert await spy.units(text) == []
        nursery.cancel_scope.cancel()
    assert turns >= 9


async def test_long_texts_in_turns_and_threads() -> None:
    spy = Spy()
    text = "".join(LESSONS) * 200
    for _ in range(3):
        await spy.units(f"{text}<|a|>{text} more<|end|>")


async def test_half_of_a_surrogate_pair() -> None:
    spy = Spy()
    for _ in range(3):
        await spy.units("<|a|>the \ud83d end<|end|>")


def test_two_requests_at_a_time_may_learn_the_same() -> None:
    backend = make()
    cache = word_cache(backend)
    assert cache is not None

    def look_up() -> Draft:
        draft = Draft(cache)
        list(cache.look_up(draft, [" the"]))
        return draft

    expected = backend.encode(" the", add_special_tokens=False).ids
    for draft in [look_up(), look_up(), look_up()]:
        draft.settle([expected for _ in draft.units])
        assert draft.texts == [expected]
    draft = look_up()
    assert draft.units == []
    draft.settle([])
    assert draft.texts == [expected]


def test_the_separator_overlaps_with_no_other() -> None:
    added = [AddedToken("<|a|>x", normalized=False)]
    cache = word_cache(make(added=added))
    assert cache is not None
    assert cache.separator == "<|end|>"


@pytest.mark.parametrize("token", ["***", "||x||", "abXab", "|||IP_ADDRESS|||"])
async def test_the_separator_overlaps_not_with_itself(token: str) -> None:
    assert word_cache(make(special=[token])) is None
    tokenizer = SmgdTokenizer(make(special=[token, "<|end|>"]), {})
    assert tokenizer.words is not None
    assert tokenizer.words.separator == "<|end|>"
    border = token[: len(token) // 3]
    text = f"the {border} end{border}, of {border}{token}{border} the{border} line {border}"
    for _ in range(4):
        assert await encode(tokenizer, text) == tokenizer.encode(text)


async def test_a_unit_that_has_the_id_of_the_separator() -> None:
    spelt = "\u00bf"  # how a byte is spelt that is in y with a diaeresis, but not in the sample
    vocab, pairs = merges()
    known = [token for token in vocab if spelt not in token]
    backend = Tokenizer(
        models.BPE(
            {token: index for index, token in enumerate([*known, "<|a|>"])},
            [pair for pair in pairs if spelt not in "".join(pair)],
            unk_token="<|a|>",
        )
    )
    backend.pre_tokenizer = byte_level(True)
    backend.add_special_tokens(["<|a|>"])
    tokenizer = SmgdTokenizer(backend, {})
    assert tokenizer.words is not None
    assert tokenizer.words.separator_id in tokenizer.encode("\u00ff")
    text = "the end \u00ff of<|a|>the \u00ff\u00ff line, the end"
    for _ in range(4):
        assert await encode(tokenizer, text) == tokenizer.encode(text)
    assert len(tokenizer.words) > 3


def words_known(tokenizer: SmgdTokenizer) -> dict[str, tuple[int, ...]]:
    cache = tokenizer.words
    assert cache is not None
    return cache._known | cache._old


def test_a_turn_is_bounded_in_words_and_in_texts() -> None:
    cache = word_cache(make())
    assert cache is not None
    texts = ["x"] * 5000 + [letters(40_000)] + ["x"] * 5000
    draft = Draft(cache)
    done = 0
    for is_full in cache.look_up(draft, texts):
        begun = len(draft.texts) + len(draft._starts)
        assert begun - done <= words.TURN // words.EACH + 1
        done = begun
        assert sum(map(len, draft.units)) <= segments.BLOCK + 8 * words.SLICE
        if is_full:
            draft.settle([[0]] * len(draft.units))
            assert not draft.parts
            assert not draft.units
    draft.settle([[0]] * len(draft.units))
    assert len(draft.texts) == len(texts)


async def test_what_a_cancelled_request_has_learned_is_right() -> None:
    tokenizer = SmgdTokenizer(make(), {})
    text = "".join(LESSONS) * 400
    for limit in range(1, 80, 6):
        with trio.CancelScope() as scope:

            async def leave(scope: trio.CancelScope = scope, turns: int = limit) -> None:
                for _ in range(turns):
                    await trio.lowlevel.checkpoint()
                scope.cancel()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(leave)
                await encode(tokenizer, f"{text}{limit}")
        assert scope.cancelled_caught
        for word, ids in words_known(tokenizer).items():
            assert list(ids) == tokenizer.encode(word)
    assert await encode(tokenizer, text) == tokenizer.encode(text)


async def test_requests_that_take_turns_at_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (words, "TURN", 20), (words, "BLOCK", 60), (words, "SLICE", 12), (words, "SEEN", 9),
        (words, "GENERATION", 8), (segments, "BLOCK", 60), (segments, "ENTRIES", 5),
        (segments, "STRIDE", 7), (stage, "GO_BYTES", 30), (stage, "QUICK_BYTES", 0),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    tokenizer = SmgdTokenizer(make(), {})
    texts = ["<|a|>".join([*LESSONS[i:], *LESSONS[:i]] * 3) for i in range(len(LESSONS))]
    results: dict[str, list[int]] = {}

    async def ask(text: str) -> None:
        results[text] = await TextStage().encode(tokenizer, text)

    for _ in range(4):
        async with trio.open_nursery() as nursery:
            for text in texts:
                nursery.start_soon(ask, text)
        assert results == {text: tokenizer.encode(text) for text in texts}
        results.clear()


def test_cutting_takes_time_in_proportion() -> None:
    for text in (" ", "\n ", "a'", "éa", "\u00a0 \n 1", "'", "漢", "\n  x"):
        long = text * 20_000
        assert "".join(PIECES.findall(long)) == long  # hangs, if it is not linear
