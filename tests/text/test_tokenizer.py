"""Tokenizers, compared with what transformers makes of the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from smgd.errors import ModelError
from smgd.text.tokenizer import Tokenizer
from tests.text.make_model import CONFIG, SPECIAL, make_backend, write_model
from tests.text.reference import AutoTokenizer

TEXTS = ["", "plain", "ab", " <s>ab</s> <|im_start|>x", "日本語 🦊 é\n\n", "\x00\x7f", "<pad>"]


def reference(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)


def assert_same(directory: Path) -> Tokenizer:
    """Load a directory with both, and compare all that smgd uses."""
    ours, theirs = Tokenizer.from_directory(directory), reference(directory)
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.eos_token_id == theirs.eos_token_id
    for text in TEXTS:
        for special in (False, True):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            for skip in (False, True):
                want = theirs.decode(ids, skip_special_tokens=skip)
                assert ours.decode(ids, skip_special_tokens=skip) == want
    return ours


def test_encodes_and_decodes_as_transformers(tmp_path: Path) -> None:
    tokenizer = assert_same(write_model(tmp_path))
    assert tokenizer.encode("ab</s>") == [256, 258]
    assert tokenizer.decode([256, 258]) == "ab"
    assert tokenizer.decode([256, 258], skip_special_tokens=False) == "ab</s>"
    assert tokenizer.id_of("<s>") == 257
    assert tokenizer.id_of("<nothing>") is None
    assert tokenizer.vocab_size == 262
    assert tokenizer.eos_token_id == 258
    assert tokenizer.vocabulary.special.keys() == {257, 258, 259, 260, 261}
    assert tokenizer.vocabulary.token(256) == "ab"


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_a_text_comes_back(text: str) -> None:
    tokenizer = Tokenizer(make_backend(), {})
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert ids == tokenizer.backend.encode(text, add_special_tokens=False).ids


def test_a_half_of_a_surrogate_pair_is_replaced() -> None:
    # JSON can spell one, so a tool call that a model broke off may have one; UTF-8 cannot.
    tokenizer = Tokenizer(make_backend(), {})
    assert tokenizer.decode(tokenizer.encode("a\ud83d!\ude0a🦊")) == "a\ufffd!\ufffd🦊"


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_bos_token": False},
                                   {"add_eos_token": True}])  # fmt: skip
@pytest.mark.parametrize("adds_bos", [False, True])
def test_the_post_processor_alone_says_whether_bos_is_added(
    tmp_path: Path, flags: dict[str, bool], adds_bos: bool
) -> None:
    backend = make_backend(adds_bos=adds_bos)
    tokenizer = assert_same(write_model(tmp_path, backend, tokenizer_config=CONFIG | flags))
    assert tokenizer.encode("ab", add_special_tokens=True) == [257, 256][not adds_bos :]
    assert tokenizer.encode("ab") == [256]


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path: Path) -> None:
    backend = make_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    config = CONFIG | {"pad_token": "</s>"}
    tokenizer = assert_same(write_model(tmp_path, backend, tokenizer_config=config))
    assert len(tokenizer.encode("plain text")) == 10


@pytest.mark.parametrize(
    "config",
    [
        {"bos_token": None, "eos_token": "</s>", "sep_token": "<s>", "added_tokens": 1},
        {"eos_token": {"content": "</s>", "lstrip": True, "__type": "AddedToken"}},
        {"extra_special_tokens": {"boi_token": "<|im_start|>", "think": "<|im_end|>"}},
        {"additional_special_tokens": ["ab"], "add_prefix_space": False},
        {"extra_special_tokens": ["ab", {"content": "c", "__type": "AddedToken"}]},
        {"eos_token": "ab"},
        {},
    ],
)
def test_special_tokens_of_the_configuration(tmp_path: Path, config: dict[str, Any]) -> None:
    assert_same(write_model(tmp_path, tokenizer_config=config))


def test_special_tokens_of_the_older_file(tmp_path: Path) -> None:
    old = {"eos_token": {"content": "<|im_end|>", "lstrip": False}, "pad_token": "</s>"}
    directory = write_model(tmp_path, special_tokens_map=old)
    tokenizer = assert_same(directory)
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert tokenizer.special_tokens["bos_token"] == "<s>"


def test_no_configuration_at_all(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write_model(tmp_path, tokenizer_config=None, config=None))
    assert tokenizer.special_tokens == {}
    assert tokenizer.eos_token_id is None
    assert tokenizer.vocabulary.special.keys() == {257, 258, 259, 260, 261}


def test_tokens_that_only_the_configuration_has(tmp_path: Path) -> None:
    decoder = {
        str(257 + i): {"content": token, "special": True, "normalized": False}
        for i, token in enumerate([*SPECIAL, "<pad>"])  # tokenizer.json has no <pad> ...
    }
    decoder["260"]["lstrip"] = True  # ... and other properties for this one
    config = CONFIG | {"added_tokens_decoder": decoder, "pad_token": "<pad>"}
    tokenizer = assert_same(write_model(tmp_path, tokenizer_config=config))
    assert tokenizer.id_of("<pad>") == 262
    assert 262 in tokenizer.vocabulary.special
    assert tokenizer.encode("a <|im_start|>") == [*tokenizer.encode("a"), 260]


def test_a_special_token_that_the_vocabulary_lacks_is_plain_text(tmp_path: Path) -> None:
    # transformers would make up an id for it, of which an engine dies.
    config = CONFIG | {"pad_token": "<pad>"}
    tokenizer = Tokenizer.from_directory(write_model(tmp_path, tokenizer_config=config))
    assert tokenizer.special_tokens["pad_token"] == "<pad>"
    assert tokenizer.id_of("<pad>") is None
    assert tokenizer.decode(tokenizer.encode("<pad>")) == "<pad>"


def test_other_kinds_of_models(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"[UNK]": 0, "hello": 1, "</s>": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["</s>"])
    backend.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 2)])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    tokenizer = assert_same(write_model(tmp_path, backend, tokenizer_config=config))
    assert tokenizer.encode("hello there", add_special_tokens=True) == [1, 0, 2]


# ------------------------------------------------------------------------------------- errors


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json: give --tokenizer-path") as error:
        Tokenizer.from_directory(tmp_path)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("names", [["tokenizer.model"], ["vocab.json", "merges.txt"]])
def test_a_slow_tokenizer(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelError, match=f"it only has {', '.join(names)}, .* slow tokenizer"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": "1.0"}', "\xff"])
def test_a_broken_tokenizer(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelError, match=f"cannot read {path}: ") as error:
        Tokenizer.from_directory(tmp_path)
    assert error.value.__cause__ is not None


@pytest.mark.parametrize("content", ["{", "[]", "\xff", "[" * 100_000])
def test_a_broken_configuration(tmp_path: Path, content: str) -> None:
    path = write_model(tmp_path) / "tokenizer_config.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelError, match=f"cannot read {path}: "):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("decoder", [[], {"x": {"content": "y"}}, {"1": {}}, {"1": "s"}, {"1": 2}])
def test_broken_added_tokens(tmp_path: Path, decoder: Any) -> None:
    directory = write_model(tmp_path, tokenizer_config={"added_tokens_decoder": decoder})
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: added_tokens_decoder: "):
        Tokenizer.from_directory(directory)
