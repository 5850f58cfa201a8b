"""The generation parameters that every surface shares, and how defaults are applied to them.

Order of precedence, as vLLM has it: the request, the model's generation_config, the library.
Ranges are the guard's business (`engine/guard.py`): it is the last thing before the wire.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from smgd.api.base import PlanContext
from smgd.core import GenerationRequest, OutputWishes, RoutingHints, Sampling, StopRules
from smgd.errors import ApiError, invalid_request
from smgd.migration import GREEDY_BELOW
from smgd.text.model import Model

# OpenAI allows 128 choices; every one is a sequence that an engine must hold.
MAX_CHOICES = 128

# Sequences of one request (prompts times choices): each is kept by an engine and by us.
MAX_SEQUENCES = 2048

# Characters of all stop strings together. Their automaton takes about 3 us and 350 bytes for each,
# on the event loop.
MAX_STOP_CHARS = 4096

# What vLLM lets into a salt: its caches make file names and addresses of it.
MAX_SALT_CHARS = 128
SALT_FORBIDDEN = frozenset("@/\\\0")

# No token is longer than this in the vocabularies that are in use; longer stops cannot be one.
LONGEST_STOP = 64


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding against listeners; never sent, so never asked


class GenerationParams(msgspec.Struct, kw_only=True):
    """Fields that chat and text completions have in common. None is absent."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


def check(params: GenerationParams) -> None:
    """Refuse what no engine needs to be asked about. Raises `ApiError` 400."""
    if params.stream_options not in (None, StreamOptions()) and not params.stream:
        raise invalid_request(
            "stream_options_requires_stream",
            "'stream_options' is only allowed when 'stream' is true.",
            "stream_options",
        )
    choices = 1 if params.n is None else params.n
    if choices < 1:
        raise _below("n", choices, 1)
    if choices > MAX_CHOICES:
        text = f"Invalid 'n': {choices} is above the maximum of {MAX_CHOICES}."
        raise invalid_request("integer_above_max_value", text, "n")
    if choices > 1 and params.temperature is not None and params.temperature < GREEDY_BELOW:
        text = f"'n' must be 1 when 'temperature' is 0, got {choices}: all choices would be equal."
        raise invalid_request("invalid_value", text, "n")
    strings = stop_strings(params)
    if "" in strings:
        raise invalid_request("invalid_value", "A stop string must not be empty.", "stop")
    length = sum(map(len, strings))
    if length > MAX_STOP_CHARS:
        text = f"'stop' has {length} characters in all; the maximum is {MAX_STOP_CHARS}."
        raise invalid_request("string_above_max_length", text, "stop")
    if params.cache_salt is not None:
        _check_salt(params.cache_salt)


def _check_salt(salt: str) -> None:
    if len(salt) > MAX_SALT_CHARS:
        text = f"'cache_salt' has {len(salt)} characters; the maximum is {MAX_SALT_CHARS}."
        raise invalid_request("string_above_max_length", text, "cache_salt")
    if not salt or not SALT_FORBIDDEN.isdisjoint(salt):
        text = "'cache_salt' must not be empty, nor contain '@', '/', '\\' or NUL."
        raise invalid_request("invalid_value", text, "cache_salt")


def stop_strings(params: GenerationParams) -> tuple[str, ...]:
    """Return the stop strings as a tuple, whatever shape the client sent."""
    if params.stop is None:
        return ()
    return (params.stop,) if isinstance(params.stop, str) else tuple(params.stop)


def max_tokens(
    requested: int | None,
    param: str,
    default: int | None,
    length: int,
    context: PlanContext,
    *,
    prompt: str,
) -> int:
    """Return how many tokens may be generated, as vLLM decides it.

    `length` is the prompt's, in tokens; `param` and `prompt` are the fields that errors blame.
    Unset is `default` (None: all there is), at most the room that is left; above the model's
    context is an error, as is a prompt that leaves no room; between room and context is clamped.
    Raises `ApiError` 400.
    """
    limit = context.max_model_len
    room = limit - length
    if room < 1:
        text = (
            f"This model's maximum context length is {limit} tokens, but the prompt has {length} "
            "tokens and at least one must be left for the answer. Shorten the prompt."
        )
        raise invalid_request("context_length_exceeded", text, prompt)
    if requested is None:
        return room if default is None else min(default, room)
    if requested < 1:
        raise _below(param, requested, 1)
    if requested > limit:
        text = (
            f"{param}={requested} cannot be greater than the model's maximum context length of "
            f"{limit} tokens (the prompt has {length} tokens, so at most {room} can be generated)."
        )
        raise invalid_request("integer_above_max_value", text, param)
    return min(requested, room)


def check_text(text: str, context: PlanContext, param: str) -> None:
    """Refuse a text that cannot fit, before it is tokenized. Raises `ApiError` 400."""
    longest = context.model.tokenizer.longest_token
    if len(text) > context.max_model_len * longest:
        message = (
            f"This model's maximum context length is {context.max_model_len} tokens, but the "
            f"prompt has {len(text)} characters, which is at least {len(text) // longest} tokens."
        )
        raise invalid_request("context_length_exceeded", message, param)


def check_logprobs(wanted: int | None, param: str, context: PlanContext) -> None:
    """Refuse more alternatives than engines are set to give. Raises `ApiError` 400."""
    if wanted is None or 0 <= wanted <= context.max_logprobs:
        return
    if wanted < 0:
        raise _below(param, wanted, 0)
    text = f"{param} must be at most {context.max_logprobs}, got {wanted}."
    raise invalid_request("integer_above_max_value", text, param)


def sequences(
    params: GenerationParams,
    context: PlanContext,
    prompts: Sequence[tuple[list[int], int]],
    logprobs: int | None,
) -> list[GenerationRequest]:
    """Return one request for each choice of each prompt, a prompt's choices together.

    A prompt comes with its limit of new tokens. `logprobs` is the number of alternatives to show
    for each token, None for none at all. An explicit seed becomes `seed + i` for choice i; behind
    the largest of 64 bits comes the smallest.
    """
    stop = stop_rules(params, context.model)
    output = OutputWishes(
        skip_special_tokens=params.skip_special_tokens is not False, logprobs=logprobs
    )
    routing = RoutingHints(params.priority or 0, params.cache_salt)
    requests = []
    for prompt_ids, tokens in prompts:
        base = sampling(params, context.model, tokens, stop)
        base.logprobs = logprobs
        for index in range(params.n or 1):
            own = base
            if index and base.seed is not None:
                own = msgspec.structs.replace(base, seed=_int64(base.seed + index))
            requests.append(
                GenerationRequest(
                    id=context.ids.next(),
                    model=context.model.id,
                    prompt_ids=prompt_ids,
                    sampling=own,
                    stop=stop,
                    output=output,
                    routing=routing,
                )
            )
    return requests


def stop_rules(params: GenerationParams, model: Model) -> StopRules:
    """Return the rules for stop strings.

    A string that is one token becomes a stop id as well, except with `min_tokens`: the engine
    would take the id for one that it must not generate until then.
    """
    strings = stop_strings(params)
    single: dict[int, str] = {}
    if not params.min_tokens:
        for string in strings:
            token = model.tokenizer.only_token(string) if len(string) <= LONGEST_STOP else None
            if token is not None:
                single[token] = string
    return StopRules(strings, bool(params.include_stop_str_in_output), single)


def sampling(params: GenerationParams, model: Model, tokens: int, stop: StopRules) -> Sampling:
    """Return the engine-side parameters; `tokens` is what `max_tokens` gave.

    EOS as vLLM has it: the tokenizer's EOS is `eos_token_id`, the model's further ones are stop
    ids, unless `ignore_eos`; all of them are masked until `min_tokens` is reached.
    """
    files = model.files
    defaults = files.sampling_defaults
    eos = None if params.ignore_eos else files.eos_token_id
    further = [] if params.ignore_eos else [i for i in files.eos_token_ids if i != eos]
    stops = list(dict.fromkeys([*(params.stop_token_ids or ()), *further]))
    return Sampling(
        max_tokens=tokens,
        min_tokens=params.min_tokens or 0,
        temperature=_first(params.temperature, defaults.temperature, 1.0),
        top_p=_first(params.top_p, defaults.top_p, 1.0),
        top_k=int(_first(params.top_k, defaults.top_k, 0)),
        min_p=_first(params.min_p, defaults.min_p, 0.0),
        presence_penalty=_first(params.presence_penalty, defaults.presence_penalty, 0.0),
        frequency_penalty=_first(params.frequency_penalty, defaults.frequency_penalty, 0.0),
        repetition_penalty=_first(params.repetition_penalty, defaults.repetition_penalty, 1.0),
        seed=None if params.seed == -1 else params.seed,
        stop_token_ids=[*stops, *(i for i in stop.token_strings if i not in stops)],
        eos_token_id=eos,
        all_stop_token_ids=sorted({*stops, *files.eos_token_ids}),
        logit_bias=params.logit_bias or None,
        allowed_token_ids=params.allowed_token_ids,
    )


def _int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def _first(asked: float | None, configured: float | None, default: float) -> float:
    if asked is not None:
        return asked
    return default if configured is None else configured


def _below(param: str, value: int, minimum: int) -> ApiError:
    text = f"{param} must be at least {minimum}, got {value}."
    return invalid_request("integer_below_min_value", text, param)
