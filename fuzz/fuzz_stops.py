"""Invariant: however a text is cut, the stop found, and the text shown, are those of the whole.

An input is a set of stop strings and a text, separated by newlines and a blank line, then cut at
places that its own bytes choose. Run under atheris (`python fuzz/fuzz_stops.py [CORPUS]`) where it
is installed, otherwise once over the files or directories given, and over the built-in seeds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path

from smgd.text.stops import StopMatcher

SEEDS = (
    b"lo w\n\nhello world",
    b"abcde\nbc\n\nabcde abcd",
    b"aab\naaab\n\naaaaaaaaaaab",
    b"</tag>\n<\n\na <b> </ta </tag> c",
    "é日\n日\n\nné日本".encode(),
    b"\n\nno stops",
)


def expected(strings: Sequence[str], text: str) -> tuple[int, str | None]:
    """Return where the first stop to end ends, and the stop: character by character."""
    for end in range(1, len(text) + 1):
        for string in strings:
            if text.endswith(string, 0, end):
                return end, string
    return len(text), None


def cut(text: str, sizes: bytes) -> Iterator[str]:
    """Cut a text into parts of at most 16 characters."""
    position = 0
    for size in cycle(sizes or b"\1"):
        if position >= len(text):
            return
        yield text[position : position + 1 + size % 16]
        position += 1 + size % 16


def check(data: bytes) -> None:
    """Raise AssertionError if the invariant does not hold for an input."""
    head, _, body = data[:4096].partition(b"\n\n")
    strings = tuple(s for s in head.decode(errors="replace").split("\n") if s)
    text = body.decode(errors="replace")
    end, string = expected(strings, text)
    for include in (False, True):
        want = text[:end] if include or string is None else text[: end - len(string)]
        for sizes in (b"\0", data, b"\xff"):
            matcher = StopMatcher(strings, include)
            shown = "".join(matcher.feed(part)[0] for part in cut(text, sizes))
            assert (shown + matcher.finish(), matcher.matched) == (want, string), (data, sizes)


def corpus(paths: Sequence[str]) -> Iterator[bytes]:
    """Yield the seeds and every file under the given paths."""
    yield from SEEDS
    for path in map(Path, paths):
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                yield file.read_bytes()


def main() -> None:
    """Fuzz, or check the corpus once."""
    try:
        import atheris
    except ImportError:
        inputs = list(corpus(sys.argv[1:]))
        for data in inputs:
            check(data)
        print(f"checked {len(inputs)} inputs")
        return
    for data in SEEDS:
        check(data)
    atheris.instrument_all()
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
