"""The rule for request fields: nothing is silently dropped.

A field is *honoured* (it is in the surface's struct), *refused* (OpenAI or vLLM know it, smgd does
not do it: 400 that names it, unless its value asks for nothing), *harmless* (it changes nothing of
the answer by its nature) or *unknown* to both, which is ignored and counted. An explicit null
always means absent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from smgd.errors import ApiError, invalid_request, unsupported_parameter

# Ignoring these is right: they label, store or bill, and do not change what is generated.
HARMLESS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "prompt_cache_options", "request_id", "rid",
    }
)  # fmt: skip

# Known to OpenAI or vLLM and not honoured on any surface yet, each with the values that ask for
# nothing. A surface adds its own and takes out what it honours.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "prompt_logprobs": (),
    "logprob_token_ids": ([],),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "return_prompt_text": (False,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "stream_interval": (1,),
    "spaces_between_special_tokens": (True,),
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
    "session_id": (),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "vllm_xargs": ({},),
    "repetition_detection": (),
    "thinking_token_budget": (-1,),
    "lora_path": (),
    "watermarking": (False,),
    "routed_experts_prompt_start": (0,),
    "return_token_offsets": (False,),
    "return_assistant_tokens_mask": (False,),
    "return_mm_kwargs": (False,),
    "mm_payload": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "moderation": (),
}


class FieldRules(msgspec.Struct, frozen=True):
    """The names that one surface honours and refuses."""

    honoured: frozenset[str]
    refused: Mapping[str, tuple[Any, ...]]

    @classmethod
    def of(cls, struct: type[msgspec.Struct], refused: Mapping[str, tuple[Any, ...]]) -> FieldRules:
        """Return the rules of a surface: its struct's fields win over the common refusals."""
        honoured = frozenset(struct.__struct_encode_fields__)
        names = {**REFUSED, **refused}
        return cls(honoured, {k: v for k, v in names.items() if k not in honoured})


_raw_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
T = TypeVar("T", bound=msgspec.Struct)


def decode(decoder: msgspec.json.Decoder[T], body: bytes, rules: FieldRules) -> tuple[T, list[str]]:
    """Decode a request body; return it and the names that neither OpenAI nor vLLM know.

    Raises `ApiError` 400: malformed JSON, a wrong type, a missing field, a refused field.
    """
    try:
        raw = _raw_decoder.decode(body)
        unknown = _check_names(raw, rules)
        return decoder.decode(body), unknown
    except msgspec.ValidationError as error:
        raise _invalid(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = f"The request body is not valid JSON: {error}"
        raise invalid_request("invalid_json", text) from error


def _check_names(raw: dict[str, msgspec.Raw], rules: FieldRules) -> list[str]:
    unknown = []
    for name in raw:
        if name in rules.honoured or name in HARMLESS:
            continue
        if name not in rules.refused:
            unknown.append(name)
            continue
        value = msgspec.json.decode(raw[name])
        if value is not None and value not in rules.refused[name]:
            raise unsupported_parameter(name)
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
        return _missing(path)
    if missing:
        name = f"{path}.{missing['name']}" if path else missing["name"]
        return _missing(name)
    where = f" for '{path}'" if path else ""
    return invalid_request("invalid_type", f"Invalid type{where}: {text}.", path)


def _missing(name: str) -> ApiError:
    return invalid_request(
        "missing_required_parameter", f"Missing required parameter: '{name}'.", name
    )
