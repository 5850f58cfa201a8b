"""The programs themselves, as a newcomer starts them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest
import trio

from smgd.wire.fnv import handshake_port
from tests.flows.client import HOST
from tests.flows.house import short_directory, start_program
from tests.support import PATIENCE

SMGD = (sys.executable, "-m", "smgd.cli")


async def run(*arguments: str, seconds: float = PATIENCE) -> subprocess.CompletedProcess[bytes]:
    with trio.fail_after(seconds):
        return await trio.run_process(
            [*SMGD, *arguments], capture_stdout=True, capture_stderr=True, check=False
        )


async def test_the_demo_streams_an_answer_and_ends() -> None:
    result = await run("demo", "--once")
    assert result.returncode == 0, result.stderr.decode()
    output = result.stdout.decode()
    _, answer, after = output.split("\n\n", 2)
    assert answer.startswith("> ")
    text = answer.partition("\n")[2]
    assert len(text.split()) > 10, output
    assert "curl -N http://" in after
    assert "/v1/chat/completions" in after
    assert "Traceback" not in result.stderr.decode()


async def test_ctrl_c_in_the_middle_of_the_demo_ends_what_it_started(
    nursery: trio.Nursery,
) -> None:
    errors: list[str] = []
    process = await start_program(nursery, [*SMGD, "demo"], errors.append, subprocess.PIPE)
    output = b""
    assert process.stdout is not None
    async with process.stdout:
        with trio.fail_after(PATIENCE):
            while b"\n> " not in output:
                more = await process.stdout.receive_some()
                assert more, output
                output += more
            children = await _children(process.pid)
            assert len(children) == 2
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 0
    assert [pid for pid in children if await trio.Path(f"/proc/{pid}").exists()] == []
    assert "Traceback" not in "".join(errors)


async def _children(pid: int) -> list[int]:
    text = await trio.Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


@pytest.mark.parametrize("flag", ["--port", "--prometheus-port"])
async def test_a_port_in_use_is_one_clear_line(flag: str) -> None:
    other = {"--port": "--prometheus-port", "--prometheus-port": "--port"}[flag]
    with short_directory() as directory, socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = await run(
            "launch", "--worker-urls", f"ipc://{directory}/e0", "--model-path", "smgd-sim",
            "--host", HOST, flag, port, other, "0",
        )  # fmt: skip
        assert result.returncode == 2
        [line] = result.stderr.decode().splitlines()
        assert line == f"smgd: cannot listen on {HOST}:{port}: Address already in use"
        assert os.listdir(directory) == []  # noqa: PTH208


async def test_a_handshake_port_in_use_is_named() -> None:
    with short_directory() as directory, socket.socket() as taken:
        port = handshake_port(f"{directory}/e0")
        # A connection of an earlier test may still be in TIME_WAIT there.
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((HOST, port))
        taken.listen()
        result = await run(
            "launch", "--worker-urls", f"ipc://{directory}/e0", "--model-path", "smgd-sim",
            "--host", HOST, "--port", "0", "--prometheus-port", "0",
        )  # fmt: skip
        assert result.returncode == 1
        lines = result.stderr.decode().splitlines()
        assert str(port) in lines[-1]
        assert "Traceback" not in result.stderr.decode()
        assert os.listdir(directory) == []  # noqa: PTH208


async def test_the_engine_alone_says_what_is_wrong() -> None:
    with trio.fail_after(PATIENCE):
        result = await trio.run_process(
            [sys.executable, "-m", "smgd.sim.cli", "--handshake", "nonsense"],
            capture_stderr=True,
            check=False,
        )
    assert result.returncode == 2
    assert b"nonsense is no tcp:// or ipc:// address" in result.stderr
