"""A whole house for one test: the daemon in this process, its real ports, simulated engines.

`House` is a daemon with as many workers as a test wants; its engines dial in over ZMQ, in this
process (`start_engine`) or in one of their own, which can be killed (`start_process`). What engines
were told is read from their log lines. Whoever waits polls a condition under a deadline.

`close` stops the daemon in order and finds nothing left of any request: that is a part of every
test.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import structlog
import trio
from prometheus_client.parser import text_string_to_metric_families
from trio.testing import wait_all_tasks_blocked

from smgd.config.load import convert
from smgd.daemon import Daemon, Ports
from smgd.sim import cli as sim
from smgd.wire.fnv import handshake_port
from tests.flows.client import HOST, Call, chat_body, dial, fetch, post
from tests.support import PATIENCE

# The flows hold on both paths; `make test-stock` runs them on the other one.
HTTP_PATH = os.environ.get("SMGD_TEST_HTTP_PATH", "fast")

# Engines that leave do not take vLLM's 4 s over it.
_QUICK_EXIT = ("--exit-delay-ms", "50")

LogLine = MutableMapping[str, Any]


async def until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait until `condition` holds."""
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await trio.sleep(0.002)


class Tally(logging.Handler):
    """The ids of the ADDs and ABORTs that engines have heard, in order, and who became ready when.

    Takes the log records of engines in this process, and the lines of others through `read`.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.adds: list[str] = []
        self.aborts: list[str] = []
        self.ready_at: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.read(record.getMessage())

    def read(self, line: str) -> None:
        """Take one line."""
        match line.split():
            case ["sim", "add", name, *_]:
                self.adds.append(name.removeprefix("id="))
            case ["sim", "abort", name]:
                self.aborts.append(name.removeprefix("id="))
            case ["sim", "ready", *_]:
                self.ready_at.append(trio.current_time())

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear the engines of this process."""
        logger = logging.getLogger("smgd.sim")
        before, propagate = logger.level, logger.propagate
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)
            logger.setLevel(before)
            logger.propagate = propagate


class LocalEngine:
    """An engine in this process. `status` is its exit status, None while it lives or if killed."""

    def __init__(self, flags: Sequence[str]) -> None:
        [self._engine] = sim.build_engines(sim.build_parser().parse_args(flags))
        self._scope = trio.CancelScope()
        self.status: int | None = None
        self.ended = trio.Event()

    async def run(self) -> None:
        """Live."""
        with self._scope:
            self.status = await self._engine.run()
        self.ended.set()

    def terminate(self) -> None:
        """Do what SIGTERM does: end all requests with `abort`, then leave."""
        self._engine.leave()

    async def kill(self) -> None:
        """Drop all connections without a word."""
        self._scope.cancel()
        await self.ended.wait()


class House:
    """A daemon, its engines and its clients. Tables of the configuration are keyword arguments.

    `lines` is the daemon's log; what is at error level has to be taken by the test (`take_errors`).
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        directory: Path,
        lines: list[LogLine],
        tally: Tally,
        *,
        workers: int = 1,
        model_path: str = "smgd-sim",
        replies: Sequence[dict[str, Any]] = (),
        **tables: dict[str, Any],
    ) -> None:
        self.paths = [directory / f"e{number}" for number in range(workers)]
        self.lines = lines
        self.tally = tally
        self.replies = directory / "replies.jsonl"
        self.replies.write_bytes(b"".join(msgspec.json.encode(r) + b"\n" for r in replies))
        self.config = convert(tables_of(self.paths, model_path, tables), "test")
        self.daemon = Daemon(self.config)
        self.engines: list[LocalEngine] = []
        self.stopped = trio.Event()
        self._ports: Ports | None = None
        self._nursery = nursery
        self._clients: list[trio.SocketStream] = []

    # ------------------------------------------------------------------------------- its life

    async def open(self) -> None:
        """Start the daemon."""
        self._ports = await self._nursery.start(self._run)

    async def _run(self, *, task_status: trio.TaskStatus[Ports]) -> None:
        await self.daemon.run(task_status=task_status)
        self.stopped.set()

    async def close(self) -> None:
        """Stop in order. Nothing may be left, and nothing may have been aborted twice."""
        for client in self._clients:
            client.socket.close()
        if self._ports is None:
            return
        if not self.stopped.is_set():
            await self.quiet()
            await self.stop()
        tally = self.tally
        assert len(set(tally.aborts)) == len(tally.aborts), "aborted twice"
        assert set(tally.aborts) <= set(tally.adds), "aborted what was never added"
        assert self.take_errors() == []
        self.assert_no_files()

    async def stop(self) -> None:
        """Drain the daemon and wait for its end."""
        with trio.fail_after(PATIENCE):
            await self.daemon.drain()
            await self.stopped.wait()

    def assert_no_files(self) -> None:
        """Socket files and locks are gone."""
        ends = ("-in.sock", "-out.sock", ".lock")
        files = [path.with_name(path.name + end) for path in self.paths for end in ends]
        assert [file for file in files if file.exists()] == []

    async def quiet(self) -> None:
        """Wait until nothing runs: no request at an engine, none on the HTTP side."""
        await until(lambda: self.active == 0 and self.answering == 0)

    @property
    def active(self) -> int:
        """Requests in flight on the workers."""
        return sum(w.requests_active for w in self.daemon.registry.workers.values())

    @property
    def answering(self) -> int:
        """Requests that the HTTP side works on."""
        return int(sample(self.daemon.metrics.render().decode(), "smg_http_inflight_requests"))

    @property
    def connections(self) -> int:
        """Connections of the HTTP port that are open."""
        return int(sample(self.daemon.metrics.render().decode(), "smg_http_connections_active"))

    def logged(self, event: str) -> list[LogLine]:
        """Return the log lines with an event; for requests' own, see `requests`."""
        return [line for line in self.lines if line["event"] == event]

    async def requests(self) -> list[LogLine]:
        """Return the lines of the requests that have ended.

        A line is written, and its request counted, after the last byte of the answer: a client may
        be here first.
        """
        await wait_all_tasks_blocked()
        return self.logged("request")

    def take_errors(self) -> list[str]:
        """Return the events of all lines at error level, once."""
        errors = [line for line in self.lines if line["log_level"] in ("error", "critical")]
        for line in errors:
            self.lines.remove(line)
        return [line["event"] for line in errors]

    # -------------------------------------------------------------------------------- engines

    def engine_flags(self, *flags: str, worker: int = 0) -> list[str]:
        """Return the command line of an engine of this house."""
        url = f"ipc://{self.paths[worker]}"
        return ["--worker-url", url, "--replies", str(self.replies), *_QUICK_EXIT, *flags]

    def start_engine(self, *flags: str, worker: int = 0) -> LocalEngine:
        """Start an engine in this process; it dials until the daemon is there."""
        engine = LocalEngine(self.engine_flags(*flags, worker=worker))
        self.engines.append(engine)
        self._nursery.start_soon(engine.run)
        return engine

    async def start_process(self, *flags: str, worker: int = 0) -> trio.Process:
        """Start an engine as a process; it dies with the test."""
        command = [sys.executable, "-m", "smgd.sim.cli", *self.engine_flags(*flags, worker=worker)]
        return await start_program(self._nursery, command, self.tally.read)

    async def ready(self, workers: int = 1) -> None:
        """Wait until so many workers and the model are there."""
        registry, service = self.daemon.registry, self.daemon.service
        await until(lambda: registry.ready_count() == workers and service.not_ready() is None)

    # -------------------------------------------------------------------------------- clients

    @property
    def port(self) -> int:
        """The HTTP port."""
        assert self._ports is not None
        return self._ports.http

    @property
    def metrics_port(self) -> int:
        """The metrics port."""
        assert self._ports is not None
        return self._ports.metrics

    async def dial(
        self, port: int | None = None, receive_buffer: int | None = None
    ) -> trio.SocketStream:
        """Connect; the connection is closed at the end of the test, at the latest."""
        self._clients.append(await dial(self.port if port is None else port, receive_buffer))
        return self._clients[-1]

    async def call(
        self,
        content: str,
        *,
        port: int | None = None,
        receive_buffer: int | None = None,
        **fields: Any,
    ) -> Call:
        """Send a chat; nothing of the answer is read yet."""
        stream = await self.dial(port, receive_buffer)
        await stream.send_all(post(chat_body(content, **fields)))
        return Call(stream)

    async def ask(self, content: str, **fields: Any) -> Call:
        """Send a chat, and read the whole answer."""
        with trio.fail_after(PATIENCE):
            call = await self.call(content, **fields)
            async with call.stream:
                return await call.read()

    async def readiness(self) -> tuple[int, Any]:
        """Return status and body of /readiness."""
        answer = await fetch(self.port, "/readiness")
        return answer.status, answer.json

    async def metric(self, name: str, **labels: str) -> float:
        """Return one value of /metrics; what clients have the answer of is counted in it."""
        await wait_all_tasks_blocked()
        page = await fetch(self.metrics_port, "/metrics")
        return sample(page.body.decode(), name, **labels)

    async def barrier(self) -> None:
        """Let everything that was sent to engines arrive: a short request comes after it."""
        answer = await self.ask("barrier", max_tokens=1)
        assert answer.status == 200


def tables_of(
    paths: Sequence[Path], model_path: str, tables: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return a configuration: any free port, no window before the end, unless `tables` say so."""
    return {
        **tables,
        "server": {"host": HOST, "port": 0, "drain_window": 0.0, "http_path": HTTP_PATH}
        | tables.get("server", {}),
        "metrics": {"port": 0},
        "models": tables.get("models", {model_path: {}}),
        "workers": [{"url": f"ipc://{path}"} for path in paths],
    }


def sample(page: str, name: str, **labels: str) -> float:
    """Return the one value of a metric that has these labels, among others."""
    [value] = [
        found.value
        for family in text_string_to_metric_families(page)
        for found in family.samples
        if found.name == name and labels.items() <= found.labels.items()
    ]
    return float(value)


@contextmanager
def short_directory(workers: int = 2) -> Iterator[Path]:
    """Give a directory whose socket paths are short, and whose handshake ports are free."""
    while True:
        with tempfile.TemporaryDirectory(prefix="smgd-") as name:
            ports = [handshake_port(f"{name}/e{number}") for number in range(workers)]
            if all(map(_is_free, ports)):
                yield Path(name)
                return


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


@contextmanager
def captured_log() -> Iterator[list[LogLine]]:
    """Collect the daemon's log lines."""
    with structlog.testing.capture_logs() as lines:
        yield lines


async def start_program(
    nursery: trio.Nursery,
    command: Sequence[str],
    read: Callable[[str], None],
    stdout: int | None = None,
) -> trio.Process:
    """Start a program whose lines on standard error go to `read`; it is killed with the nursery."""
    run = partial(
        trio.run_process,
        command,
        stdout=stdout,
        stderr=subprocess.PIPE,
        check=False,
        deliver_cancel=_kill,
    )
    process: trio.Process = await nursery.start(run)
    nursery.start_soon(_read_lines, process, read)
    return process


async def _kill(process: trio.Process) -> None:
    process.kill()


async def _read_lines(process: trio.Process, read: Callable[[str], None]) -> None:
    assert process.stderr is not None
    rest = b""
    async with process.stderr:
        async for data in process.stderr:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                read(line.decode())
