"""The admin socket's server: lines in, lines out, one task a connection.

Commands are synchronous, so a connection waits for nothing but its client. The server runs until
the daemon has ended everything else: `smgctl status` answers during a stop, too.
"""

from __future__ import annotations

import errno
import grp
import os
import socket
import stat
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import structlog
import trio

from smgd.admin.peer import Access, Peer, access_to, peer_of
from smgd.admin.protocol import MAX_REQUEST, Answer, Request, decode_request, encode
from smgd.config import AdminConfig
from smgd.errors import UNDECODABLE, ConfigError
from smgd.files import hold, is_at, listener_of

log = structlog.get_logger("smgd.admin")

# Seconds: a client that has connected speaks and listens, or goes.
IDLE_SECONDS: Final = 60.0
BACKLOG: Final = 16
SOCKET_NAME: Final = "smgd.sock"

Run: TypeAlias = Callable[[Request, Peer], Answer]


async def serve(
    listeners: list[trio.SocketListener],
    run: Run,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer requests with what `run` returns, until cancelled; at once without a listener.

    `run` is told who asks.
    """
    task_status.started()
    if listeners:
        await trio.serve_listeners(partial(_attend, run), listeners)


async def _attend(run: Run, stream: trio.SocketStream) -> None:
    try:
        access = access_to(stream.socket.getsockname())
        peer = peer_of(stream.socket)
        if access.allows(peer):
            await _answer(partial(_answer_to, run, peer), stream)
        else:
            log.warning("admin socket refused", uid=peer.uid, pid=peer.pid)
            await _answer(partial(_refuse, access), stream)
    except (OSError, trio.BrokenResourceError, trio.TooSlowError) as error:
        log.debug("admin connection lost", reason=str(error))
    except Exception:
        log.exception("admin connection failed")  # and only that one: the daemon goes on


async def _answer(answer_to: Callable[[bytes], Answer], stream: trio.SocketStream) -> None:
    async with aclosing(_lines(stream)) as lines:
        async for line in lines:
            if len(line) > MAX_REQUEST:
                text = f"a request has at most {MAX_REQUEST} bytes"
                await _send(stream, Answer(error=text, kind="usage"))
                return
            await _send(stream, answer_to(line))


def _answer_to(run: Run, peer: Peer, line: bytes) -> Answer:
    try:
        request = decode_request(line)
    except UNDECODABLE as error:
        return Answer(error=f"this is not a request: {error}", kind="usage")
    return run(request, peer)


async def _lines(stream: trio.SocketStream) -> AsyncGenerator[bytes, None]:
    """Give lines as they come; one that is too long is given as far as it has come."""
    buffer = bytearray()
    while True:
        with trio.fail_after(IDLE_SECONDS):
            data = await stream.receive_some()
        if not data:
            return
        buffer += data
        *complete, rest = buffer.split(b"\n")
        for line in complete:
            yield bytes(line)
        buffer = rest
        if len(buffer) > MAX_REQUEST:
            yield bytes(buffer)


async def _send(stream: trio.SocketStream, answer: Answer) -> None:
    with trio.fail_after(IDLE_SECONDS):
        await stream.send_all(encode(answer))


def _refuse(access: Access, _: bytes) -> Answer:
    """Be asked in vain: a client that is not heard out might not read why.

    What it has to say is not looked at.
    """
    try:
        group = grp.getgrgid(access.gid).gr_name
    except KeyError:
        group = str(access.gid)
    error = (
        f"only root, uid {access.uid} and members of the group {group} may use the admin socket:"
        f" usermod -aG {group} USER, then log in again"
    )
    return Answer(error=error, kind="denied")


# ------------------------------------------------------------------------------ the socket


def socket_path(config: AdminConfig, environ: Mapping[str, str]) -> str:
    """Return where the socket is to be: as configured, else in the directory that systemd made."""
    runtime = environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    return config.socket or (f"{runtime}/{SOCKET_NAME}" if runtime else "")


@contextmanager
def opened(
    config: AdminConfig, path: str, inherited: list[trio.SocketListener]
) -> Iterator[list[trio.SocketListener]]:
    """Give the listeners of the admin socket: those inherited, or one of our own, or none.

    Our own socket's file is gone when the block ends; that of another, which has taken its place,
    is left alone. Raises `ConfigError`.
    """
    if inherited or not path:
        yield inherited
        return
    file = Path(path)
    try:
        gid = grp.getgrnam(config.group).gr_gid if config.group else -1
        listener = _listen(file, int(config.mode, 8), gid)
        mine = hold(file)
    except KeyError:
        raise ConfigError(f"admin.group: there is no group {config.group!r}") from None
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"cannot open the admin socket {path}: {reason}") from error
    log.info("admin socket open", path=path)
    try:
        yield [trio.SocketListener(trio.socket.from_stdlib_socket(listener))]
    finally:
        listener.close()
        _remove_own(file, mine)


def _remove_own(path: Path, mine: int) -> None:
    """Remove the file that `mine` is a descriptor of."""
    try:
        if is_at(path, mine):
            path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("cannot remove the admin socket", path=str(path), reason=str(error))
    finally:
        os.close(mine)


def _listen(path: Path, mode: int, gid: int) -> socket.socket:
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(os.fspath(path))
        # Nobody can connect before listen, so there is no moment with another mode.
        if gid != -1:  # not without need: a service may be denied the call as such
            os.chown(path, -1, gid)
        path.chmod(mode)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _remove_stale(path: Path) -> None:
    """Remove the socket file of a daemon that is gone, and nothing else. Raises OSError."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(errno.EEXIST, "there is a file that is not a socket")
        if listener_of(path) is not None:
            raise OSError(errno.EADDRINUSE, "another process listens on it")
        path.unlink()
