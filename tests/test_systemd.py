"""Notifications reach a real datagram socket, the loop feeds the watchdog, sockets are taken over.

The unit files are checked by systemd's own tools where they are installed.
"""

from __future__ import annotations

import math
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import structlog
import trio
import trio.testing

from smgd.errors import ConfigError
from smgd.systemd import Notifier, ServiceManager, take

UNITS = Path(__file__).parent.parent / "systemd"


class Manager:
    """The service manager's end of the notification socket, as a path or in the abstract."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address.replace("@", "\0", 1))
        self._socket.setblocking(False)

    def heard(self) -> list[str]:
        """Return the messages that have come since the last call."""
        messages = []
        while True:
            try:
                messages.append(self._socket.recv(4096).decode())
            except BlockingIOError:
                return messages

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    name = f"smgd-test-{os.getpid()}"
    found = Manager(f"@{name}" if request.param == "abstract" else str(tmp_path / "notify"))
    yield found
    found.close()


# ----------------------------------------------------------------------------- notifications


def test_notifications(manager: Manager) -> None:
    notifier = Notifier(manager.address)
    notifier.ready("serving, 0/1 workers ready")
    notifier.status("serving, 1/1 workers ready")
    notifier.ping()
    notifier.stopping("draining", 1.5)
    notifier.stopping("draining", math.inf)
    assert manager.heard() == [
        "READY=1\nSTATUS=serving, 0/1 workers ready",
        "STATUS=serving, 1/1 workers ready",
        "WATCHDOG=1",
        "STOPPING=1\nSTATUS=draining\nEXTEND_TIMEOUT_USEC=1500000",
        f"STOPPING=1\nSTATUS=draining\nEXTEND_TIMEOUT_USEC={10**15}",
    ]


def test_reloading_has_the_time_at_which_it_began(manager: Manager) -> None:
    Notifier(manager.address).reloading()
    [message] = manager.heard()
    first, second = message.splitlines()
    assert first == "RELOADING=1"
    now = time.clock_gettime(time.CLOCK_MONOTONIC)
    assert int(second.removeprefix("MONOTONIC_USEC=")) / 1e6 == pytest.approx(now, abs=5)


def test_without_a_manager_nothing_is_said() -> None:
    with structlog.testing.capture_logs() as lines:
        ServiceManager().notifier.ready("serving")
    assert lines == []


def test_what_a_full_queue_does_not_take_goes_out_with_the_next(tmp_path: Path) -> None:
    manager = Manager(str(tmp_path / "notify"))
    notifier = Notifier(manager.address)
    with structlog.testing.capture_logs() as lines, ExitStack() as stack:
        stack.callback(manager.close)
        sent = 0
        while not lines:
            notifier.status(f"{sent}")
            sent += 1
        notifier.ready("serving")
        assert len(manager.heard()) == sent - 1
        notifier.ping()
        assert manager.heard() == ["STATUS=serving\nREADY=1\nWATCHDOG=1"]
    assert lines[0]["event"] == "cannot notify systemd; will try again"


def test_a_manager_that_is_gone_is_not_our_end(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as lines:
        Notifier(str(tmp_path / "none")).ready("serving")
    assert [line["reason"] for line in lines] == ["[Errno 2] No such file or directory"]


# ---------------------------------------------------------------------------------- watchdog


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, math.inf),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": "7"}, 0.5),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": "8"}, math.inf),
        ({"WATCHDOG_USEC": "0"}, math.inf),
        ({"WATCHDOG_USEC": "soon"}, math.inf),
    ],
)
def test_the_interval_of_the_watchdog(environ: dict[str, str], seconds: float) -> None:
    assert take(environ, 7).watchdog == seconds


async def test_the_loop_feeds_the_watchdog_at_half_its_interval(
    manager: Manager, autojump_clock: trio.testing.MockClock
) -> None:
    service_manager = take({"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "10000000"}, 7)
    with trio.move_on_after(14):
        await service_manager.feed_watchdog()
    assert manager.heard() == ["WATCHDOG=1"] * 3


# ----------------------------------------------------------------------------------- sockets


def listening(family: socket.AddressFamily, path: Path) -> socket.socket:
    found = socket.socket(family)
    found.bind(str(path) if family == socket.AF_UNIX else ("127.0.0.1", 0))
    found.listen()
    return found


def handed_over(
    sockets: Sequence[socket.socket], names: str | None, pid: int = 7
) -> dict[str, str]:
    """Return the variables for sockets that have consecutive descriptors."""
    environ = {"LISTEN_FDS": str(len(sockets)), "LISTEN_PID": str(pid)}
    return environ if names is None else environ | {"LISTEN_FDNAMES": names}


@pytest.mark.parametrize(
    ("names", "roles"),
    [
        ("admin:http", {"admin": 1, "http": 1}),
        ("metrics:admin", {"metrics": 1, "admin": 1}),
        ("http:http", {"http": 2}),
        ("smgd.socket:smgd.socket", {"http": 1, "admin": 1}),
        ("smgd.socket", {"http": 1, "admin": 1}),
        (None, {"http": 1, "admin": 1}),
    ],
)
def test_sockets_are_told_apart_by_name_and_kind(
    names: str | None, roles: dict[str, int], tmp_path: Path
) -> None:
    pair = [
        listening(socket.AF_INET, tmp_path / "x"),
        listening(socket.AF_UNIX, tmp_path / "smgd.sock"),
    ]
    first = 700  # a number that nobody has, so that the two are consecutive
    for number, found in enumerate(pair):
        os.dup2(found.fileno(), first + number)
        found.close()
    environ = handed_over(pair, names) | {"NOTIFY_SOCKET": "/x", "HOME": "/"}
    sockets = take(environ, 7, first).sockets
    assert {role: len(found) for role, found in sockets.items()} == roles
    assert environ == {"HOME": "/"}
    for found in (found for several in sockets.values() for found in several):
        assert not found.get_inheritable()
        found.close()


def test_sockets_of_another_process_are_left_alone() -> None:
    assert take(handed_over([], "http", pid=8) | {"LISTEN_FDS": "1"}, 7).sockets == {}


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_socket_that_does_not_listen_is_refused(kind: socket.SocketKind) -> None:
    found = socket.socket(socket.AF_INET, kind)
    first = found.detach()
    with pytest.raises(ConfigError, match=r"\(http\) from systemd is not a listening stream sock"):
        take({"LISTEN_FDS": "1", "LISTEN_PID": "7", "LISTEN_FDNAMES": "http"}, 7, first)


def test_a_descriptor_that_is_no_socket_is_refused() -> None:
    with Path(__file__).open() as file, pytest.raises(ConfigError, match="cannot be used: Socket"):
        take({"LISTEN_FDS": "1", "LISTEN_PID": "7"}, 7, file.fileno())


# ------------------------------------------------------------------------------- unit files


def tool(name: str) -> str:
    """Return one of systemd's tools, or skip the test: they come with Debian's package systemd."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (apt install systemd)")
    return found


def run(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=os.environ | environ, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_units_are_without_a_mistake(tmp_path: Path) -> None:
    analyze = tool("systemd-analyze")
    for unit in (*UNITS.glob("*.service"), *UNITS.glob("*.socket")):
        text = unit.read_text()  # the programs have to be there, so here they are others
        for program in ("/opt/smgd/bin/smgd", "/opt/vllm/bin/vllm"):
            text = text.replace(program, sys.executable)
        (tmp_path / unit.name).write_text(text)
    units = ("smgd.service", "smgd.socket", "smgd-engine@0.service")
    done = run(analyze, "verify", *units, SYSTEMD_UNIT_PATH=f"{tmp_path}:")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_gateway_is_confined() -> None:
    unit = str(UNITS / "smgd.service")
    done = run(tool("systemd-analyze"), "security", "--offline=true", "--threshold=25", unit)
    assert done.returncode == 0, done.stdout


def test_users_and_directories(tmp_path: Path) -> None:
    """What the gateway binds in /run/smgd/engines belongs to the engines' group."""
    sysusers, tmpfiles = tool("systemd-sysusers"), tool("systemd-tmpfiles")
    if os.geteuid() != 0:
        pytest.skip("only root may give files to other users")
    (tmp_path / "etc").mkdir()
    root = f"--root={tmp_path}"
    for command in (
        (sysusers, root, str(UNITS / "smgd.sysusers")),
        (tmpfiles, root, "--create", str(UNITS / "smgd.tmpfiles")),
    ):
        done = run(*command)
        assert done.returncode == 0, done.stderr
    users = {
        line.split(":")[0]: int(line.split(":")[2])
        for line in (tmp_path / "etc/passwd").read_text().splitlines()
    }
    engines = (tmp_path / "run/smgd/engines").stat()
    assert engines.st_mode & 0o7777 == 0o2750
    assert engines.st_uid == users["smgd"]
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "run/smgd/engines/0-in.sock"))
    made = (tmp_path / "run/smgd/engines/0-in.sock").stat()
    assert made.st_gid == engines.st_gid != users["smgd"]
