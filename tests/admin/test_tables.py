"""Columns, durations and TOML as people read them."""

from __future__ import annotations

import tomllib

import pytest

from smgd.admin import tables


def test_numbers_are_aligned_on_the_right() -> None:
    assert tables.table(("NAME", ">N", ">AGE"), [("a", 5, "1m05s"), ("long", 12, "3s")]) == (
        "NAME   N    AGE\n"
        "a      5  1m05s\n"
        "long  12     3s"
    )  # fmt: skip


def test_words_that_begin_with_digits_are_words() -> None:
    assert tables.table(("NAME", "ID"), [("a", "1be5dcfa"), ("b", "12")]) == (
        "NAME  ID\n"
        "a     1be5dcfa\n"
        "b     12"
    )  # fmt: skip


def test_facts_without_a_value_are_left_out() -> None:
    shown = tables.facts([("a", 1), ("none", None), ("empty", []), ("longer", ["x", "y"])])
    assert shown == "a       1\nlonger  x, y"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.9, "59s"), (60, "1m00s"), (3599, "59m59s"), (3660, "1h01m"), (90000, "1d01h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert tables.duration(seconds) == text


def test_a_configuration_is_toml() -> None:
    config = {
        "server": {"host": "::", "port": 1, "on": True},
        "models": {"org/m.1": {"aliases": ["a"]}},
        "workers": [{"url": "ipc:///a"}, {"url": "ipc:///b"}],
        "engines": [{"env": {"A": "b"}, "args": []}],
    }
    assert tomllib.loads(tables.config(config)) == config
