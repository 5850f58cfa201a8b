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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Protocol

import msgspec
import trio
from msgspec import structs

from smgd.launch import guardian
from smgd.launch.plan import EngineSpec
from smgd.launch.records import ProcessRecord, RecordFile, digest, log_file
from smgd.launch.strays import MARK, Strays, Traces

# What a service manager says to smgd alone; an engine that heard it would answer in our name. And
# the key of our clients, which no engine asks for.
_NOT_FOR_ENGINES: Final = ("NOTIFY_SOCKET", "WATCHDOG_", "LISTEN_", "FDSTORE", "SMGD_API_KEY")
# vLLM sets the titles of its processes by a library that writes over the environment, and the mark
# with it, unless this is in it.
_KEEPS_ENVIRONMENT: Final = {"SPT_NOENV": "1"}
_READ_BYTES: Final = 65536


class EngineProcess(Protocol):
    """A running engine. `pid` is for logs; `log` is the file that its output goes to, if any.

    `grace` is how long (seconds) it gets from SIGTERM to SIGKILL.
    """

    pid: int
    log: Path | None
    grace: float

    @property
    def served(self) -> bool:
        """Whether it has loaded its model and taken requests, in whichever life of smgd."""
        ...

    def note_served(self) -> None:
        """Take that it serves, also for the next smgd. Raises OSError."""
        ...

    def keep_record(self) -> bool:
        """Write anew what the next smgd needs to find it, if that was removed; tell whether it was.

        Raises OSError.
        """
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
        """End what is left of an engine that cannot be found. Raises OSError."""
        ...

    def find(self, spec: EngineSpec) -> Found | None:
        """Return the engine that was left running for this purpose, if it is alive.

        Raises OSError if that cannot be told now.
        """
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
        self._strays = Strays()

    def find(self, spec: EngineSpec) -> Found | None:
        """Return the engine that was left running for this purpose, if it is alive.

        Raises OSError if that cannot be told now.
        """
        file = RecordFile(spec)
        record = file.read()
        if record is None or not record.is_alive:
            return None
        try:
            engine = self._held(spec, record, file, log=log_file(spec), is_child=False)
        except ProcessLookupError:
            return None
        is_alive = False
        try:
            is_alive = record.is_alive  # looked at while its number cannot become another's
        finally:
            if not is_alive:
                engine.close()
        return Found(engine, record.digest == digest(spec)) if is_alive else None

    async def clear(self, spec: EngineSpec) -> None:
        """End what is left of an engine that cannot be found. Raises OSError."""
        file = RecordFile(spec)
        record = file.read()
        traces = Traces.of(spec, record.pid if record else 0)
        await self._strays.end(traces, self._stop_grace)
        if record is not None:
            _remove(file)

    def start(self, spec: EngineSpec) -> EngineProcess:
        """Start an engine. Raises OSError."""
        return self._start_kept(spec) if self._keep else self._start_owned(spec)

    def _start_owned(self, spec: EngineSpec) -> EngineProcess:
        read, write = os.pipe()
        try:
            pid = self._spawn(spec, write)
            with _ended_unless_held(pid):
                return self._held(spec, ProcessRecord.of(pid, "", self._stop_grace), output=read)
        except OSError:
            os.close(read)
            raise
        finally:
            os.close(write)

    def _start_kept(self, spec: EngineSpec) -> EngineProcess:
        file, log = RecordFile(spec), log_file(spec)
        file.remove()  # void from here on; fails before the start if it cannot be
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            pid = self._spawn(spec, output)
        finally:
            os.close(output)
        with _ended_unless_held(pid):
            record = ProcessRecord.of(pid, digest(spec), self._stop_grace)
            file.write(record)
            return self._held(spec, record, file, log=log)

    def _held(
        self,
        spec: EngineSpec,
        record: ProcessRecord,
        file: RecordFile | None = None,
        *,
        output: int | None = None,
        log: Path | None = None,
        is_child: bool = True,
    ) -> GuardedEngine:
        traces = Traces.of(spec, record.pid)
        return GuardedEngine(
            record, file, traces, self._strays, output=output, log=log, is_child=is_child
        )

    def _spawn(self, spec: EngineSpec, output: int) -> int:
        parent = 0 if self._keep else os.getpid()
        arguments = [f"{self._stop_grace}", f"{parent}", *spec.argv]
        return os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", guardian.__file__, *arguments],
            {**self._environ, **_KEEPS_ENVIRONMENT, **spec.env, MARK: Traces.of(spec).mark},
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

    `file` is where `record` is to be for the next smgd, as long as the engine lives. `traces` are
    on its processes, which `strays` ends. `output` is the descriptor to read from. Raises OSError
    if there is no such process.
    """

    def __init__(
        self,
        record: ProcessRecord,
        file: RecordFile | None,
        traces: Traces,
        strays: Strays,
        *,
        output: int | None,
        log: Path | None,
        is_child: bool,
    ) -> None:
        self.pid = record.pid
        self.log = log
        self.grace = record.grace
        self._pidfd = os.pidfd_open(record.pid)
        self._record = record
        self._file = file
        self._traces = traces
        self._strays = strays
        self._output = None if output is None else trio.lowlevel.FdStream(output)
        self._is_child = is_child

    @property
    def served(self) -> bool:
        """Whether it has loaded its model and taken requests, in whichever life of smgd."""
        return self._record.served

    async def read(self) -> bytes:
        """Wait for output; return it, or b"" if there will be no more."""
        return b"" if self._output is None else bytes(await self._output.receive_some(_READ_BYTES))

    async def wait(self) -> int | None:
        """Wait until nothing of the engine is left; return its status, None if it is not known."""
        await trio.lowlevel.wait_readable(self._pidfd)
        code = self._reap() if self._is_child else None
        if code is None or code < 0:  # it may have been killed, and has left all that it watched
            await self._strays.end(self._traces, self.grace)
        if self._file is not None:
            _remove(self._file)
            self._file = None  # nor is it written again
        return code if code is None or code >= 0 else 128 - code

    def _reap(self) -> int:
        _, status = os.waitpid(self.pid, 0)  # it has ended: this does not wait
        return os.waitstatus_to_exitcode(status)

    def note_served(self) -> None:
        """Take that it serves, also for the next smgd. Raises OSError."""
        if not self.served:
            self._record = structs.replace(self._record, served=True)
            if self._file is not None:
                self._file.write(self._record)

    def keep_record(self) -> bool:
        """Write the record again if its file was removed; tell whether it was. Raises OSError."""
        if self._file is None or self._file.is_there:
            return False
        self._file.write(self._record)
        return True

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


@contextmanager
def _ended_unless_held(pid: int) -> Iterator[None]:
    """End an engine that was just started if nobody can watch over it."""
    try:
        yield
    except OSError:
        os.kill(pid, signal.SIGTERM)  # its number is its own until it is waited for
        raise


def _remove(file: RecordFile) -> None:
    """Remove the record of a process that is gone."""
    with suppress(OSError):  # it is told when the file has to be written anew
        file.remove()
