"""What a worker's engines said when they registered, kept for the next start of the daemon.

An engine outlives its front end: it notices nothing, reconnects by itself when the same addresses
are bound again, and never repeats its handshake. So what it said is written to a file beside the
sockets, once for each registration and without anything about requests, and a later life of the
daemon can go on with the engine at once. Whether it is still there, only asking it can tell.

A record is taken only if it is ours and fits; any other is set aside, to be looked at by people.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from structlog.typing import FilteringBoundLogger

from smgd.engine.handshake import Said
from smgd.engine.paths import Addresses
from smgd.engine.roster import Roster
from smgd.errors import RemoteProtocolError, SmgdError

_FORMAT = 1
_MODE = 0o600
_CHECKED = ("format", "uid", "dialect", "handshake", "input", "output", "count", "model")


class RecordError(SmgdError):
    """There is a record, but not one to go by; the text says why."""


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """The file. `registration` of an engine is base64: the message as it came."""

    format: int = _FORMAT
    uid: int
    dialect: str
    handshake: str
    input: str
    output: str
    count: int
    model: str
    engines: list[Said]


class RecordFile:
    """The record of one worker's engines: `count` of them, which speak `dialect`.

    They have loaded `model`, a path or a name, which none of them says itself.
    """

    def __init__(self, addresses: Addresses, dialect: str, count: int, model: str = "") -> None:
        self.path = addresses.record
        self._addresses = addresses
        self._dialect = dialect
        self._count = count
        self._model = model

    def load(self) -> list[Said]:
        """Return what was saved last, nothing if there is no file. Raises `RecordError`."""
        with _errors():
            try:
                descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                return []
            with os.fdopen(descriptor, "rb") as file:
                seen = os.fstat(descriptor)
                if not stat.S_ISREG(seen.st_mode):
                    raise RecordError("it is no regular file")
                if seen.st_uid != os.geteuid():
                    raise RecordError(f"it belongs to uid {seen.st_uid}, not to {os.geteuid()}")
                record = msgspec.json.decode(file.read(), type=_Record)
        return self._checked(record)

    def _checked(self, record: _Record) -> list[Said]:
        expected = self._record([])
        for name in _CHECKED:
            was, now = getattr(record, name), getattr(expected, name)
            if was != now:
                raise RecordError(f"its {name} is {was}, not {now}")
        indices = [said.index for said in record.engines]
        if len({*indices}) < len(indices) or not {*indices} <= {*range(self._count)}:
            raise RecordError(f"its engines are {indices}")
        return record.engines

    def save(self, engines: Sequence[Said]) -> None:
        """Write what the engines have said; without any, remove the file. Raises `RecordError`."""
        with _errors():
            if not engines:
                self.path.unlink(missing_ok=True)
                return
            new = self.path.with_name(self.path.name + ".new")
            new.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with os.fdopen(os.open(new, flags, _MODE), "wb") as file:
                file.write(msgspec.json.encode(self._record(engines)))
            new.replace(self.path)

    def set_aside(self) -> Path:
        """Rename the file, so that it is not met again; return its new name."""
        bad = self.path.with_name(self.path.name + ".bad")
        with _errors():
            self.path.replace(bad)
        return bad

    def _record(self, engines: Sequence[Said]) -> _Record:
        return _Record(
            uid=os.geteuid(),
            dialect=self._dialect,
            handshake=self._addresses.handshake,
            input=self._addresses.input,
            output=self._addresses.output,
            count=self._count,
            model=self._model,
            engines=list(engines),
        )


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordError(str(error)) from error


class Memory:
    """What one life of the daemon tells the next about the engines of a roster, by a record.

    A record that cannot be read or written is logged: engines then have to be started anew.
    """

    def __init__(self, file: RecordFile, roster: Roster, log: FilteringBoundLogger) -> None:
        self._file = file
        self._roster = roster
        self._log = log

    def recall(self) -> None:
        """Know the engines of a former life, if it has left a record that fits."""
        try:
            said = self._file.load()
            self._roster.recall(said)
        except (RecordError, RemoteProtocolError) as error:
            self._set_aside(str(error))
        else:
            if said:
                engines = [one.index for one in said]
                self._log.info("looking for engines of a former life", engines=engines)

    def remember(self) -> None:
        """Write down what the engines have said, as it is now."""
        try:
            self._file.save(self._roster.said)
        except RecordError as error:
            self._log.warning(
                "engine record not written: should smgd be restarted, so must the engine",
                record=str(self._file.path),
                reason=str(error),
            )

    def _set_aside(self, reason: str) -> None:
        try:
            now = str(self._file.set_aside())
        except RecordError as error:
            now = f"where it was ({error})"
        self._log.warning(
            "engine record set aside: an engine of a former life has to be started anew",
            record=str(self._file.path),
            reason=reason,
            now=now,
        )
