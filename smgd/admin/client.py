"""The other end of the admin socket: one request, one answer.

Plain sockets, so that it starts fast. What keeps smgctl from the daemon is told with what can be
done about it.
"""

from __future__ import annotations

import grp
import socket
from pathlib import Path
from typing import Any, Final

from smgd.admin.protocol import Request, decode_answer, encode
from smgd.errors import UNDECODABLE

# Seconds. A daemon that systemd starts because we have connected needs some of them.
TIMEOUT: Final = 30.0
_CHUNK: Final = 65536
_CLOSED: Final = (
    "smgd at {} has closed the connection: it stops or cannot start (systemctl status smgd,"
    " journalctl -u smgd)"
)


class ClientError(Exception):
    """There is no result; the text is for people, `exit_code` for scripts."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class FailedError(ClientError):
    """The daemon has answered that it cannot do it."""


class UnreachableError(ClientError):
    """There is no daemon, or none that speaks to us."""

    def __init__(self, text: str) -> None:
        super().__init__(text, 3)


def ask(path: str, command: str, args: dict[str, Any], timeout: float = TIMEOUT) -> Any:
    """Return the result of a command. Raises `ClientError`."""
    try:
        line = _exchange(path, encode(Request(command, args)), timeout)
    except OSError as error:
        raise UnreachableError(_why(path, error, timeout)) from error
    if not line:
        raise UnreachableError(_CLOSED.format(path))
    try:
        answer = decode_answer(line)
    except UNDECODABLE as error:
        raise UnreachableError(f"what listens at {path} is not smgd: {error}") from error
    if answer.kind == "denied":
        raise UnreachableError(answer.error)
    if answer.kind is not None:
        raise FailedError(answer.error, 2 if answer.kind == "usage" else 1)
    return answer.result


def _exchange(path: str, request: bytes, timeout: float) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout)
        connection.connect(path)
        connection.sendall(request)
        data = b""
        while not data.endswith(b"\n"):
            chunk = connection.recv(_CHUNK)
            if not chunk:
                return b""
            data += chunk
        return data


def _why(path: str, error: OSError, timeout: float) -> str:
    """Say why nobody is reached, and what to do."""
    match error:
        case FileNotFoundError():
            hint = (
                "start smgd (systemctl start smgd.socket smgd), or say where its socket is: smgctl"
                " --socket PATH, smgd --admin-socket PATH"
            )
            return f"there is no socket {path}: {hint}"
        case ConnectionRefusedError():
            return (
                f"nobody listens at {path}: smgd has ended; start it (systemctl start smgd.socket"
                " smgd), or look why (journalctl -u smgd)"
            )
        case ConnectionResetError() | BrokenPipeError():
            return _CLOSED.format(path)
        case PermissionError():
            return f"you may not use {path}: {_permission_hint(path)}"
        case TimeoutError():
            return (
                f"smgd at {path} has not answered for {timeout:g} s: it hangs or cannot start"
                " (systemctl status smgd, journalctl -u smgd)"
            )
    return f"cannot connect to {path}: {error.strerror or error}"


def _permission_hint(path: str) -> str:
    try:
        group = grp.getgrgid(Path(path).stat().st_gid).gr_name
    except (OSError, KeyError):
        return "run smgctl as root, or as a member of the socket's group"
    return f"run smgctl as root, or become a member of {group} (usermod -aG {group} USER)"
