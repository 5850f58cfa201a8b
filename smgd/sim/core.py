"""The simulated engine between its sockets: frames in, effects out, no I/O.

`receive` takes one message from an input socket, `step` does what is due, `shutdown` what SIGTERM
asks for. All return effects, in order: messages to send, and breakdowns to perform. The three fault
classes of vLLM become breakdowns here; after one of them the core may still be called, and goes on
as far as the engine would.
"""

from __future__ import annotations

import logging
from typing import Literal, TypeAlias

import msgspec

from smgd.sim.faults import InputThreadError, MainLoopError, OutputThreadError
from smgd.sim.outputs import FINISH_ERROR, Output, encode_outputs
from smgd.sim.scheduler import Message, Scheduler
from smgd.sim.structured import BACKENDS
from smgd.sim.utility import Utilities, UtilityError
from smgd.sim.wire import (
    AddRequest,
    Layout,
    UtilityCall,
    decode_abort,
    decode_add,
    decode_other,
    decode_utility,
)
from smgd.wire.vllm import ABORT, ADD, START_DP_WAVE, UTILITY

log = logging.getLogger(__name__)

BreakdownKind: TypeAlias = Literal["dead", "input", "output", "exit", "kill", "hang"]

# A reply that wants garbage gets as many messages as end a connection to a lenient front end.
_GARBAGE = [b"\xc1\xff\xc1"]
_GARBAGE_COUNT = 3


class Breakdown(msgspec.Struct, frozen=True):
    """The engine, or a part of it, stops here: class D, Z or Y, or what a reply asked for."""

    kind: BreakdownKind
    reason: str


Effect: TypeAlias = Message | Breakdown


class EngineCore:
    """One engine. Times are monotonic seconds."""

    def __init__(self, layout: Layout, scheduler: Scheduler, engine_index: int = 0) -> None:
        self._layout = layout
        self._scheduler = scheduler
        self._engine_index = engine_index
        self._utilities = Utilities(layout, scheduler)
        self._deferred: list[UtilityCall] = []  # pause_scheduler("wait"), until nothing runs
        self.clients = 1  # number of output sockets

    def receive(self, frames: list[bytes], now: float) -> list[Effect]:
        """Take one message from an input socket."""
        try:
            return self._settled(self._dispatch(frames, now), now)
        except InputThreadError as error:
            return [Breakdown("input", str(error))]
        except MainLoopError as error:
            return [Breakdown("dead", str(error))]

    def next_step_at(self) -> float | None:
        """Return when `step` is due, possibly in the past, or None if there is nothing to do."""
        return self._scheduler.next_step_at()

    def step(self, now: float) -> list[Effect]:
        """Give every running request its next tokens."""
        try:
            messages, strikes = self._scheduler.step(now)
        except MainLoopError as error:
            return [Breakdown("dead", str(error))]
        effects: list[Effect] = [*messages]
        for strike in strikes:
            effects += self._strike(strike)
        return self._settled(effects, now)

    def shutdown(self, now: float) -> list[Effect]:
        """End all requests with finish reason "abort": the engine leaves in good order."""
        return self._settled([*self._scheduler.abort_all(now)], now)

    @property
    def is_idle(self) -> bool:
        """Tell whether no request is alive."""
        return not self._scheduler.live_ids()

    # ------------------------------------------------------------------------------- messages

    def _dispatch(self, frames: list[bytes], now: float) -> list[Effect]:
        if len(frames) < 2:
            raise InputThreadError(f"a message of {len(frames)} frame(s)")
        kind, payload = frames[0], frames[1]
        if kind == ADD:
            return self._add(decode_add(payload), now)
        if kind == ABORT:
            ids = decode_abort(payload)
            for request_id in ids:
                log.info("sim abort id=%s", request_id)
            return [*self._scheduler.abort(ids, now)]
        if kind == UTILITY:
            return self._utility(decode_utility(payload), now)
        if kind == START_DP_WAVE:  # only lockstep groups of MoE models know it
            decode_other(payload)
            log.info("sim ignored START_DP_WAVE")
            return []
        raise InputThreadError(f"{kind!r} is not a valid EngineCoreRequestType")

    def _add(self, request: AddRequest, now: float) -> list[Effect]:
        sampling = request.sampling_params
        log.info(
            "sim add id=%s prompt=%d max_tokens=%s",
            request.request_id,
            len(request.prompt_token_ids or ()),
            sampling.max_tokens if sampling else None,
        )
        reason = self._refusal(request)
        if reason is None:
            self._scheduler.add(request, now)
            return []
        log.info("sim refused id=%s %s", request.request_id, reason)
        output = Output(request_id=request.request_id, finish=FINISH_ERROR)
        frames = encode_outputs(
            self._layout, self._engine_index, now, [output], finished=[request.request_id]
        )
        return [Message(request.client_index, frames)]

    def _refusal(self, request: AddRequest) -> str | None:
        """Return why the input thread answers a request itself, with finish reason "error"."""
        sampling = request.sampling_params
        if sampling is None:
            return None
        if sampling.max_tokens is None:
            return "max_tokens must not be None"
        rule = sampling.structured_outputs
        if rule is None or self._scheduler.structured_backend is not None:
            return None
        if rule.backend not in BACKENDS:
            return f"unsupported structured output backend: {rule.backend}"
        self._scheduler.structured_backend = rule.backend
        return None

    def _utility(self, call: UtilityCall, now: float) -> list[Effect]:
        try:
            outcome = self._utilities.call(call.method, call.args, now)
        except UtilityError as error:
            failure = f"Call to {call.method} method failed: {error}"
            return [self._answer(call, failure, None, now)]
        if outcome.deferred and self._scheduler.running:
            self._deferred.append(call)
            return [*outcome.messages]
        return [*outcome.messages, self._answer(call, None, outcome.result, now)]

    def _answer(
        self, call: UtilityCall, failure: str | None, result: object, now: float
    ) -> Message:
        frames = encode_outputs(
            self._layout, self._engine_index, now, utility=(call.call_id, failure, result)
        )
        return Message(call.client_index, frames)

    # ------------------------------------------------------------------------------- breaking

    def _strike(self, strike: str) -> list[Effect]:
        if strike == "garbage":
            return [Message(0, _GARBAGE)] * _GARBAGE_COUNT
        kinds: dict[str, BreakdownKind] = {
            "exit": "exit", "kill": "kill", "hang": "hang", "sentinel": "dead"
        }  # fmt: skip
        return [Breakdown(kinds[strike], f"a reply says so: {strike}")]

    def _settled(self, effects: list[Effect], now: float) -> list[Effect]:
        """Add the answers that waited until nothing runs.

        The effects end at a message for which there is no output socket (class Y).
        """
        if self._deferred and not self._scheduler.running:
            effects += [self._answer(call, None, None, now) for call in self._deferred]
            self._deferred.clear()
        for index, effect in enumerate(effects):
            if isinstance(effect, Message) and not 0 <= effect.client < self.clients:
                error = OutputThreadError(f"IndexError: no output socket {effect.client}")
                return [*effects[:index], Breakdown("output", str(error))]
        return effects
