"""Each change of a matter is news, and so is each time that it begins."""

from __future__ import annotations

from smgd.once import Once


def test_a_matter_is_news_until_it_has_been_told() -> None:
    once = Once()
    assert not once.is_told
    matters = ["full", "full", "gone", "full", "full"]
    assert [once.is_news(matter) for matter in matters] == [True, False, True, True, False]
    assert once.is_told


def test_what_was_over_is_news() -> None:
    once = Once()
    for _ in range(2):
        once.over()
        assert not once.is_told
        assert [once.is_news(["a", "b"]), once.is_news(["a", "b"])] == [True, False]


def test_an_error_without_a_text_is_told_too() -> None:
    once = Once()
    assert (once.is_news(str(OSError())), once.is_told) == (True, True)
