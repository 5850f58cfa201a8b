"""What is wrong with a configuration, collected so that all of it is told at once.

A *mistake* is one line that begins with the key to blame. Of a key that is `broken`, because its
value is of the wrong kind, nothing more is said: it would follow from what nobody has written.

A *note* is what cannot be judged from where we are. Only a check from `outside` of the service has
any: what a file's rights mean depends on the user who asks, and a credential of systemd is there
for its service alone. The service itself has to do with what it sees: it finds mistakes only.
"""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path
from typing import Final

from smgd.errors import ConfigError

# systemd.exec(5), LoadCredential=: seen by the processes of one service, and while it runs.
_CREDENTIALS: Final = "/run/credentials/"


class Findings:
    """Mistakes and notes, in the order in which they were found.

    `prefix` is put before each mistake: the file that it is in. `outside` tells that another
    process than this one is going to run with the configuration.
    """

    def __init__(self, prefix: str = "", *, outside: bool = False) -> None:
        self.prefix = prefix
        self.outside = outside
        self._mistakes: dict[str, None] = {}
        self._notes: dict[str, None] = {}
        self._broken: set[str] = set()
        self._depend: dict[str, None] = {}

    @property
    def mistakes(self) -> list[str]:
        """Return the mistakes, a line each."""
        return [*self._mistakes]

    @property
    def notes(self) -> list[str]:
        """Return what could not be judged, a line each."""
        return [*self._notes, *([self._as_whom()] if self._depend else [])]

    def broken(self, key: str, text: str) -> None:
        """Add a mistake which leaves `key` without a value that could be looked at further."""
        self.wrong(key, text)
        self._broken.add(key)

    def wrong(self, key: str, text: str, *others: str) -> None:
        """Add a mistake, unless `key`, its table or another key that it is about is broken."""
        if not {key, key.rpartition(".")[0], *others} & self._broken:
            self._mistakes[f"{self.prefix}{key}: {text}"] = None

    def note(self, key: str, text: str) -> None:
        """Add what cannot be judged; only a check from outside says so."""
        if self.outside:
            self._notes[f"{key}: {text}"] = None

    def depends(self, path: Path | str) -> None:
        """Hear that it depends on the user what can be done with a file or directory."""
        if self.outside:
            self._depend[str(path)] = None

    def check(self) -> None:
        """Raise `ConfigError` with a line for each mistake, if there is one."""
        if self._mistakes:
            raise ConfigError("\n".join(self._mistakes))

    def read(self, key: str, path: str) -> bytes | None:
        """Return what is in a file that `key` names, or None: then why is found."""
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            self._unreadable(key, path, error)
            return None
        except ValueError:  # NUL
            self.wrong(key, f"{path!r} is no path")
            return None
        self.look_at(path)
        return content

    def look_at(self, path: Path | str) -> None:
        """Notice whether it says nothing of other users that this one may read a file."""
        if self.outside and os.geteuid() == 0 and not _is_for_all(Path(path)):
            self.depends(path)

    def _unreadable(self, key: str, path: str, error: OSError) -> None:
        if self.outside and path.startswith(_CREDENTIALS):
            self.note(key, f"{path} is there for its service only, so it is not judged")
            return
        if isinstance(error, PermissionError):
            self.depends(path)
        self.wrong(key, f"{path} cannot be read: {error.strerror}")

    def _as_whom(self) -> str:
        user = _user()
        paths = ", ".join(self._depend)
        how = "who may read and write everything, also" if os.geteuid() == 0 else "who may not use"
        return (
            f"judged as user {user}, {how} {paths}; to judge as the user that runs smgd:"
            " runuser -u USER -- smgd check-config FILE"
        )


def _is_for_all(path: Path) -> bool:
    """Tell whether every user may read a file."""
    absolute = path.absolute()
    try:
        within = all(parent.stat().st_mode & stat.S_IXOTH for parent in absolute.parents)
        return within and bool(absolute.stat().st_mode & stat.S_IROTH)
    except OSError:
        return False


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
