"""Answers of OpenAI's completion surfaces: choices, usage, and how they become frames or a body.

A surface says only how its choices look (`Format`). Frames of a stream differ in nothing but the
text between a prefix and a suffix, so both are rendered once per choice, and a frame costs one JSON
string and one join.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, Protocol

import msgspec

from smgd.api.base import PlanContext
from smgd.api.envelope import Usage, finish_reason, usage_object
from smgd.api.params import GenerationParams, StreamOptions
from smgd.core import Finish, GenerationRequest, TokenLogprobs
from smgd.dispatch import Sequence
from smgd.text.pipeline import PipelineOutput, TextPipeline
from smgd.text.vocab import Vocabulary

_json = msgspec.json.Encoder().encode


class Logprobs(Protocol):
    """Renders rows of log-probabilities; one per choice, since it may keep a position."""

    def render(self, rows: list[TokenLogprobs]) -> Any:
        """Return the surface's object for these tokens."""
        ...


class Format(msgspec.Struct, frozen=True):
    """How a surface's choices look.

    `role` is the body of the frame that opens a choice (empty: none); text stands between the two
    halves of `text`; `empty` is the body of a finish frame without text. `whole` builds a choice of
    a whole answer from its text. `logprobs` makes a renderer for so many alternatives.
    """

    chunk_object: str
    whole_object: str
    role: bytes
    text: tuple[bytes, bytes]
    empty: bytes
    whole: Callable[[str], dict[str, Any]]
    logprobs: Callable[[Vocabulary, int], Logprobs]


class Choice:
    """One choice of an answer: its pipeline, and what was made of it so far."""

    __slots__ = (
        "after", "before", "cached", "everyday", "finish", "index", "logprobs", "parts", "pipeline",
        "prefix", "rows", "started",
    )  # fmt: skip

    def __init__(self, index: int, pipeline: TextPipeline, logprobs: Logprobs | None) -> None:
        self.index = index
        self.pipeline = pipeline
        self.logprobs = logprobs
        self.prefix = b""
        # Around the text of an everyday frame; empty where frames have more that differs.
        self.before = self.after = b""
        self.everyday = False  # whether the next frame is one, if it is not the last
        self.parts: list[str] = []
        self.rows: list[TokenLogprobs] = []
        self.started = False
        self.cached = 0
        self.finish: Finish | None = None


class Answer:
    """What streamed and whole answers share. `done` once every choice has its finish."""

    __slots__ = (
        "_choices", "_context", "_format", "_open", "_per_prompt", "done", "eager", "requests",
    )  # fmt: skip
    stream: bool

    def __init__(
        self,
        format_: Format,
        params: GenerationParams,
        context: PlanContext,
        requests: list[GenerationRequest],
        *,
        continues_prompt: bool = False,
    ) -> None:
        self.requests = requests
        self.eager = bool(requests[0].stop.strings)
        self._format = format_
        self._context = context
        self._per_prompt = params.n or 1
        vocabulary = context.model.tokenizer.vocabulary
        self._choices: list[Choice] = []
        for index, request in enumerate(requests):
            pipeline = TextPipeline(vocabulary, request, continues_prompt=continues_prompt)
            wanted = request.output.logprobs
            logprobs = None if wanted is None else format_.logprobs(vocabulary, wanted)
            self._choices.append(Choice(index, pipeline, logprobs))
        self._open = len(requests)
        self.done = False
        self._prepare(params)

    def _prepare(self, params: GenerationParams) -> None:
        """Make ready what only one kind of answer needs."""

    def usage(self) -> Usage:
        """Return the tokens so far; a prompt counts once, however many choices it has."""
        if len(self._choices) == 1:
            [choice] = self._choices
            prompt = len(self.requests[0].prompt_ids)
            return Usage(prompt, choice.pipeline.completion_tokens, choice.cached)
        firsts = range(0, len(self.requests), self._per_prompt)
        groups = [self._choices[i : i + self._per_prompt] for i in firsts]
        return Usage(
            prompt=sum(len(self.requests[i].prompt_ids) for i in firsts),
            completion=sum(choice.pipeline.completion_tokens for choice in self._choices),
            cached=sum(max(choice.cached for choice in group) for group in groups),
        )

    def finish_reasons(self) -> str:
        """Return the finish reasons so far, for the log."""
        return ",".join(c.finish.reason for c in self._choices if c.finish is not None)

    def _take(self, sequence: Sequence) -> tuple[Choice, str, list[TokenLogprobs]]:
        """Run a sequence's news through its pipeline; return what may be shown of it."""
        choice = self._choices[sequence.index]
        pipeline = choice.pipeline
        choice.cached = sequence.cached_tokens
        if pipeline.plain and sequence.finish is None:
            output = PipelineOutput(pipeline.feed_text(sequence.take_ids()))
            output.abort = pipeline.finish is not None
        else:
            output = pipeline.feed(sequence.take())
        if pipeline.finish is not None and choice.finish is None:
            self._settle(choice, sequence, pipeline.finish, output.abort)
        return choice, output.text, output.logprobs

    def _settle(self, choice: Choice, sequence: Sequence, finish: Finish, abort: bool) -> None:
        """End a choice; one that a stop string has ended has to be stopped at its engine."""
        if abort:
            sequence.stop()
        choice.finish = finish
        choice.everyday = False
        self._open -= 1
        self.done = self._open == 0

    def _head(self, object_: str) -> dict[str, Any]:
        return {
            "id": self._context.response_id,
            "object": object_,
            "created": self._context.created,
            "model": self._context.model.id,
        }


class StreamedAnswer(Answer):
    """Frames: the opening one, text, one finish for each choice, usage, `[DONE]`."""

    __slots__ = ("_opening", "_tail", "_usage_always", "_usage_at_end")
    stream = True

    def _prepare(self, params: GenerationParams) -> None:
        options = params.stream_options or StreamOptions()
        self._usage_at_end = bool(options.include_usage)
        self._usage_always = self._usage_at_end and bool(options.continuous_usage_stats)
        # OpenAI: with include_usage every earlier frame says `"usage": null`.
        self._tail = b'],"usage":null}\n\n' if self._usage_at_end else b"]}\n\n"
        head = _json(self._head(self._format.chunk_object))[:-1]
        self._opening = b'data: %b,"choices":[' % head
        for choice in self._choices:
            choice.prefix = b'%b{"index":%d,' % (self._opening, choice.index)
            if choice.pipeline.plain and not self._usage_always:
                before, after = self._format.text
                choice.before = choice.prefix + before + b'"'
                choice.after = b'"' + after + b',"logprobs":null,"finish_reason":null}' + self._tail

    def feed(self, sequence: Sequence) -> bytes:
        """Take a sequence's news; return its frames."""
        choice = self._choices[sequence.index]
        if choice.everyday and sequence.finish is None:
            pipeline = choice.pipeline
            inside = pipeline.feed_json(sequence.take_ids())
            frame = b"%b%b%b" % (choice.before, inside, choice.after) if inside else b""
            finish = pipeline.finish
            if finish is None:
                return frame
            self._settle(choice, sequence, finish, abort=True)
            return frame + self._finish_frame(choice, finish, [])
        if choice.finish is not None:
            return b""
        choice, text, rows = self._take(sequence)
        frames = b"" if choice.started else self._open_choice(choice)
        if text or (rows and choice.finish is None):
            before, after = self._format.text
            frames += self._frame(choice, b"%b%b%b" % (before, _json(text), after), rows)
            rows = []
        if choice.finish is not None:
            frames += self._finish_frame(choice, choice.finish, rows)
        return frames

    def _open_choice(self, choice: Choice) -> bytes:
        choice.started = True
        choice.everyday = bool(choice.after) and choice.finish is None
        return self._frame(choice, self._format.role, []) if self._format.role else b""

    def _frame(self, choice: Choice, body: bytes, rows: list[TokenLogprobs]) -> bytes:
        tail = self._usage_tail() if self._usage_always else self._tail
        logprobs = self._logprobs(choice, rows)
        return b'%b%b,"logprobs":%b,"finish_reason":null}%b' % (choice.prefix, body, logprobs, tail)

    def _finish_frame(self, choice: Choice, finish: Finish, rows: list[TokenLogprobs]) -> bytes:
        tail = self._usage_tail() if self._usage_always else self._tail
        return b'%b%b,"logprobs":%b,"finish_reason":"%b","stop_reason":%b}%b' % (
            choice.prefix,
            self._format.empty,
            self._logprobs(choice, rows),
            finish_reason(finish.reason).encode(),
            _json(finish.stop_reason),
            tail,
        )

    def _logprobs(self, choice: Choice, rows: list[TokenLogprobs]) -> bytes:
        if choice.logprobs is None or not rows:
            return b"null"
        return _json(choice.logprobs.render(rows))

    def _usage_tail(self) -> bytes:
        return b'],"usage":%b}\n\n' % _json(usage_object(self.usage()))

    def end(self) -> bytes:
        """Return the usage frame, if asked for, and `[DONE]`."""
        done = b"data: [DONE]\n\n"
        return self._opening + self._usage_tail() + done if self._usage_at_end else done


class WholeAnswer(Answer):
    """An answer in one body."""

    __slots__ = ()
    stream = False

    def feed(self, sequence: Sequence) -> bytes:
        """Collect a sequence's text."""
        choice, text, rows = self._take(sequence)
        choice.parts.append(text)
        choice.rows += rows
        return b""

    def end(self) -> bytes:
        """Return the body."""
        body = self._head(self._format.whole_object)
        body["choices"] = [self._whole(choice) for choice in self._choices]
        body["usage"] = usage_object(self.usage())
        return _json(body)

    def _whole(self, choice: Choice) -> dict[str, Any]:
        finish, logprobs = choice.finish, choice.logprobs
        return {
            "index": choice.index,
            **self._format.whole("".join(choice.parts)),
            "logprobs": None if logprobs is None else logprobs.render(choice.rows),
            "finish_reason": finish_reason(finish.reason) if finish else None,
            "stop_reason": finish.stop_reason if finish else None,
        }


def make_answer(
    format_: Format,
    params: GenerationParams,
    context: PlanContext,
    requests: Seq[GenerationRequest],
    *,
    continues_prompt: bool = False,
) -> StreamedAnswer | WholeAnswer:
    """Return the plan of a request: streamed or whole, as it asks."""
    kind = StreamedAnswer if params.stream else WholeAnswer
    return kind(format_, params, context, list(requests), continues_prompt=continues_prompt)
