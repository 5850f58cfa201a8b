"""What each token id of a model spells: looked up once, then a dict access for ever.

Most decoders are *layouts*: every token stands for fixed bytes and the text is those bytes joined
and read as UTF-8. Three families are recognised in the decoder's own JSON:

- ByteLevel (GPT-2 and most that came after it): the characters of a token map one to one to bytes;
- Replace*, ByteFallback, Fuse and perhaps Strip (Llama 2, Mistral, Gemma): words with a mark in
  place of the space, and `<0xNN>` for single bytes;
- Metaspace (SentencePiece models without byte tokens).

The latter two may treat the first token of a text differently (its leading space goes). A layout
is believed only after it has agreed with `decode` on a sample of this very vocabulary; every other
decoder has no layout and is asked itself, each time (see `detok`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from tokenizers import Tokenizer

from smgd.text.description import describe, flat

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SAMPLE = 512  # tokens that are compared with `decode` at construction: about 2 ms
_SAMPLE_RUN = 8  # ... in runs of this many, since some decoders look at neighbours
_LAST_ID = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Layout:
    """How a decoder turns one token into bytes; `first_bytes` is for the first token of a text."""

    token_bytes: Callable[[str], bytes]
    first_bytes: Callable[[str], bytes] | None = None


class Bytes(dict[int, bytes]):
    """id -> the token's bytes; empty for ids that are unknown or hidden."""

    def __init__(
        self, backend: Tokenizer, layout: Layout | None, hidden: frozenset[int] = frozenset()
    ) -> None:
        super().__init__(dict.fromkeys(hidden, b""))
        self._backend = backend
        self._layout = layout

    def __missing__(self, token_id: int) -> bytes:
        data = self[token_id] = self._spell(token_id)
        return data

    def _spell(self, token_id: int) -> bytes:
        token = _token(self._backend, token_id)
        if token is None:
            return b""
        if self._layout is None:
            return self._backend.decode([token_id], skip_special_tokens=False).encode()
        return self._layout.token_bytes(token)


class Texts(dict[int, str | None]):
    """id -> the token's text, or None where the bytes are not complete UTF-8 by themselves."""

    def __init__(self, data: Bytes) -> None:
        super().__init__()
        self._bytes = data

    def __missing__(self, token_id: int) -> str | None:
        try:
            text = self._bytes[token_id].decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


class Escapes(dict[int, bytes | None]):
    """id -> the token's text inside a JSON string, or None where `Texts` has None."""

    def __init__(self, texts: Texts) -> None:
        super().__init__()
        self._texts = texts

    def __missing__(self, token_id: int) -> bytes | None:
        text = self._texts[token_id]
        data = self[token_id] = None if text is None else json_inside(text)
        return data


class Untabled(dict[int, None]):
    """A table without entries: what the next token's text is depends on those before it."""

    def __missing__(self, token_id: int) -> None:
        return None


UNTABLED = Untabled()

_json = msgspec.json.Encoder().encode


def json_inside(text: str) -> bytes:
    """Return a text as JSON writes it, without the quotes."""
    return _json(text)[1:-1]


class Vocabulary:
    """The tokens of one model. One per model, shared by all its requests.

    `size` counts all tokens, `added` maps the ids of added tokens to their texts and `special`
    those that `skip_special_tokens` hides. `layout` is None where only `decode` itself will do.
    """

    def __init__(self, backend: Tokenizer) -> None:
        self.backend = backend
        self.size: int = backend.get_vocab_size(with_added_tokens=True)
        tokens = backend.get_added_tokens_decoder()
        self.added: dict[int, str] = {i: token.content for i, token in tokens.items()}
        self.special: dict[int, str] = {i: t.content for i, t in tokens.items() if t.special}
        self.layout: Layout | None = None
        layout = read_layout(describe(backend.decoder))
        if layout is not None and self._agrees(layout):
            self.layout = layout
        shown = Bytes(backend, self.layout)
        hidden = Bytes(backend, self.layout, frozenset(self.special))
        self._bytes = (shown, hidden)
        texts = (Texts(shown), Texts(hidden))
        self._texts = texts if self.layout else (UNTABLED, UNTABLED)
        self._escapes = (
            (Escapes(texts[0]), Escapes(texts[1])) if self.layout else (UNTABLED, UNTABLED)
        )

    def token(self, token_id: int) -> str | None:
        """Return a token as the vocabulary writes it, or None for an id that it does not have."""
        return _token(self.backend, token_id)

    def raw_bytes(self, token_id: int) -> bytes:
        """Return a token's own bytes (maybe a part of a character), special tokens included."""
        return self._bytes[False][token_id]

    def bytes_table(self, skip_special_tokens: bool) -> Bytes:
        """Return the table behind `raw_bytes`, in which special tokens may be empty."""
        return self._bytes[skip_special_tokens]

    def text_table(self, skip_special_tokens: bool) -> Texts | Untabled:
        """Return the table of tokens' texts, in which special tokens may be empty.

        None is the text of a token that has none of its own.
        """
        return self._texts[skip_special_tokens]

    def escape_table(self, skip_special_tokens: bool) -> Escapes | Untabled:
        """Return the table of the same texts inside JSON strings."""
        return self._escapes[skip_special_tokens]

    def first_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes at the start of a text, where a leading space may go."""
        token = self.token(token_id)
        if token is None or self.layout is None or self.layout.first_bytes is None:
            return self.raw_bytes(token_id)
        return self.layout.first_bytes(token)

    def _agrees(self, layout: Layout) -> bool:
        """Compare a layout with `decode`, on added tokens and on ids all over the vocabulary."""
        ids = [*self.added, *range(0, self.size, max(1, self.size // _SAMPLE))]
        known = [(i, token) for i in ids if (token := self.token(i)) is not None]
        for run in _runs(known):
            want = self.backend.decode([i for i, _ in run], skip_special_tokens=False)
            if "\ufffd" not in want and want != _spell_all(layout, [token for _, token in run]):
                return False
        return True


def _token(backend: Tokenizer, token_id: int) -> str | None:
    return backend.id_to_token(token_id) if 0 <= token_id <= _LAST_ID else None


def _runs(known: Sequence[tuple[int, str]]) -> Iterator[Sequence[tuple[int, str]]]:
    """Cut the sample into single tokens, then into runs of neighbours."""
    for length in (1, _SAMPLE_RUN):
        for start in range(0, len(known), length):
            yield known[start : start + length]


def _spell_all(layout: Layout, tokens: list[str]) -> str:
    first = (layout.first_bytes or layout.token_bytes)(tokens[0])
    return (first + b"".join(map(layout.token_bytes, tokens[1:]))).decode(errors="replace")


# ----------------------------------------------------------------------------- the decoders


def read_layout(decoder: dict[str, Any] | None) -> Layout | None:
    """Recognise a decoder from its JSON; None for one whose tokens are not plain bytes."""
    match flat(decoder, "decoders"):
        case [{"type": "ByteLevel"}]:
            return Layout(_byte_level)
        case [{"type": "Metaspace", "replacement": str(mark), "prepend_scheme": str(scheme)}]:
            return _metaspace(mark, strips=scheme != "never")
        case [*replacing, {"type": "ByteFallback"}, {"type": "Fuse"}]:
            return _byte_fallback(replacing, strip=b"")
        case [
            *replacing,
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": str(space), "start": 1, "stop": 0},
        ] if space.isascii():
            return _byte_fallback(replacing, strip=space.encode())
    return None


def _byte_alphabet() -> dict[str, int]:
    """Return the characters by which GPT-2 writes bytes.

    Printable Latin-1 characters stand for themselves; the other bytes, in their order, are
    written as the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    shifted = {chr(0x100 + offset): byte for offset, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_BYTE_OF = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    # An added token may hold other characters; the decoder then takes the whole token literally.
    try:
        return bytes(map(_BYTE_OF.__getitem__, token))
    except KeyError:
        return token.encode()


def _metaspace(mark: str, *, strips: bool) -> Layout:
    return Layout(
        lambda token: token.replace(mark, " ").encode(),
        (lambda token: token.replace(mark, "").encode()) if strips else None,
    )


def _byte_fallback(replacing: Sequence[dict[str, Any]], strip: bytes) -> Layout | None:
    pairs: list[tuple[str, str]] = []
    for step in replacing:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                pairs.append((old, new))
            case _:
                return None

    def token_bytes(token: str) -> bytes:
        for old, new in pairs:
            token = token.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else token.encode()

    return Layout(
        token_bytes, (lambda token: token_bytes(token).removeprefix(strip)) if strip else None
    )
