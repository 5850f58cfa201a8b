"""Chat completions: OpenAI's request, vLLM's extensions, and the frames that answer them.

A streamed answer's frames differ only in the text between a prefix and a suffix, so both are
rendered once per choice, and a frame costs one JSON string and one join.
"""

from __future__ import annotations

from typing import Any

import msgspec

from smgd.api import params as common
from smgd.api.base import Plan, PlanContext, Surface, Usage
from smgd.api.envelope import error_body, error_event, finish_reason, usage_object
from smgd.api.fields import FieldRules, decode
from smgd.core import Finish, GenerationRequest
from smgd.dispatch import Sequence
from smgd.errors import TemplateError, invalid_request, unsupported_parameter
from smgd.text.pipeline import TextPipeline

_json = msgspec.json.Encoder().encode

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


class ChatRequest(common.GenerationParams, kw_only=True):
    """The body of POST /v1/chat/completions, as far as it is honoured."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


RULES = FieldRules.of(
    ChatRequest,
    {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),  # without tools there is nothing to parallelize
        "functions": ([],),
        "function_call": ("none", "auto"),
        "logprobs": (False,),
        "top_logprobs": (0,),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "verbosity": ("medium",),
        "echo": (False,),
        "best_of": (1,),
        "suffix": (),
        "chat_template": (),
        "mm_processor_kwargs": (),
        "media_io_kwargs": (),
        "include_reasoning": (True,),
        "separate_reasoning": (True,),
        "stream_reasoning": (True,),
        "no_stop_trim": (False,),
        "session_params": (),
        "return_hidden_states": (False,),
        "sampling_seed": (),
    },
)

_decoder = msgspec.json.Decoder(ChatRequest)


def decode_chat(body: bytes) -> tuple[ChatRequest, list[str]]:
    """Decode and check a body. Raises `ApiError` 400."""
    request, unknown = decode(_decoder, body, RULES)
    common.check(request)
    _check_messages(request.messages)
    if request.add_generation_prompt and request.continue_final_message:
        raise invalid_request(
            "mutually_exclusive_parameters",
            "Set only one of 'add_generation_prompt' and 'continue_final_message'.",
            "continue_final_message",
        )
    return request, unknown


def _check_messages(messages: list[dict[str, Any]]) -> None:
    if not messages:
        text = "Invalid 'messages': empty array. Provide at least one message."
        raise invalid_request("empty_array", text, "messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role = message.get("role")
        if role is None:
            name = f"{where}.role"
            text = f"Missing required parameter: '{name}'."
            raise invalid_request("missing_required_parameter", text, name)
        if not isinstance(role, str) or role not in ROLES:
            allowed = ", ".join(sorted(ROLES))
            text = f"Invalid value for '{where}.role': {role!r}. Supported values are: {allowed}."
            raise invalid_request("invalid_value", text, f"{where}.role")
        _check_content(message.get("content"), f"{where}.content")


def _check_content(content: object, where: str) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        text = f"Invalid type for '{where}': expected a string or an array of parts."
        raise invalid_request("invalid_type", text, where)
    for index, part in enumerate(content):
        name = f"{where}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise unsupported_parameter(name, f"Only parts of type 'text' are, not {kind!r}.")
        if not isinstance(part.get("text"), str):
            text = f"Invalid type for '{name}.text': expected a string."
            raise invalid_request("invalid_type", text, f"{name}.text")


async def plan_chat(request: ChatRequest, context: PlanContext) -> Plan:
    """Render the template, tokenize, apply defaults. Raises `ApiError` 400."""
    model = context.model
    text = _render(request, context)
    prompt_ids = await context.stage.encode(
        model.tokenizer, text, add_special_tokens=bool(request.add_special_tokens)
    )
    requested, param = request.max_completion_tokens, "max_completion_tokens"
    if requested is None:
        requested, param = request.max_tokens, "max_tokens"
    tokens = common.max_tokens(requested, param, len(prompt_ids), context)
    requests = common.sequences(request, context, prompt_ids, tokens)
    return (ChatStream if request.stream else ChatWhole)(request, context, requests)


def _render(request: ChatRequest, context: PlanContext) -> str:
    kwargs = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", request.reasoning_effort)
    continued = bool(request.continue_final_message)
    try:
        return context.model.template.render(
            request.messages,
            documents=request.documents,
            add_generation_prompt=request.add_generation_prompt is not False and not continued,
            continue_final_message=continued,
            kwargs=kwargs,
        )
    except TemplateError as error:
        text = f"The model's chat template refused the messages: {error}"
        raise invalid_request("process_messages_failed", text, "messages") from error


# ------------------------------------------------------------------------------ the answer


class _Choice:
    """One choice of an answer: its pipeline, and what was rendered of it so far."""

    __slots__ = ("cached", "finish", "index", "parts", "pipeline", "prefix", "started")

    def __init__(self, index: int, pipeline: TextPipeline, head: bytes) -> None:
        self.index = index
        self.pipeline = pipeline
        self.prefix = b'%b{"index":%d,"delta":' % (head, index)
        self.parts: list[str] = []
        self.started = False
        self.cached = 0
        self.finish: Finish | None = None


class _Answer:
    """What streamed and whole answers share: choices, usage, and the feeding of pipelines."""

    stream: bool

    def __init__(
        self, request: ChatRequest, context: PlanContext, requests: list[GenerationRequest]
    ) -> None:
        self.requests = requests
        self.eager = bool(requests[0].stop.strings)
        self._context = context
        head = self._head(context)
        vocabulary = context.model.tokenizer.vocabulary
        self._choices = [
            _Choice(i, TextPipeline(vocabulary, r), head) for i, r in enumerate(requests)
        ]
        self._open = len(requests)

    def _head(self, context: PlanContext) -> bytes:
        return b""

    @property
    def done(self) -> bool:
        """Whether every choice has its finish."""
        return self._open == 0

    def usage(self) -> Usage:
        """Return the tokens so far; the prompt counts once however many choices it has."""
        return Usage(
            prompt=len(self.requests[0].prompt_ids),
            completion=sum(choice.pipeline.completion_tokens for choice in self._choices),
            cached=max(choice.cached for choice in self._choices),
        )

    def finish_reasons(self) -> str:
        """Return the finish reasons so far, for the log."""
        return ",".join(c.finish.reason for c in self._choices if c.finish is not None)

    def _take(self, sequence: Sequence) -> tuple[_Choice, str]:
        """Run a sequence's news through its pipeline; return the text that may be shown."""
        choice = self._choices[sequence.index]
        pipeline = choice.pipeline
        choice.cached = sequence.cached_tokens
        if pipeline.plain and sequence.finish is None:
            return choice, pipeline.feed_text(sequence.take_ids())
        output = pipeline.feed(sequence.take())
        if output.abort:
            sequence.stop()
        if output.finish is not None:
            choice.finish = output.finish
            self._open -= 1
        return choice, output.text


class ChatStream(_Answer):
    """A streamed answer: role frame, text frames, one finish frame a choice, usage, `[DONE]`."""

    stream = True

    def __init__(
        self, request: ChatRequest, context: PlanContext, requests: list[GenerationRequest]
    ) -> None:
        super().__init__(request, context, requests)
        options = request.stream_options or common.StreamOptions()
        self._usage_at_end = bool(options.include_usage)
        self._usage_always = self._usage_at_end and bool(options.continuous_usage_stats)
        # OpenAI: with include_usage every earlier frame says `"usage": null`.
        self._tail = b'],"usage":null}\n\n' if self._usage_at_end else b"]}\n\n"

    def _head(self, context: PlanContext) -> bytes:
        head = {
            "id": context.response_id,
            "object": "chat.completion.chunk",
            "created": context.created,
            "model": context.model.id,
        }
        return b"data: " + _json(head)[:-1] + b',"choices":['

    def feed(self, sequence: Sequence) -> bytes:
        """Take a sequence's news; return its frames."""
        choice, text = self._take(sequence)
        frames = b""
        if not choice.started:
            choice.started = True
            frames = self._frame(choice, b'{"role":"assistant","content":""}')
        if text:
            frames += self._frame(choice, b'{"content":%b}' % _json(text))
        if choice.finish is not None:
            frames += self._finish_frame(choice, choice.finish)
        return frames

    def _frame(self, choice: _Choice, delta: bytes) -> bytes:
        tail = self._usage_tail() if self._usage_always else self._tail
        return b'%b%b,"logprobs":null,"finish_reason":null}%b' % (choice.prefix, delta, tail)

    def _finish_frame(self, choice: _Choice, finish: Finish) -> bytes:
        tail = self._usage_tail() if self._usage_always else self._tail
        return b'%b{},"logprobs":null,"finish_reason":"%b","stop_reason":%b}%b' % (
            choice.prefix,
            finish_reason(finish.reason).encode(),
            _json(finish.stop_reason),
            tail,
        )

    def _usage_tail(self) -> bytes:
        return b'],"usage":%b}\n\n' % _json(usage_object(self.usage()))

    def end(self) -> bytes:
        """Return the usage frame, if asked for, and `[DONE]`."""
        done = b"data: [DONE]\n\n"
        if not self._usage_at_end:
            return done
        return self._head(self._context) + self._usage_tail() + done


class ChatWhole(_Answer):
    """An answer in one body."""

    stream = False

    def feed(self, sequence: Sequence) -> bytes:
        """Collect a sequence's text."""
        choice, text = self._take(sequence)
        choice.parts.append(text)
        return b""

    def end(self) -> bytes:
        """Return the `chat.completion` object."""
        return _json(
            {
                "id": self._context.response_id,
                "object": "chat.completion",
                "created": self._context.created,
                "model": self._context.model.id,
                "choices": [_whole_choice(choice) for choice in self._choices],
                "usage": usage_object(self.usage()),
            }
        )


def _whole_choice(choice: _Choice) -> dict[str, Any]:
    finish = choice.finish
    return {
        "index": choice.index,
        "message": {"role": "assistant", "content": "".join(choice.parts), "refusal": None},
        "logprobs": None,
        "finish_reason": finish_reason(finish.reason) if finish else None,
        "stop_reason": finish.stop_reason if finish else None,
    }


SURFACE = Surface(
    path="/v1/chat/completions",
    endpoint="chat",
    id_prefix="chatcmpl-",
    decode=decode_chat,
    plan=plan_chat,
    error_body=error_body,
    error_event=error_event,
)
