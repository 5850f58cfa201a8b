"""A model's tokenizer: text to ids and back, and which tokens are special.

Only fast tokenizers, that is `tokenizer.json`, as transformers 5 reads them: whether BOS or EOS is
added is said by the file's post-processor alone (`add_bos_token` and `add_eos_token` of
tokenizer_config.json have no effect beside it), its truncation and padding are for training, and
tokens that tokenizer_config.json calls special are, even where tokenizer.json does not say so.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from smgd.errors import ModelError
from smgd.text.cuts import divide
from smgd.text.hub import read_json
from smgd.text.segments import segment_cache
from smgd.text.vocab import Vocabulary
from smgd.text.words import word_cache

# The library's own threads double what several short texts take; it looks when it first encodes.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# What slow tokenizers keep their vocabulary in.
_SLOW_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt",
               "tiktoken.model", "tekken.json")  # fmt: skip


class Tokenizer:
    """One model's tokenizer. Immutable, and safe to be used in several threads.

    `special_tokens` are the named ones (bos_token, eos_token, ...) as chat templates want them.
    `vocab_size` counts tokens; `longest_token` is in characters, and no token stands for more of a
    text than that; `eos_token_id` is None if no token is named so. `segments` remembers the ids of
    pieces of prompts and `words` those of words, where this tokenizer allows it; both belong to the
    event loop's thread alone.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> None:
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.vocabulary = Vocabulary(backend)
        self.vocab_size: int = self.vocabulary.size
        self.eos_token_id = self.id_of(special_tokens.get("eos_token", ""))
        # Clients tend to send the same stop strings with every request.
        # Not of a method: nothing of a tokenizer may hold it, or it outlives its model.
        self.only_token = lru_cache(maxsize=1024)(partial(_only_token, backend))
        self.longest_token = max(map(len, backend.get_vocab()), default=1)
        self.segments = segment_cache(backend)
        self.words = None if self.segments is None else word_cache(backend)

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Load the tokenizer in a directory. Blocks, up to a second. Raises `ModelError`."""
        backend = _load_backend(directory)
        config = read_json(directory / "tokenizer_config.json")
        if "added_tokens_decoder" in config:
            _add_decoder(backend, config["added_tokens_decoder"], directory)
        else:  # older models
            config |= read_json(directory / "special_tokens_map.json")
        _mark_special(backend, [*_named(config).values(), *_unnamed(config)])
        return cls(backend, {name: _content(token) for name, token in _named(config).items()})

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text. Releases the GIL, which the backend's `encode` would hold.

        What a chat template has rendered is encoded without special tokens: it has its own.
        """
        return _encode(self.backend, [text], add_special_tokens)[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of several texts, without special tokens. Releases the GIL as well."""
        return _encode(self.backend, texts, add_special_tokens=False)

    def encode_units(self, units: Sequence[str]) -> list[list[int]]:
        """Return the ids of units of `words`, encoded as one text: faster than one by one."""
        if self.words is None:
            return self.encode_all(units)
        found = divide(self.encode(self.words.separator.join(units)), self.words.separator_id)
        # Not so if a unit has the separator's id, as one may that is the unknown token.
        return found if len(found) == len(units) else self.encode_all(units)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids; ids that no token has are skipped."""
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def id_of(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it."""
        return self.backend.token_to_id(token)


def _encode(
    backend: tokenizers.Tokenizer, texts: Sequence[str], add_special_tokens: bool
) -> list[list[int]]:
    encode = partial(backend.encode_batch_fast, add_special_tokens=add_special_tokens)
    try:
        encodings = encode(texts)
    except TypeError:  # half of a surrogate pair: JSON can spell one, UTF-8 cannot
        encodings = encode([_without_surrogates(text) for text in texts])
    return [encoding.ids for encoding in encodings]


def _only_token(backend: tokenizers.Tokenizer, text: str) -> int | None:
    """Return the id of the token that a text is, if it is one and that token nothing else."""
    ids = _encode(backend, [text], add_special_tokens=False)[0]
    if len(ids) != 1 or backend.decode(ids, skip_special_tokens=False) != text:
        return None
    return ids[0]


def _without_surrogates(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _load_backend(directory: Path) -> tokenizers.Tokenizer:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelError(_missing(directory))
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more special
        raise ModelError(f"cannot read {path}: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _missing(directory: Path) -> str:
    found = ", ".join(name for name in _SLOW_FILES if (directory / name).exists())
    hint = "give --tokenizer-path a directory that has one"
    if found:
        hint = (
            f"it only has {found}, the files of a slow tokenizer. Convert it once with "
            f"transformers (AutoTokenizer.from_pretrained(...).save_pretrained(...)), or {hint}"
        )
    return f"{directory} has no tokenizer.json: {hint}"


def _named(config: dict[str, Any]) -> dict[str, Any]:
    """Return the named special tokens of a configuration: a string or a description each."""
    tokens = {name: token for name, token in config.items() if name.endswith("_token")}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        tokens |= extra
    return {name: token for name, token in tokens.items() if _content(token)}


def _unnamed(config: dict[str, Any]) -> Iterator[Any]:
    for name in ("additional_special_tokens", "extra_special_tokens"):
        tokens = config.get(name)
        if isinstance(tokens, list):
            yield from filter(_content, tokens)


def _content(token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _mark_special(backend: tokenizers.Tokenizer, tokens: list[Any]) -> None:
    """Make tokens of the vocabulary special. Others have no id that the model knows: left out."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in tokens:
        text = _content(token)
        if text not in known and backend.token_to_id(text) is not None:
            backend.add_special_tokens([AddedToken(text, special=True)])


def _add_decoder(backend: tokenizers.Tokenizer, decoder: Any, directory: Path) -> None:
    """Add the tokens that tokenizer_config.json has beyond tokenizer.json, in order of their ids.

    A token that tokenizer.json has too takes the properties that it has here.
    """
    try:
        rows = sorted((int(index), row) for index, row in decoder.items())
        tokens = {index: _added_token(row) for index, row in rows}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        path = directory / "tokenizer_config.json"
        raise ModelError(f"cannot read {path}: added_tokens_decoder: {error!r}") from error
    present = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    for index, token in tokens.items():
        if repr(token) not in present and backend.token_to_id(token.content) in {None, index}:
            backend.add_tokens([token])


def _added_token(row: dict[str, Any]) -> AddedToken:
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(row["content"], **{name: row[name] for name in names if name in row})
