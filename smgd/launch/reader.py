"""Reads what an engine prints into smgd's log, each line with the engine's name before it.

How much of it is shown is decided in `output`. What was held back is shown as soon as there is room
for it. Output that comes faster than it is shown is read a piece (64 KiB at most) at a time with a
pause in between, which bounds what an engine that prints without end costs all others; it waits
for us then.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import trio
from structlog.typing import FilteringBoundLogger

from smgd.launch.output import Output
from smgd.launch.process import EngineProcess

SILENCE_SECONDS = 1.0
FLOOD_PAUSE_SECONDS = 0.01


async def show_output(
    process: EngineProcess, name: str, log: FilteringBoundLogger, fails: Callable[[], bool]
) -> None:
    """Log the output of a process until there is no more of it, at level info.

    If that is not logged, and the process `fails`, its last words are logged as warnings.
    """
    output = Output()
    try:
        while await _show_some(process, output, name, log):
            pass
    finally:
        _show(output.finish(), name, log.info)
        if fails() and not log.is_enabled_for(logging.INFO):
            _show(output.last_words, name, log.warning)


async def _show_some(
    process: EngineProcess, output: Output, name: str, log: FilteringBoundLogger
) -> bool:
    """Log what there is next; return False if there will be no more."""
    held = output.holds_back
    if held:
        await trio.sleep(FLOOD_PAUSE_SECONDS)
    with trio.move_on_after(SILENCE_SECONDS if held else math.inf):
        data = await process.read()
        _show(output.feed(data, trio.current_time()), name, log.info)
        return bool(data)
    _show(output.idle(trio.current_time()), name, log.info)
    return True


def _show(lines: Sequence[str], name: str, say: Callable[[str], None]) -> None:
    for line in lines:
        say(f"[{name}] {line}")
