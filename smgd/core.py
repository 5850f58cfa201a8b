"""The neutral types that all layers share: the seams of smgd as code.

Down: a surface builds a `GenerationRequest`, a `Worker` takes it, a `Dialect` turns it into frames.
Up: a `Dialect` decodes frames into a `Batch` of `Delta`s, a `Receiver` gets them, the text pipeline
turns token ids into `Event`s. Nothing here knows a wire, a socket, a tokenizer or a surface.

All of it is synchronous: what is called `*_nowait`, `deliver`, `flush`, `fail` or `pick` can
neither block nor be cancelled, which is why clean-up needs no shielding anywhere.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import msgspec

# ------------------------------------------------------------------------------ going down


class Sampling(msgspec.Struct, kw_only=True):
    """All that an engine needs to know to sample one sequence, after every default is applied.

    `eos_token_id` is the one id that ends the text (None: `ignore_eos`); `all_stop_token_ids` are
    the ids that `min_tokens` masks. Counts are in tokens. `logprobs` and `prompt_logprobs` are the
    number of alternatives wanted (0: the token alone, None: nothing).
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_token_ids: list[int] = []
    eos_token_id: int | None = None
    all_stop_token_ids: list[int] = []
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words_token_ids: list[list[int]] | None = None


ConstraintKind: TypeAlias = Literal[
    "json", "json_object", "regex", "grammar", "choice", "structural_tag"
]


class Constraint(msgspec.Struct, frozen=True):
    """A structured-output rule: the engine may only generate what satisfies `value`."""

    kind: ConstraintKind
    value: Any


class StopRules(msgspec.Struct, frozen=True):
    """Stop strings, matched by smgd on decoded text; engines never see them.

    `token_strings` are those strings that are one token, by its id: such ids are also sent as stop
    ids, so that the engine stops by itself, and are reported as the strings they stand for.
    """

    strings: tuple[str, ...] = ()
    include_in_output: bool = False
    token_strings: dict[int, str] = {}


class OutputWishes(msgspec.Struct, frozen=True):
    """What the client wants to see of what was generated."""

    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False


class RoutingHints(msgspec.Struct, frozen=True):
    """What may influence which engine runs a request, and in which order."""

    priority: int = 0
    cache_salt: str | None = None
    lora_name: str | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """One sequence to generate. `id` is ours (see `RequestIds`), never the client's."""

    id: str
    model: str
    prompt_ids: list[int]
    sampling: Sampling
    constraint: Constraint | None = None
    stop: StopRules = StopRules()
    output: OutputWishes = OutputWishes()
    routing: RoutingHints = RoutingHints()


class RequestIds:
    """Makes engine request ids: a prefix for this start of the daemon, then a number.

    Fixed length (16 characters), unique in the life of an engine even across our restarts, and a
    foreign id (a former life's) is told by its prefix alone.
    """

    def __init__(self, prefix: str | None = None) -> None:
        self.prefix = secrets.token_hex(4) if prefix is None else prefix
        self._count = 0

    def next(self) -> str:
        """Return a fresh id."""
        self._count += 1
        return f"{self.prefix}{self._count:08x}"

    def is_ours(self, request_id: str) -> bool:
        """Tell whether an id was made by this start of the daemon."""
        return request_id.startswith(self.prefix)


# -------------------------------------------------------------------------------- going up

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error", "repetition"]


class TokenLogprobs(msgspec.Struct, gc=False):
    """One row: the token itself first, then the alternatives in falling order.

    `rank` is the token's 1-based rank in the vocabulary.
    """

    ids: list[int]
    logprobs: list[float]
    rank: int


class Timings(msgspec.Struct, gc=False):
    """When the engine queued and first scheduled a request, and sent its first and last token.

    The last is known from the delta that finishes it. Seconds on the engine's monotonic clock: only
    differences mean anything.
    """

    queued: float | None = None
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None


class Delta(msgspec.Struct, gc=False):
    """What one engine output says about one sequence.

    `logprobs`, if asked for, has one row per id. `finish` ends the sequence; `stop_reason` is the
    id or string that did it, None for EOS and for length. The stop token itself is among `ids`.
    """

    ids: list[int]
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    cached_tokens: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    timings: Timings | None = None


class EngineLoad(msgspec.Struct, frozen=True):
    """What an engine last said of its scheduler. `kv_usage` is in 0..1."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0


class EngineCounts(msgspec.Struct):
    """What has happened between a worker and its engines since the worker was added.

    `aborts` are requests that engines were told to abort, `adoptions` engines that were found again
    after a restart of ours, `losses` those that were lost while they took requests, `requests` what
    was sent to engines.
    """

    aborts: int = 0
    adoptions: int = 0
    losses: int = 0
    requests: int = 0


class EngineWork(msgspec.Struct):
    """What one engine has done for us since its worker was added, in tokens.

    `generated` have come from it. Of a prompt, it looks for `prefix_queries` in its prefix cache
    and finds `prefix_hits`.
    """

    generated: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine said of itself when it registered. `max_model_len` is in tokens."""

    max_model_len: int
    version: str = ""
    instance_id: str = ""
    data_parallel_size: int = 1
    supports_lora: bool = False


class Batch(msgspec.Struct, gc=False):
    """One engine message, decoded once. `dead` is the engine's own word that it is gone.

    `reply` is the call that it answers: that there is an answer counts, whatever it says.
    `prefix_queries` and `prefix_hits` (see `EngineWork`) are those since its last message.
    """

    engine_index: int
    deltas: list[tuple[str, Delta]]
    load: EngineLoad | None = None
    reply: int | None = None
    wave_complete: int | None = None
    dead: bool = False
    prefix_queries: int = 0
    prefix_hits: int = 0


class Special(msgspec.Struct, frozen=True, gc=False):
    """A special token in a text: never cut, never confused with text that spells the same."""

    id: int
    text: str


Piece: TypeAlias = str | Special


class Content(msgspec.Struct, frozen=True, gc=False):
    """Text for the user."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """Text that the model thought, not said."""

    text: str


class CallStart(msgspec.Struct, frozen=True, gc=False):
    """A tool call begins; `id` is None where the surface makes it."""

    index: int
    id: str | None
    name: str


class CallArgs(msgspec.Struct, frozen=True, gc=False):
    """A fragment of a tool call's arguments (JSON text)."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True, gc=False):
    """A tool call is complete."""

    index: int


class Finish(msgspec.Struct, frozen=True, gc=False):
    """The sequence is over: exactly one per sequence, always the last event."""

    reason: FinishReason
    stop_reason: int | str | None = None


Event: TypeAlias = Content | Reasoning | CallStart | CallArgs | CallEnd | Finish


class Parser(Protocol):
    """Tells reasoning, tool calls and content apart; whole text is one `feed`, then `finish`."""

    def feed(self, pieces: list[Piece]) -> list[Event]:
        """Take the next pieces of the text."""
        ...

    def finish(self) -> list[Event]:
        """Give what was held back: the text is over."""
        ...


# ------------------------------------------------------------------------------- the seams


# Puts on the wire what a receiver has rendered.
Write: TypeAlias = Callable[[], None]


class Receiver(Protocol):
    """The one who waits for a sequence. Its methods are called from the engine's reader."""

    @property
    def received(self) -> int:
        """How many tokens have been delivered."""
        ...

    def deliver(self, delta: Delta) -> None:
        """Take what an engine output says; nothing is rendered yet."""
        ...

    def flush(self) -> Write | None:
        """All that was there has been delivered: render or wake now. Once per drain.

        What is returned writes what was rendered; it is called once all others have rendered.
        """
        ...

    def fail(self, error: Exception) -> None:
        """The sequence will not finish. Neither `deliver` nor `flush` is called after it."""
        ...


class Dialect(Protocol):
    """One engine's wire, between frames and neutral types; a plain object without state or I/O.

    Frames are without the routing identity. Decoding raises `RemoteProtocolError`, encoding
    `LocalProtocolError`.
    """

    name: str

    def read_registration(self, payload: bytes) -> EngineInfo:
        """Read the first message that an engine sends on its input socket."""
        ...

    def encode_add(self, request: GenerationRequest, info: EngineInfo) -> list[bytes]:
        """Return the frames that submit a request."""
        ...

    def encode_abort(self, request_ids: Sequence[str]) -> list[bytes]:
        """Return the frames that abort requests; unknown ids do no harm."""
        ...

    def decode(self, frames: Sequence[bytes]) -> Batch:
        """Decode one output message."""
        ...

    def heartbeat(self, call_id: int) -> list[bytes] | None:
        """Return the frames of a call that a live engine answers, or None if the wire has none."""
        ...


WorkerState: TypeAlias = Literal["pending", "ready", "not_ready", "failed", "draining"]


class Worker(Protocol):
    """Something that runs requests, whatever transport lies behind it."""

    id: str
    url: str
    model_id: str

    @property
    def state(self) -> WorkerState:
        """Where the worker is in its life; only `ready` takes requests."""
        ...

    @property
    def load(self) -> EngineLoad:
        """What the engines last reported, summed over ranks."""
        ...

    @property
    def rank_loads(self) -> list[EngineLoad]:
        """What each engine last reported, by rank."""
        ...

    @property
    def rank_work(self) -> list[EngineWork]:
        """What each engine has done for us, by rank."""
        ...

    @property
    def usable(self) -> list[int]:
        """The ranks of the engines that take requests."""
        ...

    @property
    def counts(self) -> EngineCounts:
        """What has happened between worker and engines."""
        ...

    @property
    def info(self) -> EngineInfo | None:
        """What the engine said at registration; None until then."""
        ...

    @property
    def requests_active(self) -> int:
        """Requests of ours that are in flight on this worker."""
        ...

    def check(self, request: GenerationRequest) -> None:
        """Raise the `ApiError` (400) with which `submit_nowait` would refuse a request."""
        ...

    def submit_nowait(self, request: GenerationRequest, receiver: Receiver) -> None:
        """Send a request, or raise `EngineLostError` at once if the worker is not ready."""
        ...

    def abort_nowait(self, request_id: str) -> None:
        """Tell the engine to drop a request. Does nothing for one that is not in flight."""
        ...


class Policy(Protocol):
    """Chooses among ready workers; told of starts and ends so that it can keep its own score."""

    name: str

    def pick(self, candidates: Sequence[Worker], request: GenerationRequest) -> Worker:
        """Choose one of `candidates`, which is never empty."""
        ...

    def started(self, worker: Worker, request: GenerationRequest) -> None:
        """Hear that a request was given to a worker."""
        ...

    def ended(self, worker: Worker, request: GenerationRequest) -> None:
        """Hear that a request has left a worker, however it ended."""
        ...
