"""Admission: permits are neither lost nor doubled, whatever order things come in."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from smgd.errors import ApiError
from smgd.web.admission import Admission


class Waiters:
    """Those who wait, and who of them was woken in which order."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.woken: list[str] = []

    def park(self, *names: str) -> None:
        for name in names:
            self.admission.park(name, lambda name=name: self.woken.append(name))  # type: ignore[misc]


def test_permits_go_to_the_head_of_the_queue() -> None:
    admission = Admission(limit=2, queue_size=3)
    waiters = Waiters(admission)
    assert [admission.admit(name) for name in "abc"] == [True, True, False]
    waiters.park("c", "d", "e")
    assert (admission.running, admission.waiting) == (2, 3)
    admission.leave("d")  # out of the middle
    admission.leave("a")
    assert waiters.woken == ["c"]
    admission.settle("c")  # has one
    assert not admission.admit("f")  # no newcomer overtakes
    admission.leave("b")
    assert waiters.woken == ["c", "e"]
    for name in "abcdef":
        admission.leave(name)
    assert (admission.running, admission.waiting, admission.allowed) == (0, 0, 4)


def test_a_full_queue_refuses() -> None:
    admission = Admission(limit=1, queue_size=1)
    admission.admit("a")
    Waiters(admission).park("b")
    with pytest.raises(ApiError, match="1 requests are running and 1 are waiting") as caught:
        admission.park("c", lambda: None)
    error = caught.value
    assert (error.status, error.code, error.retry_after) == (429, "admission_queue_full", 1)
    assert (admission.waiting, admission.full) == (1, 1)


def test_without_a_queue_everybody_is_refused_at_once() -> None:
    admission = Admission(limit=1)
    admission.admit("a")
    with pytest.raises(ApiError, match="The server is busy"):
        admission.park("b", lambda: None)
    admission.leave("a")
    assert admission.admit("b")


def test_who_has_waited_too_long_leaves_the_queue() -> None:
    admission = Admission(limit=1, queue_size=2, timeout=7.5)
    admission.admit("a")
    waiters = Waiters(admission)
    waiters.park("b", "c")
    with pytest.raises(ApiError, match=r"has waited for 7\.5 seconds") as caught:
        admission.settle("b")
    error = caught.value
    assert (error.status, error.code, error.retry_after) == (503, "admission_queue_timeout", 1)
    assert (admission.waiting, admission.timeouts) == (1, 1)
    admission.leave("b")
    admission.leave("a")
    assert waiters.woken == ["c"]


def test_who_is_woken_and_leaves_hands_on() -> None:
    admission = Admission(limit=1, queue_size=2)
    admission.admit("a")
    waiters = Waiters(admission)
    waiters.park("b", "c")
    admission.leave("a")
    admission.leave("b")  # cancelled before it has run
    assert waiters.woken == ["b", "c"]
    assert admission.running == 1


def test_limits_change_under_way() -> None:
    admission = Admission(limit=1, queue_size=3)
    admission.admit("a")
    waiters = Waiters(admission)
    waiters.park("b", "c", "d")
    admission.configure(3, 0, 1.0)
    assert (waiters.woken, admission.running, admission.waiting) == (["b", "c"], 3, 1)
    with pytest.raises(ApiError, match="are waiting"):
        admission.park("e", lambda: None)
    admission.configure(1, 3, 1.0)
    for name, woken in (("a", "bc"), ("b", "bc"), ("c", "bcd")):
        admission.leave(name)
        assert waiters.woken == [*woken]
    admission.configure(0, 0, 1.0)  # no limit
    assert all(admission.admit(number) for number in range(10_000))


def test_the_end_of_a_stop_sends_all_away() -> None:
    admission = Admission(limit=1, queue_size=3)
    admission.admit("a")
    waiters = Waiters(admission)
    waiters.park("b", "c")
    admission.close()
    assert waiters.woken == ["b", "c"]
    for name in "bc":
        with pytest.raises(ApiError, match="shutting down"):
            admission.settle(name)
    admission.leave("a")
    assert not admission.admit("d")
    with pytest.raises(ApiError, match="shutting down") as caught:
        admission.park("d", lambda: None)
    assert (caught.value.status, caught.value.code) == (503, "shutting_down")
    assert (admission.running, admission.waiting, admission.timeouts) == (0, 0, 0)


class Arrivals(RuleBasedStateMachine):
    """Requests come, wait, are woken, are cancelled at any time, end, and limits change.

    The model: who has asked, in order, and who of them is still there.
    """

    present = Bundle("present")

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.limit = self.size = 0
        self.waiting: list[int] = []
        self.running: set[int] = set()
        self.refused = 0

    @initialize(limit=st.integers(0, 3), size=st.integers(0, 3))
    def start(self, limit: int, size: int) -> None:
        self.limit, self.size = limit, size
        self.admission = Admission(limit, size)

    def woken(self, who: int) -> None:
        """Take a permit that was handed over: always to the one who has waited longest."""
        assert self.waiting.pop(0) == who
        self.running.add(who)

    @rule(target=present)
    def arrive(self) -> int:
        self.number += 1
        who = self.number
        free = not self.limit or len(self.running) < self.limit
        assert self.admission.admit(who) is free
        if free:
            self.running.add(who)
        elif len(self.waiting) < self.size:
            self.waiting.append(who)
            self.admission.park(who, lambda: self.woken(who))
        else:
            with pytest.raises(ApiError, match="busy"):
                self.admission.park(who, lambda: self.woken(who))
            self.refused += 1
        return who

    def gone(self, who: int) -> None:
        self.running.discard(who)
        if who in self.waiting:
            self.waiting.remove(who)

    @rule(who=consumes(present), again=st.booleans())
    def leave(self, who: int, again: bool) -> None:
        """End, be cancelled in the queue, or leave after a refusal; twice does no harm."""
        self.gone(who)
        for _ in range(1 + again):
            self.admission.leave(who)

    @rule(who=present)
    def time_out(self, who: int) -> None:
        if who in self.waiting:
            self.waiting.remove(who)
            with pytest.raises(ApiError, match="has waited"):
                self.admission.settle(who)
        elif who in self.running:
            self.admission.settle(who)

    @precondition(lambda self: self.number)
    @rule(limit=st.integers(0, 3), size=st.integers(0, 3))
    def configure(self, limit: int, size: int) -> None:
        self.limit, self.size = limit, size
        self.admission.configure(limit, size, 1.0)

    @invariant()
    def nothing_is_lost(self) -> None:
        if not self.number:
            return
        assert self.admission.running == len(self.running)
        assert self.admission.waiting == len(self.waiting)
        assert self.admission.full == self.refused
        if self.waiting:
            assert self.limit
            assert len(self.running) >= self.limit, "a permit is free, and somebody waits"

    def teardown(self) -> None:
        if not self.number:
            return
        for who in range(self.number + 1):
            self.gone(who)
            self.admission.leave(who)
        assert (self.admission.running, self.admission.waiting) == (0, 0)


Arrivals.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestArrivals = Arrivals.TestCase
