"""How a fuzz target runs: over its corpus, then over mutations of them for some seconds.

    python fuzz/fuzz_X.py [--seconds N] [--seed N] [FILE OR DIRECTORY ...]
    python fuzz/fuzz_X.py --atheris [LIBFUZZER OPTIONS] [CORPUS]

The first is what CI does: deterministic for a seed, with no dependency. The second is for long runs
by hand, guided by coverage (`pip install atheris`). An input that breaks an invariant is printed;
put it into `fuzz/corpus/<target>/`, where it is a test for ever.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"


def run(name: str, check: Callable[[bytes], None]) -> None:
    """Run a target as the command line says; `check` raises for an input that breaks it."""
    if "--atheris" in sys.argv:
        _guided(check, [*_files([CORPUS / name])])
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("paths", nargs="*", type=Path)
    args = parser.parse_args()
    inputs = [*_files([CORPUS / name, *args.paths])]
    for data in inputs:
        _checked(check, data)
    count = _mutated(check, inputs, random.Random(args.seed), args.seconds)
    print(f"{name}: {len(inputs)} inputs and {count} mutations hold")


def _files(paths: Sequence[Path]) -> Iterator[bytes]:
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                yield file.read_bytes()


def _checked(check: Callable[[bytes], None], data: bytes) -> None:
    try:
        check(data)
    except BaseException:
        print(f"broken by {data!r}", file=sys.stderr)
        raise


def _mutated(
    check: Callable[[bytes], None], inputs: Sequence[bytes], rng: random.Random, seconds: float
) -> int:
    end = time.perf_counter() + seconds
    count = 0
    while time.perf_counter() < end:
        _checked(check, _mutate(rng, inputs))
        count += 1
    return count


def _mutate(rng: random.Random, inputs: Sequence[bytes]) -> bytes:
    data = bytearray(rng.choice(inputs))
    for _ in range(rng.randint(1, 6)):
        place = rng.randint(0, len(data))
        match rng.randrange(5):
            case 0:
                data[place:place] = rng.randbytes(rng.randint(1, 8))
            case 1:
                del data[place : place + rng.randint(1, 8)]
            case 2 if data:
                data[place % len(data)] ^= 1 << rng.randrange(8)
            case 3:
                other = rng.choice(inputs)
                start = rng.randint(0, len(other))
                data[place:place] = other[start : start + rng.randint(1, 64)]
            case _:
                data[place:place] = data[: rng.randint(0, min(len(data), 64))]
    return bytes(data[:1_000_000])


def _guided(check: Callable[[bytes], None], inputs: Sequence[bytes]) -> None:
    import atheris

    sys.argv.remove("--atheris")
    for data in inputs:
        check(data)
    atheris.instrument_all()
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()
