"""The rounds: in each, all gateways are started anew, and the cells go by, gateway after gateway.

So whatever else the machine does hits both in turn, and one round's accidents (where the loader put
things, how a hash is seeded) are not the next one's. Nobody is pinned to a core.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from tests.bench import build, clocks, probe
from tests.bench.cells import Cell, Closed, Idle, Open
from tests.bench.gateways import Gateway, Program
from tests.bench.prompts import Prompts
from tests.bench.report import OURS, PEER, Sample
from tests.bench.wrk import Wrk
from tests.engine.rig import wait_until

ROOT = Path(__file__).parents[2]
# Seconds that a load runs before it is looked at, once all its connections have a request.
SETTLE_SECONDS = 0.3
FILL_SECONDS = 30.0
# Cores that others use while a sample is taken, from which on it counts as disturbed.
DISTURBED = 0.25
# Requests must be sent for so long at least, for a p99 to mean something.
OPEN_SECONDS = 1.5
# smg tells that its worker is ready when it next looks, which it does at its start and then once a
# minute. For it the look costs nothing: it reads a flag.
PEER_OPTIONS = ["--health-check-interval-secs", "2"]

Figures: TypeAlias = dict[str, float]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """`seconds` is the length of one sample; `also` are further checkouts of smgd, by name.

    A sample that was disturbed is taken again, up to `patience` times, and the least disturbed is
    kept.
    """

    rounds: int
    seconds: float
    patience: int = 0
    model: Path
    peer: bool = True
    also: dict[str, Path] = {}


class Bench:
    """Takes samples."""

    def __init__(self, settings: Settings, directory: Path) -> None:
        self._settings = settings
        self._directory = directory
        self._prompts = Prompts(settings.model)
        self._wrk = build.wrk()
        self._programs: dict[str, Program] = {}
        if settings.peer:
            self._programs[PEER] = Program([str(build.peer_python()), "-m", "smg"], PEER_OPTIONS)
        for name, checkout in {OURS: ROOT, **settings.also}.items():
            # Without the working directory in front of the path, this may be another checkout.
            command = [sys.executable, "-P", "-m", "smgd.cli"]
            self._programs[name] = Program(command, env={"PYTHONPATH": str(checkout)})

    def run_under(self, name: str, *wrapper: str) -> None:
        """Have a gateway's module run by another one, given with its arguments."""
        python, safe, _, module = self._programs[name].command
        command = [python, safe, "-m", *wrapper, module]
        self._programs[name] = msgspec.structs.replace(self._programs[name], command=command)

    def samples(self, cells: Sequence[Cell]) -> Iterator[Sample]:
        """Run all rounds, yielding every sample as it is taken."""
        for number in range(self._settings.rounds):
            with self.gateways(number) as gateways:
                for index, cell in enumerate(cells):
                    # Nobody always comes first.
                    turned = gateways if (number + index) % 2 else gateways[::-1]
                    for gateway in turned:
                        figures = self.sample(gateway, cell)
                        yield Sample(number, cell.name, gateway.name, figures)

    @contextlib.contextmanager
    def gateways(self, number: int) -> Iterator[list[Gateway]]:
        """Start all gateways, each with its engine; they are ended in the end."""
        directory = self._directory / f"round-{number}"
        directory.mkdir()
        with contextlib.ExitStack() as stack:
            gateways = []
            for name, program in self._programs.items():
                gateway = Gateway(name, program, self._settings.model, directory / name)
                stack.callback(gateway.close)
                gateways.append(gateway)
            self._start(gateways)
            yield gateways

    def _start(self, gateways: Sequence[Gateway]) -> None:
        for gateway in gateways:
            gateway.wait("liveness")
        for gateway in gateways:
            gateway.start_engine()
        for gateway in gateways:
            gateway.wait("readiness")
            gateway.check(self._prompts.make("short", stream=True))

    def sample(self, gateway: Gateway, cell: Cell) -> Figures:
        """Measure one cell once, in quiet if that can be had.

        Raises `RigError` or `RuntimeError` if it cannot be measured.
        """
        takes = [self._take(gateway, cell)]
        while takes[-1]["others"] > DISTURBED and len(takes) <= self._settings.patience:
            takes.append(self._take(gateway, cell))
        return min(takes, key=lambda figures: figures["others"])

    def _take(self, gateway: Gateway, cell: Cell) -> Figures:
        gateway.control.interval = cell.interval_ms / 1000
        machine, ours, at = clocks.machine_seconds(), self._used(), time.monotonic()
        match cell:
            case Idle():
                figures = self._window(gateway)
            case Closed():
                figures = self._closed(gateway, cell)
            case Open():
                figures = self._open(gateway, cell)
        gateway.drain()
        took = time.monotonic() - at
        others = clocks.machine_seconds() - machine - (self._used() - ours)
        return {**figures, "took": took, "others": max(0.0, others / took)}

    def _used(self) -> float:
        """Seconds of CPU used by us and all processes that we have started."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        alive = sum(clocks.cpu_seconds(pid) for pid in clocks.tree(os.getpid()))
        return alive + ended.ru_utime + ended.ru_stime

    def _closed(self, gateway: Gateway, cell: Closed) -> Figures:
        with self.load(gateway, cell) as wrk:
            figures = self._window(gateway, wrk)
            result = wrk.stop()
        figures |= {name: result[name] for name in ("errors", "p50_us", "p99_us")}
        if result["errors"]:
            print(f"{gateway.name}: {result['errors']} errors in {cell.name}", file=sys.stderr)
        return figures

    @contextlib.contextmanager
    def load(self, gateway: Gateway, cell: Closed) -> Iterator[Wrk]:
        """Put a closed cell's load on a gateway; it has settled when the block is entered."""
        prompt = self._prompts.make(cell.prompt, stream=cell.stream, stop=cell.stop)
        idle = self._prompts.make("short", stream=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(probe.stalled(gateway.port, cell.stalled, idle))
            full = gateway.control.read()["adds"] + cell.streams
            wrk = Wrk(
                self._wrk,
                gateway.url,
                prompt,
                self._directory,
                connections=cell.streams,
                tokens=cell.tokens,
            )
            stack.enter_context(wrk)

            def is_full() -> bool:
                wrk.check()
                return gateway.control.read()["adds"] >= full

            wait_until(is_full, FILL_SECONDS, f"{gateway.name} to have all of {cell.name}")
            time.sleep(SETTLE_SECONDS)
            yield wrk

    def _window(self, gateway: Gateway, wrk: Wrk | None = None) -> Figures:
        """Look at counters and clocks before and after some seconds."""
        before, at = _reading(gateway, wrk), time.monotonic()
        time.sleep(self._settings.seconds)
        after, seconds = _reading(gateway, wrk), time.monotonic() - at
        used = {name: after[name] - before[name] for name in after}
        cpu = used["cpu"]
        figures = {
            "core": 100 * cpu / seconds,
            "kernel_share": used["kernel_cpu"] / cpu,
            "engine_core": 100 * used["engine_cpu"] / seconds,
            "load_core": 100 * used.get("load_cpu", 0) / seconds,
            "tokens_s": used["tokens"] / seconds,
            "requests_s": used["finished"] / seconds,
            "steps_s": used["steps"] / seconds,
        }
        if used["tokens"]:
            figures["us_token"] = 1e6 * cpu / used["tokens"]
        if used["finished"]:
            figures["us_request"] = 1e6 * cpu / used["finished"]
        return figures | gateway.memory()

    def _open(self, gateway: Gateway, cell: Open) -> Figures:
        prompt = self._prompts.make(cell.prompt, stream=True)
        short = self._prompts.make("short", stream=True)
        long = self._prompts.make("30k", stream=True)
        with (
            probe.stalled(gateway.port, cell.stalled, short),
            probe.burst(gateway.port, cell.burst, short),
        ):
            return probe.measure(
                gateway.port,
                prompt,
                tokens=cell.tokens,
                rate=cell.rate,
                seconds=max(self._settings.seconds, OPEN_SECONDS),
                beside=(long, 1, cell.beside) if cell.beside else None,
            )


def _reading(gateway: Gateway, wrk: Wrk | None) -> Figures:
    reading: Figures = {**gateway.control.read(), "cpu": gateway.cpu()}
    reading |= {"kernel_cpu": gateway.kernel_cpu(), "engine_cpu": gateway.engine_cpu()}
    if wrk is not None:
        reading["load_cpu"] = wrk.cpu()
    return reading


@contextlib.contextmanager
def bench(settings: Settings) -> Iterator[Bench]:
    """Provide a bench with a directory for sockets and logs, which a failure leaves behind."""
    directory = Path(tempfile.mkdtemp(prefix="smgd-bench-"))
    try:
        yield Bench(settings, directory)
    except BaseException:
        print(f"logs: {directory}", file=sys.stderr)
        raise
    else:
        shutil.rmtree(directory)
