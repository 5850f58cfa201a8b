"""The socket: its file, its limits, what is no request, and who is refused."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog
import trio

from smgd.admin.peer import Peer
from smgd.admin.protocol import MAX_REQUEST, Answer, Request
from smgd.admin.server import Run, opened, serve, socket_path
from smgd.config import AdminConfig
from smgd.errors import ConfigError
from tests.admin.conftest import raw
from tests.support import PATIENCE, unmeasured


def echo(request: Request, peer: Peer) -> Answer:
    assert (peer.pid > 0, peer.uid in (os.geteuid(), 65534)) == (True, True)
    return Answer(result=[request.command, request.args])


@asynccontextmanager
async def served(path: Path, *, run: Run = echo, **config: str) -> AsyncIterator[None]:
    with opened(AdminConfig(**config), str(path), []) as listeners:  # type: ignore[arg-type]
        async with trio.open_nursery() as nursery:
            await nursery.start(serve, listeners, run)
            yield
            nursery.cancel_scope.cancel()


# ------------------------------------------------------------------------------- the file


@pytest.mark.parametrize("mode", ["0600", "0660", "0666"])
def test_mode_and_group(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "smgd.sock"
    with opened(AdminConfig(mode=mode), str(path), []) as listeners:  # type: ignore[arg-type]
        status = path.stat()
        assert (stat.S_IMODE(status.st_mode), status.st_gid) == (int(mode, 8), os.getegid())
        assert len(listeners) == 1
    assert not path.exists()


def test_a_group_by_name(tmp_path: Path) -> None:
    path = tmp_path / "smgd.sock"
    if os.geteuid() != 0:
        pytest.skip("only root may give files to any group")
    with opened(AdminConfig(group="daemon"), str(path), []):
        assert path.group() == "daemon"
    with (
        pytest.raises(ConfigError, match=r"admin\.group: there is no group 'nobody-has-this'"),
        opened(AdminConfig(group="nobody-has-this"), str(path), []),
    ):
        pass


def test_what_a_killed_daemon_has_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "smgd.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
        left.listen()
    with opened(AdminConfig(), str(path), []) as listeners:
        assert listeners
    assert not path.exists()


def test_what_another_process_has_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "smgd.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with (
            pytest.raises(ConfigError, match=r"smgd\.sock: another process listens on it"),
            opened(AdminConfig(), str(path), []),
        ):
            pass
        assert path.exists()
    path.unlink()
    path.write_text("precious")
    with (
        pytest.raises(ConfigError, match="there is a file that is not a socket"),
        opened(AdminConfig(), str(path), []),
    ):
        pass
    assert path.read_text() == "precious"


def test_the_file_of_a_successor_is_left_alone(tmp_path: Path) -> None:
    """Its inode may well have the number of ours, which was removed."""
    path = tmp_path / "smgd.sock"
    with opened(AdminConfig(), str(path), []):
        path.unlink()
        with socket.socket(socket.AF_UNIX) as successor:
            successor.bind(str(path))
            successor.listen()
    assert path.exists()
    with opened(AdminConfig(), str(path), []):
        path.unlink()
    assert not path.exists()


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"cannot open the admin socket .*: No such file"),
        opened(AdminConfig(), str(tmp_path / "none/smgd.sock"), []),
    ):
        pass


def test_where_the_socket_is() -> None:
    assert socket_path(AdminConfig(), {}) == ""
    assert socket_path(AdminConfig(), {"RUNTIME_DIRECTORY": "/run/smgd"}) == "/run/smgd/smgd.sock"
    assert socket_path(AdminConfig(), {"RUNTIME_DIRECTORY": "/a:/b"}) == "/a/smgd.sock"
    assert socket_path(AdminConfig(socket="/s"), {"RUNTIME_DIRECTORY": "/a"}) == "/s"


async def test_without_a_path_there_is_no_socket() -> None:
    with opened(AdminConfig(), "", []) as listeners:
        assert listeners == []
        await serve(listeners, echo)


# ------------------------------------------------------------------------------ the lines


async def test_several_requests_on_one_connection(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with served(path):
        answers = await raw(str(path), b'{"command":"a"}', b'{"command":"b","args":{"x":1}}')
    assert answers == [{"result": ["a", {}]}, {"result": ["b", {"x": 1}]}]


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"status", b"[]", b'{"args":{}}', b'{"command":"a","y":1}', b'{"command":"\xff"}'),
        *(DEEP, b'{"command":"a","args":{"x":' + DEEP),
    ],
)
async def test_what_is_no_request(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with served(path):
        first, second = await raw(str(path), line, b'{"command":"a"}')
    assert first["kind"] == "usage"
    assert first["error"].startswith("this is not a request: ")
    assert second == {"result": ["a", {}]}


async def test_a_line_without_end(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with served(path):
        stream = await trio.open_unix_socket(str(path))
        async with stream:
            with trio.fail_after(PATIENCE):
                await stream.send_all(b"x" * (MAX_REQUEST + 1))
                answer = b""
                async for chunk in stream:
                    answer += chunk
    assert b'"error":"a request has at most 1048576 bytes"' in answer


async def test_a_fault_of_ours_ends_one_connection_alone(tmp_path: Path) -> None:
    def run(request: Request, peer: Peer) -> Answer:
        if request.command == "curse":
            raise RecursionError("nobody has thought of it")
        return echo(request, peer)

    path = tmp_path / "s"
    with structlog.testing.capture_logs() as lines:
        async with served(path, run=run):
            assert await raw(str(path), b'{"command":"curse"}') == []
            assert await raw(str(path), b'{"command":"a"}') == [{"result": ["a", {}]}]
    [line] = [line for line in lines if line["event"] == "admin connection failed"]
    assert (line["log_level"], line["exc_info"]) == ("error", True)


async def test_a_client_that_leaves_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with served(path):
        stream = await trio.open_unix_socket(str(path))
        await stream.send_all(b'{"command":"a"}\n' * 1000)
        await stream.aclose()
        assert await raw(str(path), b'{"command":"a"}') == [{"result": ["a", {}]}]


# -------------------------------------------------------------------------------- refusals

# Deep JSON, which a daemon must not even look at; then one question.
_AS_SOMEBODY_RUDE = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[2])
    connection.sendall(b'{"command":"x","args":' + b"[" * 100000 + b"\\n")
    sys.stdout.buffer.write(connection.makefile("rb").readline())
"""

# Imported first: who has no rights may not be able to read it.
_AS_SOMEBODY = """
import os, sys
from smgd.admin.client import ClientError, ask
os.setgroups([int(group) for group in sys.argv[1].split(",") if group])
os.setgid(65534)
os.setuid(65534)
try:
    print(ask(sys.argv[2], "status", {}))
except ClientError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


async def ask_as(
    groups: str, path: Path, program: str = _AS_SOMEBODY
) -> subprocess.CompletedProcess[bytes]:
    """Ask as a user without rights, who is in some groups."""
    if os.geteuid() != 0:
        pytest.skip("only root may become somebody else")
    command = [sys.executable, "-c", program, groups, str(path)]
    with trio.fail_after(PATIENCE):
        return await trio.run_process(
            command, check=False, capture_stdout=True, capture_stderr=True, env=unmeasured()
        )


@pytest.fixture
def open_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory that everybody may enter."""
    path = tmp_path_factory.mktemp("open")
    for directory in (path, *path.parents):
        if directory.stat().st_mode & 0o001 == 0:
            directory.chmod(0o711)
    return path


async def test_a_stranger_is_refused_even_if_the_mode_lets_him_in(open_directory: Path) -> None:
    path = open_directory / "s"
    with structlog.testing.capture_logs() as lines:
        async with served(path, mode="0666", group="daemon"):
            done = await ask_as("", path)
    [line] = [line for line in lines if line["event"] == "admin socket refused"]
    assert (line["log_level"], line["uid"]) == ("warning", 65534)
    assert done.returncode == 3
    assert done.stderr.decode() == (
        "only root, uid 0 and members of the group daemon may use the admin socket:"
        " usermod -aG daemon USER, then log in again\n"
    )


async def test_what_a_stranger_says_is_not_looked_at(open_directory: Path) -> None:
    path = open_directory / "s"
    async with served(path, mode="0666", group="daemon"):
        done = await ask_as("", path, _AS_SOMEBODY_RUDE)
        assert await raw(str(path), b'{"command":"a"}') == [{"result": ["a", {}]}]
    assert b'"kind":"denied"' in done.stdout
    assert done.stderr == b""


async def test_the_mode_keeps_a_stranger_out(open_directory: Path) -> None:
    path = open_directory / "s"
    async with served(path, group="daemon"):
        done = await ask_as("", path)
    assert done.returncode == 3
    assert "you may not use" in done.stderr.decode()
    assert "become a member of daemon (usermod -aG daemon USER)" in done.stderr.decode()


async def test_a_member_of_the_group_is_let_in(open_directory: Path) -> None:
    path = open_directory / "s"
    async with served(path, group="daemon"):
        done = await ask_as(str(path.stat().st_gid), path)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"'status'" in done.stdout
