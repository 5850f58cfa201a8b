"""The vocabulary: what each id spells, by table or by asking the decoder."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from smgd.text.vocab import Vocabulary, read_layout
from tests.text import small


@pytest.mark.parametrize("name", small.ALL)
def test_layout_is_found_exactly_for_the_decoders_that_have_one(name: str) -> None:
    assert (Vocabulary(small.ALL[name]()).layout is not None) == (name in small.LAYOUTS)


@pytest.mark.parametrize("name", small.LAYOUTS)
def test_every_token_spells_what_decode_says(name: str) -> None:
    backend = small.LAYOUTS[name]()
    vocabulary = Vocabulary(backend)
    for token_id in range(vocabulary.size):
        want = backend.decode([token_id], skip_special_tokens=False)
        assert vocabulary.first_bytes(token_id).decode(errors="replace") == want
    assert vocabulary.size == len(backend.get_vocab())


def test_a_token_that_is_part_of_a_character_has_bytes_but_no_text() -> None:
    vocabulary = Vocabulary(small.byte_level())
    token_id = small.id_of(vocabulary.backend, "ð")  # how GPT-2 writes the byte F0
    assert vocabulary.raw_bytes(token_id) == b"\xf0"
    assert vocabulary.text_table(False)[token_id] is None


@pytest.mark.parametrize("name", ["byte_level", "llama", "gemma"])
def test_raw_bytes_of_an_emoji_join_to_the_emoji(name: str) -> None:
    backend = small.LAYOUTS[name]()
    vocabulary = Vocabulary(backend)
    ids = backend.encode("😀").ids
    assert len(ids) > 1
    assert b"".join(map(vocabulary.raw_bytes, ids)).decode().strip() == "😀"


@pytest.mark.parametrize("name", small.ALL)
def test_special_tokens_are_hidden_in_one_table_only(name: str) -> None:
    vocabulary = Vocabulary(small.ALL[name]())
    assert set(vocabulary.special.values()) >= set(small.SPECIAL)
    for token_id, text in vocabulary.special.items():
        assert vocabulary.raw_bytes(token_id) == text.encode()
        assert vocabulary.bytes_table(True)[token_id] == b""
    tool = small.id_of(vocabulary.backend, "<tool>")
    assert vocabulary.added[tool] == "<tool>"
    assert vocabulary.bytes_table(True)[tool] == b"<tool>"


@pytest.mark.parametrize("name", small.ALL)
@pytest.mark.parametrize("token_id", [-1, 100_000, 2**32 - 1, 2**32, 2**70])
def test_ids_that_the_vocabulary_does_not_have_are_empty(name: str, token_id: int) -> None:
    vocabulary = Vocabulary(small.ALL[name]())
    assert vocabulary.token(token_id) is None
    assert vocabulary.raw_bytes(token_id) == b""
    assert vocabulary.first_bytes(token_id) == b""
    assert not vocabulary.text_table(False)[token_id]


def test_lookups_are_remembered() -> None:
    vocabulary = Vocabulary(small.byte_level())
    table = vocabulary.text_table(True)
    assert len(table) == 0
    assert table[65] == vocabulary.backend.decode([65])
    assert list(table) == [65]


def test_a_layout_that_disagrees_with_decode_is_not_believed() -> None:
    # The library splits <0x+1> as a byte token as well, which no real vocabulary relies on.
    backend = Tokenizer(models.WordLevel({"a": 0, "<0x+1>": 1}, unk_token="a"))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    assert backend.decode([1]) == "\x01"
    assert Vocabulary(backend).layout is None


def test_an_added_token_outside_the_byte_alphabet_is_literal() -> None:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(["two words", "日本"])
    vocabulary = Vocabulary(backend)
    assert [vocabulary.text_table(False)[0], vocabulary.text_table(False)[1]] == [
        "two words",
        "日本",
    ]


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "ByteLevel"}, {"type": "Fuse"}]},
        {
            "type": "Sequence",
            "decoders": [
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 2, "stop": 0},
            ],
        },
        {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"Regex": "▁+"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
    ],
)
def test_unknown_decoders_have_no_layout(decoder: dict[str, Any] | None) -> None:
    assert read_layout(decoder) is None


def test_a_sequence_of_one_is_that_one() -> None:
    assert read_layout({"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}) is not None
