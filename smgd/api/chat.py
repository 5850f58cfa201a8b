"""Chat completions: OpenAI's request with vLLM's extensions, and what answers it."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from smgd.api import params as common
from smgd.api.answer import Format, make_answer
from smgd.api.base import Plan, PlanContext, Surface
from smgd.api.fields import FieldRules, decode, missing_parameter, unsupported_value
from smgd.api.logprobs import ChatLogprobs
from smgd.errors import TemplateError, invalid_request, unsupported_parameter
from smgd.text.model import Model

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})

# vLLM's; the last one is not OpenAI's.
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class Conversation(Protocol):
    """The fields, besides the messages, from which a prompt is rendered."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    add_special_tokens: bool | None
    documents: list[dict[str, Any]] | None
    reasoning_effort: str | None
    chat_template_kwargs: dict[str, Any] | None


class ChatRequest(common.GenerationParams, kw_only=True):
    """The body of POST /v1/chat/completions, as far as it is honoured."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


RULES = FieldRules.of(ChatRequest)

_decoder = msgspec.json.Decoder(ChatRequest)


def decode_chat(body: bytes) -> tuple[ChatRequest, list[str]]:
    """Decode and check a body. Raises `ApiError` 400."""
    request, unknown = decode(_decoder, body, RULES)
    common.check(request)
    check_conversation(request.messages, request)
    if request.top_logprobs and not request.logprobs:
        raise invalid_request(
            "top_logprobs_requires_logprobs",
            "'top_logprobs' is only allowed when 'logprobs' is true.",
            "top_logprobs",
        )
    return request, unknown


def check_conversation(messages: list[dict[str, Any]], request: Conversation) -> None:
    """Refuse what no template needs to be asked about. Raises `ApiError` 400."""
    _check_messages(messages)
    if request.add_generation_prompt and request.continue_final_message:
        raise invalid_request(
            "mutually_exclusive_parameters",
            "Set only one of 'add_generation_prompt' and 'continue_final_message'.",
            "continue_final_message",
        )
    effort = request.reasoning_effort
    if effort is not None and effort not in REASONING_EFFORTS:
        raise unsupported_value("reasoning_effort", effort, REASONING_EFFORTS)
    if (request.chat_template_kwargs or {}).get("chat_template") is not None:
        raise unsupported_parameter("chat_template_kwargs.chat_template")


def _check_messages(messages: list[dict[str, Any]]) -> None:
    if not messages:
        text = "Invalid 'messages': empty array. Provide at least one message."
        raise invalid_request("empty_array", text, "messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role = message.get("role")
        if role is None:
            raise missing_parameter(f"{where}.role")
        if not isinstance(role, str) or role not in ROLES:
            raise unsupported_value(f"{where}.role", role, sorted(ROLES))
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
    if len(request.messages) > context.max_model_len:
        text = (
            f"{len(request.messages)} messages cannot fit into the model's maximum context length "
            f"of {context.max_model_len} tokens."
        )
        raise invalid_request("context_length_exceeded", text, "messages")
    text = render(request.messages, request, context.model)
    common.check_text(text, context, "messages")
    special = bool(request.add_special_tokens)
    tokenizer = context.model.tokenizer
    prompt_ids = await context.stage.encode(tokenizer, text, add_special_tokens=special)
    requested, param = request.max_completion_tokens, "max_completion_tokens"
    if requested is None:
        requested, param = request.max_tokens, "max_tokens"
    length = len(prompt_ids)
    default = context.model.files.sampling_defaults.max_tokens
    tokens = common.max_tokens(requested, param, default, length, context, prompt="messages")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    common.check_logprobs(logprobs, "top_logprobs", context)
    requests = common.sequences(request, context, [(prompt_ids, tokens)], logprobs)
    continued = bool(request.continue_final_message)
    return make_answer(FORMAT, request, context, requests, continues_prompt=continued)


def render(messages: list[dict[str, Any]], request: Conversation, model: Model) -> str:
    """Return the prompt of a conversation. Raises `ApiError` 400 with the template's words."""
    try:
        return model.template.render(
            messages,
            documents=request.documents,
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final_message=bool(request.continue_final_message),
            kwargs=_template_kwargs(request),
        )
    except TemplateError as error:
        message = f"The model's chat template refused the messages: {error}"
        raise invalid_request("process_messages_failed", message, "messages") from error


def _template_kwargs(request: Conversation) -> dict[str, Any]:
    """Return the further variables of the template, as vLLM makes them of the request.

    Its own field wins over the variable of that name. Templates that think only if told to are told
    so by any effort, unless the client says itself whether they shall.
    """
    kwargs = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        kwargs["reasoning_effort"] = request.reasoning_effort
        kwargs.setdefault("enable_thinking", request.reasoning_effort != "none")
    return kwargs


# ------------------------------------------------------------------------------ the answer


def _message(text: str) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text, "refusal": None}}


FORMAT = Format(
    chunk_object="chat.completion.chunk",
    whole_object="chat.completion",
    role=b'"delta":{"role":"assistant","content":""}',
    text=(b'"delta":{"content":', b"}"),
    empty=b'"delta":{}',
    whole=_message,
    logprobs=ChatLogprobs,
)

SURFACE = Surface(
    path="/v1/chat/completions",
    endpoint="chat",
    id_prefix="chatcmpl-",
    decode=decode_chat,
    plan=plan_chat,
)
