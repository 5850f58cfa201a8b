"""What accepted sockets inherit, and what is said when none can be accepted."""

from __future__ import annotations

import errno
import math
import socket

import pytest
import structlog
import trio
import trio.testing

from smgd.web.streams import Shortage, prepare_listener


@pytest.mark.parametrize(
    ("write_timeout", "milliseconds"),
    [(30.0, 35_000), (1e-9, 5_000), (3e6, 2**31 - 1), (math.inf, 2**31 - 1)],
)
def test_the_kernel_gives_up_after_the_write_deadline(
    write_timeout: float, milliseconds: int
) -> None:
    with socket.socket() as raw:
        raw.bind(("127.0.0.1", 0))
        raw.listen()
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(raw))
        prepare_listener(listener, write_timeout)
        assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == milliseconds


async def test_a_shortage_is_told_at_once_and_then_once_a_minute(
    autojump_clock: trio.testing.MockClock,
) -> None:
    shortage = Shortage()
    with structlog.testing.capture_logs() as lines:
        for _ in range(1300):
            shortage.waits(OSError(errno.EMFILE, "Too many open files"))
            await trio.sleep(0.1)
        await trio.sleep(3600)
        shortage.waits(OSError(errno.ENFILE, "Too many open files in system"))
    assert [line["event"] for line in lines] == ["cannot accept connections; retrying"] * 4
    assert lines[0]["waits"] == 1
    assert sum(line["waits"] for line in lines) == 1301
    assert lines[-1]["reason"].endswith("in system")
