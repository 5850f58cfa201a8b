"""What smgd and systemd tell each other: notifications, the watchdog, and sockets handed over.

All three are environment variables and one datagram socket (sd_notify(3), sd_listen_fds(3),
sd_watchdog_enabled(3)); without the variables nothing is said and nothing is taken, so that smgd
needs no mode for running as a service. `take` removes them from the environment: an engine
that smgd starts must neither notify in its name nor look for its sockets.

A notification never blocks the event loop. What a full queue did not take goes out with the next
one, in front of it; the watchdog's pings come at least every few seconds.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Mapping, MutableMapping
from typing import Final, Literal, TypeAlias, get_args

import msgspec
import structlog
import trio

from smgd.errors import ConfigError

log = structlog.get_logger("smgd.systemd")

FIRST_DESCRIPTOR: Final = 3
_VARIABLES: Final = (
    "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"
)  # fmt: skip

# Seconds, in place of no limit at all.
_LONGEST_STOP: Final = 1e9

Role: TypeAlias = Literal["http", "metrics", "admin"]
Sockets: TypeAlias = Mapping[Role, list[socket.socket]]


class Notifier:
    """Tells a service manager how we are; does nothing without one.

    `address` is a path, or `@` and a name in the abstract namespace.
    """

    def __init__(self, address: str = "") -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._unsent: dict[str, str] = {}

    def ready(self, status: str) -> None:
        """Say that start-up, or a reload, is complete."""
        self._send(READY="1", STATUS=status)

    def status(self, text: str) -> None:
        """Set the one line that `systemctl status` shows."""
        self._send(STATUS=text)

    def reloading(self) -> None:
        """Say that the configuration is being read again; `ready` ends it."""
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send(RELOADING="1", MONOTONIC_USEC=str(now))

    def stopping(self, status: str, within: float) -> None:
        """Say that we are about to end, and how many seconds that may take.

        A longer time than the unit's TimeoutStopSec= counts in its place.
        """
        timeout = round(min(within, _LONGEST_STOP) * 1e6)
        self._send(STOPPING="1", STATUS=status, EXTEND_TIMEOUT_USEC=str(timeout))

    def ping(self) -> None:
        """Say that we are alive."""
        self._send(WATCHDOG="1")

    def _send(self, **assignments: str) -> None:
        if not self._address:
            return
        self._unsent |= assignments
        text = "\n".join(f"{name}={value}" for name, value in self._unsent.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.sendto(text.encode(), socket.MSG_DONTWAIT, self._address)
        except OSError as error:
            log.warning("cannot notify systemd; will try again", text=text, reason=str(error))
        else:
            self._unsent.clear()


class ServiceManager(msgspec.Struct, frozen=True):
    """The service manager that started this process, if one did.

    `watchdog` is how often, in seconds, it wants to hear that we live: it ends us after that time
    in silence. `sockets` are listeners that it has opened for us, by what is served on them.
    """

    notifier: Notifier = Notifier()
    watchdog: float = math.inf
    sockets: Sockets = {}

    def listeners(self, role: Role) -> list[trio.SocketListener]:
        """Return the listeners that were opened for one purpose; none if we have to do it."""
        return [
            trio.SocketListener(trio.socket.from_stdlib_socket(listener))
            for listener in self.sockets.get(role, [])
        ]

    async def feed_watchdog(self) -> None:
        """Ping at half the interval, for ever: as long as the event loop turns, and no longer."""
        while math.isfinite(self.watchdog):
            self.notifier.ping()
            await trio.sleep(self.watchdog / 2)


def take(
    environ: MutableMapping[str, str], pid: int, first_descriptor: int = FIRST_DESCRIPTOR
) -> ServiceManager:
    """Take the service manager's variables out of an environment. Raises `ConfigError`."""
    found = {name: environ.pop(name) for name in _VARIABLES if name in environ}
    return ServiceManager(
        Notifier(found.get("NOTIFY_SOCKET", "")),
        _watchdog(found, pid),
        _sockets(found, pid, first_descriptor),
    )


def _watchdog(found: Mapping[str, str], pid: int) -> float:
    microseconds = found.get("WATCHDOG_USEC", "")
    if not microseconds.isdecimal() or found.get("WATCHDOG_PID", str(pid)) != str(pid):
        return math.inf
    return int(microseconds) / 1e6 or math.inf


def _sockets(found: Mapping[str, str], pid: int, first: int) -> Sockets:
    count = found.get("LISTEN_FDS", "")
    if not count.isdecimal() or found.get("LISTEN_PID") != str(pid):
        return {}
    names = found.get("LISTEN_FDNAMES", "").split(":")
    sockets: dict[Role, list[socket.socket]] = {}
    for number in range(int(count)):
        name = names[number] if number < len(names) else ""
        listener = _listener(first + number, name)
        sockets.setdefault(_role(name, listener), []).append(listener)
    return sockets


def _listener(descriptor: int, name: str) -> socket.socket:
    what = f"descriptor {descriptor} ({name or 'no name'}) from systemd"
    try:
        listener = socket.socket(fileno=descriptor)
    except OSError as error:
        raise ConfigError(f"{what} cannot be used: {error.strerror}") from error
    listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if listener.type != socket.SOCK_STREAM or not listening:
        listener.close()
        raise ConfigError(
            f"{what} is not a listening stream socket: the socket unit needs ListenStream= and"
            " Accept=no"
        )
    listener.set_inheritable(False)
    return listener


def _role(name: str, listener: socket.socket) -> Role:
    """Return what a socket is for: by its name (FileDescriptorName=), else by its kind.

    All sockets of one unit have one name, and the plain smgd.socket has both kinds.
    """
    for role in get_args(Role):
        if role == name:
            return role  # type: ignore[no-any-return]
    return "admin" if listener.family == socket.AF_UNIX else "http"
