"""A real headless vLLM engine and the smgd in front of it, as processes that a test can end.

Both are started the way an operator starts them, each in a session of its own. An engine is a
family of processes that outlives its parent, so it is always its whole session that is looked at,
and ended by SIGKILL; a small watcher does the same should the test run itself be killed. smgd binds
free ports and says in its log which; nothing is configured in both places but the socket path.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2

from smgd.wire.fnv import handshake_port

HOST = "127.0.0.1"
START_SECONDS = 180.0  # 20 on two idle cores, 110 was seen on busy ones
STOP_SECONDS = 20.0
REQUEST_SECONDS = 60.0
POLL_SECONDS = 0.02
LOG_TAIL_LINES = 30

MODEL_NAME = "smollm2"

# What the engine is started with, and what the model is; the tests know these numbers.
MAX_MODEL_LEN = 2048
MAX_NUM_SEQS = 16
BLOCK_SIZE = 128
VOCAB_SIZE = 49152
EOS = 2

# Offline, without telemetry, 46 000 tokens of KV cache, and no C++ compiler at the first logprobs.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
}

# The core says, at debug level, when it has nothing left to run (at first right after its READY),
# and when it has again: the engine's own word that an ABORT has arrived, with the time.
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"timed": {"format": "%(created)f %(levelname)s %(name)s: %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "timed"}},
    "loggers": {
        "vllm": {"handlers": ["stderr"], "level": "INFO", "propagate": False},
        "vllm.v1.engine.core": {"level": "DEBUG"},
    },
}
CORE_STATE = re.compile(
    rb"([0-9.]+) DEBUG vllm\.v1\.engine\.core: EngineCore (waiting for work|loop active)"
)

# Ends a session when its standard input is closed, which the kernel does for whoever dies.
_LEASH = """
import os, signal, sys
sys.stdin.buffer.read()
try:
    os.killpg(int(sys.argv[1]), signal.SIGKILL)
except ProcessLookupError:
    pass
"""


class RigError(Exception):
    """The rig itself does not work; the text has the end of the log that says why."""


class Family:
    """A program in a session of its own, with all the processes that it starts."""

    def __init__(self, name: str, command: list[str], log: Path, env: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        self._ended = False
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
            )
        self._leash = subprocess.Popen(
            [sys.executable, "-c", _LEASH, str(self.process.pid)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def members(self) -> dict[int, str]:
        """Return the living processes of the session: command line by pid."""
        return dict(_session(self.process.pid))

    def alive(self) -> bool:
        """Tell whether the first process still runs."""
        return self.process.poll() is None

    def check(self) -> None:
        """Raise `RigError` if the program has ended by itself."""
        if not self.alive():
            raise RigError(f"{self.name} ended with {self.process.returncode}:\n{self.tail()}")

    def tail(self) -> str:
        """Return the end of its log."""
        text = self.log.read_text(errors="replace")
        return "\n".join(text.splitlines()[-LOG_TAIL_LINES:])

    def terminate(self) -> int:
        """Ask the first process to end; return its exit code. What is left then is killed."""
        self.process.terminate()
        try:
            return self.process.wait(STOP_SECONDS)
        finally:
            self.kill()

    def kill(self) -> None:
        """End every process of the session at once, and wait until none is left. Idempotent."""
        if self._ended:  # the number may be another program's by now
            return
        if self.alive() or self.members():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_SECONDS)
        wait_until(lambda: not self.members(), STOP_SECONDS, f"end of {self.name}")
        self._leash.kill()
        self._leash.communicate()
        self._ended = True


def _session(leader: int) -> Iterator[tuple[int, str]]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # Behind the name, which may hold anything: state, parent, group, session.
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state not in "ZX":
                title = (stat.parent / "cmdline").read_bytes().replace(b"\0", b" ")
                yield int(stat.parent.name), title.decode(errors="replace").strip()
        except (FileNotFoundError, ProcessLookupError):  # it ended while we looked
            continue


class Engine:
    """A vLLM of one version that dials one smgd; `start` may be called again after its end."""

    def __init__(self, python: Path, model: Path, port: int, log: Path) -> None:
        self.python = python
        self._model = model
        self._port = port
        self._log = log
        self._log_settings = log.with_suffix(".logging.json")
        self._log_settings.write_text(json.dumps(LOGGING))
        self._family: Family | None = None
        self._log_start = 0

    @property
    def family(self) -> Family:
        """The processes of the last start. Raises `RigError` before the first."""
        if self._family is None:
            raise RigError("the engine was not started")
        return self._family

    def start(self) -> None:
        """Start it anew and return at once; what is left of its former life is ended first."""
        if self._family is not None:
            self._family.kill()
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        command = [
            *(str(self.python), "-m", "vllm.entrypoints.cli.main", "serve", str(self._model)),
            *("--headless", "--data-parallel-size", "1", "--data-parallel-size-local", "1"),
            *("--data-parallel-address", HOST, "--data-parallel-rpc-port", str(self._port)),
            *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS)),
            "--enforce-eager",
        ]
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        env |= ENVIRONMENT | {"VLLM_LOGGING_CONFIG_PATH": str(self._log_settings)}
        self._family = Family("the engine", command, self._log, env)

    def core_pid(self) -> int:
        """Return the pid of the EngineCore process, the one that speaks the wire."""
        for pid, title in self.family.members().items():
            if title.startswith("VLLM::EngineCore"):
                return pid
        raise RigError(f"there is no EngineCore:\n{self.family.tail()}")

    def whole(self) -> bool:
        """Tell whether core and worker are there."""
        if self._family is None:
            return False
        titles = list(self._family.members().values())
        names = ("VLLM::EngineCore", "VLLM::Worker")
        return all(any(title.startswith(name) for title in titles) for name in names)

    def _core_states(self) -> list[tuple[float, bool]]:
        """Return when the present life's core fell idle (True) and when it no longer was."""
        with self._log.open("rb") as log:
            log.seek(self._log_start)
            found = CORE_STATE.finditer(log.read())
        return [(float(match[1]), match[2] != b"loop active") for match in found]

    def idle(self) -> bool:
        """Tell whether it has nothing to run."""
        states = self._core_states()
        return bool(states) and states[-1][1]

    def idle_times(self) -> list[float]:
        """Return when the present life had nothing to run any more, as seconds of `time.time`.

        The first of them is when it had sent READY.
        """
        return [moment for moment, idle in self._core_states() if idle]

    def idle_since(self, moment: float, within: float) -> float:
        """Return how long after `moment` (`time.time`) it ran out of work, waiting for that.

        Raises `RigError` if it still runs something `within` seconds after the call.
        """

        def idle() -> list[float]:
            return [t - moment for t in self.idle_times() if t >= moment]

        return float(wait_until(idle, within, "an engine with nothing to run")[0])

    def stop(self) -> None:
        """End all its processes."""
        if self._family is not None:
            self._family.kill()


class Gateway:
    """An smgd process, and the few questions about it that tests ask.

    `socket_path` is that of a former one whose engine it shall find. `program` is the arguments of
    Python that stand for `smgd`, and `flags` are further ones of `smgd launch`.
    """

    def __init__(
        self,
        directory: Path,
        model: Path,
        socket_path: Path | None = None,
        *,
        program: Sequence[str] = ("-m", "smgd.cli"),
        flags: Sequence[str] = (),
    ) -> None:
        if socket_path is None:
            self.socket_path, self.engine_port = free_socket_path(directory)
        else:
            self.socket_path, self.engine_port = socket_path, handshake_port(str(socket_path))
        command = [
            *(sys.executable, *program, "launch", "--worker-urls"),
            *(f"ipc://{self.socket_path}", "--model-path", str(model)),
            *("--served-model-name", MODEL_NAME),
            *("--host", HOST, "--port", "0", "--prometheus-port", "0", "--log-json"),
            *flags,
        ]
        self.family = Family("smgd", command, directory / "smgd.log", os.environ)
        try:
            self.url = f"http://{HOST}:{self._bound_port()}"
        except BaseException:
            self.family.kill()
            raise
        self.http = httpx2.Client(base_url=self.url, timeout=REQUEST_SECONDS)

    def _bound_port(self) -> int:
        def listening() -> list[dict[str, Any]]:
            self.family.check()
            return self.logged("smgd listening")

        [line] = wait_until(listening, STOP_SECONDS, "smgd's port")
        return int(line["http"])

    def logged(self, event: str) -> list[dict[str, Any]]:
        """Return the log's lines of one event."""
        lines = self.family.log.read_bytes().splitlines()
        found = [json.loads(line) for line in lines if line.startswith(b"{") and line[-1:] == b"}"]
        return [line for line in found if line.get("event") == event]

    def chat(self, content: str = "Hello", **fields: Any) -> httpx2.Response:
        """Ask with one user message; no sampling unless `fields` ask for it."""
        return self.post("/v1/chat/completions", chat_body(content, **fields))

    def post(self, path: str, body: Mapping[str, Any] | bytes) -> httpx2.Response:
        """Send a body, given as it is or to be encoded as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.http.post(path, content=data, headers={"Content-Type": "application/json"})

    def ready(self) -> bool:
        """Tell what /readiness says."""
        self.family.check()
        return self.http.get("/readiness").status_code == 200

    def gauge(self, name: str) -> float:
        """Return the value of a metric that has one series."""
        page = self.http.get("/metrics").text
        [value] = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE)
        return float(value)

    def wait_running(
        self, count: int, seconds: float = 10, check: Callable[[], None] = lambda: None
    ) -> None:
        """Wait until the engine itself has reported that many running requests.

        `check` is called before every look, and may raise. Raises `RigError` with the last report.
        """
        reported = -1.0

        def is_reached() -> bool:
            nonlocal reported
            check()
            reported = self.gauge("smg_engine_running_requests")
            return reported == count

        try:
            wait_until(is_reached, seconds, f"{count} running requests")
        except RigError as error:
            raise RigError(f"{error}; there are {reported:g}") from error

    def close(self) -> int:
        """Stop it as an operator would; return its exit code."""
        self.http.close()
        return self.family.terminate()


def chat_body(content: str = "Hello", **fields: Any) -> dict[str, Any]:
    """Return the body of a chat request: greedy unless `fields` say otherwise."""
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, **fields}


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Poll until `condition` gives something true, and return that. Raises `RigError`.

    The last look is after the deadline: a machine that stands still for a while is no failure.
    """
    deadline = time.monotonic() + seconds
    late = False
    while not (value := condition()):
        if late:
            raise RigError(f"waited {seconds:g} s in vain for: {what}")
        time.sleep(POLL_SECONDS)
        late = time.monotonic() > deadline
    return value


def start_engine(engine: Engine, gateway: Gateway) -> float:
    """Start an engine and wait until it is served; return the seconds that took."""
    began = time.monotonic()
    engine.start()
    wait_served(engine, gateway)
    return time.monotonic() - began


def wait_served(engine: Engine, gateway: Gateway) -> None:
    """Wait until smgd says that it is ready. Raises `RigError` with the engine's log."""

    def served() -> bool:
        engine.family.check()
        return gateway.ready()

    try:
        wait_until(served, START_SECONDS, "an engine that is ready")
    except RigError as error:
        raise RigError(f"{error}\n{engine.family.tail()}") from error


def free_socket_path(directory: Path) -> tuple[Path, int]:
    """Return a worker path whose derived handshake port nobody has, and that port."""
    for number in range(50):
        path = directory / f"engine-{number}"
        port = handshake_port(str(path))
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        return path, port
    raise RigError("no free handshake port")
