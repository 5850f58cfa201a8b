"""The table of `lifecycle`, edge by edge."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smgd.core import WorkerState
from smgd.workers.lifecycle import Lifecycle, Thresholds

GOOD, BAD = True, False


def probed(life: Lifecycle, *results: bool) -> list[WorkerState]:
    """Return the state after each probe."""
    states: list[WorkerState] = []
    for result in results:
        life.probed(result)
        states.append(life.state)
    return states


def in_state(state: str) -> Lifecycle:
    life = Lifecycle()
    if state in ("ready", "not_ready"):
        life.handshake_complete()
    if state == "not_ready":
        life.engine_lost()
    if state == "failed":
        probed(life, *[BAD] * 30)
    if state == "draining":
        life.removed()
    assert life.state == state
    return life


def test_a_handshake_makes_ready_at_once_and_a_loss_takes_it_back_at_once() -> None:
    life = Lifecycle()
    steps = [
        (life.handshake_complete, True, "ready"),
        (life.handshake_complete, False, "ready"),
        (life.engine_lost, True, "not_ready"),
        (life.engine_lost, False, "not_ready"),
        (life.handshake_complete, True, "ready"),
    ]
    for step, changed, state in steps:
        assert (step(), life.state) == (changed, state)


def test_pending_becomes_ready_after_successes_in_a_row() -> None:
    assert probed(Lifecycle(), GOOD, BAD, GOOD, GOOD) == ["pending", "pending", "pending", "ready"]


def test_pending_fails_after_thirty_probes_whatever_their_mix() -> None:
    life = Lifecycle()
    assert set(probed(life, *[BAD, GOOD] * 14, BAD)) == {"pending"}
    assert probed(life, BAD) == ["failed"]


def test_ready_survives_two_failures_and_not_three() -> None:
    life = in_state("ready")
    assert set(probed(life, BAD, BAD, GOOD, BAD, BAD)) == {"ready"}
    assert probed(life, BAD) == ["not_ready"]


def test_not_ready_recovers_or_fails() -> None:
    assert probed(in_state("not_ready"), BAD, GOOD, GOOD) == ["not_ready", "not_ready", "ready"]
    life = in_state("not_ready")
    assert set(probed(life, *[BAD] * 8, GOOD, *[BAD] * 8)) == {"not_ready"}
    assert probed(life, BAD) == ["failed"]


def test_thresholds_are_settings() -> None:
    life = Lifecycle()
    life.thresholds = Thresholds(success=1, failure=1)
    assert probed(life, GOOD, BAD, BAD, BAD, BAD) == [
        "ready",
        "not_ready",
        "not_ready",
        "not_ready",
        "failed",
    ]


@pytest.mark.parametrize("state", ["failed", "draining"])
def test_final_states_stay(state: str) -> None:
    life = in_state(state)
    assert not life.handshake_complete()
    assert not life.engine_lost()
    assert not life.removed()
    assert set(probed(life, *[GOOD] * 50, *[BAD] * 50)) == {state}


@pytest.mark.parametrize("state", ["pending", "ready", "not_ready"])
def test_removal_drains(state: str) -> None:
    life = in_state(state)
    assert life.removed()
    assert life.state == "draining"


@given(st.lists(st.sampled_from(["handshake_complete", "engine_lost", "removed", GOOD, BAD])))
def test_every_method_tells_whether_the_state_has_changed(steps: list[str | bool]) -> None:
    life = Lifecycle()
    life.thresholds = Thresholds(success=1, failure=1)
    for step in steps:
        before = life.state
        changed = life.probed(step) if isinstance(step, bool) else getattr(life, step)()
        assert changed == (life.state != before)
