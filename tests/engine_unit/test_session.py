"""Transcripts: what an engine says, and what the session makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from smgd.core import Delta, EngineInfo, EngineLoad, Write
from smgd.engine.dialects.vllm import VllmDialect
from smgd.engine.events import (
    AbortForeign,
    EngineReady,
    Notice,
    ReceiverBroke,
    Send,
    SendInit,
    SessionEvent,
    SessionLost,
    SessionReady,
)
from smgd.engine.session import MAX_FOREIGN, Session
from smgd.errors import EngineLostError, LocalProtocolError
from smgd.wire import vllm as wire
from tests.engine_unit import recorded
from tests.engine_unit.scripted import (
    HELLO,
    READY,
    Inbox,
    outputs,
    registration,
    request,
    unpack,
)

A, B = b"\x00\x00", b"\x01\x00"
URL = "ipc:///tmp/w"
GARBAGE = b"\xc1"


def is_ours(request_id: str) -> bool:
    return request_id.startswith("r")


def new_session(engines: int = 1) -> Session:
    return Session(URL, VllmDialect(), b"INIT", is_ours, engines)


def ready_session(engines: int = 1, ready: bytes = READY) -> Session:
    session = new_session(engines)
    for index in range(engines):
        identity = index.to_bytes(2, "little")
        session.roster.handshake(identity, HELLO)
        session.roster.registration(identity, registration())
        session.roster.handshake(identity, ready)
    assert session.roster.ready
    return session


def submit(session: Session, *ids: str) -> list[Inbox]:
    """Submit requests and return their receivers."""
    inboxes = []
    for request_id in ids:
        inboxes.append(Inbox())
        session.submit(request(request_id), inboxes[-1])
    return inboxes


def call_of(events: Any) -> int:
    """Return the number of the only call among events."""
    [number] = {
        unpack(event.frames[1])[1]
        for event in events
        if isinstance(event, Send) and event.frames[0] == wire.UTILITY
    }
    return int(number)


def answer(call_id: int, engine: int = 0) -> bytes:
    return outputs(reply=[call_id, None, [None, False]], engine=engine)


def kinds(events: Any) -> list[type]:
    return [type(event) for event in events]


def aborted(events: Any) -> list[str]:
    """Return the ids of all ABORTs among events."""
    return [
        request_id
        for event in events
        if isinstance(event, Send | AbortForeign) and event.frames[0] == wire.ABORT
        for request_id in unpack(event.frames[1])
    ]


# --------------------------------------------------------------------------------- restarts


def test_a_hello_in_a_running_session_ends_it() -> None:
    session = ready_session()
    (inbox,) = submit(session, "r1")
    events = session.roster.handshake(A, HELLO)
    assert events[0] == SessionLost("engine 0 was started anew", 1)
    assert events[-1] == SendInit(A, b"INIT")
    assert str(inbox.errors[0]) == f"engine of worker {URL} lost: engine 0 was started anew"
    with pytest.raises(EngineLostError, match="waiting for READY and registration of engine 0"):
        session.submit(request("r2"), Inbox())
    session.roster.registration(A, registration())
    assert kinds(session.roster.handshake(A, READY)) == [EngineReady, SessionReady]


def test_of_several_engines_only_the_one_that_restarts_begins_again() -> None:
    session = ready_session(2)
    events = session.roster.handshake(B, HELLO)
    assert kinds(events) == [SessionLost, Notice, SendInit]
    session.roster.registration(B, registration())
    assert kinds(session.roster.handshake(B, READY)) == [EngineReady]
    assert session.roster.awaited == "an answer or HELLO of engine 0"
    asks = session.roster.asks()
    assert [ask.identity for ask in asks] == [A]
    assert kinds(session.receive([answer(call_of(asks))])) == [EngineReady, SessionReady]


# --------------------------------------------------------------------------------- requests


def test_a_request_is_sent_and_answered() -> None:
    session = ready_session()
    inbox = Inbox()
    (send,) = session.submit(request("r1"), inbox)
    assert send.identity == A
    assert send.frames[0] == wire.ADD
    assert session.in_flight == 1
    assert session.receive([outputs(("r1", [5], None), ("r1", [6], None))]) == []
    assert inbox.flushes == 0
    assert session.flush() == []
    assert inbox.flushes == 1  # once for all that was there
    session.receive([outputs(("r1", [7], 1))])
    session.flush()
    assert (inbox.ids, inbox.finishes, inbox.flushes) == ([5, 6, 7], 1, 2)
    assert session.in_flight == 0
    assert session.flush() == []
    assert inbox.flushes == 2


def test_nothing_is_submitted_before_an_engine_is_there() -> None:
    with pytest.raises(EngineLostError, match="no engine has dialled in yet"):
        new_session().submit(request("r1"), Inbox())


def test_an_id_in_flight_is_refused() -> None:
    session = ready_session()
    submit(session, "r1")
    with pytest.raises(LocalProtocolError, match="request id r1 is in flight already"):
        session.submit(request("r1"), Inbox())
    assert session.in_flight == 1


def test_what_cannot_be_encoded_is_not_in_flight() -> None:
    session = ready_session()
    with pytest.raises(LocalProtocolError, match="cannot encode"):
        session.submit(request("r1", prompt_ids=[2**70]), Inbox())
    assert session.in_flight == 0


def test_an_abort_is_sent_once_and_late_outputs_are_ignored() -> None:
    session = ready_session()
    (inbox,) = submit(session, "r1")
    session.receive([outputs(("r1", [5], None))])
    assert aborted(session.abort("r1")) == ["r1"]
    assert session.abort("r1") == []
    assert session.flush() == []
    assert session.receive([outputs(("r1", [6], None), ("r1", [7], 1))]) == []
    session.flush()
    assert (inbox.ids, inbox.flushes, inbox.endings) == ([5], 0, 0)


def test_no_abort_after_the_finish() -> None:
    session = ready_session()
    submit(session, "r1")
    session.receive([outputs(("r1", [5], 0))])
    assert session.abort("r1") == []


def test_an_abort_that_nobody_asked_for_is_an_engine_that_leaves() -> None:
    session = ready_session()
    first, second, third = submit(session, "r1", "r2", "r3")
    events = session.receive([outputs(("r1", [], 2), ("r2", [5], None))])
    reason = "it has aborted a request, as engines do that stop"
    assert events[0] == SessionLost(reason, 2)
    assert aborted(events) == ["r2", "r3"]
    for inbox in (first, second, third):
        assert str(inbox.errors[0]) == f"engine of worker {URL} lost: {reason}"
    assert (second.ids, second.flushes) == ([5], 1)  # what came before is not lost
    assert session.receive([outputs(stats={})]) == []  # its last words
    assert session.roster.awaited == "an answer or HELLO of engine 0"
    assert kinds(session.receive([answer(call_of(session.roster.asks()))])) == [
        EngineReady,
        SessionReady,
    ]


def test_only_the_answer_to_a_call_after_the_loss_counts() -> None:
    session = ready_session()
    submit(session, "r1")
    session.receive([outputs(("r1", [], 2))])
    before = call_of(session.roster.asks())
    session.roster.lose("connection closed")
    assert session.receive([answer(before)]) == []
    assert session.receive([answer(before + 7)]) == []  # nobody has asked that yet
    assert not session.roster.ready
    assert session.receive([answer(call_of(session.roster.asks()))]) != []
    assert session.roster.ready


# ---------------------------------------------------------------------------------- strays


def test_what_a_former_life_left_running_is_aborted_once() -> None:
    session = new_session()
    events = session.receive([outputs(("old", [5], None), ("r9", [5], None))])
    assert kinds(events) == [AbortForeign]
    assert aborted(events) == ["old"]
    assert session.receive([outputs(("old", [6], None))]) == []
    session.not_aborted(["old"])  # it could not be sent: the engine was not connected yet
    assert aborted(session.receive([outputs(("old", [7], None))])) == ["old"]
    assert session.receive([outputs(("gone", [7], 1))]) == []  # it has finished by itself
    assert session.receive([outputs(("other", [7], None), engine=9)]) == []


def test_the_memory_of_former_lives_is_bounded() -> None:
    session = ready_session()
    for number in range(MAX_FOREIGN + 1):
        session.receive([outputs((f"old{number}", [5], None))])
    assert aborted(session.receive([outputs(("old0", [5], None))])) == ["old0"]
    assert aborted(session.receive([outputs((f"old{MAX_FOREIGN}", [5], None))])) == []


# -------------------------------------------------------------------------- broken receivers


class Broken(Inbox):
    """Raises where a test says so."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def deliver(self, delta: Delta) -> None:
        super().deliver(delta)
        if self.where == "deliver":
            raise ZeroDivisionError("deliver")

    def flush(self) -> None:
        super().flush()
        if self.where == "flush":
            raise ZeroDivisionError("flush")

    def fail(self, error: Exception) -> None:
        super().fail(error)
        if self.where == "fail":
            raise ZeroDivisionError("fail")


@pytest.mark.parametrize("where", ["deliver", "flush"])
@pytest.mark.parametrize("finish", [None, 1])
def test_a_receiver_that_raises_ends_its_own_request_only(where: str, finish: int | None) -> None:
    session = ready_session()
    broken = Broken(where)
    session.submit(request("r1"), broken)
    (inbox,) = submit(session, "r2")
    events = list(session.receive([outputs(("r1", [5], finish), ("r2", [6], None))]))
    events += session.flush()
    assert aborted(events) == ([] if finish else ["r1"])
    (broke,) = [event for event in events if isinstance(event, ReceiverBroke)]
    assert (broke.request_id, str(broke.error)) == ("r1", where)
    assert [str(error) for error in broken.errors] == [where]
    assert (inbox.ids, inbox.flushes) == ([6], 1)
    session.receive([outputs(("r1", [7], None), ("r2", [8], 1))])
    session.flush()
    assert (len(broken.deltas), inbox.ids) == (1, [6, 8])


def test_a_receiver_that_raises_on_failure_does_not_spare_the_others() -> None:
    session = ready_session()
    session.submit(request("r1"), Broken("fail"))
    (inbox,) = submit(session, "r2")
    events = session.roster.lose("gone")
    assert SessionLost("gone", 2) in events
    assert [event.request_id for event in events if isinstance(event, ReceiverBroke)] == ["r1"]
    assert len(inbox.errors) == 1


def test_a_receiver_may_abort_itself_and_its_siblings() -> None:
    class Stopping(Inbox):
        def __init__(self) -> None:
            super().__init__()
            self.sent: list[SessionEvent] = []

        def flush(self) -> None:
            super().flush()
            self.sent += session.abort("r1")
            self.sent += session.abort("r2")

        def fail(self, error: Exception) -> None:
            super().fail(error)
            self.sent += session.abort("r1")
            self.sent += session.abort("r2")

    session = ready_session()
    stopping, sibling = Stopping(), Inbox()
    session.submit(request("r1"), stopping)
    session.submit(request("r2"), sibling)
    session.receive([outputs(("r1", [5], None), ("r2", [5], None))])
    session.flush()
    assert aborted(stopping.sent) == ["r1", "r2"]
    assert (stopping.flushes, sibling.flushes, session.in_flight) == (1, 0, 0)
    session.submit(request("r1"), stopping)
    session.submit(request("r2"), sibling)
    assert aborted([*session.roster.lose("gone"), *stopping.sent[2:]]) == ["r1", "r2"]


# ------------------------------------------------------------------- rendering, then writing


class Writing(Inbox):
    """Notes in `steps` when it renders and when it writes, and raises at the step that is given."""

    def __init__(self, name: str, steps: list[str], bad: str = "") -> None:
        super().__init__()
        self.name = name
        self.steps = steps
        self.bad = bad

    def _step(self, what: str) -> None:
        if what == self.bad:
            raise ZeroDivisionError(what)
        self.steps.append(f"{what} {self.name}")

    def flush(self) -> Write:  # type: ignore[override]
        self._step("render")
        return lambda: self._step("write")


def test_all_render_before_the_first_writes() -> None:
    session = ready_session()
    steps: list[str] = []
    for name in ("r1", "r2", "r3"):
        session.submit(request(name), Writing(name, steps))
    session.receive([outputs(("r2", [5], None), ("r1", [6], None))])
    session.receive([outputs(("r2", [7], None))])
    assert session.flush() == []
    assert steps == ["render r2", "render r1", "write r2", "write r1"]


@pytest.mark.parametrize("bad", ["render", "write"])
def test_who_cannot_render_or_write_ends_alone(bad: str) -> None:
    session = ready_session()
    steps: list[str] = []
    broken = Writing("r1", steps, bad)
    session.submit(request("r1"), broken)
    session.submit(request("r2"), Writing("r2", steps))
    session.receive([outputs(("r1", [5], None), ("r2", [6], None))])
    events = session.flush()
    assert aborted(events) == ["r1"]
    assert [str(error) for error in broken.errors] == [bad]
    assert steps[-1] == "write r2"
    session.receive([outputs(("r1", [7], None), ("r2", [8], None))])
    assert session.flush() == []
    assert steps[-2:] == ["render r2", "write r2"]


# ------------------------------------------------------------------------------------ loss


def test_the_sentinel_ends_the_session() -> None:
    session = ready_session()
    (inbox,) = submit(session, "r1")
    events = session.receive([b"ENGINE_CORE_DEAD"])
    assert events[0] == SessionLost("the engine said that it is dead (ENGINE_CORE_DEAD)", 1)
    assert isinstance(inbox.errors[0], EngineLostError)
    assert session.roster.info is None
    assert session.receive([outputs(("r1", [5], 1))]) == []  # it was in the queue
    assert not session.roster.ready
    assert session.roster.awaited == "an answer or HELLO of engine 0"
    assert inbox.endings == 1


def test_what_was_delivered_before_a_loss_is_flushed_before_the_failure() -> None:
    session = ready_session()
    heard: list[str] = []

    class Listening(Inbox):
        def flush(self) -> None:
            heard.append("flush")

        def fail(self, error: Exception) -> None:
            heard.append("fail")

    session.submit(request("r1"), Listening())
    session.receive([outputs(("r1", [5], None))])
    session.receive([b"ENGINE_CORE_DEAD"])
    session.flush()
    assert heard == ["flush", "fail"]


def test_three_undecodable_messages_in_a_row_end_the_session() -> None:
    session = ready_session()
    (inbox,) = submit(session, "r1")
    assert kinds(session.receive([GARBAGE])) == [Notice]
    assert kinds(session.receive([GARBAGE])) == [Notice]
    session.receive([outputs(("r1", [5], None))])
    assert kinds(session.receive([GARBAGE])) == [Notice]
    assert kinds(session.receive([GARBAGE])) == [Notice]
    events = session.receive([GARBAGE])
    assert SessionLost("3 outputs in a row could not be decoded", 1) in events
    assert aborted(events) == ["r1"]
    assert inbox.endings == 1
    assert session.receive([GARBAGE]) == []  # the log has heard it


def test_an_engine_that_was_only_slow_comes_back_with_its_answer() -> None:
    session = ready_session()
    (inbox,) = submit(session, "r1")
    events = session.roster.lose("no output for 300s")
    assert events[0] == SessionLost("no output for 300s", 1)
    assert aborted(events) == ["r1"]
    asks = session.roster.asks()
    assert asks == [Send(A, VllmDialect().heartbeat(1))]
    assert inbox.endings == 1
    assert session.roster.lose("again") == []
    with pytest.raises(EngineLostError, match="no output for 300s"):
        session.submit(request("r2"), Inbox())
    assert session.receive([GARBAGE]) != []
    assert session.receive([outputs(stats={})]) == []  # computed before it was asked
    assert not session.roster.ready
    found = session.receive([answer(call_of(session.roster.asks()))])
    assert found[0] == EngineReady(
        0, session.roster.info or EngineInfo(max_model_len=0), "recovered"
    )
    assert found[1:] == [SessionReady()]
    assert session.roster.asks() == []
    submit(session, "r2")


def test_a_lost_engine_that_is_started_anew_begins_with_its_handshake() -> None:
    session = ready_session()
    session.roster.lose("no output for 300s")
    asked = call_of(session.roster.asks())
    session.roster.handshake(A, HELLO)
    assert session.receive([answer(asked)]) == []
    assert session.roster.asks() == []
    session.roster.registration(A, registration())
    assert kinds(session.roster.handshake(A, READY)) == [EngineReady, SessionReady]


def test_a_loss_before_the_handshake_is_complete_is_none() -> None:
    session = new_session()
    session.roster.handshake(A, HELLO)
    assert session.roster.lose("connection closed") == []
    assert session.roster.awaited == "READY and registration of engine 0"
    with pytest.raises(EngineLostError, match="waiting for READY and registration of engine 0"):
        session.submit(request("r1"), Inbox())


# ----------------------------------------------------------------------------------- ranks


def test_requests_go_to_the_rank_with_the_lowest_score() -> None:
    session = ready_session(2)

    def target(request_id: str) -> bytes:
        return session.submit(request(request_id), Inbox())[0].identity

    assert [target(f"r{i}") for i in range(4)] == [A, B, A, B]
    busy = {"num_running_reqs": 5, "num_waiting_reqs": 1, "kv_cache_usage": 0.8}
    session.receive([outputs(stats=busy, engine=0)])
    assert session.roster.load == EngineLoad(5, 1, 0.4)
    assert session.roster.rank_loads == [EngineLoad(5, 1, 0.8), EngineLoad()]
    assert [target(f"r{i}") for i in range(4, 7)] == [B, B, B]
    session.receive([outputs(("r0", [1], 1), ("r2", [1], 1))])
    assert session.roster.rank_loads[0] == EngineLoad(0, 0, 0.8)  # its last request has ended
    assert target("r7") == A
    assert aborted(session.abort("r7")) == ["r7"]


def test_an_abort_goes_to_the_rank_that_has_the_request() -> None:
    session = ready_session(2)
    submit(session, "r0", "r1")
    assert [send.identity for send in session.abort("r1")] == [B]
    assert [send.identity for send in session.abort("r0")] == [A]


def test_a_loss_aborts_on_every_rank() -> None:
    session = ready_session(2)
    submit(session, "r0", "r1", "r2")
    events = session.roster.lose("gone")
    sends = [event for event in events if isinstance(event, Send)]
    assert [(send.identity, unpack(send.frames[1])) for send in sends] == [
        (A, ["r0", "r2"]),
        (B, ["r1"]),
    ]
    assert (
        session.roster.awaited == "an answer or HELLO of engine 0, an answer or HELLO of engine 1"
    )


def test_ranks_of_a_moe_model_are_woken_together() -> None:
    ready = recorded.message("0.32", "moe_handshake", "handshake")
    said = [m for m in recorded.messages("0.32", "handshake") if m.case == "moe_handshake"][-1]
    assert ready.meaning["status"] == "HELLO"
    session = ready_session(2, said.frames[1])

    def waves(sends: list[Send]) -> list[Any]:
        return [(s.identity, unpack(s.frames[1])) for s in sends if s.frames[0] == b"\x02"]

    first = session.submit(request("r0"), Inbox())
    assert first[0].identity == A
    assert waves(first) == [(B, [1, 0])]
    assert waves(session.submit(request("r1"), Inbox())) == [(A, [2, 1])]
    session.receive([outputs(wave_complete=9, engine=1)])
    assert waves(session.submit(request("r2"), Inbox())) == [(B, [10, 0])]
    assert waves(ready_session(2).submit(request("r0"), Inbox())) == []
