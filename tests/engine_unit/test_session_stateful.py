"""Any order of what can happen to a session, against a model of the engines' own books."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from smgd.core import Delta
from smgd.engine.dialects.vllm import VllmDialect
from smgd.engine.events import Send, SendInit, SessionEvent, SessionLost, SessionReady
from smgd.engine.session import Session
from smgd.wire import vllm as wire
from tests.engine_unit.scripted import (
    HELLO,
    READY,
    Inbox,
    outputs,
    registration,
    request,
    unpack,
)

INDEX = st.integers(0, 2)


class Fragile(Inbox):
    """Breaks on a token of 13."""

    def deliver(self, delta: Delta) -> None:
        super().deliver(delta)
        if 13 in delta.ids:
            raise ValueError("13")


class SessionMachine(RuleBasedStateMachine):
    """`running` is what the engines hold; `inboxes` is every request that ever was."""

    @initialize(engines=st.integers(1, 3), together=st.booleans())
    def begin(self, engines: int, together: bool) -> None:
        self.engines = engines
        self.together = together  # whether one process has started them all
        self.session = Session("w", VllmDialect(), b"INIT", lambda i: i[0] == "r", engines)
        self.running: dict[str, int] = {}
        self.inboxes: dict[str, Fragile] = {}
        self.finished: set[str] = set()
        self.left: set[str] = set()
        self.aborts: Counter[str] = Counter()
        self.ready = False
        self.asked: dict[int, int] = {}

    def happen(self, events: Iterable[SessionEvent]) -> None:
        """Do what the events say, as the link and the engines would."""
        for event in events:
            if isinstance(event, Send):
                self.send(event)
            elif isinstance(event, SessionReady):
                assert not self.ready
                self.ready = True
            elif isinstance(event, SessionLost):
                assert self.ready
                self.ready = False

    def send(self, send: Send) -> None:
        payload = unpack(send.frames[1])
        index = int.from_bytes(send.identity, "little")
        if send.frames[0] == wire.ADD:
            assert payload[0] not in self.running
            self.running[payload[0]] = index
        elif send.frames[0] == wire.ABORT:
            for request_id in payload:
                self.aborts[request_id] += 1
                assert self.running.pop(request_id, index) == index

    @rule(index=INDEX, step=st.sampled_from(["HELLO", "READY", "register"]))
    def handshake(self, index: int, step: str) -> None:
        """Take one step of a handshake, possibly at the wrong time or by one engine too many."""
        identity = index.to_bytes(2, "little")
        if step == "register":
            instance = "1" if self.together else f"1{index}"
            payload = registration(instance_id=instance)
            self.happen(self.session.roster.registration(identity, payload))
        elif step == "READY":
            self.happen(self.session.roster.handshake(identity, READY))
        else:
            self.hello(index)

    def hello(self, index: int) -> None:
        # One that is not in use takes nothing with it: those that went with it were lost before.
        if index < self.engines and self.session.roster.ranks[index].ready:
            self.left |= self.lost_with(index)
        events = self.session.roster.handshake(index.to_bytes(2, "little"), HELLO)
        self.happen(events)
        inits = [event for event in events if isinstance(event, SendInit)]
        assert len(inits) == (index < self.engines)

    def lost_with(self, index: int) -> set[str]:
        """Return what runs on an engine and on those that go with it."""
        together = self.together and index < self.engines
        return {i for i, where in self.running.items() if together or where == index}

    @rule(index=INDEX, answers=st.booleans())
    def ask(self, index: int, answers: bool) -> None:
        """Have the engines asked that are known but lost; one of them answers."""
        for send in self.session.roster.asks():
            self.asked[int.from_bytes(send.identity, "little")] = unpack(send.frames[1])[1]
        if answers and index in self.asked:
            reply = [self.asked[index], None, [None, False]]
            self.happen(self.session.receive([outputs(reply=reply, engine=index)]))

    @rule(count=st.integers(1, 3))
    def submit(self, count: int) -> None:
        """Submit requests, to engines that are started first if there are none."""
        if not self.ready:
            for index in range(self.engines):
                self.hello(index)
            for index in range(self.engines):
                self.handshake(index, "register")
                self.handshake(index, "READY")
        for _ in range(count):
            request_id = f"r{len(self.inboxes)}"
            self.inboxes[request_id] = Fragile()
            self.happen(self.session.submit(request(request_id), self.inboxes[request_id]))
            assert request_id in self.running

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def output(self, data: st.DataObject) -> None:
        """Send tokens for some requests; some finish, some break their receivers."""
        index = data.draw(st.sampled_from(sorted(set(self.running.values()))))
        there = sorted(i for i, where in self.running.items() if where == index)
        chosen = data.draw(st.lists(st.sampled_from(there), unique=True))
        items: list[Any] = []
        leaving = False
        for request_id in chosen:
            finish = data.draw(st.sampled_from([None, None, 0, 1, 2]))
            token = data.draw(st.sampled_from([5, 5, 5, 13]))
            items.append((request_id, [token], finish))
            if finish is not None:
                leaving = leaving or finish == 2
                del self.running[request_id]
                self.finished.add(request_id)
            elif token == 13:
                self.left.add(request_id)
        if leaving:
            self.left |= self.lost_with(index)
        self.happen(self.session.receive([outputs(*items, engine=index)]))

    @rule()
    def flush(self) -> None:
        self.happen(self.session.flush())

    @rule(data=st.data())
    def late_output(self, data: st.DataObject) -> None:
        """Send tokens for what nobody waits for any more."""
        gone = sorted(self.finished | self.left)
        if gone:
            items = [(data.draw(st.sampled_from(gone)), [5], None)]
            self.happen(self.session.receive([outputs(*items)]))

    @precondition(lambda self: self.inboxes)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.inboxes)))
        if request_id in self.running:
            self.left.add(request_id)
        self.happen(self.session.abort(request_id))

    @rule(how=st.sampled_from(["drop", "sentinel", "silence", "garbage", "garbage"]))
    def lose(self, how: str) -> None:
        """Lose the session, or nearly."""
        before, was_ready = set(self.running), self.ready
        if how == "drop":
            self.happen(self.session.roster.lose("connection closed"))
            assert not self.session.roster.ready
        elif how == "sentinel":
            self.happen(self.session.receive([wire.ENGINE_CORE_DEAD]))
        elif how == "silence":
            self.happen(self.session.roster.lose("silence"))
        else:
            self.happen(self.session.receive([b"\xc1"]))
        if was_ready and not self.ready:
            self.left |= before
        if how == "sentinel" and self.ready:
            assert self.engines > 1  # which of them it was, its connection will tell

    @invariant()
    def books_agree(self) -> None:
        if not self.inboxes:
            return
        open_ids = {i for i, _ in self.inboxes.items() if i not in self.finished | self.left}
        assert self.running.keys() == open_ids
        assert self.session.in_flight == len(open_ids)
        assert self.session.roster.ready == self.ready

    @invariant()
    def every_request_ends_once_and_is_aborted_if_it_left(self) -> None:
        for request_id, inbox in getattr(self, "inboxes", {}).items():
            broken = any(13 in delta.ids for delta in inbox.deltas)
            assert inbox.endings <= 1 + (broken and inbox.finishes)
            if request_id in self.finished:
                assert inbox.endings >= 1
                assert self.aborts[request_id] == 0
            else:
                assert self.aborts[request_id] == (request_id in self.left)


SessionMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSession = SessionMachine.TestCase
