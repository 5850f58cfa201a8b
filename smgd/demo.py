"""`smgd demo`: the daemon and the simulated engine as two processes, and a first answer.

It does what a newcomer would do by hand, over the real HTTP port and the real engine wire, so what
it shows is the product. Plain and synchronous: the two programs do the work.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

from smgd.config import Config
from smgd.engine.paths import SCHEME, derive

HOST = "127.0.0.1"
READY_WITHIN_SECONDS = 60
STOP_WITHIN_SECONDS = 15
PROMPT = "Tell me something about the sea."


class DemoError(Exception):
    """The demo cannot go on; the text says why."""


def main(once: bool) -> int:
    """Run the demo until Ctrl-C, or with `once` until the sample is answered. Returns an exit code.

    SIGTERM ends it like Ctrl-C, so that the two programs never outlive it.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="smgd-demo-")))
            port = _free_port(Config().server.port)
            programs = [stack.enter_context(_program(c)) for c in _commands(directory, port)]
            base = f"http://{HOST}:{port}"
            print(f"Starting smgd on {base} and smgd-sim behind it ...", flush=True)
            _wait_until_ready(base, programs)
            print(f"\n> {PROMPT}", flush=True)
            _stream(base)
            print(f"\n\nTry it yourself:\n\n{_curl(base)}\n", flush=True)
            if not once:
                print("Serving until Ctrl-C.", flush=True)
                _wait_for_end(programs)
    except KeyboardInterrupt:
        print()
    except (DemoError, OSError) as error:
        print(f"smgd demo: {error}", file=sys.stderr)
        return 1
    return 0


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _commands(directory: Path, port: int) -> list[list[str]]:
    """Return the command lines of the engine and of the daemon, which is stopped first."""
    url = f"{SCHEME}{directory}/engine-0"
    config = directory / "smgd.toml"
    config.write_text("[server]\ndrain_window = 0\n")  # no balancer has to turn away first
    daemon = [
        *("launch", "--config", str(config)),
        *("--worker-urls", url, "--backend", "vllm", "--model-path", "smgd-sim"),
        *("--host", HOST, "--port", str(port), "--prometheus-port", "0", "--log-level", "warn"),
    ]
    engine = [
        *("--handshake", derive(url).handshake),
        *("--ttft-ms", "80", "--itl-ms", "40", "--log-level", "warning"),
    ]
    return [
        [sys.executable, "-m", "smgd.sim.cli", *engine],
        [sys.executable, "-m", "smgd.cli", *daemon],
    ]


def _free_port(wanted: int) -> int:
    """Return the usual port, or any free one if it is taken."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise DemoError("no free port")


@contextmanager
def _program(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    # Its own session: Ctrl-C reaches us alone, and we end the programs in order. Whoever tries the
    # demo needs no key.
    env = {name: value for name, value in os.environ.items() if name != "SMGD_API_KEY"}
    process = subprocess.Popen(command, start_new_session=True, env=env)  # noqa: S603
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_WITHIN_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _check_alive(programs: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Wait a moment for a program to end, and raise if one has."""
    with suppress(subprocess.TimeoutExpired):
        programs[-1].wait(seconds)
    for program in programs:
        if program.poll() is not None:
            name = " ".join(map(str, program.args[2:4])) if isinstance(program.args, list) else ""
            text = f"{name} ended with exit code {program.returncode}; its last words are above"
            raise DemoError(text)


def _wait_until_ready(base: str, programs: Sequence[subprocess.Popen[bytes]]) -> None:
    pause = 0.1
    for _ in range(int(READY_WITHIN_SECONDS / pause)):
        try:
            with urllib.request.urlopen(f"{base}/readiness", timeout=5):  # noqa: S310
                return
        except (urllib.error.URLError, ConnectionError):
            _check_alive(programs, pause)
    raise DemoError(f"not ready within {READY_WITHIN_SECONDS} seconds")


def _body() -> str:
    return json.dumps(
        {
            "model": "smgd-sim",
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": 64,
            "stream": True,
        }
    )


def _curl(base: str) -> str:
    return (
        f"  curl -N {base}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"    -d '{_body()}'"
    )


def _stream(base: str) -> None:
    """Send the sample request and print its text as it arrives."""
    request = urllib.request.Request(  # noqa: S310
        f"{base}/v1/chat/completions",
        data=_body().encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
        for line in response:
            data = line.decode().removeprefix("data: ").strip()
            if data.startswith("{"):
                for choice in json.loads(data)["choices"]:
                    print(choice["delta"].get("content") or "", end="", flush=True)


def _wait_for_end(programs: Sequence[subprocess.Popen[bytes]]) -> None:
    while True:
        _check_alive(programs, 1)
