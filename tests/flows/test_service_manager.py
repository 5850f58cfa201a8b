"""The daemon as a service: what it tells systemd and when, and sockets that outlive it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import trio

from smgd import daemon
from smgd.admin.client import ask as ask_admin
from smgd.admin.commands import Reloaded
from smgd.systemd import Notifier, ServiceManager
from tests.flows.client import HOST, chat_body, dial, fetch, head, post
from tests.flows.conftest import Build
from tests.flows.house import House, until
from tests.support import PATIENCE


class Heard:
    """The service manager's end of the notification socket."""

    def __init__(self, path: Path) -> None:
        self.address = str(path)
        self.messages: list[str] = []
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.address)
        self.socket.setblocking(False)

    def has(self, beginning: str) -> bool:
        """Take what has come; tell whether a message that begins so is among all that did."""
        while True:
            try:
                self.messages.append(self.socket.recv(4096).decode())
            except BlockingIOError:
                return any(message.startswith(beginning) for message in self.messages)


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[Heard]:
    found = Heard(tmp_path / "notify")
    with found.socket:
        yield found


def listening() -> socket.socket:
    """Open a socket as a socket unit does."""
    found = socket.socket()
    found.bind((HOST, 0))
    found.listen(64)
    return found


async def test_ready_status_and_stopping(build: Build, heard: Heard) -> None:
    house = build(workers=2)
    house.daemon.manager = ServiceManager(Notifier(heard.address))
    await house.open()
    await until(lambda: heard.has("READY=1\nSTATUS=serving, 0/2 workers ready"))
    engine = house.start_engine()
    await until(lambda: heard.has("STATUS=serving, 1/2 workers ready"))
    house.start_engine(worker=1)
    await until(lambda: heard.has("STATUS=serving, 2/2 workers ready"))
    heard.messages.clear()
    await engine.kill()
    await until(lambda: heard.has("STATUS=serving, 1/2 workers ready"))
    heard.messages.clear()
    await house.stop()
    assert heard.has("STOPPING=1")
    assert heard.messages[0] == (
        "STOPPING=1\nSTATUS=draining, 1/2 workers ready\nEXTEND_TIMEOUT_USEC=210000000"
    )
    assert not heard.has("STATUS=serving")


async def test_ready_is_said_when_clients_can_connect(build: Build, heard: Heard) -> None:
    """Also without any engine, and while the model is loaded: they may come later."""
    house = build()
    house.daemon.manager = ServiceManager(Notifier(heard.address), watchdog=0.02)
    await house.open()
    await until(lambda: heard.has("READY=1"))
    assert (await fetch(house.port, "/health")).status == 200
    await until(lambda: heard.has("WATCHDOG=1"))


async def test_sockets_that_were_handed_over_are_served(build: Build) -> None:
    house = build()
    http, metrics = listening(), listening()
    house.daemon.manager = ServiceManager(sockets={"http": [http], "metrics": [metrics]})
    await house.open()
    assert house.port == http.getsockname()[1]
    assert house.metrics_port == metrics.getsockname()[1]
    assert (await fetch(house.port, "/health")).status == 200
    assert (await fetch(house.metrics_port, "/metrics")).status == 200


# What systemd does between fork and exec: the first descriptor passed on is 3.
_HAND_OVER = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "http"}
os.execv(sys.executable, [sys.executable, "-m", "smgd.cli", *sys.argv[2:]])
"""


async def start_service(
    house: House, nursery: trio.Nursery, http: socket.socket, heard: Heard
) -> trio.Process:
    file = house.paths[0].parent / "smgd.toml"
    file.write_text('server.drain_window = 0\nmetrics.port = 0\n[models."smgd-sim"]\n')
    command = [sys.executable, "-c", _HAND_OVER, str(http.fileno()), "run", "--config", str(file)]
    run = partial(
        trio.run_process,
        command,
        stderr=subprocess.DEVNULL,
        check=False,
        env=os.environ | {"NOTIFY_SOCKET": heard.address},
        pass_fds=[http.fileno()],
    )
    process: trio.Process = await nursery.start(run)
    return process


async def ask(port: int) -> trio.SocketStream:
    """Connect and ask; the answer is not waited for."""
    stream = await dial(port)
    await stream.send_all(head("/health", "Connection: close", method="GET"))
    return stream


async def answered(stream: trio.SocketStream) -> bool:
    async with stream:
        with trio.fail_after(PATIENCE):
            return (await stream.receive_some()).startswith(b"HTTP/1.1 200 ")


async def test_a_restart_refuses_no_connection(
    build: Build, heard: Heard, nursery: trio.Nursery
) -> None:
    house = build()
    with listening() as http:
        port = http.getsockname()[1]
        early = await ask(port)
        first = await start_service(house, nursery, http, heard)
        assert await answered(early)
        assert await answered(await ask(port))
        first.send_signal(signal.SIGTERM)
        with trio.fail_after(PATIENCE):
            assert await first.wait() == 0
        assert heard.has("STOPPING=1\nSTATUS=draining, 0/0 workers ready")
        between = [await ask(port) for _ in range(5)]
        second = await start_service(house, nursery, http, heard)
        for stream in between:
            assert await answered(stream)
        second.send_signal(signal.SIGTERM)
        with trio.fail_after(PATIENCE):
            assert await second.wait() == 0


async def test_who_waits_in_the_queue_finds_what_was_there_before(build: Build) -> None:
    """The model, here: a client of a restart gets no 503 for what takes us a moment."""
    house = build()
    with listening() as http:
        house.daemon.manager = ServiceManager(sockets={"http": [http]})
        stream = await dial(http.getsockname()[1])
        await stream.send_all(post(chat_body("hello")))
        await house.open()
        async with stream:
            with trio.fail_after(PATIENCE):
                assert b"no_available_workers" in await stream.receive_some()


async def test_what_does_not_come_back_is_not_waited_for_long(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "SETTLE_SECONDS", 0.1)
    house = build(models={"m": {"path": "/nowhere"}})
    house.daemon.manager = ServiceManager(sockets={"http": [listening()]})
    await house.open()
    assert (await fetch(house.port, "/health")).status == 200
    assert house.take_errors() == ["model not loaded; will retry"]


async def test_the_admin_socket_of_a_socket_unit_outlives_the_daemon(
    build: Build, tmp_path: Path
) -> None:
    path = tmp_path / "smgd.sock"
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(path))
        opened.listen(8)
        house = build(admin={"socket": str(tmp_path / "other.sock")})
        inherited = socket.socket(fileno=os.dup(opened.fileno()))
        house.daemon.manager = ServiceManager(sockets={"admin": [inherited]})
        await house.open()
        status = await trio.to_thread.run_sync(ask_admin, str(path), "status", {})
        assert status["state"] == "serving"
        assert not (tmp_path / "other.sock").exists()
        await house.stop()
        assert path.exists()
        assert inherited.fileno() == -1


async def test_http_on_a_unix_socket(build: Build, tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    opened = socket.socket(socket.AF_UNIX)
    opened.bind(str(path))
    opened.listen(8)
    house = build()
    house.daemon.manager = ServiceManager(sockets={"http": [opened]})
    await house.open()
    house.start_engine()
    await house.ready()
    assert house.port == 0
    for request, status in (
        (head("/health", method="GET"), b"200"),
        (post(chat_body("hello", stream=True, max_tokens=3)), b"200"),
    ):
        stream = await trio.open_unix_socket(str(path))
        async with stream:
            await stream.send_all(request)
            with trio.fail_after(PATIENCE):
                assert (await stream.receive_some()).startswith(b"HTTP/1.1 " + status)


async def test_a_reload_is_told_from_its_beginning_to_its_end(build: Build, heard: Heard) -> None:
    house = build()
    house.daemon.manager = ServiceManager(Notifier(heard.address))
    house.daemon._reread = lambda: house.config
    await house.open()
    await until(lambda: heard.has("READY=1"))
    heard.messages.clear()
    assert house.daemon.reload() == Reloaded([], [])
    assert heard.has("READY=1\nSTATUS=serving, 0/1 workers ready")
    assert heard.messages[0].startswith("RELOADING=1\nMONOTONIC_USEC=")
