"""The service does all its work under the system call filter of its unit."""

from __future__ import annotations

import ctypes
import shutil
import signal
import sys
from pathlib import Path

import pytest
import trio

from tests.flows import confine
from tests.flows.conftest import Build
from tests.flows.house import start_program, until
from tests.flows.test_stopping import Program
from tests.support import PATIENCE

UNIT = Path(__file__).parents[2] / "systemd" / "smgd.service"


@pytest.fixture
def seccomp() -> None:
    """Skip the test where it cannot be."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed (apt install systemd)")
    try:
        ctypes.CDLL("libseccomp.so.2")
    except OSError:
        pytest.skip("libseccomp is not installed (it comes with systemd)")


@pytest.mark.usefixtures("seccomp")
def test_the_filter_is_read_as_systemd_reads_it() -> None:
    allowed = confine.allowed(str(UNIT))
    assert {"read", "epoll_wait", "sched_setscheduler"} <= allowed
    assert allowed.isdisjoint({"chown", "mount", "ptrace", "setpriority", "reboot"})


@pytest.mark.usefixtures("seccomp")
async def test_a_confined_daemon_serves(
    build: Build, nursery: trio.Nursery, tmp_path: Path
) -> None:
    house = build()
    file = tmp_path / "smgd.toml"
    file.write_text(
        f"""
        server.host = "127.0.0.1"
        server.port = 0
        server.drain_window = 0
        metrics.port = 0
        admin.socket = "{tmp_path}/smgd.sock"
        limits.tokenizer_inline_bytes = 100
        [models."smgd-sim"]
        [[workers]]
        url = "ipc://{house.paths[0]}"
        """
    )
    program = Program(house)
    smgd = [sys.executable, "-m", "smgd.cli", "run", "--config", str(file)]
    command = [sys.executable, confine.__file__, str(UNIT), *smgd]
    program.process = await start_program(nursery, command, program.read)
    house.start_engine()
    await until(lambda: program.logged("ZMQ worker ready") and program.logged("model loaded"), 60)
    for content in ("hello", "a text for a thread of its own " * 100):
        call = await program.call(content, max_tokens=5)
        with trio.fail_after(PATIENCE):
            assert (await call.read()).status == 200
    smgctl = [sys.executable, "-m", "smgd.admin.cli", "--socket", f"{tmp_path}/smgd.sock", "status"]
    done = await trio.run_process(smgctl, capture_stdout=True)
    assert b"1/1 ready" in done.stdout
    program.process.send_signal(signal.SIGTERM)
    assert await program.wait() == 0
