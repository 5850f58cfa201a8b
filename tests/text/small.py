"""Small tokenizers of every family, trained in a moment on a few lines in several scripts."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

TEXT = [
    "The capital of France is Paris. It's a city, isn't it? Yes!",
    "def main(argv):\n    return [x for x in argv if x]\n\n\tprint('done')",
    "日本語のテキスト。東京は日本の首都です。 中文也可以。",
    "Emoji 😀😃 and families 👨‍👩‍👧, flags 🇫🇷, e\u0301 and combining a\u0308\u0323.",
    "Ünïcödé, naïve café, ελληνικά, русский текст, עברית, العربية, हिन्दी.",
    "<think>well</think> plain words that look like <|end|> markers </s>",
]

SPECIAL = ["<s>", "<|end|>", "<|call|>"]


def id_of(backend: Tokenizer, token: str) -> int:
    """Return the id of a token that is there."""
    token_id = backend.token_to_id(token)
    assert token_id is not None, token
    return token_id


def _with_added(backend: Tokenizer) -> Tokenizer:
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    backend.add_tokens(
        [
            AddedToken("<tool>", normalized=False),
            AddedToken("</tool>", lstrip=True, rstrip=True, normalized=False),
            AddedToken("two words", normalized=False),
            AddedToken("日本", normalized=False),
        ]
    )
    return backend


@cache
def byte_level() -> Tokenizer:
    """GPT-2 style, as most models today."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT, trainer)
    return _with_added(backend)


def _byte_fallback(*, strip: bool) -> Tokenizer:
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    learner.train_from_iterator(TEXT[:2], trainers.BpeTrainer(vocab_size=150, show_progress=False))
    learned = json.loads(learner.to_str())["model"]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned["vocab"]]
    backend = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge) for merge in learned["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = learner.normalizer
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(
        [*parts, decoders.Strip(content=" ", left=1, right=0)] if strip else parts
    )
    return _with_added(backend)


@cache
def llama() -> Tokenizer:
    """Llama 2 and Mistral: bytes as tokens, and the text's first space stripped."""
    return _byte_fallback(strip=True)


@cache
def gemma() -> Tokenizer:
    """Gemma: the same without stripping."""
    return _byte_fallback(strip=False)


@cache
def unigram() -> Tokenizer:
    """T5 style: Unigram with a Metaspace decoder, no byte tokens."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    return _with_added(backend)


@cache
def word_piece() -> Tokenizer:
    """BERT style: a decoder with no layout."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]"], show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    return _with_added(backend)


@cache
def suffix_bpe() -> Tokenizer:
    """CLIP style: a mark ends words, and the decoder treats the last token of a text apart."""
    backend = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(vocab_size=300, end_of_word_suffix="</w>", show_progress=False)
    backend.train_from_iterator(TEXT, trainer)
    return _with_added(backend)


@cache
def undecoded() -> Tokenizer:
    """No decoder at all: tokens are joined with spaces."""
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1, "cat": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return _with_added(backend)


@cache
def windowed_bytes() -> Tokenizer:
    """Byte tokens behind a decoder that smgd does not know: the hardest case for a window."""
    backend = Tokenizer.from_str(gemma().to_str())
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Replace("\u0000", "\u0000"),
        ]
    )
    return backend


@cache
def windowed_byte_level() -> Tokenizer:
    """ByteLevel behind a decoder that smgd does not know."""
    backend = Tokenizer.from_str(byte_level().to_str())
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return backend


LAYOUTS = {"byte_level": byte_level, "llama": llama, "gemma": gemma, "unigram": unigram}
WINDOWS = {
    "word_piece": word_piece,
    "suffix_bpe": suffix_bpe,
    "undecoded": undecoded,
    "windowed_bytes": windowed_bytes,
    "windowed_byte_level": windowed_byte_level,
}
ALL = LAYOUTS | WINDOWS
