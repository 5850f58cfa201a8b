"""What an engine prints: whole lines, clean ones, not too many, and always the last."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from smgd.launch.output import (
    BURST_LINES,
    LAST_WORDS,
    LINES_PER_SECOND,
    LONGEST_LINE,
    Output,
)


def numbered(first: int, count: int) -> bytes:
    return b"".join(b"%d\n" % number for number in range(first, first + count))


def test_lines_are_shown_when_they_are_whole() -> None:
    output = Output()
    assert output.feed(b"one\ntw", 0.0) == ["one"]
    assert output.feed(b"o\r\nthr", 0.0) == ["two"]
    assert output.finish() == ["thr"]
    assert output.finish() == []


def test_each_state_of_a_progress_bar_is_a_line() -> None:
    assert Output().feed(b"10%\r20%\r\n\n  \n", 0.0) == ["10%", "20%"]


def test_nothing_that_a_terminal_would_obey_is_shown() -> None:
    data = b"\x1b[31mred\x1b[0m \x1b]0;title\x07a\x07b\xc2\x9bc \x00\xff\xe2\x82\xac\n"
    assert Output().feed(data, 0.0) == ["red abc \ufffd\u20ac"]


def test_a_line_without_an_end_is_cut() -> None:
    output = Output()
    assert output.feed(b"x" * (LONGEST_LINE + 1), 0.0) == ["x" * LONGEST_LINE + "..."]
    assert output.feed(b"y\n", 0.0) == ["y"]


def test_lines_above_the_rate_are_counted() -> None:
    output = Output()
    shown = output.feed(numbered(0, BURST_LINES + 50), 0.0)
    assert shown == [str(number) for number in range(BURST_LINES)]
    assert output.feed(b"later\nlast\n", 2 / LINES_PER_SECOND) == [
        "... 50 lines suppressed",
        "later",
        "last",
    ]


def test_the_last_words_are_shown_whatever_the_rate() -> None:
    output = Output()
    output.feed(numbered(0, BURST_LINES + 50), 0.0)
    lost, *words = output.finish()
    assert lost == "... 30 lines suppressed"
    assert words == [str(number) for number in range(BURST_LINES + 30, BURST_LINES + 50)]


def test_last_words_that_were_not_cut_come_without_a_count() -> None:
    output = Output()
    output.feed(numbered(0, BURST_LINES + 3), 0.0)
    assert output.finish() == [str(BURST_LINES + number) for number in range(3)]


def test_what_was_held_back_is_shown_once_there_is_room_for_it() -> None:
    output = Output()
    output.feed(numbered(0, BURST_LINES + 50), 0.0)
    held = [output.holds_back]
    assert output.idle(0.5) == []  # room for ten by now
    lost, *words = output.idle(LAST_WORDS / LINES_PER_SECOND)
    assert lost == "... 30 lines suppressed"
    assert words == [str(number) for number in range(BURST_LINES + 30, BURST_LINES + 50)]
    assert [*held, output.holds_back] == [True, False]
    assert output.idle(100.0) == []
    assert output.finish() == []


def test_the_last_words_are_known_whether_they_were_shown_or_not() -> None:
    output = Output()
    output.feed(numbered(0, 30), 0.0)
    assert output.last_words == [str(number) for number in range(10, 30)]
    output.feed(numbered(30, BURST_LINES), 0.0)
    output.feed(b"\x1b[31mend\x1b[0m\n\n", 0.0)
    assert output.last_words[-2:] == [str(29 + BURST_LINES), "end"]
    assert len(output.last_words) == LAST_WORDS


def test_lines_that_are_not_shown_are_cut_and_blank_ones_do_not_count() -> None:
    output = Output()
    output.feed(numbered(0, BURST_LINES), 0.0)
    assert output.feed(b"\r\n \n" + b"x" * (3 * LONGEST_LINE) + b"\nend\r", 0.0) == []
    assert output.finish() == ["x" * LONGEST_LINE + "...", "end"]


def test_a_flood_without_line_ends_is_cut_into_lines() -> None:
    output = Output()
    output.feed(numbered(0, BURST_LINES), 0.0)
    for _ in range(100):
        assert output.feed(b"y" * 65536, 0.0) == []
    lost, *words = output.finish()
    assert lost == f"... {100 - LAST_WORDS} lines suppressed"
    assert words == ["y" * LONGEST_LINE + "..."] * LAST_WORDS


def test_the_rate_is_that_over_time() -> None:
    output = Output()
    shown = sum(len(output.feed(numbered(0, 10), second / 10)) for second in range(1000))
    assert shown >= BURST_LINES + 99 * LINES_PER_SECOND
    assert shown <= 2 * (BURST_LINES + 100 * LINES_PER_SECOND)


@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=5))
def test_lines_do_not_depend_on_how_they_are_read(data: bytes, cuts: list[int]) -> None:
    whole = Output()
    parts = Output()
    ends = [0, *sorted(cuts), len(data)]
    read = [line for begin, end in pairwise(ends) for line in parts.feed(data[begin:end], 0.0)]
    assert read + parts.finish() == whole.feed(data, 0.0) + whole.finish()


@given(st.lists(st.tuples(st.binary(max_size=50), st.floats(0, 10)), max_size=20))
def test_memory_and_shown_lines_are_bounded(reads: list[tuple[bytes, float]]) -> None:
    output, now, shown = Output(), 0.0, 0
    for data, pause in reads:
        now += pause
        shown += len(output.feed(data, now))
    assert shown <= 2 * (BURST_LINES + now * LINES_PER_SECOND)
    assert len(output.finish()) <= LAST_WORDS + 1
