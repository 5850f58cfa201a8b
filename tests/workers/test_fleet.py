"""The fleet itself, on real sockets and without a daemon around it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from msgspec import structs

from smgd.config import HealthConfig, WorkerConfig
from smgd.core import RequestIds
from smgd.engine.paths import Addresses
from smgd.engine.transport import WorkerSockets
from smgd.errors import ModelError, WorkerError, WorkerExistsError, WorkerNotFoundError
from smgd.text.catalog import Catalog
from smgd.text.loader import ModelLoader, ModelSource
from smgd.text.stage import TextStage
from smgd.workers import fleet
from smgd.workers.fleet import Fleet, FleetSettings
from smgd.workers.registry import Registry
from smgd.workers.spec import Health, ModelCard, WorkerPatch, WorkerSpec, spec_of
from smgd.workers.zmq import ZmqWorker
from tests.flows.house import LocalEngine, captured_log, short_directory, until

SIM = ModelSource(id="smgd-sim", path="smgd-sim", configured=True)
# Looks that come so fast that a test can wait for a hundred of them.
IMPATIENT = HealthConfig(check_interval=0.002, failure_threshold=1, remove_unhealthy_workers=True)


class Yard:
    """A fleet with one model, in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.registry = Registry()
        self.catalog = Catalog()
        self.loader = ModelLoader(self.catalog, TextStage())
        self.settings = FleetSettings(own=["127.0.0.1:30000"])
        self.fleet = Fleet(
            self.registry, self.catalog, self.loader, RequestIds(), self.settings, time.time
        )

    def spec(self, number: int = 0, **fields: Any) -> WorkerSpec:
        url = f"ipc://{self.directory}/e{number}"
        return WorkerSpec(url=url, **fields)

    def engine(self, number: int = 0) -> LocalEngine:
        flags = ["--worker-url", f"ipc://{self.directory}/e{number}", "--exit-delay-ms", "10"]
        return LocalEngine(flags)

    @property
    def files(self) -> list[str]:
        """The files but the record of engines, which is kept for a later start."""
        names = [path.name for path in self.directory.iterdir()]
        return sorted(name for name in names if not name.endswith(".engine.json"))


@pytest.fixture
async def yard(nursery: trio.Nursery) -> AsyncIterator[Yard]:
    with short_directory(3) as directory, captured_log():
        yard = Yard(directory)
        await nursery.start(yard.loader.run)
        await nursery.start(yard.fleet.run)
        yard.loader.add(SIM)
        yield yard
        nursery.cancel_scope.cancel()


async def test_a_started_worker_is_bound(yard: Yard) -> None:
    record = await yard.fleet.start(yard.spec())
    assert (record.state, record.worker.model_id) == ("pending", "smgd-sim")
    assert yard.files == ["e0-in.sock", "e0-out.sock", "e0.lock"]
    assert yard.registry.workers.get(record.id) is record.worker


async def test_a_worker_that_cannot_start_raises_its_reason(yard: Yard) -> None:
    (yard.directory / "e0-in.sock").mkdir()
    with pytest.raises(WorkerError, match="exists but is not a socket; refusing to unlink"):
        await yard.fleet.start(yard.spec())
    await yard.fleet.start(yard.spec(1))  # the fleet goes on
    assert yard.registry.by_url(yard.spec().url) is None


async def test_a_worker_that_is_added_and_cannot_be_bound_is_failed(yard: Yard) -> None:
    [taken] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    address = "tcp://127.0.0.1:{1}".format(*taken.socket.getsockname())
    record = yard.fleet.add(yard.spec(zmq_handshake_address=address))
    assert (record.state, record.reason) == ("pending", "")
    await record.gone.wait()
    await until(lambda: record.state == "failed")
    reason = f"cannot bind {address}: Address already in use"
    await taken.aclose()
    assert f"ZMQ backend handshake failed for {record.spec.url}: {reason}" in record.reason
    assert yard.registry.workers == {}
    assert yard.files == []
    again = yard.fleet.add(record.spec)
    await until(lambda: yard.registry.workers.get(again.id))
    assert list(yard.fleet.records) == [again.id]


async def test_who_asks_for_what_is_not_there_is_told(yard: Yard) -> None:
    asks: list[Callable[[], object]] = [
        lambda: yard.fleet.remove("x"),
        lambda: yard.fleet.get("x"),
        lambda: yard.fleet.patch("x", WorkerPatch()),
        lambda: yard.fleet.replace("x", yard.spec()),
    ]
    for ask in asks:
        with pytest.raises(WorkerNotFoundError, match="Worker x not found"):
            ask()


async def test_the_daemons_own_ports_are_nobodys_handshake_address(yard: Yard) -> None:
    with pytest.raises(WorkerError, match="already claimed by this daemon itself"):
        yard.fleet.add(yard.spec(zmq_handshake_address="tcp://127.0.0.1:30000"))
    assert yard.fleet.records == {}


async def test_a_url_is_free_as_soon_as_its_worker_is_on_the_way_out(yard: Yard) -> None:
    first = await yard.fleet.start(yard.spec())
    with pytest.raises(WorkerExistsError, match=f"already exists \\(id {first.id}\\)"):
        yard.fleet.add(yard.spec())
    yard.fleet.remove(first.id)
    second = yard.fleet.add(yard.spec())
    third_after = yard.fleet.remove(second.id)
    third = yard.fleet.add(yard.spec())
    assert (first.state, third_after.state, third.state) == ("draining", "draining", "pending")
    await until(lambda: yard.registry.workers.get(third.id))
    assert first.gone.is_set()
    await until(lambda: list(yard.fleet.records) == [third.id])
    assert yard.files == ["e0-in.sock", "e0-out.sock", "e0.lock"]


async def test_removal_cancels_a_handshake_under_way(yard: Yard, nursery: trio.Nursery) -> None:
    record = await yard.fleet.start(yard.spec(dp_size=2))
    engine = yard.engine()
    nursery.start_soon(engine.run)
    await until(lambda: "engine 0" not in record.worker.awaited)  # one of two has come
    assert record.state == "pending"
    yard.fleet.remove(record.id)
    await record.gone.wait()
    assert (yard.files, yard.registry.workers) == ([], {})
    await until(lambda: yard.fleet.records == {})
    await engine.kill()


async def test_the_vocabulary_is_known_to_workers_before_and_after_loading(yard: Yard) -> None:
    before = await yard.fleet.start(yard.spec())
    await until(lambda: not yard.catalog.missing)
    after = await yard.fleet.start(yard.spec(1))
    size = yard.catalog.get("smgd-sim").files.vocab_size
    assert (before.worker.vocab_size, after.worker.vocab_size) == (size, size)


async def test_a_model_loads_once_however_many_workers_serve_it(yard: Yard) -> None:
    labels = {"model_path": "smgd-sim", "model": "mine"}
    records = [yard.fleet.add(yard.spec(number, labels=labels)) for number in range(3)]
    assert {record.worker.model_id for record in records} == {"mine"}
    await until(lambda: not yard.catalog.missing)
    assert sorted(yard.loader.sources) == ["mine", "smgd-sim"]
    for record in records:
        assert "mine" in yard.loader.sources
        yard.fleet.remove(record.id)
        await until(lambda: record.id not in yard.fleet.records)  # noqa: B023 - waited for here
    assert list(yard.loader.sources) == yard.catalog.ids == ["smgd-sim"]


async def test_a_path_that_is_known_is_the_known_model(yard: Yard) -> None:
    yard.loader.add(ModelSource(id="served", path="/models/tulip", configured=True))
    by_path = yard.fleet.add(yard.spec(0, labels={"model_path": "/models/tulip"}))
    by_name = yard.fleet.add(yard.spec(1, models=(ModelCard("served"),)))
    assert by_path.worker.model_id == by_name.worker.model_id == "served"
    elsewhere = {"model_path": "/elsewhere", "tokenizer_path": "x"}
    with pytest.raises(WorkerError, match="the name 'smgd-sim' belongs to the model at smgd-sim"):
        yard.fleet.add(yard.spec(2, labels=elsewhere, models=(ModelCard("x", ("smgd-sim",)),)))


async def test_a_model_that_has_changed_is_served_until_the_new_one_is_there(yard: Yard) -> None:
    await until(lambda: not yard.catalog.missing)
    yard.loader.change(ModelSource(id="smgd-sim", path="/nowhere", aliases=("sim",)))
    served = yard.catalog.get("sim")
    assert served is yard.catalog.get("smgd-sim")
    yard.loader.change(ModelSource(id="smgd-sim", path="smgd-sim", aliases=("other",)))
    await until(lambda: yard.catalog.get("other") is not served)
    with pytest.raises(ModelError, match="the name 'other' belongs to"):
        yard.loader.change(ModelSource(id="second", path="smgd-sim", aliases=("other",)))
    assert yard.catalog.ids == ["smgd-sim"]


async def test_a_record_that_cannot_be_removed_is_told_and_ends_nothing(
    yard: Yard, nursery: trio.Nursery
) -> None:
    record = await yard.fleet.start(yard.spec())
    engine = yard.engine()
    nursery.start_soon(engine.run)
    await until(lambda: record.state == "ready")
    await engine.kill()
    await until(lambda: record.worker.deserted)
    record.addresses.record.unlink()
    record.addresses.record.mkdir()
    with captured_log() as lines:
        yard.fleet.remove(record.id)
        await record.gone.wait()
    [line] = [line for line in lines if line["event"] == "cannot remove the engine record"]
    assert line["file"] == str(record.addresses.record)
    assert yard.files == []
    await trio.Path(record.addresses.record).rmdir()


# ------------------------------------------------------------------- what nobody thought of


@pytest.mark.parametrize("error", [ValueError("embedded null byte"), KeyError("x"), OSError("x")])
async def test_a_fault_of_ours_before_a_worker_is_bound_is_its_own_failure(
    yard: Yard, error: Exception
) -> None:
    def bind(_: Addresses) -> WorkerSockets:
        raise error

    was, yard.fleet._bind = yard.fleet._bind, bind
    with captured_log() as lines:
        record = yard.fleet.add(yard.spec())
        await until(lambda: record.state == "failed")
    assert record.reason == (
        f"ZMQ backend handshake failed for {record.spec.url}: smgd itself has failed, and its log"
        f" has how: {type(error).__name__}: {error}"
    )
    [line] = [line for line in lines if line["event"] == "worker failed"]
    assert (line["worker"], line["log_level"], line["exc_info"]) == (record.spec.url, "error", True)
    with pytest.raises(WorkerError, match="smgd itself has failed, and its log has how: "):
        await yard.fleet.start(yard.spec(1))
    assert list(yard.fleet.records) == [record.id]
    yard.fleet._bind = was
    assert (await yard.fleet.start(yard.spec(1))).state == "pending"  # the fleet goes on


@pytest.mark.parametrize("how", ["start", "add"])
async def test_a_fault_of_ours_in_a_worker_that_serves_is_its_own_failure(
    yard: Yard, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = trio.Event()

    async def run(
        _: ZmqWorker, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        task_status.started()
        await faulty.wait()
        raise ZeroDivisionError("nobody has thought of it")

    with monkeypatch.context() as patch:
        patch.setattr(ZmqWorker, "run", run)
        record = (
            yard.fleet.add(yard.spec()) if how == "add" else await yard.fleet.start(yard.spec())
        )
        await until(lambda: yard.registry.workers.get(record.id))
    faulty.set()
    await until(lambda: record.state == "failed")
    assert record.reason.endswith("ZeroDivisionError: nobody has thought of it")
    assert yard.registry.workers == {}
    again = yard.fleet.add(yard.spec())
    await until(lambda: yard.registry.workers.get(again.id))


# --------------------------------------------------------------------- what engines remember


async def test_an_engine_that_has_not_answered_yet_is_not_gone(
    yard: Yard, nursery: trio.Nursery
) -> None:
    """However soon after its addition a worker is removed, its engine is found by the next one."""
    record = await yard.fleet.start(yard.spec())
    engine = yard.engine()
    nursery.start_soon(engine.run)
    await until(lambda: record.state == "ready")
    yard.fleet.remove(record.id)
    for ticks in (0, 1, 2, 5, 20):
        record = yard.fleet.add(yard.spec())
        for _ in range(ticks):
            await trio.sleep(0.001)
        yard.fleet.remove(record.id)
        await record.gone.wait()
        assert record.addresses.record.exists(), ticks
    record = yard.fleet.add(yard.spec())
    await until(lambda: record.state == "ready")
    await engine.kill()


async def test_an_engine_that_is_only_silent_is_not_gone(yard: Yard, nursery: trio.Nursery) -> None:
    record = await yard.fleet.start(yard.spec())
    engine = yard.engine()
    nursery.start_soon(engine.run)
    await until(lambda: record.state == "ready")
    record.worker._roster.lose("no sign of life for 60s with requests in flight")
    yard.fleet.remove(record.id)
    await record.gone.wait()
    assert record.addresses.record.exists()
    await engine.kill()


async def test_a_stop_while_a_worker_drains_leaves_what_is_known_of_its_engine(
    nursery: trio.Nursery,
) -> None:
    with short_directory(1) as directory, captured_log():
        async with trio.open_nursery() as own:
            yard = Yard(directory)
            await own.start(yard.loader.run)
            await own.start(yard.fleet.run)
            yard.loader.add(SIM)
            record = await yard.fleet.start(yard.spec())
            engine = yard.engine()
            nursery.start_soon(engine.run)
            await until(lambda: record.state == "ready")
            yard.fleet.remove(record.id)
            own.cancel_scope.cancel()
        assert record.addresses.record.exists()
        await engine.kill()


# ----------------------------------------------------------------------------- drained


async def test_a_drained_worker_serves_again_when_it_is_put_again(
    yard: Yard, nursery: trio.Nursery
) -> None:
    record = await yard.fleet.start(yard.spec())
    engine = yard.engine()
    nursery.start_soon(engine.run)
    await until(lambda: record.state == "ready")
    record.since = 0
    yard.fleet.drain(record.id)
    assert (record.state, record.leaving, record.since > 0) == ("draining", False, True)
    with pytest.raises(WorkerExistsError):
        yard.fleet.add(yard.spec())
    since, record.since = record.since, 7
    assert yard.fleet.drain(record.id).since == 7  # it is drained already
    assert since > 7
    again = yard.fleet.replace(record.id, record.spec)
    assert again is not record
    assert again.id == record.id
    await until(lambda: again.state == "ready")
    await engine.kill()


async def test_a_worker_that_waits_for_another_to_drain_says_so(yard: Yard) -> None:
    first = await yard.fleet.start(yard.spec())
    yard.fleet.remove(first.id)
    second = yard.fleet.add(yard.spec())
    assert second.waits == f"waits until worker {first.id} at the same URL has drained"
    await until(lambda: yard.registry.workers.get(second.id))
    assert (second.waits, second.before) == ("", ())
    third = yard.fleet.replace(second.id, yard.spec(dp_size=2))
    assert third.waits == "waits until the requests on its former connection have ended"
    await until(lambda: yard.registry.workers.get(third.id) is third.worker)
    assert (third.waits, third.before) == ("", ())


# -------------------------------------------------------------------- what a model is to be


def own(path: str, **labels: str) -> dict[str, Any]:
    return {"labels": {"model": "m", "model_path": path, **labels}}


async def test_a_worker_corrects_a_model_that_is_its_alone(yard: Yard) -> None:
    record = await yard.fleet.start(yard.spec(**own("/typo")))
    await until(lambda: "no directory" in yard.catalog.why_missing("m"))
    again = yard.fleet.replace(record.id, yard.spec(**own("smgd-sim")))
    assert again is not record, "an engine of another path is another engine"
    await until(lambda: not yard.catalog.missing)
    assert yard.loader.sources["m"].path == "smgd-sim"
    card = ModelCard("m", ("n",), tokenizer_path="smgd-sim")
    served = yard.catalog.get("m")
    kept = yard.fleet.replace(record.id, yard.spec(models=(card,)))
    assert kept is again
    assert yard.loader.sources["m"].tokenizer_path == "smgd-sim"
    await until(lambda: yard.catalog.get("n") is not served)
    yard.fleet.replace(record.id, yard.spec(models=(ModelCard("m"),)))
    assert yard.loader.named("n") is None
    assert yard.fleet.model("m").path == "smgd-sim"  # type: ignore[union-attr]


async def test_a_failed_worker_is_added_again_with_another_model_path(yard: Yard) -> None:
    (yard.directory / "e0-in.sock").mkdir()
    record = yard.fleet.add(yard.spec(**own("/typo")))
    await until(lambda: record.state == "failed")
    await trio.Path(yard.directory / "e0-in.sock").rmdir()
    yard.fleet.add(yard.spec(**own("smgd-sim")))
    await until(lambda: not yard.catalog.missing)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (own("/other"), "another path for model 'm' than 'smgd-sim'"),
        (own("smgd-sim", tokenizer_path="/t"), "another tokenizer_path for model 'm' than ''"),
        (
            {"labels": {"model": "m", "tokenizer_path": "/t"}},
            "another tokenizer_path for model 'm' than ''",
        ),
        (
            {"models": (ModelCard("m", ("other",)),)},
            "another aliases for model 'm' than ('n',)",
        ),
        (
            {"models": (ModelCard("m", chat_template="/t"),)},
            "another chat_template for model 'm' than ''",
        ),
    ],
)
@pytest.mark.parametrize("configured", [False, True])
async def test_what_others_have_of_a_model_is_not_changed_by_a_worker(
    yard: Yard, fields: dict[str, Any], said: str, configured: bool
) -> None:
    yard.loader.add(ModelSource(id="m", path="smgd-sim", aliases=("n",), configured=configured))
    first = yard.fleet.add(yard.spec(0, labels={"model": "m"}))
    holder = "is configured" if configured else f"is also that of worker {first.spec.url}"
    with pytest.raises(WorkerError) as caught:
        yard.fleet.add(yard.spec(1, **fields))
    assert str(caught.value).startswith(f"ZMQ worker {yard.spec(1).url} cannot have {said}, since ")
    assert f"since the model {holder}: leave " in str(caught.value)
    assert list(yard.fleet.records) == [first.id]
    assert yard.loader.sources["m"].path == "smgd-sim"
    same = ModelCard("m", ("n",), tokenizer_path="smgd-sim")
    for spec in (yard.spec(1, models=(same,)), yard.spec(2, **own("smgd-sim"))):
        assert yard.fleet.add(spec).worker.model_id == "m"


async def test_a_tokenizer_alone_is_that_of_the_only_model(yard: Yard) -> None:
    with pytest.raises(WorkerError, match="another tokenizer_path for model 'smgd-sim' than ''"):
        yard.fleet.add(yard.spec(labels={"tokenizer_path": "/t"}))
    assert yard.fleet.add(yard.spec(labels={"tokenizer_path": "smgd-sim"})).state == "pending"


async def test_a_name_is_not_taken_for_a_path(yard: Yard) -> None:
    yard.loader.add(ModelSource(id="org/A", path="/models/tulip", configured=True))
    record = yard.fleet.add(yard.spec(models=(ModelCard("/models/tulip"),)))
    assert record.worker.model_id == "/models/tulip"


async def test_a_worker_that_is_refused_leaves_no_model(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(WorkerError, match="the name 'smgd-sim' belongs to"):
        yard.fleet.add(yard.spec(models=(ModelCard("m", ("smgd-sim",)),)))

    def broken(*_: Any, **__: Any) -> ZmqWorker:
        raise IndexError("nobody has thought of it")

    monkeypatch.setattr(fleet, "ZmqWorker", broken)
    with pytest.raises(IndexError):
        yard.fleet.add(yard.spec(**own("smgd-sim")))
    assert list(yard.loader.sources) == yard.catalog.ids == ["smgd-sim"]
    assert yard.fleet.records == {}


# -------------------------------------------------------------------------------- health


async def test_workers_whose_engine_stays_away_are_removed_if_that_is_wanted(
    nursery: trio.Nursery,
) -> None:
    """Ten times the threshold without an engine; three times after it was lost."""
    with short_directory(3) as directory, captured_log() as lines:
        yard = Yard(directory)
        yard.settings.health = IMPATIENT
        await nursery.start(yard.loader.run)
        await nursery.start(yard.fleet.run)
        yard.loader.add(SIM)
        engine = yard.engine(1)
        nursery.start_soon(engine.run)
        patient = Health(failure_threshold=100_000)
        kept = await yard.fleet.start(yard.spec(2, health=patient))
        served = await yard.fleet.start(yard.spec(1, health=patient))
        await until(lambda: served.state == "ready")
        never = await yard.fleet.start(yard.spec(0))
        await never.gone.wait()
        await until(lambda: list(yard.fleet.records) == [kept.id, served.id])
        [line] = [line for line in lines if line["event"].startswith("engine stayed down")]
        assert (line["worker"], line["log_level"]) == (never.spec.url, "warning")
        await engine.kill()
        await until(lambda: served.state == "not_ready")
        yard.settings.health = HealthConfig(check_interval=0.002)
        yard.fleet.patch(served.id, WorkerPatch(health=Health(failure_threshold=2)))
        await trio.sleep(0.05)
        assert list(yard.fleet.records) == [kept.id, served.id]
        yard.settings.health = IMPATIENT
        await until(lambda: list(yard.fleet.records) == [kept.id])
        nursery.cancel_scope.cancel()


# --------------------------------------------------------------------------------- specs


def test_a_configured_worker_as_a_spec() -> None:
    worker = WorkerConfig(url="ipc:///x/e0", engine_count=2)
    model = ModelSource(id="m", path="/models/m", tokenizer_path="/t", aliases=("n",))
    spec = spec_of(worker, model)
    assert (spec.url, spec.dp_size, spec.declared_runtimes) == ("ipc:///x/e0", 2, [])
    declared = spec_of(structs.replace(worker, runtime_type="vllm"), model)
    assert declared.declared_runtimes == ["vllm"]
    assert spec.wanted_model == model


@pytest.mark.parametrize(
    ("fields", "model"),
    [
        ({}, None),
        ({"labels": {"rack": "7"}}, None),
        ({"labels": {"model": "m"}}, ("m", "m")),
        ({"labels": {"model_path": "org/m"}}, ("org/m", "org/m")),
        ({"labels": {"model_path": "/models/m"}}, ("/models/m", "/models/m")),
        ({"labels": {"model_path": "/models/m", "model": "x"}}, ("x", "/models/m")),
        ({"labels": {"model_path": "/m"}, "models": (ModelCard("card"),)}, ("card", "/m")),
        ({"models": (ModelCard("card"),)}, ("card", "card")),
    ],
)
def test_the_model_that_a_spec_names(fields: dict[str, Any], model: tuple[str, str] | None) -> None:
    wanted = WorkerSpec(url="ipc:///x", **fields).wanted_model
    assert (None if wanted is None else (wanted.id, wanted.path)) == model
