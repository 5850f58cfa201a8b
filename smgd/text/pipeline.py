"""From engine outputs to what a client sees, for one sequence: ids, text, stops, parser, events.

Composed once per request from what the request asks for. A request without parser, logprobs and
token ids is `plain`: until its last delta, `feed_text` or `feed_json` is all it needs, one call
that costs little more than the token's dict access, or with stop strings than the look for them.
Everything else, and every last delta, goes through `feed`. Text is the same whether an answer is
fed token by token or whole.

What ends a sequence, in this order: a stop string that the text completes, then the engine's own
word. Stop strings are matched on the text before the parser sees it, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from smgd.core import Delta, Event, Finish, GenerationRequest, Parser, Piece, TokenLogprobs
from smgd.text.detok import Detokenizer
from smgd.text.stops import StopMatcher
from smgd.text.vocab import Vocabulary, json_inside


class PipelineOutput(msgspec.Struct, gc=False):
    """What one delta made visible: `text` without a parser, `events` with one.

    `finish` is set once, in the last output; with a parser it is the last event as well. `abort`
    tells to abort the request at the engine, which does not know that it is over; it is true at
    most once. `token_ids` and `logprobs` (one row per id) are those of all counted tokens that
    were not given yet; tokens whose text is held back wait for the next output that shows
    something, at the latest the last.
    """

    text: str = ""
    events: list[Event] = []
    finish: Finish | None = None
    abort: bool = False
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []


class TextPipeline:
    """One sequence's way from token ids to text or events.

    A stop id that stands for a stop string (`StopRules.token_strings`) is reported as the string.
    With `continues_prompt` the text goes on where the prompt ends (see `Detokenizer`), as in
    completions; without, it stands alone.

    `completion_tokens` counts the tokens generated so far, up to and with the one that completed a
    stop string. `finish` is None until the end; all that comes after it is ignored.
    """

    __slots__ = (
        "_detok", "_feed_ids", "_feed_json", "_ids", "_matcher", "_parser", "_request", "_rows",
        "_special", "_strings", "completion_tokens", "finish", "plain",
    )  # fmt: skip

    def __init__(
        self,
        vocabulary: Vocabulary,
        request: GenerationRequest,
        parser: Parser | None = None,
        *,
        continues_prompt: bool = False,
    ) -> None:
        stop, output = request.stop, request.output
        prompt_ids = request.prompt_ids if continues_prompt else ()
        self._detok = Detokenizer(vocabulary, output.skip_special_tokens, prompt_ids)
        self._feed_ids = self._detok.feed
        self._feed_json = self._detok.feed_json
        self._matcher: StopMatcher | None = None
        if stop.strings:
            self._matcher = StopMatcher(stop.strings, stop.include_in_output)
            self._matcher.active = request.sampling.min_tokens == 0
        self._parser = parser
        self._request = request
        self._strings = stop.token_strings
        self._ids: list[int] = []
        self._rows: list[TokenLogprobs] = []
        self._special = vocabulary.special
        wished = parser is not None or output.logprobs is not None or output.token_ids
        self.plain = not wished
        self.completion_tokens = 0
        self.finish: Finish | None = None

    def feed_text(self, ids: Sequence[int]) -> str:
        """Take ids that are not the last; return their text. Only for a `plain` pipeline.

        If `finish` is set by it, a stop string was found, and the request is to be aborted at the
        engine. The ids are not kept for `PipelineOutput.token_ids`: the caller has them.
        """
        if self.finish is not None:
            return ""
        text, used = self._watch(ids)
        self.completion_tokens += used
        if self._matcher is not None and self._matcher.matched is not None:
            self.finish = Finish("stop", self._matcher.matched)
        return text

    def feed_json(self, ids: Sequence[int]) -> bytes:
        """Return the same as `feed_text`, as it stands inside a JSON string."""
        if self._matcher is None and self.finish is None:
            self.completion_tokens += len(ids)
            return self._feed_json(ids)
        return json_inside(self.feed_text(ids))

    def feed(self, delta: Delta) -> PipelineOutput:
        """Take what the engine says; return what the client may see of it now."""
        if self.finish is not None:
            return PipelineOutput()
        ended, matcher = delta.finish is not None, self._matcher
        pieces, used = self._advance(self._shown_ids(delta) if ended else delta.ids)
        if ended and (matcher is None or matcher.matched is None):
            pieces += self._flush()
        matched = matcher.matched if matcher is not None else None
        if matched is not None:
            self.finish = Finish("stop", matched)
        else:
            used = len(delta.ids)
            if delta.finish is not None:
                self.finish = Finish(delta.finish, self._stop_reason(delta))
        self._count(delta, used)
        output = self._output(pieces)
        output.abort = matched is not None and not ended
        return output

    def _shown_ids(self, delta: Delta) -> list[int]:
        """Leave out the token that stopped the engine, unless its text is wanted.

        Only if it is known as such: an engine may also stop because a grammar is complete. One that
        stands for a stop string is left to the matcher: its text may be more (a leading space).
        """
        ids, request = delta.ids, self._request
        if delta.finish != "stop" or not ids or request.stop.include_in_output:
            return ids
        last, sampling = ids[-1], request.sampling
        if last in self._strings and last not in self._special:
            return ids
        if (
            last in (delta.stop_reason, sampling.eos_token_id)
            or last in sampling.stop_token_ids
            or last in sampling.all_stop_token_ids
            or last in self._special
        ):
            return ids[:-1]
        return ids

    def _advance(self, ids: list[int]) -> tuple[list[Piece], int]:
        """Turn ids into pieces as far as a stop string; return also how many ids that took."""
        if self._parser is None:
            text, used = self._watch(ids)
            return ([text] if text else []), used
        matcher = self._matcher
        if matcher is None:
            return self._detok.feed_pieces(ids), len(ids)
        pieces: list[Piece] = []
        for used, token_id in enumerate(ids, 1):
            if not matcher.active:
                self._activate(matcher, used)
            for piece in self._detok.feed_pieces((token_id,)):
                pieces += self._guard(matcher, piece)
                if matcher.matched is not None:
                    return pieces, used
        return pieces, len(ids)

    def _watch(self, ids: Sequence[int]) -> tuple[str, int]:
        """Turn ids into text as far as a stop string; return also how many ids that took."""
        matcher = self._matcher
        if matcher is None:
            return self._feed_ids(ids), len(ids)
        shown = ""
        for used, token_id in enumerate(ids, 1):
            if not matcher.active:
                self._activate(matcher, used)
            text = self._feed_ids((token_id,))
            if text:
                text, matched = matcher.feed(text)
                shown += text
                if matched is not None:
                    return shown, used
        return shown, len(ids)

    def _activate(self, matcher: StopMatcher, used: int) -> None:
        generated = self.completion_tokens + used
        matcher.active = generated > self._request.sampling.min_tokens

    def _guard(self, matcher: StopMatcher, piece: Piece) -> list[Piece]:
        """Pass a piece through the matcher, which may hold it back or cut it."""
        if isinstance(piece, str):
            text, _ = matcher.feed(piece)
            return [text] if text else []
        # A stop string may lie within a visible special token, but none reaches across one.
        held = matcher.finish()
        before: list[Piece] = [held] if held else []
        if not self._request.output.skip_special_tokens:
            matcher.feed(piece.text)
            matcher.finish()
            if matcher.matched is not None and not self._request.stop.include_in_output:
                return before
        return [*before, piece]

    def _flush(self) -> list[Piece]:
        """Return what detokenizer and matcher hold back: the text is over."""
        tail, matcher = self._detok.finish(), self._matcher
        if matcher is not None:
            tail = matcher.feed(tail)[0] + matcher.finish()
        return [tail] if tail else []

    def _stop_reason(self, delta: Delta) -> int | str | None:
        """Return what stopped the engine as the client knows it: the id, or the string it was."""
        reason, sampling = delta.stop_reason, self._request.sampling
        if reason is None and delta.finish == "stop" and delta.ids:
            # Not every engine says which id it was; EOS is reported as None, as vLLM does.
            last = delta.ids[-1]
            if last != sampling.eos_token_id and last in sampling.stop_token_ids:
                reason = last
        return self._strings.get(reason, reason) if isinstance(reason, int) else reason

    def _count(self, delta: Delta, used: int) -> None:
        self.completion_tokens += used
        self._ids += delta.ids[:used]
        if delta.logprobs:
            self._rows += delta.logprobs[:used]

    def _output(self, pieces: list[Piece]) -> PipelineOutput:
        output = PipelineOutput(finish=self.finish)
        if self._parser is None:
            output.text = "".join([piece for piece in pieces if isinstance(piece, str)])
        else:
            output.events = self._events(self._parser, pieces)
        if output.text or output.events or self.finish is not None:
            output.token_ids, self._ids = self._ids, []
            output.logprobs, self._rows = self._rows, []
        return output

    def _events(self, parser: Parser, pieces: list[Piece]) -> list[Event]:
        events = parser.feed(pieces) if pieces else []
        if self.finish is None:
            return events
        return [*events, *parser.finish(), self.finish]
