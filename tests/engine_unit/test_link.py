"""Deadlines and losses of a link, on a clock that jumps and sockets in memory.

The test's own task is at a checkpoint only in `settled` and in `trio.sleep`, so what happens
between two of them happens at once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs
from trio.testing import MockClock

from smgd.core import Delta, RequestIds
from smgd.engine import paths
from smgd.engine.dialects.vllm import VllmDialect
from smgd.engine.handshake import Said
from smgd.engine.link import EngineLink
from smgd.engine.record import Former, RecordFile
from smgd.engine.transport import PeerEvent
from smgd.errors import EngineLostError, WorkerError
from smgd.wire import vllm as wire
from tests.engine_unit.memory import MemoryWorker
from tests.engine_unit.scripted import Inbox, outputs, pack, registration, request, unpack

settled = trio.testing.wait_all_tasks_blocked


class Bench:
    """A link on sockets in memory, and what it has reported."""

    def __init__(self, directory: Path, engines: int = 1) -> None:
        self.engine = MemoryWorker()
        self.changes: list[str] = []
        self.addresses = paths.derive(f"ipc://{directory}/engine-0")
        self.ids = RequestIds()
        self.link = EngineLink(
            self.addresses,
            VllmDialect(),
            self.ids,
            self.engine.bind,
            on_ready=lambda: self.changes.append("ready"),
            on_lost=self.changes.append,
            engines=engines,
        )

    @asynccontextmanager
    async def running(self, started: bool = True) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            await nursery.start(self.link.run)
            if started:
                await self.engine.start()
                assert self.changes == ["ready"]
            yield
            nursery.cancel_scope.cancel()

    def submit(self) -> tuple[str, Inbox]:
        inbox, request_id = Inbox(), self.ids.next()
        self.link.submit_nowait(request(request_id), inbox)
        return request_id, inbox


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_a_request_goes_out_and_its_output_comes_back(bench: Bench) -> None:
    async with bench.running():
        request_id, inbox = bench.submit()
        assert bench.engine.ids_of(wire.ADD) == [request_id]  # at once, without a checkpoint
        bench.engine.say(outputs((request_id, [5], None)), outputs((request_id, [6], 1)))
        await settled()
        assert (inbox.ids, inbox.flushes) == ([5, 6], 1)
        bench.link.abort_nowait(request_id)
        assert bench.engine.ids_of(wire.ABORT) == []


async def test_the_binding_is_logged_as_the_seed_has_it(bench: Bench) -> None:
    with capture_logs() as logs:
        async with bench.running():
            pass
    addresses = bench.addresses
    assert logs[0]["event"] == (
        f"Binding ZMQ client for worker {addresses.url} "
        f"(handshake={addresses.handshake}, engines=1)"
    )
    assert [log["event"] for log in logs[1:3]] == ["engine ready", "ZMQ worker ready"]


# -------------------------------------------------------------------------------- deadlines


async def test_silence_is_measured_from_the_last_output(
    bench: Bench, autojump_clock: MockClock
) -> None:
    bench.engine.answering = True
    async with bench.running():
        request_id, inbox = bench.submit()
        start = trio.current_time()
        for _ in range(3):
            await trio.sleep(299)
            bench.engine.say(outputs((request_id, [5], None)))
        await inbox.ended()
        assert trio.current_time() - start == pytest.approx(3 * 299 + 300, abs=0.01)
        assert str(inbox.errors[0]).endswith("no output for 300s with requests in flight")
        assert bench.engine.ids_of(wire.ABORT) == [request_id]
        assert bench.changes == ["ready", "no output for 300s with requests in flight"]


async def test_an_idle_engine_may_be_silent(bench: Bench, autojump_clock: MockClock) -> None:
    bench.engine.answering = True
    async with bench.running():
        await trio.sleep(10_000)
        first, _ = bench.submit()
        await trio.sleep(200)
        bench.engine.say(outputs((first, [5], 1)))
        await settled()
        calls = bench.engine.calls
        await trio.sleep(10_000)
        second, _ = bench.submit()
        bench.link.abort_nowait(second)
        await trio.sleep(10_000)
        assert bench.changes == ["ready"]
        assert bench.engine.calls == calls, "nobody is asked who has nothing to do"
        _, inbox = bench.submit()
        start = trio.current_time()
        await inbox.ended()
        assert trio.current_time() - start == pytest.approx(300, abs=0.01)


async def test_prompts_that_are_still_to_be_read_extend_the_silence(
    bench: Bench, autojump_clock: MockClock
) -> None:
    bench.engine.answering = True
    async with bench.running():
        inboxes = [Inbox(), Inbox()]
        for inbox in inboxes:
            long = request(bench.ids.next(), prompt_ids=[1] * 20_000)
            bench.link.submit_nowait(long, inbox)
        start = trio.current_time()
        await inboxes[0].ended()
        assert trio.current_time() - start == pytest.approx(300 + 40_000 / 2000)
        assert str(inboxes[0].errors[0]).endswith("no output for 320s with requests in flight")


async def test_a_busy_engine_that_says_nothing_is_asked_and_lost_without_an_answer(
    bench: Bench, autojump_clock: MockClock
) -> None:
    async with bench.running():
        _, inbox = bench.submit()
        start = trio.current_time()
        await trio.sleep(59)
        assert bench.engine.calls == 1
        await inbox.ended()
        assert trio.current_time() - start == pytest.approx(60)
        assert bench.changes[1] == "no sign of life for 60s with requests in flight"


async def test_an_answer_is_a_sign_of_life(bench: Bench, autojump_clock: MockClock) -> None:
    async with bench.running():
        request_id, inbox = bench.submit()
        for _ in range(4):  # each step takes 50 s, and the call is answered after it
            await trio.sleep(50)
            bench.engine.answer()
        await settled()
        assert inbox.endings == 0
        bench.engine.say(outputs((request_id, [5], 1)))
        await settled()
        assert inbox.ids == [5]
        assert bench.changes == ["ready"]


async def test_a_second_request_does_not_excuse_the_silence_about_the_first(
    bench: Bench, autojump_clock: MockClock
) -> None:
    bench.engine.answering = True
    async with bench.running():
        _, inbox = bench.submit()
        start = trio.current_time()
        await trio.sleep(200)
        bench.submit()
        await inbox.ended()
        assert trio.current_time() - start == pytest.approx(300, abs=0.01)


async def test_an_engine_that_was_only_slow_is_used_again(
    bench: Bench, autojump_clock: MockClock
) -> None:
    async with bench.running():
        request_id, _ = bench.submit()
        await trio.sleep(61)
        with pytest.raises(EngineLostError, match="no sign of life for 60s"):
            bench.submit()
        assert bench.engine.ids_of(wire.ABORT) == [request_id]
        await trio.sleep(1000)
        bench.engine.say(outputs((request_id, [5], None)))
        await settled()
        assert bench.changes[2:] == []
        bench.engine.answer()
        await settled()
        assert bench.changes[2:] == ["ready"]
        _, inbox = bench.submit()
        start = trio.current_time()
        await inbox.ended()
        assert trio.current_time() - start == pytest.approx(60)


async def test_a_blocked_send_ends_the_session_after_its_deadline(
    bench: Bench, autojump_clock: MockClock
) -> None:
    async with bench.running():
        bench.engine.input.fill()
        first, inbox = bench.submit()
        second, _ = bench.submit()
        start = trio.current_time()
        await inbox.ended()
        assert trio.current_time() - start == pytest.approx(10)
        assert str(inbox.errors[0]).endswith("a send was blocked for 10s")
        await trio.sleep(100)
        bench.engine.input.fill(False)  # all leaves in order, so nothing runs for nobody
        await settled()
        assert bench.engine.ids_of(wire.ADD) == [first, second]
        assert sorted(bench.engine.ids_of(wire.ABORT)) == [first, second]
        await trio.sleep(3)
        bench.engine.answer()
        await settled()
        assert bench.changes == ["ready", "a send was blocked for 10s", "ready"]


async def test_a_send_that_has_to_wait_keeps_the_order(
    bench: Bench, autojump_clock: MockClock
) -> None:
    async with bench.running():
        bench.engine.input.fill()
        first, inbox = bench.submit()
        await trio.sleep(9)
        bench.engine.input.fill(False)
        second, _ = bench.submit()  # has to wait behind the first
        assert bench.engine.ids_of(wire.ADD) == []
        await settled()
        assert bench.engine.ids_of(wire.ADD) == [first, second]
        assert inbox.errors == []
        third, _ = bench.submit()
        assert bench.engine.ids_of(wire.ADD) == [first, second, third]


async def test_a_handshake_that_does_not_get_on_is_reported_and_never_given_up(
    bench: Bench, autojump_clock: MockClock
) -> None:
    with capture_logs() as logs:
        async with bench.running(started=False):
            await trio.sleep(601)
            bench.engine.hello()
            await trio.sleep(600)
            bench.engine.register()
            await settled()
            assert bench.changes == ["ready"]
    texts = [log["event"] for log in logs if log["log_level"] == "warning"][:2]
    url = bench.addresses.url
    assert texts == [
        f"ZMQ backend handshake failed for {url}: startup handshake timed out while waiting "
        f"for {step} after {seconds}s ({what}); still listening on {bench.addresses.handshake}"
        for step, seconds, what in [
            ("HELLO", 600, "HELLO of engine 0"),
            ("READY", 1200, "READY and registration of engine 0"),
        ]
    ]


# ------------------------------------------------------------------------------------ loss


async def test_a_lost_connection_fails_requests_at_once_and_a_restart_is_served(
    bench: Bench,
) -> None:
    async with bench.running():
        _, inbox = bench.submit()
        bench.engine.vanish()
        await settled()
        assert isinstance(inbox.errors[0], EngineLostError)
        assert bench.changes[1].endswith("connection was closed")
        with pytest.raises(EngineLostError):
            bench.submit()
        await bench.engine.start()
        assert bench.changes[2:] == ["ready"]
        request_id, inbox = bench.submit()
        bench.engine.say(outputs((request_id, [5], 1)))
        await settled()
        assert inbox.ids == [5]
        assert bench.engine.binds == 1


@pytest.mark.parametrize("name", ["input", "output"])
async def test_the_end_of_either_data_connection_is_a_loss(bench: Bench, name: str) -> None:
    async with bench.running():
        _, inbox = bench.submit()
        socket = getattr(bench.engine, name)
        socket.monitor().happen(PeerEvent("disconnected", 0))
        await settled()
        assert inbox.endings == 1
        assert bench.changes == ["ready", f"the {name} connection was closed"]


async def test_the_end_of_a_former_connection_is_none(bench: Bench) -> None:
    async with bench.running():
        bench.engine.hello()  # the engine was restarted before its end was heard of
        await settled()
        for socket in (bench.engine.input, bench.engine.output):
            socket.monitor().happen(PeerEvent("connected", 9))
        bench.engine.register()
        await settled()
        assert bench.changes == ["ready", "engine 0 was started anew", "ready"]
        for socket in (bench.engine.input, bench.engine.output):
            socket.monitor().happen(PeerEvent("disconnected", 9))
        await settled()
        assert len(bench.changes) == 3


async def test_the_end_of_one_that_took_another_s_place_is_a_loss_though_that_stays(
    bench: Bench,
) -> None:
    async with bench.running():
        bench.engine.hello()
        await settled()
        for socket in (bench.engine.input, bench.engine.output):
            socket.monitor().happen(PeerEvent("connected", 9))
        bench.engine.register()
        await settled()
        _, inbox = bench.submit()
        bench.engine.input.monitor().happen(PeerEvent("disconnected", 9))
        await settled()  # the question was taken: the connection is about to go
        assert bench.changes == ["ready", "engine 0 was started anew", "ready"]
        bench.engine.input.peers.clear()
        await trio.sleep(0.1)
        assert bench.changes[3:] == ["its connection was closed"]
        assert inbox.endings == 1


async def test_a_hello_is_heard_after_the_end_that_came_before_it(bench: Bench) -> None:
    with capture_logs() as logs:
        async with bench.running():
            bench.engine.hello()
            bench.engine.vanish()
            await settled()
    assert [log["event"] for log in logs if "duplicate HELLO" in log["event"]] == []


async def test_a_peer_that_is_gone_when_we_send_is_a_loss(bench: Bench) -> None:
    async with bench.running():
        _, inbox = bench.submit()
        bench.engine.input.peers.clear()
        other = Inbox()
        with pytest.raises(EngineLostError, match="no connection with that identity"):
            bench.link.submit_nowait(request(bench.ids.next()), other)
        assert (inbox.endings, other.endings) == (1, 0)
        assert bench.link.session.in_flight == 0
        assert bench.changes == ["ready", "no connection with that identity"]


async def test_an_abort_to_a_peer_that_is_gone_is_a_loss(bench: Bench) -> None:
    async with bench.running():
        request_id, aborted = bench.submit()
        _, inbox = bench.submit()
        bench.engine.input.peers.clear()
        bench.link.abort_nowait(request_id)
        assert (aborted.endings, inbox.endings) == (0, 1)


async def test_a_peer_that_goes_while_sends_wait_is_a_loss(bench: Bench) -> None:
    async with bench.running():
        bench.engine.input.fill()
        _, inbox = bench.submit()
        await settled()
        bench.engine.input.peers.clear()
        bench.engine.input.fill(False)
        await settled()
        assert inbox.endings == 1
        await bench.engine.start()
        request_id, _ = bench.submit()
        assert bench.engine.ids_of(wire.ADD) == [request_id]


async def test_what_waits_for_a_former_engine_is_not_sent_to_its_successor(bench: Bench) -> None:
    async with bench.running():
        bench.engine.input.fill()
        bench.submit()
        await settled()
        bench.engine.hello()
        await settled()
        bench.engine.input.fill(False)
        bench.engine.register()
        await settled()
        assert bench.engine.ids_of(wire.ADD) == []
        assert bench.changes[-1] == "ready"


async def test_an_engine_that_leaves_after_hello_is_no_failure(bench: Bench) -> None:
    with capture_logs() as logs:
        async with bench.running(started=False):
            bench.engine.hello()
            bench.engine.handshake.peers.clear()
            await settled()
            await bench.engine.start()
            assert bench.changes == ["ready"]
    assert "engine left between HELLO and INIT" in [log["event"] for log in logs]


async def test_a_failing_socket_is_bound_again(bench: Bench, autojump_clock: MockClock) -> None:
    with capture_logs() as logs:
        async with bench.running():
            _, inbox = bench.submit()
            failed = bench.engine.output
            bench.engine.bind_errors = [WorkerError("cannot bind x: Address already in use")]
            failed.fail()
            await settled()
            assert failed.closed
            assert inbox.endings == 1
            with pytest.raises(EngineLostError, match="socket failed: test"):
                bench.submit()
            await trio.sleep(2.5)
            assert bench.engine.binds == 2
            await bench.engine.start()
            assert bench.changes == ["ready", "socket failed: test", "ready"]
    errors = [log for log in logs if log["log_level"] == "error"]
    assert [log["event"] for log in errors] == [
        "ZMQ socket failed; binding again",
        "cannot bind again; will retry",
    ]


async def test_files_that_are_removed_are_made_anew_around_a_running_request(
    bench: Bench, autojump_clock: MockClock
) -> None:
    addresses = bench.addresses
    files = [addresses.lock, addresses.record, *addresses.sockets]
    with capture_logs() as logs:
        async with bench.running():
            request_id, inbox = bench.submit()
            for path in files:
                path.unlink()
            await trio.sleep(5.1)
            assert [path.exists() for path in files] == [True] * 4
            bench.engine.say(outputs((request_id, [5], 1)))
            await settled()
            assert inbox.ids == [5]
            assert (bench.changes, bench.engine.binds) == (["ready"], 1)
            await trio.sleep(1000)
    errors = [log["event"] for log in logs if log["log_level"] == "error"]
    assert errors == [
        "files of this worker were removed or replaced; making them anew",
        "engine record was removed; writing it anew",
    ]


async def test_before_an_engine_is_told_where_to_dial_there_is_something_to_dial(
    bench: Bench,
) -> None:
    async with bench.running():
        bench.engine.vanish()
        await settled()
        files = bench.addresses.sockets
        for path in files:
            path.unlink()
        seen: list[bool] = []
        bench.engine.handshake.on_send = lambda _: seen.extend(path.exists() for path in files)
        await bench.engine.start()
        assert seen == [True, True]
        assert bench.changes[2:] == ["ready"]


async def test_the_reason_of_a_loss_is_the_one_in_the_log(bench: Bench) -> None:
    """The abort of what ran there finds nobody any more."""
    with capture_logs() as logs:
        async with bench.running():
            bench.submit()
            bench.engine.vanish()
            await settled()
            [lost] = [log for log in logs if log["event"] == "engine session ended"]
            assert lost["reason"].endswith("connection was closed")
            assert bench.link.session.roster.unready == lost["reason"]


async def test_waves_begin_above_those_of_a_life_whose_clock_was_ahead(tmp_path: Path) -> None:
    ahead = 10**17  # microseconds: the sixth millennium
    said = [Said(i, registration(data_parallel_size=2), lockstep=True) for i in range(2)]
    bench = Bench(tmp_path, engines=2)
    RecordFile(bench.addresses, "vllm", 2).save(Former(said, ahead))
    async with bench.running(started=False):
        bench.engine.answering = True
        for identity in (b"\x00\x00", b"\x01\x00"):
            bench.engine.input.peers.add(identity)
            bench.engine.input.monitor().happen(PeerEvent("connected", identity[0]))
        await settled()
        assert bench.changes == ["ready"]
        bench.submit()
        [wave] = [m for m in bench.engine.input.sent if m[1] == wire.START_DP_WAVE]
        assert unpack(wave[2])[0] > ahead + 10**9
        assert RecordFile(bench.addresses, "vllm", 2).load().first_wave > ahead


async def test_several_engines_and_one_too_many(tmp_path: Path, autojump_clock: MockClock) -> None:
    bench = Bench(tmp_path, engines=2)
    with capture_logs() as logs:
        async with bench.running(started=False):
            for identity in (b"\x00\x00", b"\x01\x00", b"\x02\x00"):
                bench.engine.hello(identity)
            await settled()
            bench.engine.register()
            await settled()
            assert bench.changes == []
            bench.engine.register(b"\x01\x00")
            await settled()
            assert bench.changes == ["ready"]
            bench.engine.vanish(b"\x01\x00")
            await settled()
            assert len(bench.changes) == 2
            assert bench.changes[1].endswith("connection was closed")
    assert any("identity 0200 has dialled in" in log["event"] for log in logs)


# ------------------------------------------------------------------- what is not our engine's


async def test_what_a_former_life_left_running_is_aborted_when_it_can_be(bench: Bench) -> None:
    async with bench.running(started=False):
        old = outputs(("ffffffff00000001", [5], None))
        bench.engine.say(old)
        await settled()
        assert bench.engine.input.sent == []  # its input connection is not back yet
        bench.engine.input.peers.add(b"\x00\x00")
        bench.engine.say(old, old)
        await settled()
        assert bench.engine.ids_of(wire.ABORT) == ["ffffffff00000001"]


@pytest.mark.parametrize("where", ["deliver", "flush"])
async def test_a_broken_stream_fails_alone_and_is_logged_once(bench: Bench, where: str) -> None:
    class Broken(Inbox):
        def deliver(self, delta: Delta) -> None:
            if where == "deliver":
                raise ZeroDivisionError("render")

        def flush(self) -> None:
            raise ZeroDivisionError("render")

    with capture_logs() as logs:
        async with bench.running():
            broken, broken_id = Broken(), bench.ids.next()
            bench.link.submit_nowait(request(broken_id), broken)
            request_id, inbox = bench.submit()
            both = outputs((broken_id, [5], None), (request_id, [5], None))
            bench.engine.say(both, both)
            await settled()
            assert [str(error) for error in broken.errors] == ["render"]
            assert inbox.ids == [5, 5]
            assert bench.engine.ids_of(wire.ABORT) == [broken_id]
    (failure,) = [log for log in logs if log["event"] == "stream failed"]
    assert failure["request_id"] == broken_id
    assert isinstance(failure["exc_info"], ZeroDivisionError)


async def test_garbage_is_reported_and_survived(bench: Bench) -> None:
    with capture_logs() as logs:
        async with bench.running():
            request_id, inbox = bench.submit()
            bench.engine.say(b"\xc1", pack({}), outputs((request_id, [5], 1)))
            bench.engine.handshake.feed([b"\x00\x00"], [b"\x00\x00", b"\xc1"])
            bench.engine.input.feed([b"\x00\x00"], [b"\x00\x00", b"\xc1"])
            await settled()
            assert inbox.ids == [5]
    assert sum(log["event"].startswith("output skipped") for log in logs) == 2


# ------------------------------------------------------------------------------------ stop


async def test_stopping_aborts_and_leaves_no_files(bench: Bench) -> None:
    async with bench.running():
        request_id, inbox = bench.submit()
        assert bench.addresses.lock.exists()
    assert bench.engine.ids_of(wire.ABORT) == [request_id]
    assert str(inbox.errors[0]).endswith("the worker was stopped")
    assert all(s.closed for s in (bench.engine.handshake, bench.engine.input, bench.engine.output))
    assert not bench.addresses.lock.exists()
    bench.link.abort_nowait(request_id)
    with pytest.raises(EngineLostError, match="the worker was stopped"):
        bench.submit()


async def test_a_bind_error_at_the_start_is_raised_if_it_stays(
    bench: Bench, autojump_clock: MockClock
) -> None:
    bench.engine.bind_errors = [WorkerError("cannot bind x: Address already in use")] * 6
    with pytest.raises(WorkerError, match="cannot bind x: Address already in use"):
        await bench.link.run()
    assert trio.current_time() == pytest.approx(0.5)
    assert not bench.addresses.lock.exists()


async def test_a_predecessor_on_the_same_path_may_take_a_moment_to_go(
    bench: Bench, autojump_clock: MockClock
) -> None:
    bench.engine.bind_errors = [WorkerError("cannot bind x: Address already in use")] * 5
    async with bench.running():
        assert bench.engine.binds == 1
