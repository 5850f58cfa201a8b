"""From neutral requests to running sequences: who runs what, and one request's life as a block.

`async with dispatcher.generation(requests) as generation:` is the life of a request on the engines.
Entering it chooses a worker for every sequence and submits; leaving it, however that happens, sends
one ABORT for each sequence that the engine has not finished. All of it is synchronous, so a cancel
can neither interrupt nor outrun it.

Between the engine's reader and the one who answers the client stands a `Sequence`: an array of
token ids that only grows, and an index up to which they were taken. Whatever arrives while the
client is slow merges there; its memory is bounded by `max_tokens`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from types import TracebackType

import msgspec
import structlog
import trio

from smgd.core import (
    Delta,
    FinishReason,
    GenerationRequest,
    Policy,
    RequestIds,
    Timings,
    TokenLogprobs,
    Worker,
    Write,
)
from smgd.errors import (
    ApiError,
    EngineLostError,
    SmgdError,
    WorkerLeftError,
    engine_lost,
    internal_error,
    no_available_workers,
)
from smgd.migration import Mode, continuation, refusal

log = structlog.get_logger("smgd.dispatch")

# Called by the engine's reader for a sequence that has news, in place of waking the task: renders
# them and returns what writes them, or calls `Sequence.touch`.
FlushHook = Callable[["Sequence"], Write | None]


class Sequence:
    """One sequence of a generation: the receiver of one engine request, and all its output.

    `request` is what was asked for; `running` is what an engine was given last: the same, or after
    a migration its continuation. `first_token_at` and `ended_at`, when it left its worker, are on
    trio's clock; `timings` are those of the engine that it began on.
    """

    __slots__ = (
        "_logprobs",
        "_taken",
        "_touched",
        "cached_tokens",
        "ended_at",
        "finish",
        "first_token_at",
        "generation",
        "hook",
        "ids",
        "index",
        "migrations",
        "open",
        "request",
        "running",
        "stop_reason",
        "timings",
        "worker",
    )

    def __init__(self, generation: Generation, index: int, request: GenerationRequest) -> None:
        self.generation = generation
        self.index = index
        self.request = request
        self.running = request
        self.hook: FlushHook | None = None
        self.worker: Worker | None = None
        self.open = False
        self.migrations = 0
        self.ids = array("I")
        self.finish: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.cached_tokens = 0
        self.timings: Timings | None = None
        self.first_token_at: float | None = None
        self.ended_at: float | None = None
        self._logprobs: list[TokenLogprobs] | None = None
        self._taken = 0
        self._touched = False

    # ------------------------------------------------------- the receiver, called by the reader

    @property
    def received(self) -> int:
        """How many tokens have been delivered, by all engines that it was on."""
        return len(self.ids)

    def deliver(self, delta: Delta) -> None:
        """Merge what the engine says into what has not been taken yet."""
        if self.first_token_at is None:
            self._first(delta)
        ids = delta.ids
        if len(ids) == 1:
            self.ids.append(ids[0])
        else:
            self.ids.extend(ids)
        if delta.logprobs is not None:
            if self._logprobs is None:
                self._logprobs = delta.logprobs
            else:
                self._logprobs += delta.logprobs
        if delta.finish is not None:
            self._finished(delta)

    def flush(self) -> Write | None:
        """Let the hook render what is there, or wake the task that answers the client."""
        hook = self.hook
        if hook is not None:
            return hook(self)
        self.touch()
        return None

    def fail(self, error: Exception) -> None:
        """Go on with another engine, or end the whole generation: no answer has a part missing."""
        self.generation.release(self)
        if isinstance(error, EngineLostError):
            self.generation.lost(self, error)
        else:
            self.generation.fail(error)

    def _first(self, delta: Delta) -> None:
        if delta.ids:
            self.first_token_at = trio.current_time()
        self.timings = delta.timings
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens

    def full(self) -> None:
        """End with what there is: no engine has room for more."""
        self.finish = "length"
        self.touch()

    def _finished(self, delta: Delta) -> None:
        self.generation.release(self)
        if delta.finish == "abort":
            # We did not ask for it (an aborted request is not delivered to): the engine is leaving.
            worker = self.worker.url if self.worker else "?"
            self.fail(EngineLostError(worker, "the engine aborted the request"))
        elif delta.finish == "error":
            text = "The engine failed to run this request; its log has the reason"
            self.generation.fail(ApiError(500, "engine_error", text))
        else:
            self.finish = delta.finish
            self.stop_reason = delta.stop_reason
            # Another engine's clock has nothing to do with the first one's.
            if self.timings is not None and delta.timings is not None and not self.migrations:
                self.timings.last_token = delta.timings.last_token

    # ------------------------------------------------------------------- the taker

    def take_ids(self) -> Seq[int]:
        """Return the ids that have come since the last time, where nothing else is asked for."""
        taken, ids = self._taken, self.ids
        self._taken = count = len(ids)
        self._touched = False
        # A slice of an array costs several times as much as a lone id, which is the everyday case.
        return (ids[taken],) if count == taken + 1 else ids[taken:]

    def take(self) -> Delta:
        """Return all that has come since the last time, as one delta."""
        rows, self._logprobs = self._logprobs, None
        return Delta(
            [*self.take_ids()],
            finish=self.finish,
            stop_reason=self.stop_reason,
            logprobs=rows,
        )

    def stop(self) -> None:
        """End the sequence from our side (a stop string matched): the engine is told at once."""
        self.generation.abort(self)

    def touch(self) -> None:
        """Wake the task for this sequence."""
        self.generation.touch(self)

    def mark_touched(self) -> bool:
        """Note that the task will look at this sequence; False if that is noted already."""
        was, self._touched = self._touched, True
        return not was


class Generation:
    """All sequences that answer one client request; made by `Dispatcher.generation`."""

    # No dictionaries in the path of a token: with a thousand streams every cache line counts.
    __slots__ = (
        "_closed", "_dispatcher", "_news", "_task", "error", "request_id", "sequences",
        "started_at",
    )  # fmt: skip

    def __init__(
        self, dispatcher: Dispatcher, requests: Seq[GenerationRequest], request_id: str
    ) -> None:
        self._dispatcher = dispatcher
        self.request_id = request_id
        self.sequences = [Sequence(self, i, request) for i, request in enumerate(requests)]
        self.error: ApiError | None = None
        self.started_at = trio.current_time()
        self._closed = False
        self._news: list[Sequence] = []
        self._task: trio.lowlevel.Task | None = None

    async def __aenter__(self) -> Generation:
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            if len(self.sequences) > 1:
                self._dispatcher.check([sequence.request for sequence in self.sequences])
            for sequence in self.sequences:
                self._dispatcher.start(sequence)
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Abort what the engine has not finished, and let go of the sequences. Idempotent.

        A sequence holds its generation: the cycle would keep prompt and output, and by the hook the
        model, until the next full collection, which may be hours away.
        """
        self._closed = True
        sequences, self.sequences = self.sequences, []
        for sequence in sequences:
            self.abort(sequence)
            sequence.hook = None

    def set_hook(self, hook: FlushHook | None) -> None:
        """Have the reader call `hook` for sequences with news, in place of waking the task."""
        for sequence in self.sequences:
            sequence.hook = hook

    async def wait(self) -> list[Sequence]:
        """Wait for news; return the sequences that have some. Look at `error` after taking them."""
        if self._news or self.error is not None:
            await trio.lowlevel.checkpoint_if_cancelled()
        else:
            self._task = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._forget_task)
        news, self._news = self._news, []
        return news

    def touch(self, sequence: Sequence) -> None:
        """Note that a sequence has news, and wake the task."""
        if sequence.mark_touched():
            self._news.append(sequence)
        self.wake()

    def fail(self, error: Exception) -> None:
        """End the generation; the first error counts. What was delivered can still be taken."""
        if self.error is None:
            self.error = _for_client(error)
        self.wake()

    def lost(self, sequence: Sequence, error: EngineLostError) -> None:
        """Go on with another engine after a loss, or fail where that cannot be."""
        if self.error is not None or self._closed:
            return
        final = self._dispatcher.migrate(sequence, error)
        if final is not None:
            self.fail(final)

    def abort(self, sequence: Sequence) -> None:
        """Send the sequence's ABORT if the engine still runs it."""
        if sequence.open and sequence.worker is not None:
            sequence.worker.abort_nowait(sequence.running.id)
            self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Note that a sequence has left its worker. Idempotent."""
        if sequence.open and sequence.worker is not None:
            sequence.open = False
            sequence.ended_at = trio.current_time()
            self._dispatcher.policy.ended(sequence.worker, sequence.running)

    def wake(self) -> None:
        """Wake the task, with or without news."""
        task, self._task = self._task, None
        if task is not None:
            trio.lowlevel.reschedule(task)

    def _forget_task(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED


def _for_client(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    answer = engine_lost(error) if isinstance(error, EngineLostError) else internal_error()
    answer.__cause__ = error
    return answer


class Migration(msgspec.Struct, frozen=True):
    """How often a sequence may go on elsewhere after losing its engine, and which ones may."""

    mode: Mode = "best-effort"
    limit: int = 2


BEST_EFFORT = Migration()


class Dispatcher:
    """Gives sequences to workers. `candidates` returns the ready workers of a model."""

    def __init__(
        self,
        candidates: Callable[[str], Seq[Worker]],
        policy: Policy,
        ids: RequestIds,
        *,
        migration: Migration = BEST_EFFORT,
        on_migration: Callable[[str, str], None] = lambda _model, _result: None,
        on_choice: Callable[[str], None] = lambda _model: None,
    ) -> None:
        self.policy = policy
        self._candidates = candidates
        self._ids = ids
        self._migration = migration
        self._on_migration = on_migration
        self._on_choice = on_choice

    def generation(self, requests: Seq[GenerationRequest], request_id: str) -> Generation:
        """Return the life of `requests` on the engines, to be entered with `async with`.

        `request_id` is what the client's request is called in the log.
        Entering raises `ApiError`: 503 if no worker is ready, 400 if the guard refuses a request.
        """
        return Generation(self, requests, request_id)

    def check(self, requests: Seq[GenerationRequest]) -> None:
        """Raise what a worker's guard says of any of them, before the first is sent."""
        for request in requests:
            for worker in self._candidates(request.model)[:1]:
                worker.check(request)

    def start(self, sequence: Sequence) -> None:
        """Choose a worker and submit. Raises `ApiError`."""
        self._submit(sequence, sequence.request, self._candidates(sequence.request.model))

    def migrate(self, sequence: Sequence, error: EngineLostError) -> EngineLostError | None:
        """Continue a sequence on another engine, or return the loss with why it has to fail."""
        request = sequence.request
        reason = self._stays(sequence)
        ready = [w for w in self._candidates(request.model) if _has_another(w, sequence)]
        if reason is None and not ready:
            reason = "no other worker of the model is ready"
        if reason is None:
            reason = self._go_on(sequence, ready)
        self._on_migration(request.model, "migrated" if reason is None else "failed")
        if reason is None:
            log.info(
                "stream migrated",
                request_id=sequence.generation.request_id,
                engine_request=request.id,
                now=sequence.running.id,
                tokens=len(sequence.ids),
                lost=error.worker,
            )
            return None
        log.warning(
            "stream lost",
            request_id=sequence.generation.request_id,
            engine_request=request.id,
            worker=error.worker,
            reason=reason,
        )
        was_left = sequence.worker is not None and sequence.worker.state == "draining"
        kind = WorkerLeftError if was_left else EngineLostError
        return kind(error.worker, f"{error.reason}; {reason}")

    def _stays(self, sequence: Sequence) -> str | None:
        if sequence.migrations >= self._migration.limit:
            return f"the request has moved {sequence.migrations} times already"
        return refusal(sequence.request, len(sequence.ids), self._migration.mode)

    def _go_on(self, sequence: Sequence, ready: list[Worker]) -> str | None:
        request = sequence.request
        if _is_full(request, len(sequence.ids), ready):
            sequence.full()
            return None
        sequence.migrations += 1
        try:
            going_on = continuation(request, sequence.ids, self._ids.next())
            self._submit(sequence, going_on, ready)
        except ApiError as refused:
            return refused.message
        return None

    def _submit(
        self, sequence: Sequence, request: GenerationRequest, candidates: Seq[Worker]
    ) -> None:
        """Give a request to one of the candidates. One that turns out to be lost is passed over."""
        lost: SmgdError | None = None
        while candidates:
            # Most daemons have one worker for a model, and to score it costs 10 to 25 us.
            lone = len(candidates) == 1
            worker = candidates[0] if lone else self.policy.pick(candidates, request)
            try:
                worker.submit_nowait(request, sequence)
            except EngineLostError as error:
                candidates = [other for other in candidates if other is not worker]
                lost = error
                continue
            sequence.worker, sequence.running, sequence.open = worker, request, True
            sequence.ended_at = None
            self._on_choice(request.model)
            self.policy.started(worker, request)
            return
        raise no_available_workers(request.model) from lost


def _has_another(worker: Worker, sequence: Sequence) -> bool:
    """Tell whether a worker has an engine that a sequence was not on; a ready one uses no other.

    Asked in the middle of a loss, which the list of ready workers may not have heard of yet.
    """
    if worker.state != "ready":
        return False
    return worker is not sequence.worker or len(worker.rank_loads) > 1


def _is_full(request: GenerationRequest, generated: int, workers: Seq[Worker]) -> bool:
    """Tell whether a sequence has all it asked for, or fills the context of every worker."""
    if generated >= request.sampling.max_tokens:
        return True
    longest = max(w.info.max_model_len if w.info is not None else 0 for w in workers)
    return bool(generated) and len(request.prompt_ids) + generated >= longest
