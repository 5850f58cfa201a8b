"""Invariant: however a text is cut, the stop found, and the text shown, are those of the whole.

An input is a set of stop strings and a text, separated by newlines and a blank line, then cut at
places that its own bytes choose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle

from runner import run

from smgd.text.stops import StopMatcher


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


if __name__ == "__main__":
    run("stops", check)
