"""smgd and simulated engines as processes, for flows in which smgd itself is killed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import trio

from tests.flows.client import Call, chat_body, dial, fetch, post
from tests.flows.house import Tally, sample, start_program, until
from tests.support import PATIENCE


class Town:
    """smgd and engines as processes of their own, so that either can be killed.

    smgd has one worker; `log` is that of its present life.
    """

    def __init__(
        self, nursery: trio.Nursery, directory: Path, replies: Sequence[dict[str, Any]] = ()
    ) -> None:
        self.path = directory / "e0"
        self.record = directory / "e0.engine.json"
        self.replies = directory / "replies.jsonl"
        self.replies.write_text("".join(json.dumps(reply) + "\n" for reply in replies))
        self.tally = Tally()
        self.hellos = 0
        self.log: list[dict[str, Any]] = []
        self.smgd: trio.Process
        self._nursery = nursery
        self._programs: list[trio.Process] = []
        self._clients: list[trio.SocketStream] = []

    async def close(self) -> None:
        """End the programs, which write into the directory, and what clients have left open."""
        for program in self._programs:
            program.kill()
            await program.wait()
        for client in self._clients:
            client.socket.close()

    async def start_smgd(self, *flags: str) -> None:
        """Start smgd, and wait until it listens."""
        self.log = log = []
        command = [
            *(sys.executable, "-m", "smgd.cli", "launch", "--worker-urls", f"ipc://{self.path}"),
            *("--model-path", "smgd-sim", "--host", "127.0.0.1", "--port", "0"),
            *("--prometheus-port", "0", "--log-json", "true", *flags),
        ]
        self.smgd = await self._start(command, lambda line: log.append(json.loads(line)))
        await until(lambda: self.logged("smgd listening"))

    async def kill_smgd(self) -> None:
        """End smgd as a crash does."""
        self.smgd.kill()
        await self.smgd.wait()

    async def start_engine(self, *flags: str) -> trio.Process:
        """Start an engine; it dials until smgd is there."""
        command = [
            *(sys.executable, "-m", "smgd.sim.cli", "--worker-url", f"ipc://{self.path}"),
            *("--replies", str(self.replies), *flags),
        ]
        return await self._start(command, self._read_engine)

    async def _start(self, command: Sequence[str], read: Callable[[str], None]) -> trio.Process:
        self._programs.append(await start_program(self._nursery, command, read))
        return self._programs[-1]

    def _read_engine(self, line: str) -> None:
        self.hellos += line.startswith("sim hello")
        self.tally.read(line)

    def logged(self, event: str) -> list[dict[str, Any]]:
        """Return the log lines with an event."""
        return [line for line in self.log if line["event"] == event]

    @property
    def port(self) -> int:
        """The HTTP port."""
        return int(self.logged("smgd listening")[0]["http"])

    async def ready(self) -> None:
        """Wait until smgd says that it is ready."""
        with trio.fail_after(PATIENCE):
            while (await fetch(self.port, "/readiness")).status != 200:  # noqa: ASYNC110
                await trio.sleep(0.01)

    async def ask(self, content: str, **fields: Any) -> Call:
        """Send a chat; nothing of the answer is read yet."""
        stream = await dial(self.port)
        self._clients.append(stream)
        await stream.send_all(post(chat_body(content, **fields)))
        return Call(stream)

    async def answered(self, content: str = "the sea") -> Call:
        """Ask until there is an answer."""
        with trio.fail_after(PATIENCE):
            while True:
                call = await (await self.ask(content, max_tokens=3)).read()
                if call.status == 200:
                    return call
                await trio.sleep(0.01)

    async def metric(self, name: str, **labels: str) -> float:
        """Return one value of /metrics."""
        page = await fetch(self.port, "/metrics")
        return sample(page.body.decode(), name, **labels)
