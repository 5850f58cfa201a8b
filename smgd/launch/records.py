"""Which process an engine is that outlives smgd: a file beside its sockets, for the next start.

A record is for our eyes only and holds no secret: what an engine was started with is in it as a
digest. One that cannot be read counts as none, and its engine is a stray then.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Container
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from smgd.files import write_whole
from smgd.launch.plan import EngineSpec

_SUFFIX: Final = ".process.json"
# What says nothing about a file or a process, only that we cannot look now.
_SHORTAGES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_LONGEST_NUMBER: Final = 10  # digits of a pid


class ProcessRecord(msgspec.Struct, frozen=True):
    """A process: a number may be used again, but not with the same start.

    `began` is in clock ticks since boot, 0 for one that had ended at once; `digest` as below;
    `grace` is what its guardian was told, in seconds. `served` tells an engine that has said all
    that it has to say to some smgd from one that was still loading its model.
    """

    pid: Annotated[int, Meta(gt=0, lt=2**31)]
    began: Annotated[int, Meta(ge=0)]
    digest: str
    grace: Annotated[float, Meta(ge=0)] = 0.0
    served: bool = False

    @classmethod
    def of(cls, pid: int, digest: str, grace: float) -> ProcessRecord:
        """Return the record of a process that was just started."""
        return cls(pid, began(pid), digest, grace)

    @property
    def is_alive(self) -> bool:
        """Whether that process is still there. Raises OSError if that cannot be told now."""
        return self.began != 0 and began(self.pid) == self.began


class RecordFile:
    """The file of one engine's record."""

    def __init__(self, spec: EngineSpec) -> None:
        self._path = Path(f"{spec.path}{_SUFFIX}")

    @property
    def is_there(self) -> bool:
        """Whether there is a file."""
        return os.path.lexists(self._path)

    def read(self) -> ProcessRecord | None:
        """Return the record; None if there is none that can be read.

        Raises OSError if that cannot be told now.
        """
        return _read(self._path)

    def write(self, record: ProcessRecord) -> None:
        """Write a record at once: it is whole or not there. Raises OSError."""
        write_whole(self._path, msgspec.json.encode(record))

    def remove(self) -> None:
        """Remove the file, if there is one. Raises OSError."""
        self._path.unlink(missing_ok=True)


class Forgotten(msgspec.Struct, frozen=True):
    """An engine that was left running and is not configured any more."""

    name: str
    pid: int


def forgotten(directory: str, known: Container[str]) -> list[Forgotten]:
    """Return the engines left running in a directory of sockets, save for those `known` by name.

    Those of another smgd that runs are not forgotten. Raises OSError if it cannot look now.
    """
    found: list[Forgotten] = []
    for file in sorted(Path(directory).glob(f"engine-*{_SUFFIX}")):
        name = file.name.removesuffix(_SUFFIX)
        record = _read(file)
        if name in known or record is None or not record.is_alive:
            continue
        if not _is_used(file.with_name(f"{name}.lock")):
            found.append(Forgotten(name, record.pid))
    return found


def digest(spec: EngineSpec) -> str:
    """Return what is another if a running engine could not do what this one would."""
    what = [spec.argv, sorted(spec.env.items()), spec.runtime, spec.model]
    return hashlib.sha256(msgspec.json.encode(what)).hexdigest()


def log_file(spec: EngineSpec) -> Path:
    """Return where the output of an engine goes that outlives smgd."""
    return Path(f"{spec.path}.log")


def began(pid: int) -> int:
    """Return when a process began, in clock ticks since boot; 0 if it has ended. Raises OSError."""
    return _field(pid, 22)


def session_of(pid: int) -> int:
    """Return the session of a process; 0 if it has ended. Raises OSError."""
    return _field(pid, 6)


def _field(pid: int, number: int) -> int:
    """Return a number from proc_pid_stat(5), where fields are counted from 1."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    # Behind the name, which may hold anything, come the fields from the third on.
    state, *fields = stat.rpartition(b")")[2].split()
    return 0 if state == b"Z" else int(fields[number - 4])


def _read(file: Path) -> ProcessRecord | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=ProcessRecord)
    except OSError as error:
        if error.errno in _SHORTAGES:
            raise
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _is_used(lock: Path) -> bool:
    """Tell whether another smgd uses an engine's sockets: its pid is in the lock beside them."""
    try:
        owner = lock.read_text()
    except (OSError, UnicodeDecodeError):
        return False
    if not owner.isdecimal() or len(owner) > _LONGEST_NUMBER:
        return False
    return int(owner) != os.getpid() and began(int(owner)) != 0
