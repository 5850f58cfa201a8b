"""Processes of an engine that nobody watches over any more: found by a mark, and ended.

A guardian ends only when all of its engine has. But somebody may kill the guardian itself, or it
and smgd together, and a record of an engine that was kept can get lost. What is left then holds the
GPU, and another engine that is started beside it would find no memory. So every process of an
engine has a mark in its environment, inherited by all that it starts, and whoever still has it when
the engine is to be started is ended first.

The mark names the directory of the sockets by its device and inode, not by its path: several
containers on a host may have one path, but each its own directory.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import structlog
import trio

from smgd.launch.plan import EngineSpec

log = structlog.get_logger("smgd.launch")

MARK: Final = "SMGD_ENGINE"
_LOOK_AGAIN_SECONDS: Final = 0.2


def mark_of(spec: EngineSpec) -> str:
    """Return the mark of an engine's processes. Raises OSError if there is no such directory."""
    directory = Path(spec.path).parent.stat()
    return f"{directory.st_dev:x}.{directory.st_ino:x}/{spec.name}"


async def end_strays(mark: str, grace: float) -> None:
    """End all processes with a mark; after `grace` (seconds) by SIGKILL. Returns when none is left.

    Zombies do not count: they have no environment.
    """
    deadline = trio.current_time() + grace
    told: set[int] = set()
    while strays := await trio.to_thread.run_sync(partial(_find, mark)):
        if new := strays - told:
            log.warning(
                "processes are left of an earlier engine; ending them",
                engine=mark.rpartition("/")[2],
                pids=sorted(new),
            )
        is_over = trio.current_time() >= deadline
        for pid in strays if is_over else new:
            _send(pid, signal.SIGKILL if is_over else signal.SIGTERM, mark)
        told |= new
        await trio.sleep(_LOOK_AGAIN_SECONDS)


def _find(mark: str) -> set[int]:
    """Return the processes of ours, other than this one, that have a mark."""
    pids = {int(entry.name) for entry in Path("/proc").glob("[0-9]*")}
    return {pid for pid in pids - {os.getpid()} if _has(pid, mark)}


def _has(pid: int, mark: str) -> bool:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # another user's, or it has just ended
        return False
    return f"{MARK}={mark}".encode() in environ.split(b"\0")


def _send(pid: int, number: signal.Signals, mark: str) -> None:
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            if _has(pid, mark):  # looked at while its number cannot become another's
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)
