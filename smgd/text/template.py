"""Chat templates: a conversation becomes a prompt, byte for byte as transformers renders it.

The environment is the one that templates on the Hub are written for: Jinja's immutable sandbox with
`trim_blocks`, `lstrip_blocks` and loop controls, a `generation` block, `tojson` that prints as
Python's json does, `raise_exception` and `strftime_now`. Variables that nobody set are undefined;
`tools` and `documents` are always set, to None if there are none.

What a client sends is fitted to the template first, and only where the template would trip over it:
content is a string or a list of parts, null or "", as the template's own code reads it (see
`template_ast`). If the template fails all the same, a second attempt gives it the plainest form.

Templates print `bos_token` themselves if the model wants it, so what is rendered is encoded without
adding special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar

from jinja2 import Environment, nodes
from jinja2 import Template as CompiledTemplate
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from smgd.errors import TemplateError
from smgd.text.template_ast import ContentUse, content_use

ContentFormat: TypeAlias = Literal["string", "openai"]
Message: TypeAlias = dict[str, Any]
T = TypeVar("T")

# Marks the end of the text that is to be continued. The space behind it tells whether the template
# has trimmed the text: then the space is gone.
_END = "=====smgd-continues-here====="

# Of the arguments of a rendering, those that no variable of the same name can change.
_FIXED = ("add_generation_prompt", "continue_final_message")


# --------------------------------------------------------------------------- the environment


class _GenerationTag(Extension):
    """`{% generation %}` marks what an assistant wrote, for training. Here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 wants a class attribute

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _environment()


def _compile(source: str) -> tuple[CompiledTemplate, ContentUse]:
    try:
        use = content_use(_ENVIRONMENT.parse(source))
        template = _ENVIRONMENT.from_string(source)
        # Jinja keeps a chain of maps, of which every rendering makes a dict anew, slowly.
        template.globals = dict(template.globals)
        return template, use
    except Exception as error:
        raise TemplateError(f"cannot be compiled: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


# ------------------------------------------------------------------------------ the template


class ChatTemplate:
    """A compiled template. Immutable, so one is shared by all requests.

    `content_format` is "openai" if content is given to the template as a list of parts wherever the
    client sent one, "string" if parts are joined; by default the template's own code decides.
    `tool_use` is the template that takes over whenever tools are given. Raises `TemplateError` if
    the source cannot be compiled.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        content_format: ContentFormat | None = None,
        tool_use: ChatTemplate | None = None,
    ) -> None:
        self.tool_use = tool_use
        self._template, use = _compile(source)
        self._special_tokens = dict(special_tokens)
        detected: ContentFormat = "openai" if use.reads_parts else "string"
        self.content_format: ContentFormat = content_format or detected
        self._keeps_parts = self.content_format == "openai"
        # A template that reads parts and never asks for a string would go through its characters.
        self._wraps = self._keeps_parts and use.reads_parts and not use.tests_string
        self._no_content = None if use.tests_none else [_part("")] if self._wraps else ""
        # "developer" is OpenAI's newer word for "system"; older templates do not know it.
        self._knows_developer = "'developer'" in source or '"developer"' in source

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        documents: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt. Encode it without adding special tokens.

        `kwargs` are further variables, which may override special tokens. Among them may be `tools`
        and `documents`; as in vLLM, these tools win over the argument and these documents stand
        in for it, while the generation prompt is the arguments' alone. With
        `continue_final_message` the prompt ends with the last message's text, and there is no
        generation prompt. Nothing that is passed in is changed. Raises `TemplateError`, whatever
        goes wrong; the text is the template's own if it called `raise_exception`.
        """
        further = dict(kwargs or {})
        if "messages" in further:
            raise TemplateError("template arguments must not be named messages")
        for name in _FIXED:
            further.pop(name, None)
        tools = _first(further.pop("tools", None), tools)
        documents = _first(documents, further.pop("documents", None))
        template = self if tools is None or self.tool_use is None else self.tool_use
        variables: dict[str, Any] = {
            **template._special_tokens,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            **further,
        }
        return template._render(messages, variables, continue_final_message)

    def _render(
        self, messages: Sequence[Message], variables: dict[str, Any], continues: bool
    ) -> str:
        if continues and not (messages and messages[-1].get("content")):
            raise TemplateError("the last message cannot be continued: it has no content")
        attempt = self._attempt_continued if continues else self._attempt
        fitted = [self._fit(message) for message in messages]
        try:
            return attempt(fitted, variables)
        except TemplateError:
            raise
        except Exception as error:
            plain = [_plain(message) for message in fitted]
            if plain != fitted:
                with suppress(Exception):  # the first failure is the one that tells
                    return attempt(plain, variables)
            raise TemplateError(_reason(error)) from error

    def _attempt(self, messages: list[Message], variables: dict[str, Any]) -> str:
        return self._template.render(variables, messages=messages)

    def _attempt_continued(self, messages: list[Message], variables: dict[str, Any]) -> str:
        text, marked = _mark_end(messages[-1])
        prompt = self._attempt([*messages[:-1], marked], variables)
        if _END not in prompt or text.strip() not in prompt:
            raise TemplateError("the last message cannot be continued: the template changes it")
        continued, _, rest = prompt.rpartition(_END)
        return continued if rest.startswith(" ") else continued.rstrip()

    # ---------------------------------------------------------------- fitting the messages

    def _fit(self, message: Message) -> Message:
        """Return a message in the form that the template reads; the same object if it is in it."""
        content = message.get("content")
        role = message.get("role")
        changes: Message = {}
        if content is None:
            changes["content"] = self._no_content
        elif isinstance(content, str):
            if self._wraps:
                changes["content"] = [_part(content)]
        elif isinstance(content, list) and (
            # Templates take a tool's answer for a string, even those that read parts elsewhere.
            not self._keeps_parts or (role == "tool" and _is_text(content))
        ):
            changes["content"] = _join(content)
        if role == "developer" and not self._knows_developer:
            changes["role"] = "system"
        if "tool_calls" in message:
            return _with_calls({**message, **changes})
        return {**message, **changes} if changes else message


def _first(wanted: T | None, otherwise: T | None) -> T | None:
    return otherwise if wanted is None else wanted


def _plain(message: Message) -> Message:
    """Return a message in the form that the most simple-minded template can read."""
    changes: Message = {}
    content = message.get("content")
    if isinstance(content, list) and _is_text(content):
        changes["content"] = _join(content)
    if message.get("tool_calls"):
        changes["tool_calls"] = [_with_arguments(c, force=True) for c in message["tool_calls"]]
    return {**message, **changes}


# ------------------------------------------------------------------------------- the content


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _is_text(parts: list[Any]) -> bool:
    return all(_text(part) is not None for part in parts)


def _join(parts: list[Any]) -> str:
    """Return the text of a list of parts. Raises `TemplateError` if there is anything but text."""
    texts = []
    for part in parts:
        text = _text(part)
        if text is None:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise TemplateError(f"this model takes text only, not a content part of type {kind!r}")
        texts.append(text)
    return "\n".join(texts)


def _text(part: Any) -> str | None:
    text = part.get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) else None


def _mark_end(message: Message) -> tuple[str, Message]:
    """Return the text that is to be continued, and the message with a mark behind that text."""
    content = message.get("content")
    if isinstance(content, str):
        return content, {**message, "content": f"{content}{_END} "}
    if isinstance(content, list):
        for index in reversed(range(len(content))):
            text = _text(content[index])
            if text is not None:
                marked = _part(f"{text}{_END} ")
                parts = [*content[:index], marked, *content[index + 1 :]]
                return text, {**message, "content": parts}
    raise TemplateError("the last message cannot be continued: it has no text")


# ---------------------------------------------------------------------------- the tool calls


def _with_calls(message: Message) -> Message:
    """Return a message with its calls as templates read them: no empty list, arguments parsed."""
    calls = message["tool_calls"]
    if not calls:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise TemplateError("a message's 'tool_calls' must be an array of objects")
    return {**message, "tool_calls": [_with_arguments(call, force=False) for call in calls]}


def _with_arguments(call: dict[str, Any], *, force: bool) -> dict[str, Any]:
    """Return a call with its arguments as an object.

    Arguments that are not one (a model was cut off, and the client replays what it said) stay as
    they are, or become an empty object if `force` says so: the conversation must go on.
    """
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        return call
    parsed = _parse_object(arguments) if arguments else {}
    if parsed is None:
        parsed = {} if force else arguments
    return {**call, "function": {**function, "arguments": parsed}}


def _parse_object(text: Any) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
