from __future__ import annotations

import os
import time
from random import Random

import pytest

from smgd.text.hub import BUILTIN_DIRECTORY
from tests.bench import clocks, report
from tests.bench.cells import CELLS, Closed, Target
from tests.bench.prompts import Kind, Prompts
from tests.bench.report import Sample, rows, table


def cell(target: Target | None) -> Closed:
    return Closed(name="c", figures={"us_token": target}, streams=1)


def sample(number: int, gateway: str, value: float) -> Sample:
    return Sample(number, "c", gateway, {"us_token": value, "others": 0.0})


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    # The machine got four times slower from round to round; ours is always half.
    samples = [sample(n, "smg", 10.0 * 4**n) for n in range(3)]
    samples += [sample(n, "smgd", 5.0 * 4**n) for n in range(3)]
    samples += [sample(9, "smgd", 1.0)]  # a round that was cut short has no peer

    (row,) = rows([cell((0.75, 0.6))], samples)

    assert row.ratios == {"smgd": [0.5, 0.5, 0.5]}
    assert row.verdict == "stretch"


@pytest.mark.parametrize(
    ("ratio", "target", "verdict"),
    [
        (0.7, (0.7, 0.5), "done"),
        (0.71, (0.7, 0.5), "MISSED"),
        (0.5, (0.7, 0.5), "stretch"),
        (1.0, (1.0, None), "done"),
        (9.0, None, ""),
    ],
)
def test_verdicts(ratio: float, target: Target | None, verdict: str) -> None:
    (row,) = rows([cell(target)], [sample(0, "smg", 1.0), sample(0, "smgd", ratio)])

    assert row.verdict == verdict


def test_the_table_has_other_checkouts_beside_the_two() -> None:
    samples = [sample(0, "smg", 10.0), sample(0, "smgd", 6.0), sample(0, "before", 8.0)]

    head, _, line = table(rows([cell((0.75, 0.6))], samples)).splitlines()

    assert [part.strip() for part in head.split("|")][-3:] == ["before/smg", "", ""]
    assert [part.strip() for part in line.split("|")][3:6] == ["10", "6", "0.60"]
    assert line.endswith("| 0.80       | stretch |")


def test_a_process_is_charged_what_it_has_used() -> None:
    before = clocks.cpu_seconds(os.getpid())
    own = time.process_time()
    while time.process_time() < own + 0.05:
        pass
    assert 0.05 <= clocks.cpu_seconds(os.getpid()) - before < 0.2
    assert clocks.cpu_seconds(2**22 + 1) == 0.0


@pytest.mark.parametrize("kind", ["short", "2k", "30k", "chat", "2k-same"])
def test_prompts_differ_in_what_they_say_and_not_in_length(kind: Kind) -> None:
    prompts = Prompts(BUILTIN_DIRECTORY)
    prompt = prompts.make(kind, stream=True, stop=True)
    rng = Random(5)
    bodies = [prompt.body(number, rng, 7) for number in range(3)]

    assert len(set(bodies)) == (1 if kind == "2k-same" else 3)
    assert all(body.endswith(b'"max_tokens": 7}') for body in bodies)
    lengths = [len(body) for body in bodies]
    assert max(lengths) < 1.3 * min(lengths)


def test_cells_have_names_of_their_own() -> None:
    names = [cell.name for cell in CELLS]
    assert len(names) == len(set(names))
    assert all(figure in report.UNITS or "_p" in figure or "_max" in figure
               for cell in CELLS for figure in cell.figures)  # fmt: skip
