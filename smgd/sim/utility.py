"""The utility calls: the methods of vLLM's engine core that a front end may call by name.

Two are ours, for tests and benchmarks: `sim_counters` counts what happened since the start, and
`sim_stats` has the ids of all ABORTs, too. What vLLM does not have, or what its default
configuration refuses, fails with vLLM's text.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_args

import msgspec

from smgd.errors import SmgdError
from smgd.sim.cache import BLOCK_SIZE
from smgd.sim.scheduler import Message, PauseMode, Scheduler
from smgd.sim.wire import Layout

_WORKER_FAILED = (
    "Worker failed with error '{}', please check the stack trace above for the root cause"
)
_NO_LORA = "LoRA is not enabled. Use --enable-lora to enable LoRA."
_NO_PROFILER = (
    "Profiling is not enabled. Please set --profiler-config to enable profiling. Example: "
    "'--profiler-config.profiler=torch --profiler-config.torch_profiler_dir="
    "YOUR_DIR_PATH_TO_DUMP_TRACE'"
)


class UtilityError(SmgdError):
    """The call failed; the text is the engine's."""


class Outcome(msgspec.Struct, frozen=True):
    """What a call returns, and the messages that go out first.

    `deferred` is an answer that waits until nothing runs.
    """

    result: Any = None
    messages: list[Message] = []
    deferred: bool = False


class Utilities:
    """Performs the calls on one engine."""

    def __init__(self, layout: Layout, scheduler: Scheduler) -> None:
        self._layout = layout
        self._scheduler = scheduler
        self._sleeping = False
        self._methods: dict[str, Callable[..., Any]] = {
            "get_supported_tasks": lambda: ["generate"],
            "is_sleeping": lambda: self._sleeping,
            "is_scheduler_paused": lambda: scheduler.paused is not None,
            "get_kv_cache_group_metadata": _kv_cache_groups,
            "get_weight_version": lambda: "default",
            "reset_prefix_cache": self._reset_prefix_cache,
            "reset_mm_cache": lambda: None,
            "reset_encoder_cache": lambda: None,
            "sleep": self._sleep,
            "wake_up": self._wake_up,
            "collective_rpc": _collective_rpc,
            "profile": lambda _is_start=True: _fail(_WORKER_FAILED.format(_NO_PROFILER)),
            "list_loras": lambda: _fail(_WORKER_FAILED.format(_NO_LORA)),
            "add_lora": lambda _lora: _fail(_WORKER_FAILED.format(_NO_LORA)),
            "remove_lora": lambda _id: _fail(_WORKER_FAILED.format(_NO_LORA)),
            "pin_lora": lambda _id: _fail(_WORKER_FAILED.format(_NO_LORA)),
            "sim_stats": self._sim_stats,
            "sim_counters": self._sim_counters,
        }

    def call(self, method: str, args: list[Any], now: float) -> Outcome:
        """Perform a call. Raises `UtilityError`."""
        if method == "pause_scheduler":
            return self._pause(now, *args)
        if method == "resume_scheduler":
            self._scheduler.resume(now)
            return Outcome()
        function = self._methods.get(method)
        if function is None:
            raise UtilityError(f"'EngineCoreProc' object has no attribute '{method}'")
        try:
            inspect.signature(function).bind(*args)
        except TypeError as error:
            raise UtilityError("") from error  # vLLM leaves the reason out, too
        return Outcome(function(*args))

    def _pause(
        self, now: float, mode: PauseMode = "abort", clear_cache: bool = True, *_: Any
    ) -> Outcome:
        if mode not in get_args(PauseMode):
            raise UtilityError(f"Invalid pause mode: {mode}")
        self._scheduler.paused = mode
        if clear_cache and mode != "wait":
            self._scheduler.cache.clear()
        if mode == "abort":
            return Outcome(messages=self._scheduler.abort_all(now))
        return Outcome(deferred=mode == "wait")

    def _reset_prefix_cache(
        self, _reset_running: bool = False, _reset_connector: bool = False
    ) -> bool:
        self._scheduler.cache.clear()
        return True

    def _sleep(self, _level: int = 1, *_: Any) -> None:
        self._sleeping = True

    def _wake_up(self, _tags: list[str] | None = None) -> bool | None:
        self._sleeping = False
        return None if self._layout.is_old else True

    def _sim_counters(self) -> dict[str, int]:
        running, waiting = self._scheduler.running, self._scheduler.waiting
        return {**self._scheduler.counters.totals(), "running": running, "waiting": waiting}

    def _sim_stats(self) -> dict[str, Any]:
        return {**self._sim_counters(), "abort_ids": self._scheduler.counters.abort_ids}


def _fail(text: str) -> None:
    raise UtilityError(text)


def _kv_cache_groups() -> list[dict[str, Any]]:
    return [
        {"group_idx": 0, "kind": "full_attention", "block_size": BLOCK_SIZE, "sliding_window": None}
    ]


def _collective_rpc(method: str, *_: Any) -> list[None]:
    if method != "check_health":
        raise UtilityError(f"the simulated worker has no method '{method}'")
    return [None]
