"""`python -m tests.bench.profile CELL`: where smgd's CPU goes in one closed cell, by function.

smgd runs under `sampler.py` while the cell's load is on it. What its main thread uses counts for
the innermost function of smgd, so a library's time counts for who calls it; what no function of a
task calls counts for `trio`. What other threads use (libzmq's, tokenizing ones) is only known as a
sum. Sampling costs some percent: read the shares, and take sums from the benchmark.

Exit codes: 0 profiled, 1 failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from tests.bench import build, clocks
from tests.bench.cells import CELLS, Closed
from tests.bench.gateways import Gateway, GatewayError
from tests.bench.report import OURS
from tests.bench.run import Bench, Settings, bench
from tests.engine.rig import RigError, wait_until

WRITE_SECONDS = 10.0
# trio's functions that run the tasks, one after the other, and wait between the rounds.
EVENT_LOOP = ("trio/_core/_run.py", ("run", "unrolled_run"))

Frame: TypeAlias = tuple[str, str, int]


class Profile(msgspec.Struct, frozen=True):
    """CPU in microseconds per `unit`: by thread; of the main thread by module and by place.

    `own` counts what the place itself used, `total` what was used while it was on the stack.
    `kernel` is the share of CPU time that the kernel used.
    """

    unit: str
    threads: dict[str, float]
    kernel: float
    modules: dict[str, float]
    own: dict[str, float]
    total: dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Profile; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.profile", description=__doc__)
    parser.add_argument("cell", metavar="REGEX", help="the first closed cell whose name matches")
    parser.add_argument("--seconds", type=float, default=20.0, help="default: 20")
    parser.add_argument("--top", type=int, default=40, help="places to show (default: 40)")
    parser.add_argument("--lines", action="store_true", help="lines instead of functions")
    parser.add_argument("--libraries", action="store_true", help="their functions, too")
    parser.add_argument("--within", metavar="REGEX", default="", help="only what this calls")
    parser.add_argument("--model", type=Path, default=build.default_model())
    args = parser.parse_args(argv)
    cells = [c for c in CELLS if isinstance(c, Closed) and re.search(args.cell, c.name)]
    if not cells:
        parser.error(f"no closed cell matches {args.cell!r}")
    settings = Settings(rounds=1, seconds=args.seconds, model=args.model.resolve(), peer=False)
    try:
        with tempfile.TemporaryDirectory() as directory, bench(settings) as bench_:
            path = Path(directory) / "looks"
            bench_.run_under(OURS, "tests.bench.sampler", str(path))
            with bench_.gateways(0) as (gateway,):
                reader = Reader(args.lines, args.libraries, args.within)
                profile = _profile(bench_, gateway, cells[0], path, args.seconds, reader)
    except (build.NeedError, GatewayError, RigError, RuntimeError, OSError) as error:
        print(f"profile: {error}", file=sys.stderr)
        return 1
    print(f"{cells[0].name}\n{text(profile, args.top)}")
    return 0


class Reader(msgspec.Struct, frozen=True):
    """How stacks are read: what is shown of a place, and which are counted."""

    lines: bool
    libraries: bool
    within: str

    def sums(self, stacks: list[tuple[int, list[Frame]]]) -> tuple[Counter[str], ...]:
        """Return nanoseconds by module, by innermost place, and by every place."""
        modules, own, total = Counter[str](), Counter[str](), Counter[str]()
        for used, stack in stacks:
            names = [self._name(*frame) for frame in stack]
            if self.within and not any(re.search(self.within, name) for name in names):
                own["(else)"] += used
                continue
            inner = _innermost(stack)
            modules["trio" if inner is None else _short(stack[inner][0])] += used
            own[names[0 if self.libraries or inner is None else inner]] += used
            for name in set(names):
                total[name] += used
        return modules, own, total

    def _name(self, file: str, function: str, line: int) -> str:
        return f"{function}  {_short(file)}" + (f":{line}" if self.lines else "")


def _innermost(stack: list[Frame]) -> int | None:
    """Return where in a stack the innermost function of smgd is, if a task was running it."""
    for at, (file, function, _) in enumerate(stack):
        if _short(file) == EVENT_LOOP[0] and function in EVENT_LOOP[1]:
            return None
        if _short(file).startswith("smgd/"):
            return at
    return None


def _short(file: str) -> str:
    inside = re.sub(r"^.*/(?:site-packages|lib/python3\.\d+)/", "", file)
    return re.sub(r"^.*/(?=smgd/)", "", inside)


def _profile(
    bench_: Bench, gateway: Gateway, cell: Closed, path: Path, seconds: float, reader: Reader
) -> Profile:
    unit, counter = "token", "tokens"
    if "us_request" in cell.figures:
        unit, counter = "request", "finished"
    gateway.control.interval = cell.interval_ms / 1000
    with bench_.load(gateway, cell):
        os.kill(gateway.pid, signal.SIGUSR2)
        count, before = gateway.control.read()[counter], clocks.thread_seconds(gateway.pid)
        kernel = gateway.kernel_cpu()
        time.sleep(seconds)
        after, kernel = clocks.thread_seconds(gateway.pid), gateway.kernel_cpu() - kernel
        count = gateway.control.read()[counter] - count
        os.kill(gateway.pid, signal.SIGUSR2)
        wait_until(path.exists, WRITE_SECONDS, "the profile")
    used = {name: after[name] - before.get(name, 0.0) for name in after}
    micros = [
        {name: value / 1000 / count for name, value in sums.most_common()}
        for sums in reader.sums(json.loads(path.read_text()))
    ]
    threads = {name: 1e6 * value / count for name, value in used.items()}
    return Profile(unit, threads, kernel / sum(used.values()), *micros)


def text(profile: Profile, top: int) -> str:
    """Return threads, modules and places as tables."""
    rows = [f"us CPU / {profile.unit}, by thread ({profile.kernel:.0%} of all in the kernel):"]
    for name, micros in sorted(profile.threads.items(), key=lambda item: -item[1]):
        rows.append(f"{micros:10.2f}  {name}")
    rows += ["", f"main thread, us / {profile.unit}, by module:"]
    rows += [f"{micros:10.2f}  {name}" for name, micros in profile.modules.items()]
    rows += ["", "by place:", f"{'own':>10}{'total':>10}"]
    for name, micros in list(profile.own.items())[:top]:
        rows.append(f"{micros:10.2f}{profile.total.get(name, 0.0):10.2f}  {name}")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
