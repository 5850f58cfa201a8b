"""vLLM's EngineCore wire as the engine sees it: what a front end sends, and the handshake.

The mirror image of `smgd.wire.vllm`, written apart from it on purpose: two readings of the same
measurements, so that a mistake in one of them shows. Requests are decoded as strictly as vLLM does
it: a value out of range is an undecodable message.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from smgd.errors import UNDECODABLE
from smgd.sim.faults import InputThreadError

T = TypeVar("T")

_pack = msgspec.msgpack.Encoder().encode


class Layout(msgspec.Struct, frozen=True):
    """What differs on the wire between the versions; counts are of array elements.

    `min_tokens_first`: nothing stops a request below `min_tokens`, whatever the ids are called.
    """

    version: str
    message_length: int
    output_length: int
    prompt_logprobs_length: int
    min_tokens_first: bool

    @property
    def is_old(self) -> bool:
        """Tell whether the maps lack the keys that came after 0.27."""
        return self.version == "0.27.1"


LAYOUTS = {
    layout.version: layout
    for layout in (Layout("0.27.1", 8, 14, 4, True), Layout("0.32.0", 9, 18, 5, False))
}


# ---------------------------------------------------------------------------- from the front end


class StructuredOutputs(msgspec.Struct):
    """A structured-output rule; exactly one of the constraints is set."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    backend: str | None = msgspec.field(default=None, name="_backend")

    def __post_init__(self) -> None:
        if len(self.constraints()) != 1:
            raise ValueError(f"structured outputs need one constraint, not {self.constraints()}")

    def constraints(self) -> dict[str, Any]:
        """Return the constraints that are set, by kind."""
        names = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class RepetitionDetection(msgspec.Struct):
    """Ends a text that repeats a pattern of so many tokens at least `min_count` times."""

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2

    def __post_init__(self) -> None:
        if self.min_count < 2 or not 0 < self.min_pattern_size <= self.max_pattern_size:
            raise ValueError(f"invalid repetition_detection: {self}")


class SamplingParams(msgspec.Struct):
    """vLLM's class of that name; what only its own front end reads is left out."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    detokenize: bool = True
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    eos_token_id: int | None = msgspec.field(default=None, name="_eos_token_id")
    all_stop_token_ids: list[int] = msgspec.field(default_factory=list, name="_all_stop_token_ids")
    bad_words_token_ids: list[list[int]] | None = msgspec.field(
        default=None, name="_bad_words_token_ids"
    )
    structured_outputs: StructuredOutputs | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    skip_reading_prefix_cache: bool | None = None
    repetition_detection: RepetitionDetection | None = None

    def __post_init__(self) -> None:
        for what, holds in self._checks():
            if not holds:
                raise ValueError(f"{what} is out of range: {getattr(self, what)!r}")
        if self.seed == -1:
            self.seed = None
        if self.temperature < 1e-5:
            self.temperature = 0.0
        elif self.temperature < 0.01:
            self.temperature = 0.01

    def _checks(self) -> list[tuple[str, bool]]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        wanted = self.logprob_token_ids
        return [
            ("n", self.n >= 1 and (self.n == 1 or self.temperature >= 1e-5)),
            ("presence_penalty", -2 <= self.presence_penalty <= 2),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2),
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf")),
            ("temperature", 0 <= self.temperature <= 2),
            ("top_p", 0 < self.top_p <= 1),
            ("top_k", self.top_k >= -1),
            ("min_p", 0 <= self.min_p <= 1),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1),
            ("min_tokens", 0 <= self.min_tokens <= (self.max_tokens or self.min_tokens)),
            ("logprobs", self.logprobs is None or self.logprobs >= -1),
            ("prompt_logprobs", self.prompt_logprobs is None or self.prompt_logprobs >= -1),
            ("stop", "" not in stops and (self.detokenize or not stops)),
            (
                "logprob_token_ids",
                wanted is None or (len(wanted) <= 128 and self.logprobs in (None, len(wanted))),
            ),
        ]


class AddRequest(msgspec.Struct, array_like=True):
    """The ADD array up to the last element that the simulator reads."""

    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: Any
    sampling_params: SamplingParams | None
    pooling_params: Any
    arrival_time: float
    lora_request: Any
    cache_salt: str | None
    data_parallel_rank: int | None
    prompt_embeds: Any = None
    prompt_is_token_ids: list[bool] | None = None
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    trace_headers: dict[str, str] | None = None


class UtilityCall(msgspec.Struct, array_like=True):
    """A call of a method of the engine core."""

    client_index: int
    call_id: int
    method: str
    args: list[Any]


class Addresses(msgspec.Struct):
    """Where an engine shall connect: one address of each kind per front-end process."""

    inputs: list[str]
    outputs: list[str]


class Init(msgspec.Struct):
    """The front end's answer to HELLO."""

    addresses: Addresses
    parallel_config: dict[str, Any]


_add_decoder = msgspec.msgpack.Decoder(AddRequest)
_utility_decoder = msgspec.msgpack.Decoder(UtilityCall)
_init_decoder = msgspec.msgpack.Decoder(Init)
_any_decoder = msgspec.msgpack.Decoder()


def decode_add(payload: bytes) -> AddRequest:
    """Read an ADD. Raises `InputThreadError`, also for a parameter out of range."""
    return _decode(_add_decoder, payload)


def decode_abort(payload: bytes) -> list[str]:
    """Read an ABORT; what is not a list of strings names nothing. Raises `InputThreadError`."""
    ids = _decode(_any_decoder, payload)
    return [i for i in ids if isinstance(i, str)] if isinstance(ids, list) else []


def decode_utility(payload: bytes) -> UtilityCall:
    """Read a utility call. Raises `InputThreadError`."""
    return _decode(_utility_decoder, payload)


def decode_other(payload: bytes) -> None:
    """Read what is then ignored, as vLLM does. Raises `InputThreadError`."""
    _decode(_any_decoder, payload)


def decode_init(payload: bytes) -> Init:
    """Read INIT. Raises `InputThreadError`."""
    return _decode(_init_decoder, payload)


def _decode(decoder: msgspec.msgpack.Decoder[T], payload: bytes) -> T:
    try:
        return decoder.decode(payload)
    except UNDECODABLE as error:
        raise InputThreadError(f"{type(error).__name__}: {error}") from error


# ------------------------------------------------------------------------------ to the front end


def identity(engine_index: int) -> bytes:
    """Return the routing identity of an engine on all its sockets."""
    return engine_index.to_bytes(2, "little")


def encode_handshake(status: str) -> bytes:
    """Return HELLO or READY, as a local headless engine sends it."""
    return _pack({"status": status, "local": False, "headless": True})


def encode_registration(
    layout: Layout,
    *,
    engine_index: int,
    instance_id: str,
    max_model_len: int,
    max_num_seqs: int,
    num_gpu_blocks: int,
    block_size: int,
) -> bytes:
    """Return the map that an engine sends first on each input socket. Lengths are in tokens."""
    size = num_gpu_blocks * block_size
    newer: dict[str, Any] = {"supports_lora": False, "max_loras": 0, "mamba_block_size": None}
    newest: dict[str, Any] = {
        "weight_transfer_backend": None,
        "enable_sleep_mode": False,
        "supports_draft_weight_updates": False,
        "effective_attention_block_size": block_size,
    }
    if layout.is_old:
        newer, newest = {}, {}
    return _pack(
        {
            "max_model_len": max_model_len,
            "num_gpu_blocks": num_gpu_blocks,
            "block_size": block_size,
            "dp_stats_address": None,
            "dtype": "bfloat16",
            "vllm_version": layout.version,
            "world_size": 1,
            # Ranks of a dense model are engines of their own: each says that it is alone.
            "data_parallel_size": 1,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "data_parallel_rank": engine_index,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": 2048,
            "instance_id": instance_id,
            **newer,
            "kv_cache_size_tokens": size,
            "kv_cache_max_concurrency": size / max_model_len,
            "kv_events_config": None,
            **newest,
        }
    )
