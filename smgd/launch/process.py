"""Processes of engines: started with a guardian, found again, waited for and ended.

`Programs` is the seam to the supervisor, which is tested without processes. An engine that is to
end with smgd writes to a pipe that we read. One that is to be kept must not depend on us at all: it
writes to a file beside its sockets, and another file says which process it is, for the next start.

The pid of an engine is that of its guardian (`guardian.py`), whose end means that all of it is
gone, unless somebody has killed it: then what it leaves is ended here (`strays`). A process is
always held by a pidfd, so no signal reaches another that has got its number.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

import msgspec
import trio

from smgd.launch import guardian
from smgd.launch.plan import EngineSpec
from smgd.launch.records import Record, RecordFile, digest, log_file
from smgd.launch.strays import MARK, end_strays, mark_of

# What a service manager says to smgd alone; an engine that heard it would answer in our name. And
# the key of our clients, which no engine asks for.
_NOT_FOR_ENGINES: Final = ("NOTIFY_SOCKET", "WATCHDOG_", "LISTEN_", "FDSTORE", "SMGD_API_KEY")
_READ_BYTES: Final = 65536


class EngineProcess(Protocol):
    """A running engine. `pid` is for logs; `log` is the file that its output goes to, if any.

    `grace` is how long (seconds) it gets from SIGTERM to SIGKILL; `served` is whether it has loaded
    its model and taken requests, in whichever life of smgd.
    """

    pid: int
    log: Path | None
    grace: float
    served: bool

    def note_served(self) -> None:
        """Take that it serves, also for the next smgd. Raises OSError."""
        ...

    async def read(self) -> bytes:
        """Wait for output; return it, or b"" if there will be no more."""
        ...

    async def wait(self) -> int | None:
        """Wait until nothing of the engine is left; return its status, None if it is not known."""
        ...

    def terminate(self) -> None:
        """Have all of it ended; does nothing if it has."""
        ...

    def close(self) -> None:
        """Let go of it, whether it has ended or not. Idempotent."""
        ...


class Found(msgspec.Struct, frozen=True):
    """An engine that an earlier smgd has left, and whether it is what would be started now."""

    process: EngineProcess
    is_same: bool


class Programs(Protocol):
    """How engines come to run."""

    async def clear(self, spec: EngineSpec) -> None:
        """End what is left of an engine that cannot be found."""
        ...

    def find(self, spec: EngineSpec) -> Found | None:
        """Return the engine that was left running for this purpose, if it is alive."""
        ...

    def start(self, spec: EngineSpec) -> EngineProcess:
        """Start an engine. Raises OSError."""
        ...


class GuardedPrograms:
    """Engines as real processes; with `keep` they outlive smgd. `stop_grace` is in seconds.

    To be used in the main thread: the kernel takes the death of the thread that has started a
    guardian for the death of smgd.
    """

    def __init__(self, environ: Mapping[str, str], *, keep: bool, stop_grace: float) -> None:
        self._environ = {k: v for k, v in environ.items() if not k.startswith(_NOT_FOR_ENGINES)}
        self._keep = keep
        self._stop_grace = stop_grace

    def find(self, spec: EngineSpec) -> Found | None:
        """Return the engine that was left running for this purpose, if it is alive."""
        file = RecordFile(spec)
        record = file.read()
        if record is None:
            return None
        try:
            engine = GuardedEngine(
                record.pid,
                grace=record.grace,
                mark=mark_of(spec),
                log=log_file(spec),
                record=file,
                served=record.served,
                is_child=False,
            )
        except OSError:
            _remove(file)
            return None
        if record.is_alive:
            return Found(engine, record.digest == digest(spec))
        engine.close()
        _remove(file)
        return None

    async def clear(self, spec: EngineSpec) -> None:
        """End what is left of an engine that cannot be found."""
        try:
            mark = mark_of(spec)
        except OSError:  # no directory, no engine
            return
        await end_strays(mark, self._stop_grace)

    def start(self, spec: EngineSpec) -> EngineProcess:
        """Start an engine. Raises OSError."""
        return self._start_kept(spec) if self._keep else self._start_owned(spec)

    def _start_owned(self, spec: EngineSpec) -> EngineProcess:
        mark = mark_of(spec)
        read, write = os.pipe()
        try:
            pid = self._spawn(spec, write, mark)
            return GuardedEngine(pid, grace=self._stop_grace, mark=mark, output=read)
        except OSError:
            os.close(read)
            raise
        finally:
            os.close(write)

    def _start_kept(self, spec: EngineSpec) -> EngineProcess:
        mark, record, log = mark_of(spec), RecordFile(spec), log_file(spec)
        record.remove()  # void from here on; fails before the start if it cannot be
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            pid = self._spawn(spec, output, mark)
        finally:
            os.close(output)
        grace = self._stop_grace
        engine = GuardedEngine(pid, grace=grace, mark=mark, log=log, record=record)
        try:
            record.write(Record.of(pid, digest(spec), grace))
        except OSError:
            engine.terminate()
            engine.close()
            raise
        return engine

    def _spawn(self, spec: EngineSpec, output: int, mark: str) -> int:
        parent = 0 if self._keep else os.getpid()
        arguments = [f"{self._stop_grace}", f"{parent}", *spec.argv]
        return os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", guardian.__file__, *arguments],
            {**self._environ, **spec.env, MARK: mark},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, output, 1),
                (os.POSIX_SPAWN_DUP2, output, 2),
            ],
            setsid=True,  # Ctrl-C is for us alone
            setsigmask=(),
        )


class GuardedEngine:
    """An engine under its guardian, which is a child of ours or was one of an earlier smgd.

    `mark` is in the environment of its processes. `output` is the descriptor to read from; `record`
    the file to remove when the engine has ended. Raises OSError if there is no such process.
    """

    def __init__(
        self,
        pid: int,
        *,
        grace: float,
        mark: str,
        output: int | None = None,
        log: Path | None = None,
        record: RecordFile | None = None,
        served: bool = False,
        is_child: bool = True,
    ) -> None:
        self.pid = pid
        self.log = log
        self.grace = grace
        self.served = served
        self._pidfd = os.pidfd_open(pid)
        self._mark = mark
        self._output = None if output is None else trio.lowlevel.FdStream(output)
        self._record = record
        self._is_child = is_child

    async def read(self) -> bytes:
        """Wait for output; return it, or b"" if there will be no more."""
        return b"" if self._output is None else bytes(await self._output.receive_some(_READ_BYTES))

    async def wait(self) -> int | None:
        """Wait until nothing of the engine is left; return its status, None if it is not known."""
        await trio.lowlevel.wait_readable(self._pidfd)
        code = self._reap() if self._is_child else None
        if code is None or code < 0:  # it may have been killed, and has left all that it watched
            await end_strays(self._mark, self.grace)
        if self._record is not None:
            self._record.remove()
        return code if code is None or code >= 0 else 128 - code

    def _reap(self) -> int:
        _, status = os.waitpid(self.pid, 0)  # it has ended: this does not wait
        return os.waitstatus_to_exitcode(status)

    def note_served(self) -> None:
        """Take that it serves, also for the next smgd. Raises OSError."""
        if not self.served:
            self.served = True
            if self._record is not None:
                self._record.note_served()

    def terminate(self) -> None:
        """Have all of it ended; does nothing if it has."""
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
        except ProcessLookupError:
            return

    def close(self) -> None:
        """Let go of it, whether it has ended or not. Idempotent."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        if self._output is not None:
            self._output.close()


def _remove(file: RecordFile) -> None:
    """Remove the record of a process that is gone."""
    with suppress(OSError):  # it is told when the file has to be written anew
        file.remove()
