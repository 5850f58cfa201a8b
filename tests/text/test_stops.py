"""Stop strings: the same match and the same text for every way of cutting the text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smgd.text.stops import StopMatcher, automaton

FEW = st.text(alphabet="ab<é", max_size=24)
STOPS = st.lists(st.text(alphabet="ab<é", min_size=1, max_size=5), min_size=1, max_size=5)


def find(strings: Sequence[str], text: str, start: int = 0) -> tuple[int, str] | None:
    """The rule, spelled out: the first end after `start`, then the order of the list."""
    for end in range(start + 1, len(text) + 1):
        for string in strings:
            if text[:end].endswith(string):
                return end, string
    return None


def held(strings: Sequence[str], text: str) -> int:
    """The length of the longest end of `text` that is a stop string's beginning, not all of it."""
    return max(
        (n for s in strings for n in range(1, len(s)) if text.endswith(s[:n])),
        default=0,
    )


@st.composite
def chunks(draw: st.DrawFn) -> list[str]:
    text = draw(FEW)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(strings=STOPS, parts=chunks(), include=st.booleans())
def test_any_cutting_gives_what_the_rule_says(
    strings: list[str], parts: list[str], include: bool
) -> None:
    matcher = StopMatcher(tuple(strings), include)
    fed = [matcher.feed(part) for part in parts]
    text = "".join(shown for shown, _ in fed) + matcher.finish()
    whole = "".join(parts)
    match find(strings, whole):
        case None:
            assert text == whole
            assert matcher.matched is None
            assert {found for _, found in fed} == {None}
        case end, string:
            assert text == (whole[:end] if include else whole[: end - len(string)])
            assert matcher.matched == string
            assert [found for _, found in fed if found] == [string]


@given(strings=STOPS, parts=chunks())
def test_only_what_may_become_a_stop_is_held_back(strings: list[str], parts: list[str]) -> None:
    matcher = StopMatcher(tuple(strings))
    seen = shown = ""
    for part in parts:
        released, found = matcher.feed(part)
        seen, shown = seen + part, shown + released
        if found:
            return
        assert shown == seen[: len(seen) - held(strings, seen)]
    assert shown + matcher.finish() == seen


@given(strings=STOPS, parts=chunks(), early=st.integers(0, 6), include=st.booleans())
def test_a_match_counts_only_if_it_ends_while_active(
    strings: list[str], parts: list[str], early: int, include: bool
) -> None:
    matcher = StopMatcher(tuple(strings), include)
    text = ""
    for number, part in enumerate(parts):
        matcher.active = number >= early
        released, _ = matcher.feed(part)
        text += released
    text += matcher.finish()
    whole = "".join(parts)
    match find(strings, whole, len("".join(parts[:early]))):
        case None:
            assert (text, matcher.matched) == (whole, None)
        case end, string:
            assert text == (whole[:end] if include else whole[: end - len(string)])
            assert matcher.matched == string


@given(strings=STOPS, parts=chunks())
def test_while_inactive_no_more_is_held_than_may_become_a_stop(
    strings: list[str], parts: list[str]
) -> None:
    matcher = StopMatcher(tuple(strings))
    matcher.active = False
    seen = shown = ""
    for part in parts:
        seen, shown = seen + part, shown + matcher.feed(part)[0]
        assert shown == seen[: len(seen) - held(strings, seen)]


@pytest.mark.parametrize(
    ("strings", "text", "shown", "string"),
    [
        (("lo w",), "hello world", "hel", "lo w"),
        (("abcde", "bc"), "abcde", "a", "bc"),  # the first end, although it starts later
        (("c", "abc"), "abc", "ab", "c"),  # the same end: the first in the list
        (("abc", "c"), "abc", "", "abc"),
        (("ab", "abc"), "abc", "", "ab"),
        (("aab",), "aaab", "a", "aab"),
        (("ab", "ab"), "xab", "x", "ab"),
        (("é日",), "né日本", "n", "é日"),
        (("x", ""), "abx", "ab", "x"),  # an empty string never matches
    ],
)
def test_which_stop_wins(strings: tuple[str, ...], text: str, shown: str, string: str) -> None:
    assert StopMatcher(strings).feed(text) == (shown, string)
    by_char = StopMatcher(strings)
    assert "".join(by_char.feed(char)[0] for char in text) == shown
    assert by_char.matched == string


def test_a_long_stop_string_delays_nothing_that_is_not_its_beginning() -> None:
    matcher = StopMatcher(("</very_long_tag_name>",))
    assert matcher.feed("The") == ("The", None)
    assert matcher.feed(" a </v") == (" a ", None)
    assert matcher.feed("ery") == ("", None)
    assert matcher.feed("!") == ("</very!", None)
    assert matcher.feed(" <") == (" ", None)
    assert matcher.finish() == "<"
    assert matcher.finish() == ""


def test_included_stops_hold_nothing_back_and_cut_what_follows() -> None:
    matcher = StopMatcher(("END",), include_in_output=True)
    assert matcher.feed("the E") == ("the E", None)
    assert matcher.feed("ND of") == ("ND", "END")
    assert matcher.feed("more") == ("", None)
    assert matcher.finish() == ""


def test_after_a_match_all_is_ignored() -> None:
    matcher = StopMatcher(("END",))
    assert matcher.feed("a END END") == ("a ", "END")
    assert matcher.feed("b END") == ("", None)
    assert matcher.feed("b") == ("", None)
    assert matcher.finish() == ""


def test_finish_also_forgets_what_had_begun() -> None:
    matcher = StopMatcher(("ab",))
    assert matcher.feed("xa") == ("x", None)
    assert matcher.finish() == "a"
    assert matcher.feed("b") == ("b", None)


def test_the_work_is_linear_in_the_text() -> None:
    """Counted, not timed: each character goes one node down, so on average but one can go up."""
    count = 0

    class Counted(list[dict[str, int]]):
        def __getitem__(self, index: int) -> dict[str, int]:  # type: ignore[override]
            nonlocal count
            count += 1
            return super().__getitem__(index)

    long = "a" * 3000
    matcher = StopMatcher((long + "b", long[1:] + "c", "aab"))
    matcher._auto.follow = Counted(matcher._auto.follow)
    text = ("a" * 2900 + "d") * 5
    assert "".join(matcher.feed(char)[0] for char in text) == text
    assert len(text) < count <= 2 * len(text)


def test_an_automaton_is_shared_by_all_who_look_for_the_same() -> None:
    assert automaton(("a", "b")) is automaton(("a", "b"))
    long = ("x" * 4000, "y")
    assert automaton(long) is automaton(tuple(long))
