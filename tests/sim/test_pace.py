from __future__ import annotations

import pytest

from smgd.sim.pace import Cadence


def test_steps_keep_their_rate_however_late_each_one_is() -> None:
    cadence = Cadence(0.1)
    now = 50.0
    steps = []
    for _ in range(5):
        due = cadence.next(49.0)
        now = max(now, due) + 0.003
        cadence.stepped(due, now)
        steps.append(due)

    assert [second - steps[1] for second in steps[1:]] == pytest.approx([0, 0.1, 0.2, 0.3])


def test_what_was_missed_is_not_made_up_for() -> None:
    cadence = Cadence(0.1)
    cadence.stepped(50.0, 50.0)

    cadence.stepped(cadence.next(0.0), 53.0)

    assert cadence.next(0.0) == pytest.approx(53.1)


def test_nothing_is_due_before_there_is_something_to_do() -> None:
    cadence = Cadence(0.1)
    cadence.stepped(50.0, 50.0)

    assert cadence.next(51.0) == 51.0
