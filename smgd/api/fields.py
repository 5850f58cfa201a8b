"""The rule for request fields: nothing is silently dropped.

A field is *honoured* (it is in the surface's struct), *refused* (OpenAI or vLLM know it, this
surface does not do it: 400 that names it, unless its value asks for nothing), *harmless* (it
changes nothing of the answer by its nature) or *unknown* to both, which is ignored and counted.
What one surface honours is known to all of them. An explicit null always means absent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, get_args

import msgspec

from smgd.errors import UNDECODABLE, ApiError, invalid_request, unsupported_parameter

# Ignoring these is right: they label, store or bill, and do not change what is generated.
HARMLESS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "prompt_cache_options", "request_id", "rid",
    }
)  # fmt: skip

# What OpenAI, vLLM or smg know on some surface, each with the values that ask for nothing. A
# surface refuses those that it does not honour itself.
KNOWN: Mapping[str, tuple[Any, ...]] = {
    # Honoured by one surface.
    "messages": (),
    "prompt": (),
    "tokens": (),
    "max_completion_tokens": (),
    "top_logprobs": (0,),
    "add_generation_prompt": (True, False),  # without a chat there is none, asked for or not
    "continue_final_message": (False,),
    "add_special_tokens": (True, False),  # of no meaning where nothing is tokenized
    "documents": ([],),
    "reasoning_effort": ("none",),
    "chat_template_kwargs": ({},),
    "return_token_strs": (False,),
    # What is asked in a chat.
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),  # without tools there is nothing to parallelize
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "moderation": (),
    "chat_template": (),
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    # What the prompt is made of.
    "prompt_embeds": ([],),
    "suffix": ("",),
    "echo": (False,),
    "truncate_prompt_tokens": (),
    "truncation_side": ("left", "right"),  # of what is not truncated
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    # How it is sampled.
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "sampling_seed": (),
    "bad_words": ([],),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "response_format": ({"type": "text"},),
    "regex": (),
    "ebnf": (),
    "repetition_detection": (),
    "thinking_token_budget": (-1,),
    "watermarking": (False,),
    "lora_path": (),
    "vllm_xargs": ({},),
    # Where it runs.
    "session_id": (),
    "session_params": ({},),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    # What is returned, and how.
    "prompt_logprobs": (),
    "logprob_token_ids": ([],),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_prompt_text": (False,),
    "return_hidden_states": (False,),
    "return_assistant_tokens_mask": (False,),
    "return_mm_kwargs": (False,),
    "mm_payload": ("tensors", "none"),  # of media, which there are none of
    "routed_experts_prompt_start": (0,),
    "spaces_between_special_tokens": (True,),
    "no_stop_trim": (False,),
    "stream_interval": (1,),
}


class FieldRules(msgspec.Struct, frozen=True):
    """The names that one surface honours, ignores and refuses.

    `refused` has the values that are no request at all. `nested` are the names within those
    honoured fields that are objects with fields of their own.
    """

    honoured: frozenset[str]
    harmless: frozenset[str]
    refused: Mapping[str, tuple[Any, ...]]
    nested: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, struct: type[msgspec.Struct], harmless: frozenset[str] = frozenset()) -> FieldRules:
        """Return the rules of a surface: what its struct has not, it refuses if it is known.

        `harmless` are further names that change nothing of this surface's answers.
        """
        honoured = frozenset(struct.__struct_encode_fields__)
        harmless = (HARMLESS | harmless) - honoured
        refused = {k: v for k, v in KNOWN.items() if k not in honoured | harmless}
        return cls(honoured, harmless, refused, _nested(struct))


def _nested(struct: type[msgspec.Struct]) -> dict[str, frozenset[str]]:
    return {
        field.encode_name: frozenset(kind.__struct_encode_fields__)
        for field in msgspec.structs.fields(struct)
        for kind in get_args(field.type)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    }


_raw_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_raw_or_null = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)
T = TypeVar("T", bound=msgspec.Struct)


def decode(decoder: msgspec.json.Decoder[T], body: bytes, rules: FieldRules) -> tuple[T, list[str]]:
    """Decode a request body; return it and the names that neither OpenAI nor vLLM know.

    Those inside an object are given with its name, as in `stream_options.name`.
    Raises `ApiError` 400: malformed JSON, a wrong type, a missing field, a refused field.
    """
    try:
        raw = _raw_decoder.decode(body)
        unknown = _check_names(raw, rules)
        request = decoder.decode(body)
        return request, unknown + _unknown_inside(raw, rules)
    except msgspec.ValidationError as error:
        raise _invalid(error) from error
    except UNDECODABLE as error:
        text = f"The request body is not valid JSON: {error}"
        raise invalid_request("invalid_json", text) from error


def _check_names(raw: dict[str, msgspec.Raw], rules: FieldRules) -> list[str]:
    unknown = []
    for name in raw:
        if name in rules.honoured or name in rules.harmless:
            continue
        if name not in rules.refused:
            unknown.append(name)
            continue
        if not _asks_for_nothing(raw[name], rules.refused[name]):
            raise unsupported_parameter(name)
    return unknown


def _asks_for_nothing(raw: msgspec.Raw, neutral: tuple[Any, ...]) -> bool:
    try:
        value = msgspec.json.decode(raw)
    except msgspec.ValidationError:  # a number that nothing here can hold
        return False
    if value is None:
        return True
    # Python's True is 1, JSON's is not.
    same_kind = [each for each in neutral if isinstance(each, bool) == isinstance(value, bool)]
    return value in same_kind


def _unknown_inside(raw: dict[str, msgspec.Raw], rules: FieldRules) -> list[str]:
    unknown = []
    for field, known in rules.nested.items():
        inner = _raw_or_null.decode(raw[field]) if field in raw else None
        unknown += [f"{field}.{name}" for name in inner or () if name not in known]
    return unknown


_PATH = re.compile(r"^(?P<text>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>\w+)`")


def _invalid(error: msgspec.ValidationError) -> ApiError:
    """Translate msgspec's message into the field that is to blame and why."""
    match = _PATH.match(str(error))
    text, path = (match["text"], match["path"] or None) if match else (str(error), None)
    missing = _MISSING.match(text)
    if path and text.endswith("got `null`") and path.isidentifier():
        # Null is absent; a field that may be absent takes it, so this one may not.
        return missing_parameter(path)
    if missing:
        name = f"{path}.{missing['name']}" if path else missing["name"]
        return missing_parameter(name)
    where = f" for '{path}'" if path else ""
    return invalid_request("invalid_type", f"Invalid type{where}: {text}.", path)


def missing_parameter(name: str) -> ApiError:
    """Return the 400 for a field that has to be there."""
    return invalid_request(
        "missing_required_parameter", f"Missing required parameter: '{name}'.", name
    )


def unsupported_value(name: str, value: object, allowed: Iterable[str]) -> ApiError:
    """Return the 400 for a field that takes certain words, and has another."""
    text = f"Invalid value for '{name}': {value!r}. Supported values are: {', '.join(allowed)}."
    return invalid_request("invalid_value", text, name)
