"""What engines have done, by rank: tokens however they come and whatever ends a request."""

from __future__ import annotations

import pytest

from smgd.core import Delta, EngineWork
from smgd.engine.session import Session
from tests.engine_unit import recorded
from tests.engine_unit.scripted import HELLO, Inbox, outputs, request
from tests.engine_unit.test_groups import A, apart


def submitted(session: Session, *ids: str, receiver: Inbox | None = None) -> None:
    for request_id in ids:
        session.submit(request(request_id), receiver or Inbox())


def generated(session: Session) -> list[int]:
    return [work.generated for work in session.rank_work]


def test_tokens_are_those_of_running_and_of_finished_requests() -> None:
    session = apart(1)
    submitted(session, "r1", "r2")
    session.receive([outputs(("r1", [5], None), ("r2", [5, 6, 7], None))])
    assert generated(session) == [4]
    session.receive([outputs(("r1", [6, 7], 0), ("r2", [], None))])
    assert generated(session) == [6]
    session.receive([outputs(("r2", [8], 1))])
    assert generated(session) == [7]
    assert session.in_flight == 0


def test_tokens_belong_to_the_rank_they_came_from() -> None:
    session = apart(2)
    submitted(session, "r1", "r2")
    session.receive([outputs(("r1", [5, 6], None))])
    session.receive([outputs(("r2", [5], 0), engine=1)])
    assert generated(session) == [2, 1]


@pytest.mark.parametrize("end", ["abort", "loss", "HELLO", "broken"])
def test_tokens_stay_counted_whatever_ends_a_request(end: str) -> None:
    class Broken(Inbox):
        def deliver(self, delta: Delta) -> None:
            super().deliver(delta)
            if end == "broken" and len(self.deltas) == 2:
                raise ValueError("2")

    session = apart(1)
    submitted(session, "r1", receiver=Broken())
    session.receive([outputs(("r1", [5, 6], None))])
    match end:
        case "abort":
            session.abort("r1")
        case "loss":
            session.roster.lose("a test")
        case "HELLO":
            session.roster.handshake(A, HELLO)
        case _:
            session.receive([outputs(("r1", [], None))])
    assert session.in_flight == 0
    assert generated(session) == [2]
    session.receive([outputs(("r1", [7], None))])  # late, and nobody's
    assert generated(session) == [2]


def test_what_other_engines_have_generated_is_not_counted_again() -> None:
    session, migrated = apart(1), Inbox()
    migrated.deliver(Delta([1, 2, 3]))
    submitted(session, "r1", receiver=migrated)
    session.receive([outputs(("r1", [4], None))])
    assert generated(session) == [1]
    session.receive([outputs(("r1", [5], 0))])
    assert generated(session) == [2]


def test_a_request_that_could_not_be_sent_counts_nothing() -> None:
    session, receiver = apart(1), Inbox()
    receiver.deliver(Delta([1, 2, 3]))
    submitted(session, "r1", receiver=receiver)
    session.withdraw("r1")
    assert generated(session) == [0]


def test_counts_of_the_prefix_cache_are_added_up() -> None:
    session = apart(2)
    for queries, hits, engine in ((64, 0, 0), (64, 48, 0), (32, 16, 1)):
        cache = {"reset": False, "requests": 1, "queries": queries, "hits": hits}
        session.receive([outputs(engine=engine, stats={"prefix_cache_stats": cache})])
    session.receive([outputs(stats={"prefix_cache_stats": None})])
    session.receive([outputs(stats={})])
    session.receive([outputs()])
    assert session.rank_work == [EngineWork(0, 128, 48), EngineWork(0, 32, 16)]


def test_an_engine_that_is_started_anew_goes_on_counting() -> None:
    session = apart(1)
    cache = {"queries": 64, "hits": 48}
    session.receive([outputs(stats={"prefix_cache_stats": cache})])
    session.roster.handshake(A, HELLO)
    assert session.rank_work == [EngineWork(0, 64, 48)]


def test_what_is_read_does_not_change_afterwards() -> None:
    session = apart(1)
    before = session.rank_work
    session.receive([outputs(stats={"prefix_cache_stats": {"queries": 64, "hits": 48}})])
    assert before == [EngineWork()]


@pytest.mark.parametrize("version", recorded.VERSIONS)
def test_what_vllm_says_of_its_prefix_cache(version: str) -> None:
    session = apart(1)
    prompt = recorded.message(version, "greedy_length", "input", "F->E").meaning[1]
    for message in recorded.messages(version, "output0"):
        if message.case == "greedy_length":
            session.receive(message.frames)
    assert session.rank_work == [EngineWork(0, len(prompt), 0)]
