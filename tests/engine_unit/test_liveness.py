"""Connections that come and go, in the orders in which monitors report them."""

from __future__ import annotations

from smgd.engine.liveness import Connections, Patience
from smgd.engine.transport import PeerEvent


def up(connection: int) -> PeerEvent:
    return PeerEvent("connected", connection)


def down(connection: int) -> PeerEvent:
    return PeerEvent("disconnected", connection)


def test_an_end_is_noticed_and_the_rest_counted() -> None:
    connections = Connections()
    assert not connections.ended([up(7), up(8)])
    assert connections.count == 2
    assert connections.ended([down(8)])
    assert connections.count == 1
    assert connections.ended([down(7)])
    assert connections.count == 0
    assert not connections.ended([up(7)])  # the number is used again
    assert connections.ended([down(7)])


def test_a_restart_reported_late_leaves_one() -> None:
    connections = Connections()
    assert not connections.ended([up(7)])
    assert connections.ended([up(8), down(7)])  # the new one was there first
    assert connections.count == 1
    assert connections.ended([down(8), up(9)])  # or it was reported along with the end
    assert connections.count == 1


def test_what_began_before_anybody_watched_does_not_count() -> None:
    connections = Connections()
    assert not connections.ended([down(99)])
    assert connections.count == 0


def test_patience() -> None:
    patience = Patience(heartbeat=60, silence=300, prefill_rate=2000)
    assert patience.ask_after == 6
    assert patience.silence_with(0) == 300
    assert patience.silence_with(100_000) == 350
