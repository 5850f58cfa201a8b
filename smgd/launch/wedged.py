"""When an engine is given up that runs and does not serve."""

from __future__ import annotations

import math
from collections.abc import Callable

import trio
from structlog.typing import FilteringBoundLogger

from smgd.launch.process import EngineProcess

# An engine whose connection is lost ends by itself within some 7 s, unless it hangs: vLLM can lose
# one of its threads and live on for ever, deaf or dumb. One that served an earlier smgd answers the
# next within some 3 s.
WEDGED_SECONDS = 30.0


class Wedged:
    """The patience with one process of an engine.

    `is_loading` tells whether it loads its model anew, which may take as long as it takes.
    """

    def __init__(self, is_loading: Callable[[], bool]) -> None:
        self._is_loading = is_loading
        self._patience = trio.CancelScope()

    def hear(self, *, is_missed: bool) -> None:
        """Hear whether the process does not serve and should; hearing it again renews nothing."""
        ends = math.inf
        if is_missed:
            ends = min(self._patience.deadline, trio.current_time() + WEDGED_SECONDS)
        self._patience.deadline = ends

    async def watch(self, process: EngineProcess, log: FilteringBoundLogger) -> None:
        """End the process once it was missed for too long. To be called once."""
        while True:
            with self._patience:
                await trio.sleep_forever()
            self._patience = trio.CancelScope()
            if not self._is_loading():
                break
        log.warning(
            f"engine runs, and has not served for {WEDGED_SECONDS:g} s; ending it", pid=process.pid
        )
        process.terminate()
