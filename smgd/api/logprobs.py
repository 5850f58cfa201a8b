"""Log-probabilities as OpenAI's two completion surfaces show them.

A row's first column is the token itself, the others are the alternatives from the top; the token is
often among those as well. `bytes` are the token's own, so that a client can put characters together
that several tokens share; `token` is their text, with U+FFFD for what is no text by itself.
"""

from __future__ import annotations

import math
from typing import Any

from smgd.core import TokenLogprobs
from smgd.text.vocab import Vocabulary

# vLLM's stand-in for minus infinity, which JSON cannot say.
LOWEST = -9999.0


def finite(value: float) -> float:
    """Return a log-probability that JSON can say."""
    return value if math.isfinite(value) else LOWEST


class ChatLogprobs:
    """`{"content": [{token, logprob, bytes, top_logprobs}]}`; `top` alternatives each."""

    def __init__(self, vocabulary: Vocabulary, top: int) -> None:
        self._vocabulary = vocabulary
        self._top = top

    def render(self, rows: list[TokenLogprobs]) -> dict[str, Any]:
        """Return the object for these tokens."""
        return {"content": [self._token(row) for row in rows], "refusal": None}

    def _token(self, row: TokenLogprobs) -> dict[str, Any]:
        ranked = zip(row.ids[1 : self._top + 1], row.logprobs[1 : self._top + 1], strict=True)
        return {
            **self._entry(row.ids[0], row.logprobs[0]),
            "top_logprobs": [self._entry(token, logprob) for token, logprob in ranked],
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._vocabulary.raw_bytes(token_id)
        text = raw.decode(errors="replace")
        return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}


class CompletionLogprobs:
    """`{tokens, token_logprobs, top_logprobs, text_offset}`; offsets are in characters.

    `top_logprobs` has the token itself too, as in vLLM. Offsets go on from call to call.
    """

    def __init__(self, vocabulary: Vocabulary, top: int) -> None:
        self._vocabulary = vocabulary
        self._top = top
        self._offset = 0

    def render(self, rows: list[TokenLogprobs]) -> dict[str, Any]:
        """Return the object for these tokens."""
        tokens = [self._text(row.ids[0]) for row in rows]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "text_offset": offsets,
            "token_logprobs": [finite(row.logprobs[0]) for row in rows],
            "tokens": tokens,
            "top_logprobs": [self._ranked(row) for row in rows],
        }

    def _ranked(self, row: TokenLogprobs) -> dict[str, float]:
        ranked = zip(row.ids[: self._top + 1], row.logprobs[: self._top + 1], strict=True)
        return {self._text(token): finite(logprob) for token, logprob in ranked}

    def _text(self, token_id: int) -> str:
        return self._vocabulary.raw_bytes(token_id).decode(errors="replace")
