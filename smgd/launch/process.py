"""Processes of engines: started with a guardian, found again, waited for and ended.

`Programs` is the seam to the supervisor, which is tested without processes. An engine that is to
end with smgd writes to a pipe that we read. One that is to be kept must not depend on us at all: it
writes to a file beside its sockets, and another file says which process it is, for the next start.

The pid of an engine is that of its guardian (`guardian.py`), whose end means that all of it is
gone. A process is always held by a pidfd, so no signal reaches another that has got its number.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol

import msgspec
import trio

from smgd.launch import guardian
from smgd.launch.plan import EngineSpec

# What a service manager says to smgd alone; an engine that heard it would answer in our name. And
# the key of our clients, which no engine asks for.
_NOT_FOR_ENGINES: Final = ("NOTIFY_SOCKET", "WATCHDOG_", "LISTEN_", "FDSTORE", "SMGD_API_KEY")
_READ_BYTES: Final = 65536


class EngineProcess(Protocol):
    """A running engine. `pid` is for logs; `log` is the file that its output goes to, if any."""

    pid: int
    log: Path | None

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
        file = _record_file(spec)
        try:
            record = msgspec.json.decode(file.read_bytes(), type=_Record)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
        process = _open(record, spec)
        if process is None:
            file.unlink()
            return None
        return Found(process, record.digest == _digest(spec))

    def start(self, spec: EngineSpec) -> EngineProcess:
        """Start an engine. Raises OSError."""
        return self._start_kept(spec) if self._keep else self._start_owned(spec)

    def _start_owned(self, spec: EngineSpec) -> EngineProcess:
        read, write = os.pipe()
        try:
            return GuardedEngine(self._spawn(spec, write), output=read)
        except OSError:
            os.close(read)
            raise
        finally:
            os.close(write)

    def _start_kept(self, spec: EngineSpec) -> EngineProcess:
        log, record = _log_file(spec), _record_file(spec)
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            engine = GuardedEngine(self._spawn(spec, output), log=log, record=record)
        finally:
            os.close(output)
        try:
            _write(record, _Record(engine.pid, _began(engine.pid), _digest(spec)))
        except OSError:
            engine.terminate()
            engine.close()
            raise
        return engine

    def _spawn(self, spec: EngineSpec, output: int) -> int:
        parent = 0 if self._keep else os.getpid()
        arguments = [f"{self._stop_grace}", f"{parent}", *spec.argv]
        return os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", guardian.__file__, *arguments],
            {**self._environ, **spec.env},
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

    `output` is the descriptor to read from; `record` the file to remove when the engine has ended.
    Raises ProcessLookupError if there is no such process.
    """

    def __init__(
        self,
        pid: int,
        *,
        output: int | None = None,
        log: Path | None = None,
        record: Path | None = None,
        is_child: bool = True,
    ) -> None:
        self.pid = pid
        self.log = log
        self._pidfd = os.pidfd_open(pid)
        self._output = None if output is None else trio.lowlevel.FdStream(output)
        self._record = record
        self._is_child = is_child

    async def read(self) -> bytes:
        """Wait for output; return it, or b"" if there will be no more."""
        return b"" if self._output is None else bytes(await self._output.receive_some(_READ_BYTES))

    async def wait(self) -> int | None:
        """Wait until nothing of the engine is left; return its status, None if it is not known."""
        await trio.lowlevel.wait_readable(self._pidfd)
        if self._record is not None:
            self._record.unlink(missing_ok=True)
        return self._reap() if self._is_child else None

    def _reap(self) -> int:
        _, status = os.waitpid(self.pid, 0)  # it has ended: this does not wait
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

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


# ------------------------------------------------------------------------- engines that were kept


class _Record(msgspec.Struct):
    """Which process an engine is: a number may be used again, but not with the same start.

    `began` is in clock ticks since boot; `digest` is that of the command and of the environment of
    its own, which may hold secrets.
    """

    pid: int
    began: int
    digest: str


def _open(record: _Record, spec: EngineSpec) -> GuardedEngine | None:
    """Return the engine of a record if it is the same process still."""
    try:
        engine = GuardedEngine(
            record.pid, log=_log_file(spec), record=_record_file(spec), is_child=False
        )
    except ProcessLookupError:
        return None
    if _began(record.pid) == record.began:
        return engine
    engine.close()
    return None


def _digest(spec: EngineSpec) -> str:
    return hashlib.sha256(msgspec.json.encode([spec.argv, sorted(spec.env.items())])).hexdigest()


def _began(pid: int) -> int:
    """Return when a process began, in clock ticks since boot; 0 if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError:
        return 0
    # Behind the name, which may hold anything, come the fields from the third on; it is the 22nd.
    state, *fields = stat.rpartition(b")")[2].split()
    return 0 if state == b"Z" else int(fields[18])


def _record_file(spec: EngineSpec) -> Path:
    return Path(f"{spec.path}.process.json")


def _log_file(spec: EngineSpec) -> Path:
    return Path(f"{spec.path}.log")


def _write(file: Path, record: _Record) -> None:
    """Write a record for our eyes only, at once: it is whole or not there."""
    new = file.with_suffix(".new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(msgspec.json.encode(record))
    new.replace(file)
