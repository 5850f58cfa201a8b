"""Handshakes and losses: who can be used, and who is told that others cannot be any more."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from smgd.core import EngineCounts
from smgd.engine.dialects.vllm import VllmDialect
from smgd.engine.events import (
    EngineReady,
    EnginesLost,
    Notice,
    SendInit,
    SessionEvent,
    SessionLost,
    SessionReady,
)
from smgd.engine.handshake import Rank, Said
from smgd.engine.roster import OnLost, Roster
from tests.engine_unit import recorded
from tests.engine_unit.scripted import HELLO, READY, pack, registration
from tests.engine_unit.test_session import kinds

A, B = b"\x00\x00", b"\x01\x00"


def nothing_runs(lost: Sequence[Rank], reason: str) -> list[SessionEvent]:
    return []


def new_roster(engines: int = 1, on_lost: OnLost = nothing_runs) -> Roster:
    return Roster(VllmDialect(), b"INIT", engines, 1, EngineCounts(), on_lost)


# -------------------------------------------------------------------------------- handshake


@pytest.mark.parametrize("version", recorded.VERSIONS)
def test_the_recorded_handshake(version: str) -> None:
    roster = new_roster()
    events: list[SessionEvent] = []
    for message in recorded.messages(version, "handshake"):
        if message.case == "handshake":
            events += roster.handshake(message.frames[0], message.frames[1])
    assert events == [SendInit(A, b"INIT")]
    message = recorded.message(version, "handshake", "input")
    ready = roster.registration(message.frames[0], message.frames[1])
    assert kinds(ready) == [EngineReady, SessionReady]
    assert roster.info is not None
    assert roster.info.max_model_len == 2048


def test_registration_may_come_before_ready_or_after() -> None:
    roster = new_roster()
    assert roster.awaited == "HELLO of engine 0"
    assert roster.step == "HELLO"
    assert roster.handshake(A, HELLO) == [SendInit(A, b"INIT")]
    assert roster.awaited == "READY and registration of engine 0"
    assert roster.step == "READY"
    assert roster.registration(A, registration()) == []
    assert roster.awaited == "READY of engine 0"
    assert kinds(roster.handshake(A, READY)) == [EngineReady, SessionReady]
    assert (roster.awaited, roster.step) == ("", "")
    other = new_roster()
    other.handshake(A, HELLO)
    assert other.handshake(A, READY) == []
    assert other.awaited == "registration of engine 0"
    assert other.step == "registration"
    assert kinds(other.registration(A, registration())) == [EngineReady, SessionReady]


def test_an_engine_that_was_greeted_by_a_former_life_is_served() -> None:
    roster = new_roster()
    assert roster.registration(A, registration()) == []
    assert kinds(roster.handshake(A, READY)) == [EngineReady, SessionReady]


def test_several_engines_interleave() -> None:
    roster = new_roster(2)
    assert roster.handshake(B, HELLO) == [SendInit(B, b"INIT")]
    assert roster.handshake(A, HELLO) == [SendInit(A, b"INIT")]
    roster.registration(B, registration())
    assert kinds(roster.handshake(B, READY)) == [EngineReady]
    assert not roster.ready
    assert roster.awaited == "READY and registration of engine 0"
    roster.handshake(A, READY)
    assert kinds(roster.registration(A, registration())) == [EngineReady, SessionReady]


def test_an_engine_that_starts_anew_while_it_loads_begins_again() -> None:
    roster = new_roster()
    roster.handshake(A, HELLO)
    roster.registration(A, registration())
    assert roster.handshake(A, HELLO) == [SendInit(A, b"INIT")]
    assert roster.handshake(A, READY) == []
    assert roster.awaited == "registration of engine 0"


def test_one_engine_too_many_is_refused_with_what_was_expected() -> None:
    roster = new_roster(2)
    for events in (
        roster.handshake(b"\x02\x00", HELLO),
        roster.registration(b"\x02\x00", b""),
    ):
        (notice,) = events
        assert isinstance(notice, Notice)
        assert "identity 0200 has dialled in" in notice.text
        assert (
            "waits for 2 engine(s), with indices 0 to 1: --zmq-engine-count must be" in notice.text
        )


@pytest.mark.parametrize("identity", [b"", b"\x00", b"\x00\x00\x00", b"\xff\xff"])
def test_other_identities_are_refused(identity: bytes) -> None:
    assert kinds(new_roster().handshake(identity, HELLO)) == [Notice]


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (pack({"status": "BYE"}), "engine 0 said 'BYE' where HELLO or READY was expected"),
        (b"", "undecodable handshake message"),
        (pack(["HELLO"]), "undecodable handshake message"),
    ],
)
def test_other_handshake_messages_are_refused(payload: bytes, text: str) -> None:
    (notice,) = new_roster().handshake(A, payload)
    assert isinstance(notice, Notice)
    assert text in notice.text


def test_a_bad_registration_changes_nothing() -> None:
    roster = new_roster()
    roster.handshake(A, HELLO)
    roster.handshake(A, READY)
    assert kinds(roster.registration(A, b"\x80")) == [Notice]
    assert not roster.ready
    assert kinds(roster.registration(A, registration())) == [EngineReady, SessionReady]
    assert roster.registration(A, registration(max_model_len=7)) == []
    assert roster.info is not None
    assert roster.info.max_model_len == 7


# ------------------------------------------------------------------------------------ loss


def test_a_loss_is_told_once_nothing_goes_to_the_engine_any_more() -> None:
    told: list[tuple[list[int], str, list[int], str | None]] = []

    def on_lost(lost: Sequence[Rank], reason: str) -> list[SessionEvent]:
        told.append(([rank.index for rank in lost], reason, roster.usable, roster.unready))
        return [Notice("what follows")]

    roster = new_roster(2, on_lost)
    for index, identity in enumerate((A, B)):
        roster.handshake(identity, HELLO)
        roster.registration(identity, registration(instance_id=f"process {index}"))
        roster.handshake(identity, READY)
    what_follows = Notice("what follows")
    assert roster.lose("gone", B) == [EnginesLost([1], "gone", 0), what_follows]
    assert roster.lose("again", B) == []
    reason = "engine 0 was started anew"
    events = roster.handshake(A, HELLO)
    assert events[:2] == [SessionLost(reason, 0), what_follows]
    assert kinds(events[2:]) == [Notice, SendInit]
    assert told == [([1], "gone", [0], None), ([0], reason, [], reason)]


def test_two_engines_with_one_index_are_told_of() -> None:
    roster = new_roster()
    start(roster)
    *_, notice, init = roster.handshake(A, HELLO)
    assert isinstance(notice, Notice)
    assert notice.text.startswith("duplicate HELLO of engine 0, which is still connected")
    assert "two engines with index 0 dial the same address" in notice.text
    assert init == SendInit(A, b"INIT")
    assert kinds(roster.handshake(A, HELLO)) == [SendInit]  # nobody else is in use


def test_a_restart_is_no_second_engine() -> None:
    closed = "the output connection was closed"
    roster = new_roster()
    start(roster)
    roster.disconnected(closed, 0)
    assert kinds(roster.handshake(A, HELLO)) == [SendInit]
    several = new_roster(2)
    start(several, A, instance_id="a")
    start(several, B, instance_id="b")
    several.disconnected(closed, 1)  # whose, is open
    assert kinds(several.handshake(A, HELLO)) == [EnginesLost, SendInit]


# -------------------------------------------------------------------------------- reasons


def start(roster: Roster, identity: bytes = A, **fields: str) -> None:
    roster.handshake(identity, HELLO)
    roster.registration(identity, registration(**fields))
    roster.handshake(identity, READY)


def test_the_reason_follows_the_handshake() -> None:
    roster = new_roster()
    assert roster.unready == "no engine has dialled in yet"
    roster.handshake(A, HELLO)
    assert roster.unready == "waiting for READY and registration of engine 0"
    roster.handshake(A, b"\x80")
    roster.registration(A, b"\x80")
    assert roster.unready == "waiting for READY and registration of engine 0"
    roster.handshake(A, READY)
    assert roster.unready == "waiting for registration of engine 0"
    roster.registration(A, registration())
    assert roster.unready is None


def test_the_reason_names_all_that_a_group_waits_for() -> None:
    roster = new_roster(2)
    start(roster, instance_id="a")
    assert roster.unready == "waiting for HELLO of engine 1"
    roster.handshake(B, HELLO)
    assert roster.unready == "waiting for READY and registration of engine 1"
    roster.lose("gone", A)  # it does not take requests yet, but was there
    assert roster.unready == "gone"
    roster.handshake(B, READY)
    assert roster.unready == "waiting for an answer or HELLO of engine 0, registration of engine 1"
    assert roster.step == "HELLO"


def test_of_several_signs_of_a_loss_the_first_is_the_reason() -> None:
    roster = new_roster()
    start(roster)
    closed = "the output connection was closed"
    assert roster.disconnected(closed, 0) == [SessionLost(closed, 0)]
    for later in ("no connection with that identity", "the input connection was closed"):
        assert roster.lose(later, A) == []
        assert roster.disconnected(later, 0) == []
        assert roster.lose(later) == []
        assert roster.unready == closed
    start(roster)
    assert roster.unready is None
    roster.lose("no connection with that identity", A)
    assert roster.unready == "no connection with that identity"


def test_the_reason_ends_with_what_an_engine_says_next() -> None:
    roster = new_roster()
    start(roster)
    roster.lose("gone")
    roster.handshake(A, HELLO)
    assert roster.unready == "waiting for READY and registration of engine 0"
    roster.lose("no connection with that identity", A)  # a late one of its predecessor
    assert roster.unready == "waiting for READY and registration of engine 0"


def test_the_reason_is_that_of_the_engine_that_was_lost_last() -> None:
    roster = new_roster(2)
    start(roster, A, instance_id="a")
    start(roster, B, instance_id="b")
    roster.lose("first", A)
    assert roster.unready is None
    roster.lose("second", B)
    roster.lose("no connection with that identity", A)
    assert roster.unready == "second"


def test_the_reason_of_engines_of_a_former_life() -> None:
    roster = new_roster()
    roster.recall([Said(0, registration())])
    assert roster.unready == "an engine was here before, and has not answered yet"
    roster.lose("socket failed: first")
    roster.lose("socket failed: second")
    assert roster.unready == "socket failed: first"
    roster.handshake(A, HELLO)
    assert roster.unready == "waiting for READY and registration of engine 0"


def test_a_rank_does_not_serve_before_its_family_is_ready() -> None:
    """Of two processes with two ranks each, both lost, one is started anew rank by rank."""
    identities = [bytes([rank, 0]) for rank in range(4)]
    roster = new_roster(4)
    for identity, process in zip(identities, "aabb", strict=True):
        roster.handshake(identity, HELLO)
        roster.registration(identity, registration(instance_id=process))
        roster.handshake(identity, READY)
    roster.lose("slow")
    roster.handshake(identities[0], HELLO)
    roster.handshake(identities[1], HELLO)
    roster.registration(identities[0], registration(instance_id="c"))
    assert kinds(roster.handshake(identities[0], READY)) == [EngineReady, SessionReady]
    assert roster.usable == [0]
    [lost] = roster.registration(identities[1], registration(instance_id="c"))
    assert isinstance(lost, SessionLost)
    assert lost.reason.startswith("waiting for READY of engine 1")
    assert (lost.failed, roster.usable, roster.ready) == (0, [], False)
    assert kinds(roster.handshake(identities[1], READY)) == [EngineReady, SessionReady]
    assert roster.usable == [0, 1]
