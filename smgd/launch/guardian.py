"""The parent of one engine: a small program that ends only when every process of the engine has.

    guardian.py GRACE PARENT COMMAND...

GRACE is in seconds; PARENT is the pid of smgd, whose death ends the engine, or 0 for an engine that
is to outlive it. Exit status: that of the command, 128 and the signal's number if it was killed by
one, 127 if it could not be started.

An engine is a family of processes, and those left over when its first one dies keep the GPU. So
this program adopts whatever the family orphans (PR_SET_CHILD_SUBREAPER), and when the first process
has ended, or SIGTERM or SIGINT tells it to end, or smgd has died (PR_SET_PDEATHSIG, which comes as
SIGTERM): SIGTERM to the whole process group, after GRACE SIGKILL, also to those who have left the
group, until no child remains. Should somebody kill this program itself, the engine's first process
gets SIGTERM, by the same means, and smgd ends the others (`strays`).

A program of its own, on the standard library alone, because all this has to go on when smgd cannot:
while it stops at once, or after it was killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NoReturn

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36

_STOP: Final = {signal.SIGTERM, signal.SIGINT}
_WATCHED: Final = {signal.SIGCHLD, *_STOP}

# Those who have left the group die one generation at a time: their orphans are ours only then.
_KILL_AGAIN_SECONDS: Final = 0.2

EXIT_NOT_STARTED: Final = 127
_libc = ctypes.CDLL(None, use_errno=True)


class Family:
    """The engine's processes: the first one leads their group, and its status is what counts."""

    def __init__(self, leader: int) -> None:
        self._leader = leader
        self.status: int | None = None

    def reap(self) -> bool:
        """Take leave of those who have ended; return whether any child remains."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._leader:
                self.status = os.waitstatus_to_exitcode(status)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the group and to children that have left it."""
        for pid in self._strays():
            os.kill(pid, number)
        try:
            os.killpg(self._leader, number)
        except ProcessLookupError:
            return

    def _strays(self) -> Iterator[int]:
        # Children cannot vanish meanwhile: they stay until we reap them.
        for pid in _children():
            if os.getpgid(pid) != self._leader:
                yield pid


def main(argv: list[str]) -> int:
    """Run the command; return the exit status."""
    grace, parent, *command = argv
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # an engine must not hold a socket of smgd's
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if int(parent):
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):  # it died before it could be told to whom
            return EXIT_NOT_STARTED
    family = Family(_start(command))
    while family.status is None and signal.sigwait(_WATCHED) not in _STOP:
        family.reap()
    _end(family, float(grace))
    status = family.status or 0
    return status if status >= 0 else 128 - status


def _start(command: list[str]) -> int:
    ours = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become(command, ours)
    return pid


def _become(command: list[str], parent: int) -> NoReturn:
    """Become the engine, in a process group of its own."""
    try:
        os.setpgid(0, 0)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == parent:
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
            os.execvp(command[0], command)  # noqa: S606 - the operator's own command
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(EXIT_NOT_STARTED)


def _end(family: Family, grace: float) -> None:
    """End what remains of the family; return when nothing does."""
    deadline = time.monotonic() + grace  # noqa: TID251 - no trio here
    family.signal(signal.SIGTERM)
    while family.reap():
        left = deadline - time.monotonic()  # noqa: TID251
        if left <= 0:
            family.signal(signal.SIGKILL)
        signal.sigtimedwait({signal.SIGCHLD}, left if left > 0 else _KILL_AGAIN_SECONDS)


def _children() -> list[int]:
    """Return our children; none where the kernel does not list them (CONFIG_PROC_CHILDREN)."""
    own = os.getpid()
    try:
        return list(map(int, Path(f"/proc/{own}/task/{own}/children").read_text().split()))
    except FileNotFoundError:
        return []


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
