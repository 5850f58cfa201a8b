"""Connections that come and go, in the orders in which monitors report them."""

from __future__ import annotations

from smgd.engine.liveness import Connections
from smgd.engine.transport import PeerEvent


def up(connection: int) -> PeerEvent:
    return PeerEvent("connected", connection)


def down(connection: int) -> PeerEvent:
    return PeerEvent("disconnected", connection)


def test_the_end_of_the_only_connection_is_a_loss() -> None:
    connections = Connections(1)
    assert not connections.lost([up(7)])
    assert connections.lost([down(7)])
    assert not connections.lost([up(7)])  # the number is used again
    assert connections.lost([down(7)])


def test_a_restart_reported_late_is_no_loss() -> None:
    connections = Connections(1)
    assert not connections.lost([up(7)])
    assert not connections.lost([up(8), down(7)])  # the new one was there first
    assert not connections.lost([down(8), up(9)])  # or it was reported along with the end
    assert connections.lost([down(9)])


def test_each_engine_of_several_counts() -> None:
    connections = Connections(2)
    assert not connections.lost([up(7), up(8)])
    assert connections.lost([down(8)])
    assert connections.lost([down(7)])


def test_others_may_come_and_go() -> None:
    connections = Connections(1)
    assert not connections.lost([up(7), up(8), down(8)])
    assert not connections.lost([down(99)])  # it began before anybody watched
