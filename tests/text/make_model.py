"""Small models for tests: a byte-level tokenizer with a few special tokens, in a directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]
CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "lstrip": False, "__type": "AddedToken"},
    "unk_token": "<unk>",
    "image_token": "<|im_start|>",
}


def make_backend(*, adds_bos: bool = False) -> Tokenizer:
    """Return a tokenizer of 256 bytes, one merge ("ab") and the special tokens, 262 in all."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)}
    vocab["ab"] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A",
            pair="<s> $A $B",
            special_tokens=[("<s>", backend.token_to_id("<s>"))],
        )
    return backend


def write_model(directory: Path, backend: Tokenizer | None = None, **files: Any) -> Path:
    """Write a model; `files` are by name without .json, None leaves one out."""
    directory.mkdir(parents=True, exist_ok=True)
    (backend or make_backend()).save(str(directory / "tokenizer.json"))
    contents = {
        "tokenizer_config": CONFIG,
        "config": {"vocab_size": 300, "max_position_embeddings": 4096},
        **files,
    }
    for name, content in contents.items():
        if content is not None:
            (directory / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return directory
