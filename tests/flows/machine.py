"""systemd as the first process of a small machine: namespaces on a throw-away copy of this system.

It has a network, processes, control groups and a file system of its own (machine.sh), so that units
run as they are shipped, and the system outside does not notice. Needs root and systemd; where it
cannot be had, `start` skips the test with the reason. smgd is installed there from this checkout,
with the packages of the interpreter that runs the tests.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import smgd

_HERE = Path(__file__).parent
_SYSTEMD = Path("/lib/systemd/systemd")
_UNSHARE = ("unshare", "--mount", "--propagation", "private")
_ENVIRON = {"PATH": "/opt/smgd/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/", "LANG": "C"}
_PROGRAMS = {"smgd": "smgd.cli", "smgctl": "smgd.admin.cli", "smgd-sim": "smgd.sim.cli"}
_PROGRAM = """\
#!/opt/python/bin/python3
import sys
sys.path[:0] = ["/opt/smgd/source", "/opt/smgd/packages"]
from {module} import main
sys.exit(main())
"""
_BOOT_SECONDS = 30.0


class Machine:
    """A running machine; `close` ends every process of it."""

    def __init__(self, booting: subprocess.Popen[bytes]) -> None:
        self._booting = booting
        self._first = 0

    @classmethod
    def start(cls, directory: Path) -> Machine:
        """Boot one whose files are under `directory` while it lives; skips if that cannot be."""
        _require()
        packages = Path(pytest.__file__).parents[1]
        paths = (
            sys.base_prefix,
            packages,
            Path(smgd.__file__).parent,
            _HERE.parents[1] / "systemd",
        )
        script = ["bash", str(_HERE / "machine.sh"), str(directory), *map(str, paths)]
        booting = subprocess.Popen(
            [*_UNSHARE, *script], stdin=subprocess.DEVNULL, start_new_session=True
        )
        machine = cls(booting)
        try:
            machine._await_boot()
        except BaseException:
            machine.close()
            raise
        return machine

    def _await_boot(self) -> None:
        deadline = time.monotonic() + _BOOT_SECONDS
        while time.monotonic() < deadline and self._booting.poll() is None:
            self._first = _systemd_below(self._booting.pid)
            if self._first and "basic.target" in self._active():
                self._install()
                return
            time.sleep(0.05)
        pytest.skip("systemd does not boot in namespaces here")

    def _active(self) -> str:
        command = ("systemctl", "list-units", "--plain", "--state=active", "basic.target")
        return self.run(*command, check=False)

    def _install(self) -> None:
        for name, module in _PROGRAMS.items():
            path = f"/opt/smgd/bin/{name}"
            self.write(path, _PROGRAM.format(module=module))
            self.run("chmod", "755", path)

    def run(self, *command: str, check: bool = True, timeout: float = 60) -> str:
        """Run a command in the machine; return what it printed, on both outputs."""
        done = self.call(*command, timeout=timeout)
        assert done.returncode == 0 or not check, done.stdout
        return done.stdout

    def call(
        self, *command: str, stdin: str = "", timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the machine."""
        enter = ("nsenter", "-t", str(self._first), "-m", "-p", "-n", "-i", "-u", "-C", "-r", "-w")
        return subprocess.run(
            [*enter, *command],
            env=_ENVIRON,
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )

    def write(self, path: str, text: str) -> None:
        """Write a file in the machine."""
        script = 'mkdir -p "$(dirname "$1")" && cat > "$1"'
        done = self.call("sh", "-c", script, "sh", path, stdin=text)
        assert done.returncode == 0, done.stdout

    def close(self) -> None:
        """End it: without its first process no other can be."""
        if self._first:
            os.kill(self._first, signal.SIGKILL)
        else:
            os.killpg(self._booting.pid, signal.SIGKILL)
        self._booting.wait(timeout=10)


def _require() -> None:
    if not _SYSTEMD.exists() or shutil.which("nsenter") is None:
        pytest.skip("systemd or nsenter is not installed (apt install systemd util-linux)")
    if os.geteuid() != 0:
        pytest.skip("only root may boot a machine")
    trial = [*_UNSHARE, "--cgroup", "--pid", "--net", "--fork", "mount", "-t", "tmpfs", "t", "/mnt"]
    if subprocess.run(trial, capture_output=True, check=False).returncode != 0:
        pytest.skip("namespaces and mounts are not allowed here")


def _systemd_below(pid: int) -> int:
    """Return the process that has become systemd among a process's descendants, 0 if none has."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if Path(f"/proc/{pid}/comm").read_text().strip() == "systemd":
            return pid
    except FileNotFoundError:
        return 0
    return next(filter(None, map(_systemd_below, map(int, children))), 0)
