"""`smgd serve` with the real engine: it is started, served, started anew, and ends with smgd."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.engine.rig import (
    ENVIRONMENT,
    HOST,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    MODEL_NAME,
    REQUEST_SECONDS,
    START_SECONDS,
    Family,
    chat_body,
    wait_until,
)


class Served:
    """A running `smgd serve` and all that it has started, in whatever session."""

    def __init__(self, directory: Path, python: Path, model: Path) -> None:
        command = [
            *(sys.executable, "-m", "smgd.cli", "serve", "--backend", "vllm"),
            *("--engine-python", str(python), "--model", str(model)),
            *("--served-model-name", MODEL_NAME, "--host", HOST, "--port", "0"),
            *("--prometheus-port", "0", "--admin-socket", str(directory / "admin"), "--log-json"),
            *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS)),
            "--enforce-eager",
        ]
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        env |= ENVIRONMENT | {"SMGD_ZMQ_SOCKET_DIR": str(directory / "engines")}
        self.family = Family("smgd serve", command, directory / "serve.log", env)

    def url(self) -> str:
        """Return where it listens."""

        def port() -> int | None:
            self.family.check()
            for line in self.family.log.read_bytes().splitlines():
                if line.startswith(b"{") and b'"smgd listening"' in line:
                    return int(json.loads(line)["http"])
            return None

        return f"http://{HOST}:{wait_until(port, 30, 'the port of smgd serve')}"

    def descendants(self) -> dict[int, str]:
        """Return the processes that it has started and their children: title by pid."""
        parents: dict[int, tuple[int, str]] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(stat.read_text().rpartition(")")[2].split()[1])
                title = (stat.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents[int(stat.parent.name)] = (parent, title)
        found: dict[int, str] = {}
        family = {self.family.process.pid}
        while children := {p for p, (q, _) in parents.items() if q in family} - family:
            family |= children
            found |= {pid: parents[pid][1] for pid in children}
        return found

    def core(self) -> int | None:
        """Return the pid of the EngineCore, None while there is none."""
        titles = self.descendants().items()
        return next((pid for pid, title in titles if title.startswith("VLLM::EngineCore")), None)


@pytest.fixture
def served(python: Path, model: Path) -> Iterator[Served]:
    with tempfile.TemporaryDirectory(prefix="smgd-") as directory:
        served = Served(Path(directory), python, model)
        try:
            yield served
        finally:
            left = served.descendants()
            served.family.kill()
            for pid in left:
                if Path(f"/proc/{pid}").exists():
                    os.kill(pid, signal.SIGKILL)


def test_an_engine_is_started_served_and_started_again_and_ends_with_smgd(served: Served) -> None:
    with httpx2.Client(base_url=served.url(), timeout=REQUEST_SECONDS) as http:

        def ready() -> bool:
            served.family.check()
            return http.get("/readiness").status_code == 200

        def answers() -> None:
            body = chat_body(model=MODEL_NAME, max_tokens=3)
            assert http.post("/v1/chat/completions", json=body).status_code == 200

        wait_until(ready, START_SECONDS, "the engine of smgd serve")
        answers()
        first = served.core()
        assert first is not None
        began = time.monotonic()
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: not ready(), 30, "the loss of the engine")
        assert served.family.alive()
        wait_until(ready, START_SECONDS, "the engine that was started again")
        print(f"served again {time.monotonic() - began:.1f} s after kill -9 of its core")
        answers()
        assert served.core() not in (first, None)
    before = served.descendants()
    assert any(title.startswith("VLLM::EngineCore") for title in before.values())
    served.family.process.terminate()
    assert served.family.process.wait(60) == 0
    wait_until(lambda: not any(Path(f"/proc/{p}").exists() for p in before), 10, "the end of all")
