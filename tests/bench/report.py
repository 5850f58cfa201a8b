"""Samples to rows, rows to a table: medians over the rounds, ratios within each round.

The machine's speed drifts, and a round is short: so a ratio is the median of the rounds' ratios,
not the ratio of the medians.
"""

from __future__ import annotations

import os
import platform
import re
import statistics
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec

from tests.bench.cells import Cell, Target

PEER, OURS = "smg", "smgd"
UNITS = {
    "us_token": "us CPU / token",
    "us_request": "us CPU / request",
    "core": "% of a core",
    "pss": "PSS, MB",
    "rss": "RSS, MB",
}
COLUMNS = ("cell", "figure", PEER, OURS, f"{OURS}/{PEER}", "range", "done at", "stretch", "")


class Sample(msgspec.Struct, frozen=True):
    """One gateway in one cell in one round."""

    round: int
    cell: str
    gateway: str
    figures: dict[str, float]


class Row(msgspec.Struct, frozen=True):
    """One figure of one cell: `values` by gateway, each a median; ratios to the peer."""

    cell: str
    figure: str
    values: dict[str, float]
    ratios: dict[str, list[float]]
    target: Target | None

    def ratio(self, gateway: str = OURS) -> float | None:
        """Return a gateway's ratio to the peer."""
        return statistics.median(self.ratios[gateway]) if self.ratios.get(gateway) else None

    @property
    def verdict(self) -> str:
        """`stretch`, `done`, `MISSED`, or nothing where there is no target."""
        ratio = self.ratio()
        if self.target is None or ratio is None:
            return ""
        done, stretch = self.target
        if stretch is not None and ratio <= stretch:
            return "stretch"
        return "done" if ratio <= done else "MISSED"


def rows(cells: Iterable[Cell], samples: Sequence[Sample]) -> list[Row]:
    """Return the rows of those cells that have samples."""
    found = []
    for cell in cells:
        of_cell = [sample for sample in samples if sample.cell == cell.name]
        for figure, target in cell.figures.items():
            if row := _row(cell.name, figure, target, of_cell):
                found.append(row)
    return found


def _row(cell: str, figure: str, target: Target | None, samples: Sequence[Sample]) -> Row | None:
    values: dict[str, dict[int, float]] = {}
    for sample in samples:
        if figure in sample.figures:
            values.setdefault(sample.gateway, {})[sample.round] = sample.figures[figure]
    if not values:
        return None
    peer = values.get(PEER, {})
    ratios = {
        gateway: [value / peer[number] for number, value in rounds.items() if peer.get(number)]
        for gateway, rounds in values.items()
        if gateway != PEER
    }
    medians = {gateway: statistics.median(rounds.values()) for gateway, rounds in values.items()}
    return Row(cell, figure, medians, ratios, target)


def table(found: Sequence[Row]) -> str:
    """Return a table in Markdown; gateways beside the two have columns of their own."""
    others = sorted({name for row in found for name in row.values} - {PEER, OURS})
    head = [*COLUMNS[:-1], *(f"{name}/{PEER}" for name in others), COLUMNS[-1]]
    lines = [head, *(_cells(row, others) for row in found)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(text.ljust(w) for text, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def _cells(row: Row, others: Sequence[str]) -> list[str]:
    ratios = row.ratios.get(OURS) or []
    done, stretch = row.target or (None, None)
    return [
        row.cell,
        UNITS.get(row.figure, row.figure.replace("_", " ") + ", ms"),
        _number(row.values.get(PEER)),
        _number(row.values.get(OURS)),
        _ratio(row.ratio()),
        f"{min(ratios):.2f}-{max(ratios):.2f}" if ratios else "",
        _ratio(done),
        _ratio(stretch),
        *(_ratio(row.ratio(name)) for name in others),
        row.verdict,
    ]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def disturbance(samples: Sequence[Sample]) -> str:
    """Return how much the rest of the machine was in the way, as a sentence."""
    others = [sample.figures["others"] for sample in samples] or [0.0]
    return (
        f"Other processes used {statistics.median(others):.1f} of {os.cpu_count()} cores while "
        f"samples were taken (median; {min(others):.1f} to {max(others):.1f})."
    )


def machine() -> str:
    """Return what the figures depend on, in one line."""
    info = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*:\s*(.*)", info)
    return ", ".join((
        f"{os.cpu_count()} x {model[1].strip() if model else platform.machine()}",
        f"Linux {platform.release().split('-')[0]}",
        f"Python {platform.python_version()}",
        *(f"{name} {version(name)}" for name in ("trio", "hypercorn", "msgspec", "tokenizers")),
    ))  # fmt: skip
