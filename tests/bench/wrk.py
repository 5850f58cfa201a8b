"""Closed-loop load by wrk: so many connections, each with one request after the other."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

from tests.bench import clocks, prompts

SCRIPT = Path(__file__).parent / "load.lua"
FOREVER = "3600s"
STOP_SECONDS = 20


class Wrk:
    """One wrk process, from its start to `stop`; a context manager that never leaves one behind."""

    def __init__(
        self,
        program: str,
        url: str,
        prompt: prompts.Prompt,
        directory: Path,
        *,
        connections: int,
        tokens: int,
    ) -> None:
        env = {"COUNT": str(prompt.sentences), "TOKENS": str(tokens)}
        files = {"HEAD": prompt.head, "TAIL": prompt.tail, "SENTENCES": "\n".join(prompts.ESCAPED)}
        for name, text in files.items():
            path = directory / f"wrk-{name.lower()}"
            path.write_text(text)
            env[name] = str(path)
        command = [program, "-t1", f"-c{connections}", f"-d{FOREVER}", "--timeout", "60s"]
        self._process = subprocess.Popen(
            [*command, "-s", str(SCRIPT), url],
            env={**os.environ, **env, "CONNECTIONS": str(connections)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def check(self) -> None:
        """Raise `RuntimeError` if wrk has ended by itself."""
        if self._process.poll() is not None:
            raise RuntimeError(f"wrk failed:\n{self._process.communicate()[0]}")

    def cpu(self) -> float:
        """Seconds of CPU used so far."""
        return clocks.cpu_seconds(self._process.pid)

    def stop(self) -> dict[str, Any]:
        """End the load; return requests, bytes, errors, p50_us and p99_us. Raises `RuntimeError`.

        What is in flight is cut off. Latencies are those of whole answers.
        """
        self._process.send_signal(signal.SIGINT)
        output, _ = self._process.communicate(timeout=STOP_SECONDS)
        found = re.search(r"RESULT (\{.*\})", output)
        if found is None:
            raise RuntimeError(f"wrk failed:\n{output}")
        result: dict[str, Any] = json.loads(found[1])
        return result

    def __enter__(self) -> Wrk:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()
