"""SIGTERM: what is said, what still runs, what is aborted, and what is left: nothing."""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

import pytest
import trio

from tests.flows.client import HOST, Call, chat_body, dial, fetch, post
from tests.flows.conftest import Build, Start
from tests.flows.house import House, start_program, until
from tests.support import PATIENCE

ENDLESS = {"contains": "endless", "token_ids": [300] * 8000}
DRAINING = {"status": "not ready", "reason": "draining"}
PACE = ("--itl-ms", "5")


async def refused(port: int) -> bool:
    """Tell whether nobody listens any more."""
    try:
        stream = await dial(port)
    except OSError:
        return True
    await stream.aclose()
    return False


async def test_the_order_of_a_stop(start: Start, nursery: trio.Nursery) -> None:
    house = await start(*PACE, server={"drain_window": 0.5}, replies=[ENDLESS])
    call = await house.call("endless", stream=True, max_tokens=200)
    await call.read("content")
    nursery.start_soon(house.daemon.drain)
    await until(lambda: house.daemon.service.draining)
    # The window: it says so, and still takes what comes.
    assert await house.readiness() == (503, DRAINING)
    assert (await fetch(house.port, "/health")).status == 200
    late = await house.call("endless", stream=True, max_tokens=150)
    await late.read("content")
    idle = await house.dial()
    # After the window: nobody is let in, idle connections end, what runs goes on to its end.
    with trio.fail_after(PATIENCE):
        while not await refused(house.port):
            await trio.lowlevel.checkpoint()
        assert await idle.receive_some() == b""
    assert not house.stopped.is_set()
    for one, tokens in ((call, 200), (late, 150)):
        with trio.fail_after(PATIENCE):
            await one.read()
        assert (one.done, one.finishes()) == (True, ["length"])
        assert len(one.frames) <= tokens + 2
    with trio.fail_after(PATIENCE):
        await house.stopped.wait()
    assert house.tally.aborts == []


async def test_what_runs_after_the_grace_is_told_and_aborted(start: Start) -> None:
    house = await start(*PACE, server={"shutdown_grace": 0.3}, replies=[ENDLESS])
    calls = [await house.call("endless", stream=True), await house.call("endless")]
    await calls[0].read("content")
    await until(lambda: len(house.tally.adds) == 2)
    await house.stop()
    for call, status in zip(calls, (200, 503), strict=True):
        await call.read()
        assert (call.status, call.complete) == (status, True)
        assert call.error["code"] == "shutting_down"
    await until(lambda: len(house.tally.aborts) == 2)
    assert sorted(house.tally.aborts) == sorted(house.tally.adds)
    assert house.active == 0
    house.assert_no_files()


async def test_no_grace_at_all(start: Start) -> None:
    house = await start(*PACE, server={"shutdown_grace": 0.0}, replies=[ENDLESS])
    call = await house.call("endless", stream=True)
    await call.read("content")
    await house.stop()
    await until(lambda: house.tally.aborts)
    assert house.tally.aborts == house.tally.adds


async def test_a_kept_alive_connection_is_told_to_close(start: Start, nursery: Any) -> None:
    house = await start(*PACE, server={"drain_window": 0.2}, replies=[ENDLESS])
    stream = await house.dial()
    await stream.send_all(post(chat_body("endless", stream=True, max_tokens=80)))
    call = Call(stream)
    await call.read("content")
    nursery.start_soon(house.daemon.drain)
    with trio.fail_after(PATIENCE):
        await call.read()
        assert call.done
        assert await stream.receive_some() == b""
        await house.stopped.wait()


# ------------------------------------------------------------------------ as a process of its own


class Program:
    """`smgd run` as a process: its log lines and its port."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.lines: list[dict[str, Any]] = []
        self.process: trio.Process

    def read(self, line: str) -> None:
        self.lines.append(json.loads(line))

    def logged(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == event]

    @property
    def port(self) -> int:
        return int(self.logged("smgd listening")[0]["http"])

    async def call(self, content: str, **fields: Any) -> Call:
        return await self.house.call(content, port=self.port, **fields)

    async def wait(self) -> int:
        with trio.fail_after(PATIENCE):
            return await self.process.wait()


async def run_program(
    house: House, nursery: trio.Nursery, server: str, *, engine: bool = True
) -> Program:
    """Run the daemon of a house as a process, and unless there is one, an engine here."""
    file = house.paths[0].parent / "smgd.toml"
    await trio.Path(file).write_text(
        f"""
        [server]
        host = "{HOST}"
        port = 0
        {server}
        [metrics]
        port = 0
        [models."smgd-sim"]
        [[workers]]
        url = "ipc://{house.paths[0]}"
        """
    )
    program = Program(house)
    command = [sys.executable, "-m", "smgd.cli", "run", "--config", str(file)]
    program.process = await start_program(nursery, command, program.read)
    if engine:
        house.start_engine(*PACE)
        await until(lambda: program.logged("ZMQ worker ready"))
    await until(lambda: program.logged("model loaded"))
    return program


@pytest.fixture
async def house(build: Build) -> House:
    return build(replies=[ENDLESS])


async def test_sigterm(house: House, nursery: trio.Nursery) -> None:
    program = await run_program(house, nursery, "drain_window = 8\nshutdown_grace = 0.4")
    short = await program.call("endless", stream=True, max_tokens=100)
    long = await program.call("endless", stream=True, max_tokens=8000)
    for call in (short, long):
        await call.read("content")
    nursery.start_soon(long.read)  # or smgd would have to wait for it
    program.process.send_signal(signal.SIGTERM)
    await until(lambda: program.logged("draining"))
    answer = await fetch(program.port, "/readiness")
    assert (answer.status, answer.json) == (503, DRAINING)
    await short.read()
    assert short.done
    assert await program.wait() == 0
    assert await refused(program.port)
    await until(lambda: long.complete or long.cut)
    assert long.error["code"] == "shutting_down"
    assert long.done
    await until(lambda: house.tally.aborts)
    assert house.tally.aborts == house.tally.adds[1:]
    house.assert_no_files()
    assert [line for line in program.lines if line["level"] == "error"] == []
    await until(lambda: program.logged("smgd stopped"))


async def test_a_second_sigterm_stops_at_once(house: House, nursery: trio.Nursery) -> None:
    program = await run_program(house, nursery, "drain_window = 3600\nshutdown_grace = 3600")
    call = await program.call("endless", stream=True)
    await call.read("content")
    program.process.send_signal(signal.SIGTERM)
    await until(lambda: program.logged("draining"))
    program.process.send_signal(signal.SIGTERM)
    assert await program.wait() == 1
    await call.read()
    assert (call.cut, call.done) == (True, False)
    await until(lambda: house.tally.aborts)
    assert house.tally.aborts == house.tally.adds
    house.assert_no_files()
    await until(lambda: program.logged("smgd failed"))
    [line] = program.logged("smgd failed")
    assert "second SIGTERM" in line["reason"]


async def test_sigint_with_nothing_to_do(house: House, nursery: trio.Nursery) -> None:
    program = await run_program(house, nursery, "drain_window = 0\nshutdown_grace = 3600")
    program.process.send_signal(signal.SIGINT)
    assert await program.wait() == 0
    house.assert_no_files()


async def test_a_killed_daemon_leaves_nothing_that_its_successor_minds(
    house: House, nursery: trio.Nursery
) -> None:
    program = await run_program(house, nursery, "drain_window = 0")
    call = await program.call("endless", stream=True)
    await call.read("content")
    left = house.tally.adds[0]
    program.process.kill()
    await program.wait()
    await call.close()
    # The files are still there, and the engine still runs the request, for nobody: it is told so.
    # It says no HELLO twice in its life, and is served without.
    again = await run_program(house, nursery, "drain_window = 0", engine=False)
    await until(lambda: house.tally.aborts == [left])
    await until(lambda: again.logged("ZMQ worker ready"))
    call = await again.call("endless", stream=True, max_tokens=5)
    assert (await call.read()).done
    again.process.send_signal(signal.SIGTERM)
    assert await again.wait() == 0
    assert house.tally.aborts == [left]
    house.assert_no_files()
