"""What a worker's engines said when they registered, kept for the next start of the daemon.

An engine outlives its front end: it notices nothing, reconnects by itself when the same addresses
are bound again, and never repeats its handshake. So what it said is written to a file beside the
sockets, once for each registration and without anything about requests, and a later life of the
daemon can go on with the engine at once. Whether it is still there, only asking it can tell.

Ranks of a MoE model ignore a wave whose number is not above all that they have seen, and what waits
for it waits for ever. So every life numbers its waves from above those of the former: from the
clock, and if that was set back, from what the record says.

A record is taken only if it is ours and fits; any other is set aside, to be looked at by people.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta
from structlog.typing import FilteringBoundLogger

from smgd.engine.handshake import Said
from smgd.engine.paths import Addresses
from smgd.engine.roster import Roster
from smgd.errors import UNDECODABLE, RemoteProtocolError, SmgdError
from smgd.files import write_whole
from smgd.once import Once

_FORMAT = 1
# Not waiting for anybody, in case that it is a pipe.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# A registration has some hundred bytes, and there are a thousand engines at most.
_MAX_BYTES = 16 * 1024 * 1024
# Above the first wave of a life: no life has as many requests.
_WAVES_OF_A_LIFE = 10**12
_CHECKED = ("format", "uid", "dialect", "handshake", "input", "output", "count", "model")


class RecordError(SmgdError):
    """There is a record, but not one to go by; the text says why."""


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """The file. `registration` of an engine is base64: the message as it came.

    `first_wave` is that of the life that has written it; earlier versions did not write it.
    """

    format: int = _FORMAT
    uid: int
    dialect: str
    handshake: str
    input: str
    output: str
    count: int
    model: str
    engines: list[Said]
    first_wave: Annotated[int, Meta(ge=0, lt=2**62)] = 0


class Former(msgspec.Struct, frozen=True):
    """What a former life knew: its engines, and the number of its first wave."""

    engines: list[Said]
    first_wave: int = 0


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

    @property
    def is_there(self) -> bool:
        """Whether there is a file."""
        return os.path.lexists(self.path)

    def load(self) -> Former:
        """Return what was saved last, no engines if there is no file. Raises `RecordError`."""
        with _errors():
            try:
                descriptor = os.open(self.path, _READ)
            except FileNotFoundError:
                return Former([])
            with os.fdopen(descriptor, "rb") as file:
                seen = os.fstat(descriptor)
                if not stat.S_ISREG(seen.st_mode):
                    raise RecordError("it is no regular file")
                if seen.st_uid != os.geteuid():
                    raise RecordError(f"it belongs to uid {seen.st_uid}, not to {os.geteuid()}")
                record = msgspec.json.decode(file.read(_MAX_BYTES), type=_Record)
        return self._checked(record)

    def _checked(self, record: _Record) -> Former:
        expected = self._record(Former([]))
        for name in _CHECKED:
            was, now = getattr(record, name), getattr(expected, name)
            if was != now:
                raise RecordError(f"its {name} is {was}, not {now}")
        indices = [said.index for said in record.engines]
        if len({*indices}) < len(indices) or not {*indices} <= {*range(self._count)}:
            raise RecordError(f"its engines are {indices}")
        return Former(record.engines, record.first_wave)

    def save(self, known: Former) -> None:
        """Write what a later life has to know; without engines, remove the file.

        Raises `RecordError`.
        """
        with _errors():
            if not known.engines:
                self.path.unlink(missing_ok=True)
                return
            write_whole(self.path, msgspec.json.encode(self._record(known)))

    def set_aside(self) -> Path:
        """Rename the file, so that it is not met again; return its new name."""
        bad = self.path.with_name(self.path.name + ".bad")
        with _errors():
            self.path.replace(bad)
        return bad

    def _record(self, known: Former) -> _Record:
        return _Record(
            uid=os.geteuid(),
            dialect=self._dialect,
            handshake=self._addresses.handshake,
            input=self._addresses.input,
            output=self._addresses.output,
            count=self._count,
            model=self._model,
            engines=known.engines,
            first_wave=known.first_wave,
        )


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except (OSError, *UNDECODABLE) as error:
        raise RecordError(str(error)) from error


class Memory:
    """What one life of the daemon tells the next about the engines of a roster, by a record.

    `first_wave` is the number of this life's first wave; it has grown after `recall` if that of the
    former life asks for it. A record that cannot be read or written is logged: engines then have to
    be started anew.
    """

    def __init__(
        self, file: RecordFile, roster: Roster, log: FilteringBoundLogger, first_wave: int
    ) -> None:
        self.first_wave = first_wave
        self._file = file
        self._roster = roster
        self._log = log
        self._failure = Once()  # of the last try to write

    def recall(self) -> None:
        """Know the engines of a former life, if it has left a record that fits."""
        try:
            former = self._file.load()
            self._roster.recall(former.engines)
        except (RecordError, RemoteProtocolError) as error:
            self._set_aside(str(error))
            return
        if former.engines:
            engines = [one.index for one in former.engines]
            self._log.info("looking for engines of a former life", engines=engines)
        if any(one.lockstep for one in former.engines):
            self.first_wave = max(self.first_wave, former.first_wave + _WAVES_OF_A_LIFE)
            self.remember()  # before the first of them is sent

    def remember(self) -> None:
        """Write down what the engines have said, as it is now. A failure is told once."""
        try:
            self._file.save(Former(self._roster.said, self.first_wave))
        except RecordError as error:
            if self._failure.is_news(str(error)):
                self._log.warning(
                    "engine record not written: should smgd be restarted, so must the engine",
                    record=str(self._file.path),
                    reason=str(error),
                )
        else:
            self._failure.over()

    def keep(self) -> None:
        """Write it again if it is not there: it was removed, or could not be written before."""
        if not self._roster.said or self._file.is_there:
            return
        if not self._failure.is_told:
            self._log.error(
                "engine record was removed; writing it anew", record=str(self._file.path)
            )
        self.remember()

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
