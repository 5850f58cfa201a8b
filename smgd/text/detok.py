"""Token ids to text, a few at a time, so that the parts join to what `decode` gives for all.

Two strategies, chosen by the vocabulary. With a layout (see `vocab`) a token that is complete UTF-8
costs one dict access; the rest goes through the bytes, of which an unfinished character is kept
for the next call. Without one, a window of the last tokens is decoded again for each token and
what is new in it is the text: microseconds in place of a tenth of one, but nothing is assumed.

Text that was given out is never taken back. Bytes that can no longer become a character are given
out as U+FFFD, as `decode` does; how many of them is only defined for layouts of type ByteLevel.
How ids are divided into calls never changes the joined text.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence

from smgd.core import Piece, Special
from smgd.text.vocab import UNTABLED, Vocabulary, json_inside

_NO_TABLES = (UNTABLED, UNTABLED)
_BROKEN = "\ufffd"
_CONTEXT = 16  # prompt tokens that are looked at: far more than any decoder's memory
_MAX_BROKEN = 3  # an unfinished UTF-8 character is at most three bytes, or tokens, or U+FFFDs
_WINDOW = 10  # tokens decoded again at most, ordinarily
_WINDOW_LIMIT = 64  # ... and where no clean place to cut is found
_TAIL = 4  # tokens kept as context when a window is cut


class Detokenizer:
    """The text of one sequence. Ids that the vocabulary does not have are silent.

    With `prompt_ids` the text continues the prompt's: a leading space that the decoder drops at
    the start of a text is kept, and a character that the prompt left unfinished is finished.
    Without, the text is that of the generated ids alone.
    """

    __slots__ = ("_escapes", "_special", "_stream", "_tables", "_texts")

    def __init__(
        self,
        vocabulary: Vocabulary,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        make = WindowStream if vocabulary.layout is None else ByteStream
        self._stream: ByteStream | WindowStream = make(vocabulary, skip_special_tokens)
        self._stream.feed(prompt_ids[-_CONTEXT:])
        self._special = vocabulary.special
        self._tables = (
            vocabulary.text_table(skip_special_tokens),
            vocabulary.escape_table(skip_special_tokens),
        )
        self._choose_tables()

    def _choose_tables(self) -> None:
        """Let tables answer for a lone token only while nothing earlier bears on its text."""
        self._texts, self._escapes = self._tables if self._stream.clean else _NO_TABLES

    def feed_json(self, ids: Sequence[int]) -> bytes:
        """Return the same as `feed`, as it stands inside a JSON string."""
        if len(ids) == 1:
            data = self._escapes[ids[0]]
            if data is not None:
                return data
        return json_inside(self.feed(ids))

    def feed(self, ids: Sequence[int]) -> str:
        """Return the text that `ids` add; what is not yet a whole character comes later."""
        if len(ids) == 1:
            text = self._texts[ids[0]]
            if text is not None:
                return text
        text = self._stream.feed(ids)
        self._choose_tables()
        return text

    def feed_pieces(self, ids: Sequence[int]) -> list[Piece]:
        """Return the same as `feed`, but every special token as a `Special` in its place.

        They are there even when `skip_special_tokens` hides them from text: parsers need them.
        Text never runs across one, so an unfinished character before it is given up.
        """
        special = self._special
        if special.keys().isdisjoint(ids):
            text = self.feed(ids)
            return [text] if text else []
        pieces: list[Piece] = []
        run: list[int] = []
        for token_id in ids:
            if token_id not in special:
                run.append(token_id)
                continue
            if text := self.feed(run) + self.finish():
                pieces.append(text)
            self.feed((token_id,))  # in its place for decoders that count; its text is known
            pieces.append(Special(token_id, special[token_id]))
            run = []
        if text := self.feed(run):
            pieces.append(text)
        return pieces

    def finish(self) -> str:
        """Return what was held back, since nothing follows that could complete it."""
        text = self._stream.finish()
        self._choose_tables()
        return text


class ByteStream:
    """Detokenizes by layout. `clean` tells that the next token depends on none before it."""

    __slots__ = ("_at_start", "_bytes", "_pending", "_vocabulary", "clean")

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._bytes = vocabulary.bytes_table(skip_special_tokens)
        self._pending = b""
        self._at_start = vocabulary.layout is not None and bool(vocabulary.layout.first_bytes)
        self.clean = not self._at_start

    def feed(self, ids: Sequence[int]) -> str:
        """Return the whole characters among the bytes so far."""
        data = self._start(ids) if self._at_start else self._join(ids)
        if self._pending:
            data = self._pending + data
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        self.clean = not (self._pending or self._at_start)
        return text

    def finish(self) -> str:
        """Return U+FFFD for an unfinished character."""
        text, _ = utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        self.clean = not self._at_start
        return text

    def _join(self, ids: Sequence[int]) -> bytes:
        return b"".join(map(self._bytes.__getitem__, ids))

    def _start(self, ids: Sequence[int]) -> bytes:
        """Join the bytes, of which the first token to show anything has its own way."""
        for index, token_id in enumerate(ids):
            if self._bytes[token_id]:
                self._at_start = False
                first = self._vocabulary.first_bytes(token_id)
                return first + self._join(ids[index + 1 :])
        return b""


class WindowStream:
    """Detokenizes by decoding a window of the last tokens again, whatever the decoder does.

    The window always starts at the same kind of place in both decodings that are compared, so
    what a decoder does to the start of a text cancels out.
    """

    __slots__ = ("_given", "_settled", "_skip", "_vocabulary", "_window", "clean")

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._given = ""  # the part of the window's text that was given out
        self._settled = 0  # tokens in the window after which all of its text was given out
        self.clean = False

    def feed(self, ids: Sequence[int]) -> str:
        """Return the text that `ids` add, each in its turn."""
        return "".join([self._step(token_id) for token_id in ids])

    def finish(self) -> str:
        """Return what was held back and start afresh after it."""
        text = self._decode(self._window)
        if text.startswith(self._given):
            held = text[len(self._given) :]
        else:
            held = self._decode(self._window[self._settled :])
        self._given, self._settled = text, len(self._window)
        return held

    def _step(self, token_id: int) -> str:
        if self._is_silent(token_id):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.startswith(self._given):
            # Byte tokens after a whole character: the decoder gives up the group until the next
            # character is whole as well. If that does not come, the group is left behind.
            if len(self._window) - self._settled <= _MAX_BROKEN:
                return ""
            del self._window[: self._settled]
            self._given, self._settled, text = "", 0, self._decode(self._window)
        end = max(len(self._given), _stable_length(text))
        new, self._given = text[len(self._given) : end], text[:end]
        if end == len(text):
            self._settled = len(self._window)
        if len(self._window) >= (_WINDOW if end == len(text) else _WINDOW_LIMIT):
            self._cut()
        return new

    def _is_silent(self, token_id: int) -> bool:
        """Tell whether `decode` would drop the token: such a one must not start a window."""
        vocabulary = self._vocabulary
        return (self._skip and token_id in vocabulary.special) or not vocabulary.token(token_id)

    def _cut(self) -> None:
        """Shorten the window to a tail that starts with a whole, visible character."""
        window = self._window
        for length in range(_TAIL, _TAIL + _MAX_BROKEN + 1):
            text = self._decode(window[-length:])
            if _BROKEN not in text and text.strip():
                break
        else:
            if len(window) < _WINDOW_LIMIT:
                return
        self._window, self._given = window[-length:], text[: _stable_length(text)]
        self._settled = length if self._given == text else length - 1

    def _decode(self, ids: list[int]) -> str:
        return self._vocabulary.backend.decode(ids, skip_special_tokens=self._skip)


def _stable_length(text: str) -> int:
    """Return the length of a text without the U+FFFDs that may still become a character."""
    if not text.endswith(_BROKEN):
        return len(text)
    whole = len(text.rstrip(_BROKEN))
    return max(whole, len(text) - _MAX_BROKEN)
