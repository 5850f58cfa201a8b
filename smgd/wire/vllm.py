"""vLLM's EngineCore wire, 0.27.1 to 0.32, as measured on real engines: structs and codecs only.

Outgoing requests use the prefix of the ADD array that all these versions share; incoming arrays
are read by position with a default for every field that may be missing, and what later versions
append is skipped. So one module serves every version, and a test removes and adds trailing fields.

Fields are typed only where smgd uses them; the others cost no more than skipping them. Nothing
here is a policy: what a request may contain is decided in `engine/guard.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from smgd.errors import UNDECODABLE, RemoteProtocolError

# The type byte in front of every message on the input socket.
ADD = b"\x00"
ABORT = b"\x01"
START_DP_WAVE = b"\x02"
UTILITY = b"\x03"

# The one frame that is not msgpack: a fatal error in the engine's main loop.
ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"

# msgpack extension types: 3 is a raw view of a tensor; 1 and 2 are pickles, which we never read.
EXT_RAW_VIEW = 3

_pack = msgspec.msgpack.Encoder().encode
T = TypeVar("T")


# ----------------------------------------------------------------------------- the handshake


class HandshakeMessage(msgspec.Struct):
    """HELLO or READY of an engine; `parallel_config_hash` comes only from MoE groups."""

    status: str
    parallel_config_hash: str | None = None


class Registration(msgspec.Struct):
    """The map that an engine sends first on its input socket, as far as smgd reads it."""

    max_model_len: int
    vllm_version: str = ""
    instance_id: str = ""
    data_parallel_size: int = 1
    supports_lora: bool = False


_handshake_decoder = msgspec.msgpack.Decoder(HandshakeMessage)
_registration_decoder = msgspec.msgpack.Decoder(Registration)


def decode_handshake(payload: bytes) -> HandshakeMessage:
    """Read a HELLO or READY. Raises `RemoteProtocolError`."""
    return _decode(_handshake_decoder, payload, "handshake message")


def decode_registration(payload: bytes) -> Registration:
    """Read a registration map. Raises `RemoteProtocolError`."""
    return _decode(_registration_decoder, payload, "registration")


def encode_init(inputs: list[str], outputs: list[str]) -> bytes:
    """Return INIT: where the engine shall connect. No coordinator, no parallel configuration."""
    addresses = {
        "inputs": inputs,
        "outputs": outputs,
        "coordinator_input": None,
        "coordinator_output": None,
        "frontend_stats_publish_address": None,
    }
    return _pack({"addresses": addresses, "parallel_config": {}})


# --------------------------------------------------------------------- messages to the engine


def encode_add(
    request_id: str,
    prompt_token_ids: list[int],
    sampling_params: dict[str, Any],
    *,
    arrival_time: float,
    lora_request: list[Any] | None = None,
    cache_salt: str | None = None,
    priority: int = 0,
) -> list[bytes]:
    """Return the frames of an ADD; `arrival_time` is wall-clock seconds.

    The nine required elements always, further ones only as far as needed: index 13 is the priority.
    """
    fields: list[Any] = [
        request_id,
        prompt_token_ids,
        None,  # mm_features
        sampling_params,
        None,  # pooling_params
        arrival_time,
        lora_request,
        cache_salt,
        None,  # data_parallel_rank: the engine ignores it
    ]
    if priority:
        # prompt_embeds, prompt_is_token_ids, client_index, current_wave, priority
        fields += [None, None, 0, 0, priority]
    return [ADD, _pack(fields)]


def encode_abort(request_ids: list[str]) -> list[bytes]:
    """Return the frames of an ABORT. It must be a list: a bare string is silently ignored."""
    return [ABORT, _pack(request_ids)]


def encode_utility(call_id: int, method: str, args: list[Any]) -> list[bytes]:
    """Return the frames of a utility call by client 0; `call_id` is any non-negative u64."""
    return [UTILITY, _pack([0, call_id, method, args])]


def encode_start_dp_wave(wave: int, exclude_engine_index: int) -> list[bytes]:
    """Return the frames that wake a parked MoE rank, all but the one that has the request."""
    return [START_DP_WAVE, _pack([wave, exclude_engine_index])]


# ------------------------------------------------------------------- messages from the engine


class EngineCoreEvent(msgspec.Struct, gc=False):
    """Something that happened to a request; `timestamp` is the engine's monotonic seconds."""

    type: int
    timestamp: float


EVENT_QUEUED = 1
EVENT_SCHEDULED = 2


class PrefillStats(msgspec.Struct, gc=False):
    """Sent with a request's first output; how many of its prompt's tokens were cached."""

    num_cached_tokens: int = 0


class EngineCoreOutput(msgspec.Struct, array_like=True, gc=False):
    """One request's share of a message; 14 elements in 0.27.1, 18 in 0.32, read up to here."""

    request_id: str
    new_token_ids: list[int] = []
    new_logprobs: Any = None
    new_prompt_logprobs_tensors: Any = None
    pooling_output: Any = None
    finish_reason: int | None = None
    stop_reason: int | str | None = None
    events: list[EngineCoreEvent] | None = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    trace_headers: Any = None
    prefill_stats: PrefillStats | None = None


class PrefixCacheStats(msgspec.Struct, gc=False):
    """What was looked for in the prefix cache and found there since the last message, in tokens."""

    queries: int = 0
    hits: int = 0


class SchedulerStats(msgspec.Struct, gc=False):
    """The scheduler's state after a step; absent when the engine runs without statistics."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_stats: PrefixCacheStats | None = None


class UtilityOutput(msgspec.Struct, array_like=True, gc=False):
    """The answer to a utility call. What follows, a failure's text and a result, is not read."""

    call_id: int


class EngineCoreOutputs(msgspec.Struct, array_like=True, gc=False):
    """One message on the output socket. `timestamp` is the engine's monotonic seconds."""

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None
    finished_requests: Any = None
    wave_complete: int | None = None


def _read_extension(code: int, data: memoryview) -> bytes:
    if code != EXT_RAW_VIEW:
        raise RemoteProtocolError(f"engine sent msgpack extension type {code}, which is not read")
    return bytes(data)


_outputs_decoder = msgspec.msgpack.Decoder(EngineCoreOutputs, ext_hook=_read_extension)


def decode_outputs(payload: bytes) -> EngineCoreOutputs:
    """Read the first frame of an output message. Raises `RemoteProtocolError`."""
    return _decode(_outputs_decoder, payload, "outputs")


def _decode(decoder: msgspec.msgpack.Decoder[T], payload: bytes, what: str) -> T:
    try:
        return decoder.decode(payload)
    except RemoteProtocolError:
        raise
    except UNDECODABLE as error:
        raise RemoteProtocolError(f"undecodable {what}: {error}") from error


# ------------------------------------------------------------------------------------ tensors


def read_tensor(encoded: Any, aux: Sequence[bytes]) -> tuple[list[int], list[Any]]:
    """Return the shape of a `[dtype, shape, data]` array and its items, flat.

    Data lies inline, or in the auxiliary frame whose 1-based number stands in its place.
    Raises `RemoteProtocolError`.
    """
    try:
        dtype, shape, data = encoded
        raw = aux[data - 1] if isinstance(data, int) else data
        items: list[Any] = memoryview(raw).cast(_FORMATS[dtype]).tolist()
        fits = math.prod(shape) == len(items) and (not isinstance(data, int) or data > 0)
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise RemoteProtocolError(f"malformed tensor: {type(error).__name__}: {error}") from error
    if not fits:
        raise RemoteProtocolError(f"malformed tensor: {len(items)} items for shape {shape}")
    return list(shape), items


# Array-protocol strings of numpy and names of torch, to struct format characters. The wire is
# little endian, as are the machines that vLLM runs on.
_FORMATS: dict[str, Any] = {
    "<i4": "i", "<i8": "q", "<f4": "f", "<f8": "d",
    "int32": "i", "int64": "q", "float32": "f", "float64": "d",
}  # fmt: skip
