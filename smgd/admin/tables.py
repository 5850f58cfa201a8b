"""What smgctl shows to people: aligned columns, durations in words, the configuration as TOML."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from smgd.config.keys import ARRAYS, header, toml

Row = Sequence[object]


def table(titles: Sequence[str], rows: Iterable[Row]) -> str:
    """Return columns as wide as they have to be; those whose title begins with > on the right."""
    right = [title.startswith(">") for title in titles]
    names = [title.removeprefix(">") for title in titles]
    lines = [names, *([_text(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def facts(pairs: Iterable[tuple[str, object]]) -> str:
    """Return names and values, one pair a line; what has no value is left out."""
    shown = [(name, _text(value)) for name, value in pairs if value not in (None, "", [], {})]
    width = max(len(name) for name, _ in shown)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in shown)


def duration(seconds: float) -> str:
    """Return a duration in its two largest units."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


def percent(share: float) -> str:
    """Return a share in 0..1 in percent."""
    return f"{share:.0%}"


def config(tables: dict[str, Any]) -> str:
    """Return a configuration as TOML."""
    return "\n".join(block for name, value in tables.items() for block in _blocks(name, value))


def _blocks(name: str, value: Any) -> Iterator[str]:
    if name in ARRAYS:
        yield from (_block(header(name), one) for one in value)
    elif name == "models":
        yield from (_block(f"[models.{toml(model)}]", keys) for model, keys in value.items())
    else:
        yield _block(header(name), value)


def _block(first: str, keys: dict[str, Any]) -> str:
    return "\n".join([first, *(f"{key} = {_inline(value)}" for key, value in keys.items()), ""])


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        pairs = ", ".join(f"{toml(key)} = {_inline(inner)}" for key, inner in value.items())
        return f"{{{pairs}}}" if pairs else "{}"
    return toml(value)


def _text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{key}={inner}" for key, inner in value.items())
    return str(value)
