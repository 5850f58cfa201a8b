"""Who is there, and who takes requests."""

from __future__ import annotations

import pytest

from smgd.core import EngineLoad, EngineWork
from smgd.errors import ApiError, WorkerError
from smgd.samples import RankSample
from smgd.workers.registry import Registry
from tests.workers.fakes import FakeWorker


def registry(*workers: FakeWorker) -> Registry:
    made = Registry()
    for worker in workers:
        made.add(worker)
    return made


def test_workers_are_found_by_id_url_and_model() -> None:
    a, b = FakeWorker("a"), FakeWorker("b", "other")
    made = registry(a, b)
    assert made.workers.get("a") is a
    assert made.workers.get("c") is None
    assert made.by_url("ipc:///b") is b
    assert made.by_url("ipc:///c") is None
    assert made.of_model("other") == [b]
    assert list(made.workers.values()) == [a, b]


def test_only_ready_workers_are_candidates() -> None:
    a, b, c = FakeWorker("a"), FakeWorker("b"), FakeWorker("c", "other")
    made = registry(a, b, c)
    assert made.candidates("m") == [a, b]
    assert made.ready_count() == 3
    for state in ("pending", "not_ready", "failed", "draining"):
        a.state = state
        made.changed(a)
        assert made.candidates("m") == [b]
        assert made.ready_count() == 2
    assert made.of_model("m") == [a, b]
    assert made.candidates("unknown") == []


def test_an_id_or_a_url_is_registered_once() -> None:
    made = registry(FakeWorker("a"))
    with pytest.raises(WorkerError, match="worker ipc:///a is registered already"):
        made.add(FakeWorker("a"))
    same_url = FakeWorker("b")
    same_url.url = "ipc:///a"
    with pytest.raises(WorkerError, match="worker ipc:///a is registered already"):
        made.add(same_url)
    assert len(made.workers) == 1


def test_removal() -> None:
    a = FakeWorker("a")
    made = registry(a)
    assert made.remove("a") is a
    assert made.remove("a") is None
    assert made.candidates("m") == []


def test_listeners_hear_of_every_change() -> None:
    heard: list[str] = []
    made = Registry()
    made.on_change(lambda worker: heard.append(worker.id))
    a = FakeWorker("a")
    made.add(a)
    made.changed(a)
    made.remove("a")
    made.remove("a")
    assert heard == ["a", "a", "a"]


def test_the_context_of_a_model_is_the_smallest_of_its_ready_workers() -> None:
    small = FakeWorker("a", max_model_len=1024)
    made = registry(small, FakeWorker("b", max_model_len=2048), FakeWorker("c", "other"))
    assert made.known_max_model_len("m") == made.max_model_len("m") == 1024
    small.state = "not_ready"
    made.changed(small)
    assert made.max_model_len("m") == 2048
    assert made.known_max_model_len("m") == 2048
    assert made.known_max_model_len("other") is None
    with pytest.raises(ApiError, match="No ready worker for model 'other'") as caught:
        made.max_model_len("other")
    assert caught.value.status == 503


def test_the_context_stays_known_while_a_worker_is_there() -> None:
    large = FakeWorker("a", max_model_len=2048)
    small = FakeWorker("b", max_model_len=1024)
    made = registry(large, small)
    for worker in (small, large):
        worker.state = "not_ready"
        made.changed(worker)
    assert made.known_max_model_len("m") == 1024
    with pytest.raises(ApiError, match="No ready worker for model 'm'"):
        made.max_model_len("m")
    made.remove("b")
    assert made.known_max_model_len("m") == 2048
    made.remove("a")
    assert made.known_max_model_len("m") is None


def test_samples_tell_of_every_worker_and_of_each_of_its_ranks() -> None:
    ready, lost = FakeWorker("a", requests_active=3), FakeWorker("b", "other", "not_ready")
    ready.rank_loads = [EngineLoad(2, 1, 0.5), EngineLoad()]
    ready.rank_work = [EngineWork(7, 64, 32), EngineWork()]
    ready.usable = [1]
    first, second = registry(ready, lost).samples()
    assert (first.worker, first.model, first.healthy, first.requests_active) == (
        "ipc:///a", "m", True, 3,
    )  # fmt: skip
    assert first.ranks == [
        RankSample(0, False, 2, 1, 0.5, EngineWork(7, 64, 32)),
        RankSample(1, True, 0, 0, 0.0, EngineWork()),
    ]
    assert (second.model, second.healthy) == ("other", False)
    assert second.ranks == [RankSample(0, False, 0, 0, 0.0, EngineWork())]
