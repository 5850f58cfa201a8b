"""Train the built-in model's tokenizer and write its files: `python tools/train_builtin.py`.

A byte-level BPE like those of the models that people serve: no normalizer, no token added in front,
single digits, special tokens of the ChatML family. Training is deterministic, so the files in
`smgd/text/builtin/` can be made again byte for byte; a test does.

The chat template is written by hand and is not touched here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).parent))

from builtin_corpus import corpus

TARGET = Path(__file__).parent.parent / "smgd" / "text" / "builtin"

VOCAB_SIZE = 4096
MAX_LENGTH = 8192
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = "<|im_end|>"
PAD = "<|endoftext|>"
# Text to a client, but one token each to a parser.
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def train() -> Tokenizer:
    """Return the trained tokenizer: special tokens first, markers last, `VOCAB_SIZE` in all."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(MARKERS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer=trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in MARKERS])
    return tokenizer


def files(tokenizer: Tokenizer) -> dict[str, str]:
    """Return what belongs into the model's directory: file names and texts."""
    eos = tokenizer.token_to_id(EOS)
    size = tokenizer.get_vocab_size()
    if size != VOCAB_SIZE:
        raise SystemExit(f"the corpus is too small: {size} tokens instead of {VOCAB_SIZE}")
    return {
        "tokenizer.json": tokenizer.to_str(pretty=False) + "\n",
        "config.json": _json(
            {
                "architectures": ["SmgdSimForCausalLM"],
                "model_type": "smgd-sim",
                "vocab_size": size,
                "max_position_embeddings": MAX_LENGTH,
                "eos_token_id": eos,
                "pad_token_id": tokenizer.token_to_id(PAD),
            }
        ),
        "generation_config.json": _json(
            {"eos_token_id": eos, "pad_token_id": tokenizer.token_to_id(PAD)}
        ),
        "tokenizer_config.json": _json(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": MAX_LENGTH,
                "bos_token": None,
                "eos_token": EOS,
                "pad_token": PAD,
                "unk_token": None,
                "additional_special_tokens": ["<|im_start|>"],
                "clean_up_tokenization_spaces": False,
            }
        ),
    }


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def main() -> None:
    """Write the files."""
    TARGET.mkdir(parents=True, exist_ok=True)
    for name, text in files(train()).items():
        TARGET.joinpath(name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
