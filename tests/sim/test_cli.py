from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import pytest
import trio

from smgd.sim.cli import build_parser, main
from smgd.text.tokenizer import Tokenizer
from tests.sim.frontend import FrontEnd
from tests.support import PATIENCE

Start: TypeAlias = Callable[..., AbstractAsyncContextManager[trio.Process]]


@pytest.fixture
def front_end(tmp_path: Path) -> Iterator[FrontEnd]:
    with FrontEnd(tmp_path) as front_end:
        yield front_end


@pytest.fixture
def start(front_end: FrontEnd) -> Start:
    """Start a simulator that has been greeted; it is killed in the end."""

    @asynccontextmanager
    async def started(*arguments: str, engines: int = 1) -> AsyncIterator[trio.Process]:
        command = [sys.executable, "-m", "smgd.sim.cli", "--handshake", front_end.address]
        process = await trio.lowlevel.open_process(
            [*command, *arguments], stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        try:
            await front_end.greet(engines)
            yield process
        finally:
            process.kill()
            assert process.stderr is not None
            await process.stderr.aclose()
            with trio.fail_after(PATIENCE):
                await process.wait()

    return started


async def exit_status(process: trio.Process) -> int:
    with trio.fail_after(PATIENCE):
        return await process.wait()


async def read_log(process: trio.Process) -> str:
    assert process.stderr is not None
    with trio.fail_after(PATIENCE):
        return b"".join([chunk async for chunk in process.stderr]).decode()


async def test_a_script_and_a_log(
    front_end: FrontEnd, start: Start, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    replies = tmp_path / "replies.jsonl"
    replies.write_text('{"contains": "greet", "text": "Good morning, Anna."}\n')
    async with start("--replies", str(replies)) as process:
        await front_end.add("a", tokenizer.encode("Please greet me"), max_tokens=40)
        result = (await front_end.collect("a"))["a"]
        await front_end.abort("a")
        await front_end.call("is_sleeping")
        process.terminate()
        log = await read_log(process)
        status = await exit_status(process)

    assert tokenizer.decode(result.ids) == "Good morning, Anna."
    assert "sim add id=a prompt=4 max_tokens=40\n" in log
    assert "sim abort id=a\n" in log
    assert status == 0


@pytest.mark.parametrize(
    ("then", "status"), [("exit", 0), ("kill", -signal.SIGKILL), ("sentinel", 1)]
)
async def test_replies_that_end_it(
    front_end: FrontEnd, start: Start, tmp_path: Path, then: str, status: int
) -> None:
    replies = tmp_path / "replies.jsonl"
    replies.write_text(f'{{"token_ids": [5, 6], "then": "{then}"}}\n')
    async with start("--replies", str(replies), "--exit-delay-ms", "50") as process:
        await front_end.add("a", [7, 8, 9], max_tokens=40)
        ids = [(await front_end.receive())[1][0][1] for _ in range(2)]

        assert await exit_status(process) == status

    assert ids == [[5], [6]]


async def test_a_signal_ends_requests_first(front_end: FrontEnd, start: Start) -> None:
    async with start("--itl-ms", "5", "--exit-delay-ms", "20") as process:
        await front_end.add("a", [7, 8, 9], max_tokens=4000)
        await front_end.receive()
        process.send_signal(signal.SIGINT)
        result = (await front_end.collect("a"))["a"]
        status = await exit_status(process)

    assert result.finish == 2
    assert status == 0


async def test_ranks_in_one_process(front_end: FrontEnd, start: Start) -> None:
    async with start("--data-parallel-size", "2", engines=2):
        for rank in (0, 1):
            await front_end.add(f"r{rank}", [7, 8, 9], rank=rank, temperature=0.0, max_tokens=1)
        indices = {m[0] for m in [await front_end.receive() for _ in range(4)]}

    assert indices == {0, 1}


async def test_options_reach_the_engine(front_end: FrontEnd, start: Start) -> None:
    async with start("--flood", "--engine-version", "0.27.1", "--max-model-len", "77") as process:
        await front_end.add("a", [7, 8, 9], max_tokens=3)
        result = (await front_end.collect("a"))["a"]
        process.terminate()
        log = await read_log(process)

    assert [len(output) for output in result.outputs] == [14] * 3
    assert log == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of the arguments --handshake --worker-url is required"),
        (["--handshake", "127.0.0.1:5"], "127.0.0.1:5 is no tcp:// or ipc:// address"),
        (["--worker-url", "tcp://host"], "ZMQ worker URL must be ipc://<path>, not 'tcp://host'"),
        (["--handshake", "tcp://h:5", "--itl-ms", "-1"], "-1 is no time"),
        (["--handshake", "tcp://h:5", "--itl-ms", "inf"], "inf is no time"),
        (["--handshake", "tcp://h:5", "--itl-ms", "x"], "invalid milliseconds value: 'x'"),
        (["--handshake", "tcp://h:5", "--max-num-seqs", "0"], "0 is below 1"),
        (["--handshake", "tcp://h:5", "--engine-index", "-1"], "-1 is below 0"),
        (["--handshake", "tcp://h:5", "--engine-version", "1"], "invalid choice: '1'"),
        (["--handshake", "tcp://h:5", "--replies", "/nowhere"], "--replies: cannot read /nowhere"),
    ],
)
def test_wrong_usage(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)

    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_bad_line_of_the_script_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "replies.jsonl"
    path.write_text('{"text": 5}\n')

    with pytest.raises(SystemExit) as caught:
        main(["--handshake", "tcp://h:5", "--replies", str(path)])

    assert caught.value.code == 2
    assert f"--replies: {path}, line 1: " in capsys.readouterr().err


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--handshake", "tcp://h:5", "--model-path", str(tmp_path)])

    assert status == 1
    assert f"smgd-sim: {tmp_path} has no tokenizer.json" in capsys.readouterr().err


def test_no_init_in_time_is_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    status = main(["--handshake", "tcp://127.0.0.1:9", "--init-timeout-ms", "50"])

    assert status == 1
    assert "no INIT in 0.05 s" in caplog.text


def test_the_handshake_address_follows_from_the_workers_url() -> None:
    args = build_parser().parse_args(["--worker-url", "ipc:///tmp/smg-zmq/engine-0"])

    assert args.handshake == "tcp://127.0.0.1:22670"


def test_help_is_the_manual(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])

    assert caught.value.code == 0
    text = capsys.readouterr().out
    for word in ("contains", "delay_ms", "sim_stats", "exit codes", "--flood"):
        assert word in text
