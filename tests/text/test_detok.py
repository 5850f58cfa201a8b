"""Incremental detokenizing: the parts join to what `decode` gives, however they are cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from smgd.core import Piece, Special
from smgd.text.detok import Detokenizer
from smgd.text.vocab import Vocabulary
from tests.text import small

BROKEN = "\ufffd"

SAMPLES = st.text(alphabet="ab .é日中😀👨\u200d👩🇫🇷e\u0301\u0323\n <>|ш", max_size=12)


@cache
def vocabulary(name: str) -> Vocabulary:
    return Vocabulary(small.ALL[name]())


@st.composite
def sequences(draw: st.DrawFn, names: Sequence[str]) -> tuple[str, list[int]]:
    """Draw a tokenizer and ids: real text, tokens at random, bytes at random, strangers."""
    name = draw(st.sampled_from(names))
    backend = vocabulary(name).backend
    parts = st.one_of(
        SAMPLES.map(lambda text: backend.encode(text).ids),
        st.lists(st.integers(0, backend.get_vocab_size() + 2), max_size=6),
        st.lists(st.integers(0, 260), max_size=6),
        st.sampled_from([[token_id] for token_id in vocabulary(name).added]),
        st.sampled_from([[-1], [2**40]]),
    )
    return name, [token_id for part in draw(st.lists(parts, max_size=8)) for token_id in part]


@st.composite
def chunked(draw: st.DrawFn, names: Sequence[str]) -> tuple[str, list[int], list[list[int]]]:
    name, ids = draw(sequences(names))
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    return name, ids, [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def decode(name: str, ids: Sequence[int], *, skip: bool) -> str:
    known = [token_id for token_id in ids if 0 <= token_id < 2**32]
    return vocabulary(name).backend.decode(known, skip_special_tokens=skip)


def run(detokenizer: Detokenizer, chunks: Sequence[Sequence[int]]) -> str:
    return "".join(map(detokenizer.feed, chunks)) + detokenizer.finish()


def singles(ids: Sequence[int]) -> Iterator[list[int]]:
    return ([token_id] for token_id in ids)


@given(drawn=chunked(list(small.ALL)), skip=st.booleans())
def test_deltas_join_to_decode(drawn: tuple[str, list[int], list[list[int]]], skip: bool) -> None:
    name, ids, chunks = drawn
    text = run(Detokenizer(vocabulary(name), skip), chunks)
    want = decode(name, ids, skip=skip)
    assert BROKEN in want or text == want


@given(drawn=chunked(["byte_level"]), skip=st.booleans())
def test_byte_level_equals_decode_even_where_it_is_broken(
    drawn: tuple[str, list[int], list[list[int]]], skip: bool
) -> None:
    name, ids, chunks = drawn
    assert run(Detokenizer(vocabulary(name), skip), chunks) == decode(name, ids, skip=skip)


@given(drawn=chunked(list(small.ALL)), skip=st.booleans())
def test_batching_never_matters(drawn: tuple[str, list[int], list[list[int]]], skip: bool) -> None:
    name, ids, chunks = drawn
    known = vocabulary(name)
    by_one = run(Detokenizer(known, skip), list(singles(ids)))
    assert run(Detokenizer(known, skip), chunks) == by_one
    assert run(Detokenizer(known, skip), [ids]) == by_one


@given(
    drawn=sequences(list(small.ALL)),
    prompt=st.lists(st.integers(0, 420), min_size=1, max_size=20),
    skip=st.booleans(),
)
def test_after_a_prompt_the_text_continues_the_prompts(
    drawn: tuple[str, list[int]], prompt: list[int], skip: bool
) -> None:
    name, ids = drawn
    text = run(Detokenizer(vocabulary(name), skip, prompt), list(singles(ids)))
    before, both = decode(name, prompt, skip=skip), decode(name, prompt + ids, skip=skip)
    assert BROKEN in before + both or before + text == both


@pytest.mark.parametrize("name", ["byte_level", "llama", "windowed_bytes", "windowed_byte_level"])
def test_a_character_that_the_prompt_left_unfinished_is_finished(name: str) -> None:
    known = vocabulary(name)
    ids = known.backend.encode("a😀").ids
    assert run(Detokenizer(known, True, ids[:-2]), [ids[-2:]]) == "😀"


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    merged: list[Piece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if isinstance(piece, str) and isinstance(last, str):
            merged[-1] = last + piece
        else:
            merged.append(piece)
    return merged


@given(drawn=chunked(list(small.ALL)), skip=st.booleans())
def test_pieces_keep_special_tokens_whole_under_any_batching(
    drawn: tuple[str, list[int], list[list[int]]], skip: bool
) -> None:
    name, ids, chunks = drawn
    known = vocabulary(name)
    results = []
    for cut in (chunks, [ids], list(singles(ids))):
        detokenizer = Detokenizer(known, skip)
        pieces = [piece for chunk in cut for piece in detokenizer.feed_pieces(chunk)]
        assert "" not in pieces
        tail = detokenizer.finish()
        results.append(joined([*pieces, tail] if tail else pieces))
    assert results[0] == results[1] == results[2]
    got = [piece for piece in results[0] if isinstance(piece, Special)]
    assert got == [Special(i, known.special[i]) for i in ids if i in known.special]
    text = "".join(piece for piece in results[0] if isinstance(piece, str))
    want = decode(name, ids, skip=True)
    assert not skip or BROKEN in text + want or text == want


def test_special_tokens_are_told_from_text_that_spells_the_same() -> None:
    known = vocabulary("byte_level")
    end = small.id_of(known.backend, "<|end|>")
    spelled = [small.id_of(known.backend, c) for c in "<|end|>"]
    pieces = Detokenizer(known).feed_pieces([*spelled, end, *spelled])
    assert pieces == ["<|end|>", Special(end, "<|end|>"), "<|end|>"]


def test_an_unfinished_character_before_a_special_token_is_given_up_in_pieces_only() -> None:
    known = vocabulary("byte_level")
    end = small.id_of(known.backend, "<|end|>")
    euro = [small.id_of(known.backend, c) for c in "âĤ¬"]
    assert known.backend.decode(euro) == "€"
    assert Detokenizer(known).feed([euro[0], end, *euro[1:]]) == "€"
    pieces = Detokenizer(known).feed_pieces([euro[0], end, *euro[1:]])
    assert pieces == [BROKEN, Special(end, "<|end|>"), BROKEN * 2]


@pytest.mark.parametrize("name", ["byte_level", "llama", "windowed_bytes", "windowed_byte_level"])
def test_an_emoji_appears_with_its_last_token(name: str) -> None:
    known = vocabulary(name)
    ids = known.backend.encode("a😀").ids
    parts = [Detokenizer(known, True, [65]).feed(ids[:n]) for n in range(1, len(ids) + 1)]
    assert [part.strip() for part in parts[-4:]] == ["a", "a", "a", "a😀"]


@pytest.mark.parametrize("name", ["byte_level", "llama", "gemma", "windowed_bytes"])
def test_what_is_unfinished_at_the_end_is_flushed_once(name: str) -> None:
    known = vocabulary(name)
    ids = known.backend.encode("x😀").ids
    detokenizer = Detokenizer(known)
    assert detokenizer.feed(ids[:-1]).strip() == "x"
    assert set(detokenizer.finish()) == {BROKEN}
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("name", ["llama", "unigram"])
def test_the_first_space_goes_unless_a_prompt_came_before(name: str) -> None:
    known = vocabulary(name)
    ids = known.backend.encode("is it").ids
    assert run(Detokenizer(known), [ids]) == "is it"
    assert run(Detokenizer(known, True, ids), [ids]) == " is it"
    assert run(Detokenizer(known, True, list(known.special)), [ids]) == "is it"
    strangers = [2**40, -1, *known.special]
    assert run(Detokenizer(known), [*singles(strangers), ids]) == "is it"


def test_long_streams_of_byte_tokens_stay_right_in_a_window() -> None:
    known = vocabulary("windowed_bytes")
    text = "日本語👨‍👩‍👧ш" * 40
    ids = known.backend.encode(text).ids
    assert run(Detokenizer(known), list(singles(ids))) == decode("windowed_bytes", ids, skip=True)


def test_a_window_recovers_from_bytes_that_are_no_text() -> None:
    known = vocabulary("windowed_bytes")
    euro, a = known.backend.encode("€").ids[-3:], small.id_of(known.backend, "a")
    text = run(Detokenizer(known), list(singles([*euro, *euro[:2], a, a, a, *euro])))
    assert text == "€" + BROKEN * 2 + "aaa€"


@pytest.mark.parametrize("tail", [["a"], [], ["a", "Ĥ", "Ĥ", "Ĥ", "Ĥ"]])
def test_a_window_without_a_clean_cut_stays_bounded(tail: list[str]) -> None:
    known = vocabulary("windowed_byte_level")
    # A continuation byte, never text by itself.
    ids = [small.id_of(known.backend, token) for token in ["Ĥ", *tail]] * 100
    detokenizer = Detokenizer(known)
    assert run(detokenizer, list(singles(ids))) == decode("windowed_byte_level", ids, skip=True)
    assert len(detokenizer._stream._window) <= 64  # type: ignore[union-attr]


def test_a_window_that_never_ends_on_a_whole_character_loses_none() -> None:
    backend = Tokenizer(models.BPE(vocab={"â": 0, "Ĥ¬â": 1, "Ĥ¬": 2}, merges=[]))
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    ids = [0, *[1] * 150, 2]
    assert backend.decode(ids) == "€" * 151
    known = Vocabulary(backend)
    assert known.layout is None
    assert run(Detokenizer(known), list(singles(ids))) == "€" * 151
