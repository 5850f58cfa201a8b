"""A daemon with an admin socket, and the ways to ask it: a raw line, or smgctl as it is called."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from smgd.admin import cli
from tests.flows.conftest import build, start
from tests.flows.house import House
from tests.support import PATIENCE

__all__ = ["build", "start"]

Ctl = Callable[..., Awaitable["Outcome"]]


class Outcome(msgspec.Struct):
    """What smgctl has said, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.out)


def socket_of(house: House) -> str:
    """Return the path of a house's admin socket."""
    return str(house.config.admin.socket)


async def raw(path: str, *lines: bytes) -> list[Any]:
    """Send lines on one connection; return what comes back, to the end of the connection."""
    stream = await trio.open_unix_socket(path)
    async with stream:
        await stream.send_all(b"".join(line + b"\n" for line in lines))
        await stream.send_eof()
        data = b""
        with trio.fail_after(PATIENCE):
            async for chunk in stream:
                data += chunk
    return [msgspec.json.decode(line) for line in data.splitlines()]


@pytest.fixture
def admin(tmp_path: Path) -> dict[str, str]:
    """Return the table [admin] of a house."""
    return {"socket": str(tmp_path / "smgd.sock")}


@pytest.fixture
def ctl(
    admin: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Ctl:
    """Return `await ctl(*argv)`: smgctl in a thread, with the socket from its environment."""
    monkeypatch.setitem(os.environ, cli.SOCKET_VARIABLE, admin["socket"])

    async def ctl(*argv: str) -> Outcome:
        capsys.readouterr()
        code = await trio.to_thread.run_sync(partial(cli.main, argv))
        said = capsys.readouterr()
        return Outcome(code, said.out, said.err)

    return ctl
