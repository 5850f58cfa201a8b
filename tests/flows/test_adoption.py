"""smgd is restarted, its engines are not: they are found again, and know nothing of it."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator

import pytest
import trio

from tests.flows.client import fetch
from tests.flows.house import short_directory, until
from tests.flows.town import Town
from tests.support import PATIENCE

ENDLESS = {"contains": "endless", "token_ids": [300] * 8000}
STREAMS = 8


@pytest.fixture
async def town(nursery: trio.Nursery) -> AsyncIterator[Town]:
    with short_directory(1) as directory:
        town = Town(nursery, directory, [ENDLESS])
        yield town
        await town.close()


async def test_a_killed_daemon_finds_its_engine_again(town: Town) -> None:
    await town.start_smgd()
    engine = await town.start_engine("--itl-ms", "5")
    await town.ready()
    assert town.record.stat().st_mode & 0o777 == 0o600
    calls = [await town.ask("endless", stream=True, ignore_eos=True) for _ in range(STREAMS)]
    for call in calls:
        await call.read("content")
    old = list(town.tally.adds)
    assert len(old) == STREAMS
    await town.kill_smgd()
    for call in calls:
        await call.close()
    before = town.record.read_bytes()
    await town.start_smgd()
    await town.answered()
    assert engine.returncode is None
    assert (town.hellos, len(town.tally.ready_at)) == (1, 1), "the engine has not begun anew"
    await until(lambda: sorted(town.tally.aborts) == sorted(old))
    await until_zero(town, "smg_engine_running_requests")
    assert await town.metric("smg_engine_adoptions_total") == 1
    assert await town.metric("smg_engine_aborts_total") == STREAMS
    assert town.record.read_bytes() == before, "written once, at the registration"


async def test_an_engine_is_found_again_in_less_than_two_seconds(town: Town) -> None:
    """On a machine that does not stand still meanwhile: that may be once in five times."""
    await town.start_smgd()
    await town.start_engine()
    await town.ready()
    for _ in range(5):
        await town.kill_smgd()
        await town.start_smgd()
        await town.answered()
        if (seconds := seconds_from_binding(town)) < 2:
            break
    print(f"adopted {seconds} s after binding")
    assert seconds < 2


def seconds_from_binding(town: Town) -> float:
    """Return how long after the sockets were bound the worker was ready."""
    [adopted] = town.logged("engine adopted")
    return float(adopted["seconds_since_bound"])


async def until_zero(town: Town, name: str) -> None:
    with trio.fail_after(PATIENCE):
        while await town.metric(name):  # noqa: ASYNC110
            await trio.sleep(0.02)


async def test_an_ordinary_stop_leaves_the_record_too(town: Town) -> None:
    await town.start_smgd()
    await town.start_engine()
    await town.ready()
    town.smgd.send_signal(signal.SIGTERM)
    assert await town.smgd.wait() == 0
    assert [f.name for f in town.path.parent.glob("e0*")] == [town.record.name]
    await town.start_smgd()
    await town.answered()
    assert town.hellos == 1
    assert town.tally.aborts == []


async def test_a_daemon_killed_between_init_and_ready_serves_the_engine(town: Town) -> None:
    await town.start_smgd()
    await town.start_engine("--startup-ms", "6000")
    await until(lambda: town.hellos)
    await trio.sleep(0.5)  # INIT was sent; the engine loads
    await town.kill_smgd()
    assert town.tally.ready_at == []
    await town.start_smgd()
    await town.answered()
    assert (town.hellos, len(town.tally.ready_at)) == (1, 1)
    assert town.logged("engine ready")
    assert town.logged("engine adopted") == []


async def test_an_engine_killed_with_its_daemon_is_forgotten_at_its_hello(town: Town) -> None:
    await town.start_smgd()
    engine = await town.start_engine()
    await town.ready()
    await town.kill_smgd()
    engine.kill()
    await engine.wait()
    await town.start_smgd()
    await trio.sleep(0.3)  # nobody is there to answer
    assert (await fetch(town.port, "/readiness")).status == 503
    await town.start_engine()
    await town.answered()
    assert "engine 0 was started anew: its record is void" in [line["event"] for line in town.log]
    assert town.logged("engine adopted") == []


@pytest.mark.parametrize("damage", ["garbage", "count", "link"])
async def test_a_record_that_does_not_fit_is_set_aside(town: Town, damage: str) -> None:
    await town.start_smgd()
    await town.start_engine()
    await town.ready()
    await town.kill_smgd()
    if damage == "garbage":
        town.record.write_bytes(b"{")
    elif damage == "link":
        town.record.rename(town.record.with_name("elsewhere"))
        town.record.symlink_to(town.record.with_name("elsewhere"))
    await town.start_smgd(*(["--zmq-engine-count", "2"] if damage == "count" else []))
    [line] = town.logged(
        "engine record set aside: an engine of a former life has to be started anew"
    )
    assert line["now"].endswith("e0.engine.json.bad")
    assert (await fetch(town.port, "/readiness")).status == 503
    await trio.sleep(0.3)
    assert town.logged("engine adopted") == []


async def test_groups_are_found_again_as_far_as_they_are_there(town: Town) -> None:
    await town.start_smgd("--zmq-engine-count", "2")
    engines = [await town.start_engine("--engine-index", str(index)) for index in range(2)]
    await town.ready()
    await town.kill_smgd()
    engines[1].kill()
    await engines[1].wait()
    await town.start_smgd("--zmq-engine-count", "2")
    await town.answered()
    assert [line["engine"] for line in town.logged("engine adopted")] == [0]
    await town.start_engine("--engine-index", "1")
    await until(lambda: [line["engine"] for line in town.logged("engine ready")] == [1])
