"""Several engines behind one session: who is lost with whom, and who goes on."""

from __future__ import annotations

import random
from typing import Any

import pytest

from smgd.core import Delta
from smgd.engine.dialects.vllm import VllmDialect
from smgd.engine.events import (
    EngineReady,
    EnginesLost,
    Notice,
    Send,
    SendInit,
    SessionLost,
    SessionReady,
)
from smgd.engine.handshake import Said
from smgd.engine.session import Session
from smgd.errors import EngineLostError, RemoteProtocolError
from smgd.wire import vllm as wire
from tests.engine_unit import recorded
from tests.engine_unit.scripted import HELLO, READY, Inbox, outputs, registration, request, unpack
from tests.engine_unit.test_session import aborted, answer, call_of, is_ours, kinds, submit

A, B, C = b"\x00\x00", b"\x01\x00", b"\x02\x00"


class SilentDialect(VllmDialect):
    """Knows no utility call."""

    def heartbeat(self, call_id: int) -> list[bytes]:
        return None  # type: ignore[return-value]


def hear(session: Session, *frames: bytes) -> list[Any]:
    return list(session.receive(list(frames)))


def new_session(engines: int, dialect: VllmDialect | None = None) -> Session:
    return Session("w", dialect or VllmDialect(), b"INIT", is_ours, engines)


def start(session: Session, index: int, ready: bytes = READY, **fields: Any) -> list[Any]:
    identity = index.to_bytes(2, "little")
    events: list[Any] = session.roster.handshake(identity, HELLO)
    fields = {"instance_id": f"process {index}"} | fields
    events += session.roster.registration(identity, registration(**fields))
    return events + session.roster.handshake(identity, ready)


def apart(engines: int) -> Session:
    """Return a session with engines that were started one by one."""
    session = new_session(engines)
    for index in range(engines):
        start(session, index)
    assert session.roster.ready
    return session


def targets(session: Session, count: int) -> list[bytes]:
    base = session.in_flight
    return [session.submit(request(f"r{base + i}x"), Inbox())[0].identity for i in range(count)]


# ----------------------------------------------------------------------------------- losses


def test_the_others_serve_while_one_is_lost() -> None:
    session = apart(3)
    inboxes = submit(session, "r0", "r1", "r2")
    events = session.roster.lose("gone", B)
    assert events[0] == EnginesLost([1], "gone", 1)
    assert aborted(events) == ["r1"]
    assert [inbox.endings for inbox in inboxes] == [0, 1, 0]
    assert session.roster.ready
    assert session.roster.usable == [0, 2]
    assert set(targets(session, 6)) == {A, C}
    assert session.roster.awaited == "an answer or HELLO of engine 1"
    assert kinds(start(session, 1)) == [SendInit, EngineReady]
    assert session.roster.usable == [0, 1, 2]


def test_a_lost_request_may_go_on_with_another_engine_of_the_session() -> None:
    session = apart(2)
    taken: list[Send] = []

    class Moving(Inbox):
        def fail(self, error: Exception) -> None:
            super().fail(error)
            taken.extend(session.submit(request("r9"), Inbox()))

    session.submit(request("r0"), Moving())
    session.roster.lose("gone", A)
    assert [send.identity for send in taken] == [B]
    session.roster.lose("gone", B)
    with pytest.raises(EngineLostError, match="gone"):
        session.submit(request("r10"), Inbox())


def test_the_last_one_takes_the_session_along() -> None:
    session = apart(2)
    assert kinds(session.roster.lose("first", A)) == [EnginesLost]
    assert kinds(session.roster.lose("second", B)) == [SessionLost]
    assert session.roster.unready == "second"
    # Both were there once, so the first that is back can serve.
    assert kinds(start(session, 0)) == [SendInit, EngineReady, SessionReady]


def test_nothing_is_served_before_all_were_there() -> None:
    session = new_session(2)
    start(session, 0)
    assert not session.roster.ready
    assert session.roster.awaited == "HELLO of engine 1"


def test_an_engine_that_stops_takes_those_of_its_process_along() -> None:
    session = new_session(3)
    for index, instance in enumerate(("one", "one", "two")):
        start(session, index, instance_id=instance)
    inboxes = submit(session, "r0", "r1", "r2")
    events = hear(session, outputs(("r0", [], 2), engine=0))
    assert events[0] == EnginesLost([0, 1], "it has aborted a request, as engines do that stop", 1)
    assert aborted(events) == ["r1"]
    assert [inbox.endings for inbox in inboxes] == [1, 1, 0]
    # One that still answers is not used while its sibling does not.
    asked = call_of(session.roster.asks())
    assert kinds(hear(session, answer(asked, engine=1))) == [EngineReady]
    assert session.roster.usable == [2]
    assert kinds(hear(session, answer(asked, engine=0))) == [EngineReady]
    assert session.roster.usable == [0, 1, 2]


def test_ranks_in_lockstep_go_together() -> None:
    said = [m for m in recorded.messages("0.32", "handshake") if m.case == "moe_handshake"][-1]
    session = new_session(2)
    for index in range(2):
        start(session, index, said.frames[1])
    assert session.roster.ready
    submit(session, "r0", "r1")
    assert session.roster.lose("gone", B)[0] == SessionLost("gone", 2)
    start(session, 1, said.frames[1])
    assert session.roster.usable == []
    start(session, 0, said.frames[1])
    assert session.roster.ready


def test_lockstep_is_known_without_the_ready() -> None:
    session = new_session(2)
    for identity in (A, B):
        session.roster.registration(identity, registration(data_parallel_size=2))
        hear(session, answer(call_of(session.roster.asks()), engine=identity[0]))
    assert session.roster.ready
    sends = session.submit(request("r0"), Inbox())
    assert [send.frames[0] for send in sends] == [wire.ADD, wire.START_DP_WAVE]


def test_waves_go_on_above_those_of_a_former_life() -> None:
    session = new_session(2)
    session.begin_waves(1000)
    session.roster.recall(
        [Said(i, registration(data_parallel_size=2), lockstep=True) for i in range(2)]
    )
    asked = call_of(session.roster.asks())
    for index in range(2):
        hear(session, answer(asked, engine=index))
    _, wake = session.submit(request("r0"), Inbox())
    assert (wake.identity, unpack(wake.frames[1])) == (B, [1000, 0])
    hear(session, outputs(engine=1, wave_complete=2000))
    session.begin_waves(1500)  # not below what was seen
    _, wake = session.submit(request("r1"), Inbox())
    assert unpack(wake.frames[1])[0] == 2001


# ---------------------------------------------------------------------------- whose connection


def test_whose_connection_has_ended_shows_in_who_answers() -> None:
    session = apart(3)
    _, inbox, _ = submit(session, "r0", "r1", "r2")
    assert session.roster.disconnected("the output connection was closed", 2) == []
    calls = session.roster.asks()
    assert [call.identity for call in calls if isinstance(call, Send)] == [A, B, C]
    asked = call_of(calls)
    hear(session, outputs(("r1", [5], None), engine=1))  # was on its way: no answer
    assert hear(session, answer(asked, engine=0)) == []
    assert session.roster.usable == [0, 1, 2]
    events = hear(session, answer(asked, engine=2))
    assert events[0] == EnginesLost([1], "its connection was closed", 1)
    assert session.roster.usable == [0, 2]
    assert inbox.endings == 1


def test_an_engine_that_cannot_be_called_is_the_lost_one() -> None:
    session = apart(2)
    assert session.roster.disconnected("the input connection was closed", 1) == []
    asked = call_of(session.roster.asks())
    assert session.roster.undelivered(B)[0] == EnginesLost([1], "its connection was closed", 0)
    assert session.roster.undelivered(B) == []
    assert hear(session, answer(asked, engine=0)) == []
    assert session.roster.usable == [0]
    assert session.roster.disconnected("the output connection was closed", 1) == []


def test_a_connection_of_one_that_is_not_in_use_does_not_matter() -> None:
    session = apart(2)
    assert session.roster.disconnected("closed", 2) == []
    asks = session.roster.asks()
    assert [ask.identity for ask in asks] == [A, B]
    assert hear(session, answer(call_of(asks), engine=1)) == []
    assert [ask.identity for ask in session.roster.asks()] == [A]
    assert hear(session, answer(call_of(asks), engine=0)) == []
    assert session.roster.asks() == []
    assert session.roster.usable == [0, 1]
    assert new_session(2).roster.disconnected("closed", 0) == []


def test_one_process_needs_no_questions() -> None:
    session = new_session(2)
    for index in range(2):
        start(session, index, instance_id="one")
    assert session.roster.disconnected("closed", 1)[0] == SessionLost("closed", 0)


def test_the_dead_one_of_several_is_told_by_its_connection() -> None:
    session = apart(2)
    (notice,) = hear(session, b"ENGINE_CORE_DEAD")
    assert isinstance(notice, Notice)
    assert session.roster.usable == [0, 1]


# ------------------------------------------------------------------------------ former lives


def said(*indices: int) -> list[Said]:
    return [Said(i, registration(instance_id=f"process {i}", max_model_len=99)) for i in indices]


def test_an_answer_adopts_what_a_former_life_knew() -> None:
    session = new_session(1)
    session.roster.recall(said(0))
    assert not session.roster.ready
    assert session.roster.seen == ["record of engine 0"]
    with pytest.raises(EngineLostError):
        session.submit(request("r0"), Inbox())
    events = hear(session, answer(call_of(session.roster.asks())))
    assert kinds(events) == [EngineReady, SessionReady]
    assert events[0].how == "adopted"
    assert session.roster.info is not None
    assert session.roster.info.max_model_len == 99
    assert session.counts.adoptions == 1
    assert session.roster.said == said(0)
    submit(session, "r0")
    session.roster.lose("closed")
    (again, _) = hear(session, answer(call_of(session.roster.asks())))
    assert again.how == "recovered"


def test_an_answer_to_a_call_of_a_former_life_proves_nothing() -> None:
    session = Session("w", VllmDialect(), b"INIT", is_ours, first_call=1000)
    session.roster.recall(said(0))
    asked = call_of(session.roster.asks())
    for call in (1, asked - 1, asked + 1):
        assert hear(session, answer(call)) == []
    assert kinds(hear(session, answer(asked))) == [EngineReady, SessionReady]


def test_a_hello_voids_what_a_former_life_knew() -> None:
    session = new_session(1)
    session.roster.recall(said(0))
    asked = call_of(session.roster.asks())
    events = session.roster.handshake(A, HELLO)
    assert kinds(events) == [Notice, SendInit]
    assert session.roster.said == []
    assert hear(session, answer(asked)) == []
    assert not session.roster.ready


def test_a_group_that_was_complete_serves_with_those_that_are_there() -> None:
    session = new_session(2)
    session.roster.recall(said(0, 1))
    hear(session, answer(call_of(session.roster.asks()), engine=1))
    assert session.roster.usable == [1]
    partly = new_session(2)
    partly.roster.recall(said(0))
    hear(partly, answer(call_of(partly.roster.asks()), engine=0))
    assert not partly.roster.ready  # the other was still on its way to us
    assert kinds(start(partly, 1))[-1] == SessionReady


def test_a_record_that_cannot_be_read_is_not_half_known() -> None:
    session = new_session(2)
    with pytest.raises(RemoteProtocolError):
        session.roster.recall([*said(0), Said(1, b"\x80")])
    assert session.roster.asks() == []


def test_an_engine_whose_ready_went_to_nobody_is_asked() -> None:
    session = new_session(1)
    assert session.roster.registration(A, registration()) == []
    events = hear(session, answer(call_of(session.roster.asks())))
    assert kinds(events) == [EngineReady, SessionReady]
    assert events[0].how == "handshake"
    greeted = new_session(1)
    greeted.roster.handshake(A, HELLO)
    greeted.roster.registration(A, registration())
    assert greeted.roster.asks() == []  # its READY will come to us


def test_where_engines_do_not_answer_a_delivery_or_an_output_is_the_proof() -> None:
    session = new_session(1, SilentDialect())
    session.roster.recall(said(0))
    (ask,) = session.roster.asks()
    assert (ask.frames[0], unpack(ask.frames[1])) == (wire.ABORT, [])
    assert kinds(session.roster.delivered(A)) == [EngineReady, SessionReady]
    session.roster.disconnected("closed", 1)
    assert session.roster.asks() != []
    assert session.roster.delivered(A) == []
    assert session.roster.asks() == []
    session.roster.lose("silence")
    assert session.roster.delivered(A) == []  # it was there all the time; that proves nothing now
    assert kinds(hear(session, outputs(stats={}))) == [EngineReady, SessionReady]


# --------------------------------------------------------------------------------- placement


def test_a_burst_on_silent_ranks_is_even() -> None:
    session = apart(8)
    placed = targets(session, 512)
    counts = [placed.count(index.to_bytes(2, "little")) for index in range(8)]
    assert max(counts) - min(counts) <= 1


def test_a_hundred_thousand_requests_leave_nothing_behind() -> None:
    """Finished, aborted, broken, lost: in any order, on three ranks that come and go."""
    rng = random.Random(7)
    session = apart(3)
    running: dict[str, int] = {}

    class Fragile(Inbox):
        def deliver(self, delta: Delta) -> None:
            if 13 in delta.ids:
                raise ValueError("13")

    for number in range(100_000):
        request_id = f"r{number}"
        (send,) = session.submit(request(request_id), Fragile())
        running[request_id] = send.identity[0]
        chosen = rng.choice(list(running)) if len(running) > 64 else request_id
        if (how := rng.random()) < 0.4:
            session.abort(chosen)
        elif how < 0.8:
            token, finish = rng.choice([(5, 1), (13, None), (13, 0), (5, 0)])
            hear(session, outputs((chosen, [token], finish), engine=running[chosen]))
            session.flush()
        else:
            continue
        del running[chosen]
        if number % 5000 == 4999:
            index = rng.randrange(3)
            session.roster.lose("gone", index.to_bytes(2, "little"))
            running = {i: where for i, where in running.items() if where != index}
            start(session, index)
    for request_id in running:
        session.abort(request_id)
    assert session.in_flight == 0
    assert [rank.in_flight for rank in session.roster.ranks] == [set(), set(), set()]
    assert session.flush() == []
