"""`python -m tests.bench`: run the cells, print the table, keep every sample as a JSON line.

Exit codes: 0 measured (whatever the figures are), 1 failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tests.bench import build, report
from tests.bench.cells import CELLS, Cell
from tests.bench.gateways import GatewayError
from tests.bench.prompts import model_name
from tests.bench.run import Settings, bench
from tests.engine.rig import RigError

GATEWAYS = """\
both with their defaults, log level info included, logging to a file (smgd: metrics, request ids,
guard, one canonical line a request; smg: its lines at info, its metrics port)"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    args = _parser().parse_args(argv)
    pattern = re.compile(args.cells)
    cells = [c for c in CELLS if pattern.search(c.name) and (c.quick or not args.quick)]
    settings = Settings(
        rounds=args.rounds or (3 if args.quick else 5),
        seconds=args.seconds or (0.8 if args.quick else 4.0),
        patience=args.patience if args.patience is not None else (0 if args.quick else 3),
        model=(args.model or build.default_model()).resolve(),
        peer=not args.alone,
        also={path.name: path.resolve() for path in args.also},
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends what was started, as Ctrl-C does
    try:
        return _measure(settings, cells, args.json)
    except (build.NeedError, GatewayError, RigError, RuntimeError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1


def _measure(settings: Settings, cells: Sequence[Cell], path: Path) -> int:
    print(f"{report.machine()}\nmodel {model_name(settings.model)}, {settings.rounds} rounds of "
          f"{settings.seconds:g} s a sample\n{GATEWAYS}\n")  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    samples: list[report.Sample] = []
    try:
        with path.open("ab") as lines, bench(settings) as bench_:
            for sample in bench_.samples(cells):
                samples.append(sample)
                lines.write(msgspec.json.encode(sample) + b"\n")
                print(sample.round, sample.gateway, sample.cell, file=sys.stderr, flush=True)
    finally:  # a run that was cut short has something to say, too
        found = report.rows(cells, samples)
        with path.open("ab") as lines:
            lines.writelines(msgspec.json.encode(row) + b"\n" for row in found)
        print(report.table(found))
        print(
            f"\n{report.disturbance(samples)}\nsamples and rows as JSON lines: {path}", flush=True
        )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    add = parser.add_argument
    # fmt: off
    add("--quick", action="store_true", help="the cells with a target, three short rounds")
    add("--cells", metavar="REGEX", default="", help="only cells whose names match")
    add("--rounds", type=int, metavar="N", help="default: 5, quick 3")
    add("--seconds", type=float, metavar="S", help="length of a sample (default: 4, quick 0.8)")
    add("--patience", type=int, metavar="N",
        help="take a sample again, up to N times, while others use the machine (default: 3, "
        "quick 0)")
    add("--model", type=Path, metavar="DIR",
        help="whose tokenizer and template to use (default: that of `make engine` if it is built, "
        "else the built-in one)")
    add("--also", type=Path, metavar="CHECKOUT", action="append", default=[],
        help="measure the smgd of another checkout in the same run, too (repeatable)")
    add("--alone", action="store_true", help="measure without smg")
    add("--json", type=Path, metavar="FILE", help="where samples and rows are appended",
        default=build.cache_root() / "results" / f"{time.strftime('%Y%m%d-%H%M%S')}.jsonl")
    # fmt: on
    return parser


if __name__ == "__main__":
    sys.exit(main())
