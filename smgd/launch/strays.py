"""Processes of an engine that nobody watches over any more: found, and ended.

A guardian ends only when all of its engine has. But somebody may kill the guardian itself, or it
and smgd together, and a record of an engine that was kept can get lost. What is left then holds the
GPU, and another engine that is started beside it would find no memory. So what is left of an engine
is ended before it is started. There are two ways to know it:

- A mark in the environment, inherited by all that an engine starts. It names the path of the
  sockets, which stays when the directory is made anew, with the user and the mount namespace:
  several containers on a host may have one path, but each its own directory. Two smgd that run
  cannot have one mark, since the path also makes the port that they bind.
- A program may write over its environment (PostgreSQL's way to set the title of a process does).
  Where it is not legible any more, the session counts, which is the guardian's: its number
  belongs to nobody else as long as anyone is in it.
"""

from __future__ import annotations

import math
import os
import signal
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import structlog
import trio
from structlog.typing import FilteringBoundLogger

from smgd.launch.plan import EngineSpec
from smgd.launch.records import began, session_of
from smgd.once import Once

log = structlog.get_logger("smgd.launch")

MARK: Final = "SMGD_ENGINE"
# From SIGKILL to the end of a process. Longer than this is a driver that does not let go.
KILL_SECONDS: Final = 5.0
_LOOK_AGAIN_SECONDS: Final = 0.2


class Traces(msgspec.Struct, frozen=True):
    """By what the processes of an engine are known: `guardian` is the pid of a dead one, 0 if none.

    `name` is the engine's, for the log.
    """

    name: str
    mark: str
    guardian: int = 0

    @classmethod
    def of(cls, spec: EngineSpec, guardian: int = 0) -> Traces:
        """Return those of an engine. Raises OSError without /proc."""
        place = f"{Path('/proc/self/ns/mnt').stat().st_ino:x}.{os.geteuid()}"
        return cls(spec.name, f"{place}{os.path.realpath(spec.path)}", guardian)

    def are_on(self, pid: int) -> bool:
        """Tell whether a process is the engine's. Raises OSError if that cannot be looked at."""
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):  # ended, or not ours
            return False
        first, *others = environ.split(b"\0")
        if f"{MARK}={self.mark}".encode() in (first, *others):
            return True
        is_legible = b"=" in first  # it is written over from the front, not always to the end
        if is_legible or self.guardian == 0 or session_of(pid) != self.guardian:
            return False
        return began(self.guardian) == 0  # else the number is another's by now


class Strays:
    """Ends what is left of engines; one for all of them, so that they look one after the other."""

    def __init__(self) -> None:
        self._one_look = trio.CapacityLimiter(1)

    async def end(self, traces: Traces, grace: float) -> None:
        """End all that is left of an engine; after `grace` (seconds) by SIGKILL.

        Returns when nothing is left. Zombies do not count.
        """
        say = log.bind(engine=traces.name)
        kill_at = trio.current_time() + grace
        tell_at = kill_at + KILL_SECONDS
        told: set[int] = set()
        asked: set[int] = set()
        while strays := await self._look(traces, say):
            if new := strays - told:
                say.warning(
                    "processes are left of an earlier engine; ending them", pids=sorted(new)
                )
                told |= new
            if trio.current_time() < kill_at:
                asked |= {pid for pid in strays - asked if _send(pid, signal.SIGTERM, traces)}
            else:
                for pid in strays:
                    _send(pid, signal.SIGKILL, traces)
            if trio.current_time() >= tell_at:
                tell_at = math.inf
                say.warning(
                    "processes of an earlier engine do not end, not even by SIGKILL",
                    pids=sorted(strays),
                )
            await trio.sleep(_LOOK_AGAIN_SECONDS)

    async def _look(self, traces: Traces, say: FilteringBoundLogger) -> set[int]:
        """Return what is left of an engine; what cannot be looked at is not taken for nothing."""
        failure = Once()
        while True:
            try:
                return await trio.to_thread.run_sync(
                    partial(_find, traces), abandon_on_cancel=True, limiter=self._one_look
                )
            except OSError as error:
                if failure.is_news(str(error)):
                    say.warning(
                        "cannot look for processes of an earlier engine; trying again",
                        reason=str(error),
                    )
            await trio.sleep(_LOOK_AGAIN_SECONDS)


def _find(traces: Traces) -> set[int]:
    """Return the processes, other than this one, that are an engine's. Raises OSError."""
    pids = {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()}
    return {pid for pid in pids - {os.getpid()} if traces.are_on(pid)}


def _send(pid: int, number: signal.Signals, traces: Traces) -> bool:
    """Send a signal, if the process is the engine's still; return False to be asked again."""
    try:
        descriptor = os.pidfd_open(pid)
        try:
            if traces.are_on(pid):  # looked at while its number cannot become another's
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)
    except OSError:  # it has just ended, or we are out of descriptors
        return False
    return True
