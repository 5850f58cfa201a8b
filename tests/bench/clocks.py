"""What the kernel says of a process tree: CPU time in nanoseconds, memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

_libc = ctypes.CDLL(None)
TICKS = os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> Iterator[int]:
    """Yield a process and all below it."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for child in children.read_text().split():
                yield from tree(int(child))


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process with all its threads; 0 if it has ended."""
    clock = ctypes.c_int()
    if _libc.clock_getcpuclockid(pid, ctypes.byref(clock)):
        return 0.0
    with contextlib.suppress(OSError):
        return time.clock_gettime(clock.value)
    return 0.0


def machine_seconds() -> float:
    """Return what all processes have used, and what the hypervisor gave away, in ticks of 10 ms."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    line = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    used = dict(zip(names, map(int, line[: len(names)]), strict=True))
    return sum(used[name] for name in names if name not in ("idle", "iowait")) / TICKS


def kernel_seconds(pid: int) -> float:
    """Return the part of a process's CPU time that the kernel used for it, in ticks of 10 ms."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return int(fields[12]) / TICKS  # stime; fields[0] is the state


def thread_seconds(pid: int) -> dict[str, float]:
    """Return the CPU time of a process's living threads by name; equal names are added up."""
    found: dict[str, float] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            name = "main" if task.name == str(pid) else (task / "comm").read_text().strip()
            used = int((task / "schedstat").read_text().split()[0]) / 1e9
            found[name] = found.get(name, 0.0) + used
    return found


def memory_mb(pid: int) -> dict[str, float]:
    """Return the resident and the proportional set size of a process tree, in MB."""
    found = {"rss": 0.0, "pss": 0.0}
    for member in tree(pid):
        rollup = Path(f"/proc/{member}/smaps_rollup").read_text()
        for name in found:
            line = re.search(rf"^{name}:\s+(\d+) kB", rollup, re.MULTILINE | re.IGNORECASE)
            found[name] += int(line[1]) / 1024 if line else 0.0
    return found
