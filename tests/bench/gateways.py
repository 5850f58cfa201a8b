"""The gateways under test, each with an engine of its own, and what the kernel knows about them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from random import Random
from types import MappingProxyType

import msgspec

from smgd.sim.flood import Control
from smgd.wire.fnv import handshake_port
from tests.bench import clocks
from tests.bench.prompts import Prompt
from tests.engine.rig import HOST, Family, wait_until

START_SECONDS = 60.0
DRAIN_SECONDS = 30.0
# Longer than any prompt here; both gateways learn it from the engine.
MAX_MODEL_LEN = 65536
CHECK_TOKENS = 24


class GatewayError(Exception):
    """A gateway does not do what the benchmark needs it to."""


class Program(msgspec.Struct, frozen=True):
    """How to start a gateway: what comes before `launch`, and what is added behind."""

    command: list[str]
    options: list[str] = []
    env: dict[str, str] = {}


class Gateway:
    """One gateway process, and once `start_engine` was called its engine; `close` ends both."""

    def __init__(self, name: str, program: Program, model: Path, directory: Path) -> None:
        directory.mkdir(mode=0o700)
        self.name = name
        self.port = free_port()
        self.control = Control(directory / "control")
        self._directory = directory
        self._model = str(model)
        self._worker = f"ipc://{_worker_path(directory)}"
        arguments = [
            *("launch", "--worker-urls", self._worker, "--backend", "vllm"),
            *("--model-path", self._model, "--host", HOST, "--port", str(self.port)),
            *("--prometheus-host", HOST, "--prometheus-port", str(free_port())),
            *("--log-level", "info", *program.options),
        ]
        self._started = contextlib.ExitStack()
        self._gateway = self._start(name, [*program.command, *arguments], program.env)
        self.pid = self._gateway.process.pid

    def start_engine(self) -> None:
        """Start the engine, which dials in when it is ready."""
        arguments = [
            *("--worker-url", self._worker, "--model-path", self._model, "--flood"),
            *("--control", str(self._directory / "control")),
            *("--max-model-len", str(MAX_MODEL_LEN)),
        ]
        self._engine = self._start("engine", [sys.executable, "-m", "smgd.sim.cli", *arguments])

    def _start(
        self, name: str, command: list[str], env: Mapping[str, str] = MappingProxyType({})
    ) -> Family:
        log = self._directory / f"{name}.log"
        family = Family(name, command, log, {**os.environ, **env})
        self._started.callback(family.kill)
        return family

    def wait(self, probe: str) -> None:
        """Wait until a probe ("liveness" or "readiness") says yes. Raises `RigError`."""
        wait_until(lambda: self._answers(probe), START_SECONDS, f"{self.name}'s {probe}")

    def _answers(self, probe: str) -> bool:
        self._gateway.check()
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self.port}/{probe}", timeout=5):
                return True
        except (urllib.error.URLError, ConnectionError):
            return False

    @property
    def url(self) -> str:
        """Where requests go."""
        return f"http://{HOST}:{self.port}/v1/chat/completions"

    def close(self) -> None:
        """End both; idempotent."""
        self._started.close()

    def stop(self) -> int:
        """Ask the gateway to end, and wait; return its exit code."""
        return self._gateway.terminate()

    def drain(self) -> None:
        """Wait until the engine runs nothing. Raises `RigError`."""
        wait_until(lambda: not self.control.read()["running"], DRAIN_SECONDS, f"{self.name} idle")

    def check(self, prompt: Prompt) -> None:
        """Raise `GatewayError` unless a streamed answer comes whole and as a stream."""
        self.control.interval = 0.005
        request = urllib.request.Request(
            self.url, prompt.body(0, Random(0), CHECK_TOKENS), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            lines = response.read().decode().split("\n\n")
        frames = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        texts = [c["delta"].get("content") for f in frames for c in f["choices"]]
        ends = [c["finish_reason"] for f in frames for c in f["choices"] if c["finish_reason"]]
        if ends != ["length"] or len([text for text in texts if text]) < CHECK_TOKENS / 2:
            raise GatewayError(f"{self.name} answers {lines}")

    def cpu(self) -> float:
        """Seconds of CPU that the process tree has used, from its nanosecond clocks."""
        return sum(clocks.cpu_seconds(pid) for pid in clocks.tree(self.pid))

    def kernel_cpu(self) -> float:
        """Seconds of that which were spent in the kernel, in steps of 10 ms."""
        return sum(clocks.kernel_seconds(pid) for pid in clocks.tree(self.pid))

    def memory(self) -> dict[str, float]:
        """Return the process tree's resident and proportional set sizes, in MB."""
        return clocks.memory_mb(self.pid)

    def engine_cpu(self) -> float:
        """Seconds of CPU that the engine has used."""
        return clocks.cpu_seconds(self._engine.process.pid)


def free_port() -> int:
    """Return a TCP port that nobody has at the moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _worker_path(directory: Path) -> Path:
    """Return a worker path whose handshake port nobody has."""
    for number in range(50):
        path = directory / f"engine-{number}"
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, handshake_port(str(path))))
            return path
    raise GatewayError("no free handshake port")
