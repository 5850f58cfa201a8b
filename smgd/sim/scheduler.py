"""Requests and steps: who runs, who waits, and what one step says about each of them.

Time is passed in (seconds on any monotonic clock) and nothing here waits: `next_step_at` says when
`step` shall be called. A step gives every running request its next tokens and makes one message
for each front-end process; the first of them carries the statistics. A request's first token is
due `ttft` seconds after it was admitted; the steps themselves are at least `itl` seconds apart.

When the last request has ended, one more message reports an idle scheduler; then there is silence.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, Literal, TypeAlias

import msgspec

from smgd.sim.cache import PrefixCache, blocks
from smgd.sim.faults import MainLoopError
from smgd.sim.generation import Generation, Script
from smgd.sim.model import Model
from smgd.sim.outputs import (
    EVENT_QUEUED,
    EVENT_SCHEDULED,
    FINISH_ABORT,
    Output,
    encode_outputs,
    prefill_stats,
    scheduler_stats,
)
from smgd.sim.pace import Cadence, Pace
from smgd.sim.poison import Limits
from smgd.sim.replies import Reply, Then, find_reply
from smgd.sim.structured import NotCompiledError, scripted_text
from smgd.sim.wire import AddRequest, Layout, SamplingParams

log = logging.getLogger(__name__)

PauseMode: TypeAlias = Literal["abort", "wait", "keep"]

# What the KV cache holds: 32 of the longest requests, or thousands of chats. It is never short.
NUM_GPU_BLOCKS = 16384


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine was started, as far as the scheduler cares."""

    engine_index: int = 0
    max_num_seqs: int = 256
    pace: Pace = Pace()
    replies: list[Reply] = []
    with_stats: bool = True


class Message(msgspec.Struct, frozen=True):
    """Frames for one front-end process, by its client index."""

    client: int
    frames: list[bytes]


class Counters(msgspec.Struct):
    """What happened since the start; `abort_ids` are the ids of all ABORTs, known or not."""

    adds: int = 0
    aborts: int = 0
    abort_ids: list[str] = []
    finished: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    steps: int = 0

    def totals(self) -> dict[str, int]:
        """Return the numbers alone, under their names."""
        numbers = msgspec.structs.asdict(self)
        del numbers["abort_ids"]
        return numbers


class _Arrival(msgspec.Struct, frozen=True):
    """A request that waits, and when it came."""

    add: AddRequest
    at: float


class _Job(msgspec.Struct):
    """A request that runs; `events` and `prefill` are what its first output reports."""

    add: AddRequest
    generation: Generation
    due: float
    events: list[tuple[int, float]]
    prefill: dict[str, int] | None
    is_new: bool = True


class Scheduler:
    """The engine's main loop, but for the loop. Raises `MainLoopError` for what vLLM dies of."""

    def __init__(self, layout: Layout, model: Model, limits: Limits, options: Options) -> None:
        self._layout = layout
        self._model = model
        self._limits = limits
        self._options = options
        self._waiting: deque[_Arrival] = deque()
        self._running: dict[str, _Job] = {}
        self._cadence = Cadence(options.pace.itl)
        self._prefix = [0, 0, 0]  # requests, queries and hits since the last statistics
        self.cache = PrefixCache(NUM_GPU_BLOCKS)
        self.counters = Counters()
        self.paused: PauseMode | None = None
        self.structured_backend: str | None = None  # the first structured request chooses

    # ------------------------------------------------------------------------------- requests

    def add(self, request: AddRequest, now: float) -> None:
        """Take a request; it runs at once if there is room."""
        self.counters.adds += 1
        if request.request_id in self.live_ids():
            raise MainLoopError(f"AssertionError: duplicate request id {request.request_id}")
        self._waiting.append(_Arrival(request, now))
        self._admit(now)

    def abort(self, request_ids: list[str], now: float) -> list[Message]:
        """Drop requests, silently, but for the report of an idle scheduler."""
        self.counters.aborts += len(request_ids)
        self.counters.abort_ids += request_ids
        was_idle = not self._running
        for request_id in request_ids:
            self._running.pop(request_id, None)
        self._waiting = deque(j for j in self._waiting if j.add.request_id not in request_ids)
        self._admit(now)
        return [] if was_idle else self._idle_report(now)

    def abort_all(self, now: float) -> list[Message]:
        """End all requests with finish reason "abort", as vLLM does when it leaves or pauses."""
        requests = [job.add for job in self._running.values()]
        requests += [arrival.add for arrival in self._waiting]
        self._running.clear()
        self._waiting.clear()
        messages = []
        for client in sorted({request.client_index for request in requests}):
            ids = [r.request_id for r in requests if r.client_index == client]
            outputs = [Output(request_id=i, finish=FINISH_ABORT) for i in ids]
            messages.append(self._message(client, now, outputs, finished=ids))
        return messages + (self._idle_report(now) if requests else [])

    def live_ids(self) -> set[str]:
        """Return the ids of all requests that have not ended."""
        return {*self._running, *(arrival.add.request_id for arrival in self._waiting)}

    @property
    def running(self) -> int:
        """Number of requests that run."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return len(self._waiting)

    def resume(self, now: float) -> None:
        """End a pause."""
        self.paused = None
        self._admit(now)

    def _admit(self, now: float) -> None:
        while (
            self._waiting
            and len(self._running) < self._options.max_num_seqs
            and self.paused is None
        ):
            arrival = self._waiting.popleft()
            prompt, sampling = self._limits.check(arrival.add)
            job = self._job(arrival, prompt, sampling, now)
            self._running[arrival.add.request_id] = job

    def _job(
        self, arrival: _Arrival, prompt: list[int], sampling: SamplingParams, now: float
    ) -> _Job:
        reply = self._reply(prompt)
        queued, scheduled = (EVENT_QUEUED, arrival.at), (EVENT_SCHEDULED, now)
        try:
            script = self._script(reply, sampling)
        except NotCompiledError as error:
            log.info("sim not compiled id=%s %s", arrival.add.request_id, error)
            generation = self._generation(arrival.add, prompt, sampling, Script(ending="error"))
            return _Job(arrival.add, generation, now, [queued], None)
        generation = self._generation(arrival.add, prompt, sampling, script)
        due = now + self._options.pace.ttft + (reply.delay if reply else 0.0)
        prefill = self._prefill(prompt, sampling, arrival.add.cache_salt)
        return _Job(arrival.add, generation, due, [queued, scheduled], prefill)

    def _generation(
        self, add: AddRequest, prompt: list[int], sampling: SamplingParams, script: Script
    ) -> Generation:
        return Generation(
            add.request_id,
            prompt,
            sampling,
            self._model,
            script,
            max_model_len=self._limits.max_model_len,
            min_tokens_first=self._layout.min_tokens_first,
        )

    def _reply(self, prompt: list[int]) -> Reply | None:
        replies = self._options.replies
        return find_reply(replies, self._model.codec.decode(prompt, False)) if replies else None

    def _script(self, reply: Reply | None, sampling: SamplingParams) -> Script:
        eos = sampling.eos_token_id
        if reply is not None:
            return Script.of(reply, self._model.eos_token_id if eos is None else eos)
        if sampling.structured_outputs is None:
            return Script()
        text = scripted_text(sampling.structured_outputs, self.structured_backend)
        if text is None:
            return Script()
        return Script([*self._model.codec.encode(text), *([] if eos is None else [eos])])

    def _prefill(
        self, prompt: list[int], sampling: SamplingParams, salt: str | None
    ) -> dict[str, int]:
        cached = 0
        self.counters.prompt_tokens += len(prompt)
        if not sampling.skip_reading_prefix_cache and sampling.prompt_logprobs is None:
            cached = self.cache.match(prompt, salt)
            for index, value in enumerate((1, len(prompt), cached)):
                self._prefix[index] += value
        return prefill_stats(len(prompt), cached, self.cache.store(prompt, salt))

    # ---------------------------------------------------------------------------------- steps

    def next_step_at(self) -> float | None:
        """Return when `step` is due, possibly in the past, or None if there is nothing to do."""
        if not self._running or self.paused == "keep":
            return None
        return self._cadence.next(min(job.due for job in self._running.values()))

    def step(self, now: float) -> tuple[list[Message], list[Then]]:
        """Return the messages of one step, and what replies want to happen after it."""
        self._cadence.stepped(self.next_step_at() or now, now)
        self.counters.steps += 1
        by_client: dict[int, list[Output]] = {}
        strikes: list[Then] = []
        for job in [job for job in self._running.values() if job.due <= now]:
            output = self._advance(job)
            by_client.setdefault(job.add.client_index, []).append(output)
            script = job.generation.script
            if script.then and (script.is_over or output.finish is not None):
                strikes.append(script.then)
                script.then = None
        self._admit(now)
        return self._step_messages(by_client, now), strikes

    def _advance(self, job: _Job) -> Output:
        output = job.generation.step()
        output.trace_headers = job.add.trace_headers
        if job.is_new:
            job.is_new = False
            output.prefill_stats = job.prefill
            output.prompt_logprobs = job.generation.prompt_logprobs()
            output.events = job.events if self._options.with_stats else None
        self.counters.tokens += len(output.ids)
        if output.finish is not None:
            del self._running[job.add.request_id]
            self.counters.finished += 1
            # The last token was sampled but never run through the model.
            self.cache.store(job.generation.ids[:-1], job.add.cache_salt)
        return output

    def _step_messages(self, by_client: dict[int, list[Output]], now: float) -> list[Message]:
        messages = []
        stats = self._stats()
        for client, outputs in by_client.items():
            messages.append(self._message(client, now, outputs, stats=stats, from_step=True))
            stats = None
        return messages + self._idle_report(now)

    def _idle_report(self, now: float) -> list[Message]:
        if self._running or self._waiting or not self._options.with_stats:
            return []
        return [self._message(0, now, stats=self._stats(), from_step=True)]

    def _stats(self) -> dict[str, Any] | None:
        if not self._options.with_stats:
            return None
        requests, queries, hits = self._prefix
        self._prefix = [0, 0, 0]
        used = sum(blocks(len(job.generation.ids)) for job in self._running.values())
        return scheduler_stats(
            self._layout,
            running=len(self._running),
            waiting=len(self._waiting),
            kv_usage=min(1.0, used / NUM_GPU_BLOCKS),
            prefix_requests=requests,
            prefix_queries=queries,
            prefix_hits=hits,
        )

    def _message(
        self,
        client: int,
        now: float,
        outputs: list[Output] | None = None,
        *,
        stats: dict[str, Any] | None = None,
        finished: list[str] | None = None,
        from_step: bool = False,
    ) -> Message:
        frames = encode_outputs(
            self._layout,
            self._options.engine_index,
            now,
            outputs or [],
            stats=stats,
            finished=finished,
            from_step=from_step,
        )
        return Message(client, frames)
