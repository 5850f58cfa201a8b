"""Every series is documented, and every documented one exported; what they count, and rates."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from prometheus_client import Metric

from smgd.core import EngineCounts, EngineWork
from smgd.metrics import NOTES, Finished, Metrics
from smgd.samples import (
    AGE_BOUNDS,
    HIT_RATE_SPAN,
    RESOLUTION,
    THROUGHPUT_SPAN,
    GateSample,
    Looks,
    LookupSample,
    ProcessSample,
    RankSample,
    WorkerSample,
)

DOCS = (Path(__file__).parent.parent / "docs/metrics.md").read_text()
EXPORTED, NOT_EXPORTED = DOCS.split("\n## Not exported")
NAMES = re.compile(r"`(smg_[a-z_]+)`")

FINISHED = Finished(
    streaming=True,
    prompt_tokens=3,
    completion_tokens=5,
    seconds=1.0,
    ttft=0.2,
    generation=0.8,
    queue=0.01,
    prefill=0.1,
    decode=0.7,
)


def rank(number: int = 0, work: EngineWork | None = None) -> RankSample:
    return RankSample(number, True, 1, 2, 0.5, work or EngineWork())


def worker(
    *ranks: RankSample, url: str = "ipc:///w", counts: EngineCounts | None = None
) -> WorkerSample:
    return WorkerSample(url, "m", True, 3, list(ranks), counts or EngineCounts())


def watching(
    workers: Callable[[], list[WorkerSample]], clock: Callable[[], float] = lambda: 0.0
) -> Metrics:
    metrics = Metrics()
    metrics.watch_workers(workers, clock)
    return metrics


def gate(*ages: float) -> GateSample:
    return GateSample(ages=list(ages), running=0, waiting=0, allowed=0, full=0, timeouts=0)


def every_series() -> list[Metric]:
    metrics = watching(lambda: [worker(rank())])
    metrics.watch_gate(gate)
    metrics.watch_lookups(lambda: [LookupSample("m", 3, 1)])
    metrics.watch_processes(lambda: {"ipc:///w": ProcessSample("running", 3, 2)})
    metrics.watch_connections(lambda: 2)
    metrics.watch_log(lambda: 7)
    metrics.answered("GET", "/health", 200, "", 0.1)
    metrics.failed("m", "chat", "no_workers")
    metrics.failed("m", "chat", "backend_error")
    metrics.chosen("m", "least_load")
    metrics.finished("m", "chat", FINISHED)
    return list(metrics.registry.collect())


def family(metrics: Metrics, name: str) -> Metric:
    [found] = [metric for metric in metrics.registry.collect() if metric.name == name]
    return found


def values(metrics: Metrics, name: str) -> list[float]:
    return [sample.value for sample in family(metrics, name).samples]


# ----------------------------------------------------------------------------- documentation


def exported() -> set[str]:
    return {
        metric.name + ("_total" if metric.type == "counter" else "") for metric in every_series()
    }


def test_every_series_is_documented() -> None:
    assert exported() - {*NAMES.findall(EXPORTED)} == set()


def test_every_documented_series_is_exported() -> None:
    rows = re.findall(r"^\|([^|]*)\|", EXPORTED, re.MULTILINE)
    assert {name for row in rows for name in NAMES.findall(row)} - exported() == set()


def test_what_is_documented_as_not_exported_is_not() -> None:
    rows = re.findall(r"^\|([^|]*)\|", NOT_EXPORTED, re.MULTILINE)
    assert {name for row in rows for name in NAMES.findall(row)} & exported() == set()


# ------------------------------------------------------------------- what is counted at an end


def test_requests_are_counted_some_at_a_time_and_whenever_somebody_looks() -> None:
    metrics = Metrics()
    for number in range(1, 2 * NOTES + 2):
        metrics.answered("POST", "/v1/completions", 200, "", 0.1)
        counted = metrics.http_requests.labels("POST", "/v1/completions")
        [sample] = [s for m in counted.collect() for s in m.samples]
        assert sample.value == number // NOTES * NOTES
    assert values(metrics, "smg_http_requests") == [2 * NOTES + 1]
    assert b'smg_http_requests_total{method="POST",path="/v1/completions"} 65.0' in metrics.render()


def test_only_what_an_engine_did_counts_as_its_error() -> None:
    [errors] = [m for m in every_series() if m.name == "smg_worker_errors"]
    assert [s.labels["error_type"] for s in errors.samples] == ["backend_error"]


def test_the_mean_time_per_token_leaves_the_first_out() -> None:
    [tpot] = [m for m in every_series() if m.name == "smg_router_tpot_seconds"]
    [total] = [s.value for s in tpot.samples if s.name.endswith("_sum")]
    assert total == 0.8 / 4


def test_buckets_reach_an_hour_and_are_fine_for_tokens() -> None:
    bounds: dict[str, list[float]] = {}
    for metric in every_series():
        if metric.type == "histogram":
            limits = [s.labels["le"] for s in metric.samples if s.name.endswith("_bucket")]
            bounds[metric.name] = sorted({float(limit) for limit in limits})
    assert {limits[-2] for limits in bounds.values()} == {3600}
    for name in ("smg_router_ttft_seconds", "smg_router_tpot_seconds"):
        within = [bound for bound in bounds[name] if 0.001 <= bound <= 0.1]
        assert all(after / before <= 2.5 for before, after in pairwise(within))
        assert len(within) >= 10


def test_what_is_not_known_is_not_observed() -> None:
    metrics = Metrics()
    metrics.endpoint("m", "chat").finished(
        Finished(
            streaming=False,
            prompt_tokens=3,
            completion_tokens=0,
            seconds=1.0,
            ttft=None,
            generation=None,
            queue=None,
            prefill=None,
            decode=None,
        )
    )
    page = metrics.render().decode()
    assert "smg_router_ttft_seconds_count" in page
    assert re.search(r"^smg_router_ttft_seconds_count\{.*\} 0\.0$", page, re.MULTILINE)
    assert re.search(r'stage="queue"\} 0\.0$', page, re.MULTILINE)


# ------------------------------------------------------------------ what is read at a scrape


@pytest.mark.parametrize(
    ("age", "gt", "le"),
    [
        (0.0, "0", "30"),
        (30.0, "0", "30"),
        (30.1, "30", "60"),
        (3599.0, "1200", "3600"),
        (86400.0, "28800", "86400"),
        (1e6, "86400", "+Inf"),
    ],
)
def test_a_request_is_in_the_bucket_of_its_age_alone(age: float, gt: str, le: str) -> None:
    metrics = Metrics()
    metrics.watch_gate(lambda: gate(age))
    ages = family(metrics, "smg_http_inflight_request_age_count")
    assert [s.labels for s in ages.samples if s.value] == [{"gt": gt, "le": le}]
    assert len(ages.samples) == len(AGE_BOUNDS) + 1
    assert values(metrics, "smg_http_inflight_requests") == [1]


def test_connections_are_counted_when_somebody_looks() -> None:
    metrics, connections = Metrics(), {1, 2}
    assert values(metrics, "smg_http_connections_active") == [0]
    metrics.watch_connections(lambda: len(connections))
    assert values(metrics, "smg_http_connections_active") == [2]
    connections.clear()
    assert values(metrics, "smg_http_connections_active") == [0]


def test_lookups_are_told_by_model_and_result() -> None:
    metrics = Metrics()
    metrics.watch_lookups(lambda: [LookupSample("a", 5, 2), LookupSample("b", 0, 1)])
    samples = family(metrics, "smg_tokenizer_cache_lookups").samples
    assert [(s.labels["model"], s.labels["result"], s.value) for s in samples] == [
        ("a", "hit", 5), ("a", "miss", 2), ("b", "hit", 0), ("b", "miss", 1),
    ]  # fmt: skip


def test_restarts_are_told_by_worker() -> None:
    metrics = Metrics()
    processes = {"a": ProcessSample("waiting", 3, 4), "b": ProcessSample("running", 1, 0)}
    metrics.watch_processes(lambda: processes)
    samples = family(metrics, "smg_engine_restarts").samples
    assert [(s.labels, s.value) for s in samples] == [({"worker": "a"}, 4), ({"worker": "b"}, 0)]


def test_counts_of_workers_and_engines() -> None:
    work = EngineWork(generated=70, prefix_queries=64, prefix_hits=48)
    counts = EngineCounts(requests=9, aborts=2)
    metrics = watching(lambda: [worker(rank(0), rank(1, work), counts=counts)])
    [requests] = family(metrics, "smg_worker_requests").samples
    assert (requests.labels, requests.value) == ({"worker": "ipc:///w", "model": "m"}, 9)
    assert values(metrics, "smg_engine_aborts") == [2]
    assert values(metrics, "smg_engine_generated_tokens") == [0, 70]
    assert values(metrics, "smg_engine_prefix_cache_queries") == [0, 64]
    assert values(metrics, "smg_engine_prefix_cache_hits") == [0, 48]


def test_series_end_with_their_worker_and_begin_anew_with_its_successor() -> None:
    now = [0.0]
    present = [worker(rank(work=EngineWork(1000, 64, 32)))]
    metrics = watching(lambda: present, lambda: now[0])
    assert values(metrics, "smg_engine_cache_hit_rate") == [0.5]
    now[0], present[0] = 5.0, worker(rank(work=EngineWork(10, 16, 0)))
    assert values(metrics, "smg_engine_gen_throughput") == []  # not -198
    assert values(metrics, "smg_engine_cache_hit_rate") == [0]
    present.clear()
    engines = [m for m in metrics.registry.collect() if m.name.startswith("smg_engine_")]
    assert [sample for metric in engines for sample in metric.samples] == []
    now[0] = 6.0
    present.append(worker(rank(work=EngineWork(20, 16, 0))))
    assert values(metrics, "smg_engine_gen_throughput") == []  # nothing is left of before


# ----------------------------------------------------------------------------------- rates


def test_series_end_with_their_model_and_begin_anew_with_its_return() -> None:
    metrics = Metrics()
    served = {"a", "b"}
    metrics.watch_models(lambda: served)
    metrics.failed("unknown", "chat", "validation_error")
    for model in served:
        serve_once(metrics, model)
    assert 'model="a"' in metrics.render().decode()
    with_both = len(metrics.render().splitlines())
    served.remove("a")
    for _ in range(2):
        assert 'model="a"' in metrics.render().decode()
        page = metrics.render().decode()
        assert 'model="a"' not in page
        assert "smg_router_requests_total{" in page
        assert 'model="unknown"' in page
        serve_once(metrics, "a")  # what ends after its model was removed
    served.add("a")
    assert 'model="a"' in metrics.render().decode()
    served.remove("a")
    metrics.render()
    metrics.render()
    served.add("a")
    serve_once(metrics, "a")
    assert len(metrics.render().splitlines()) == with_both
    for name in ("smg_router_requests", "smg_worker_selection"):
        assert sum(values(metrics, name)) == 2


def serve_once(metrics: Metrics, model: str) -> None:
    metrics.finished(model, "chat", FINISHED)
    metrics.chosen(model, "least_load")
    metrics.failed(model, "chat", "no_workers")
    metrics.migrations.labels(model, "migrated").inc()


def test_throughput_is_that_of_the_last_seconds() -> None:
    looks = Looks()
    assert looks.look(0.0, EngineWork(generated=500)).throughput is None
    assert looks.look(RESOLUTION / 2, EngineWork(generated=600)).throughput is None
    assert looks.look(1.0, EngineWork(generated=700)).throughput == 200
    looks.look(THROUGHPUT_SPAN, EngineWork(generated=1500))
    # A look that is too young to start from: the one at 1.0 is the latest that is old enough.
    later = looks.look(1.0 + THROUGHPUT_SPAN, EngineWork(generated=1700))
    assert later.throughput == 1000 / THROUGHPUT_SPAN


def test_throughput_reaches_back_to_the_last_look_if_that_is_long_ago() -> None:
    looks = Looks()
    looks.look(0.0, EngineWork())
    looks.look(100.0, EngineWork(generated=100))
    assert looks.look(160.0, EngineWork(generated=100 + 6000)).throughput == 100


def test_throughput_falls_to_nothing() -> None:
    looks = Looks()
    looks.look(0.0, EngineWork())
    looks.look(5.0, EngineWork(generated=100))
    assert looks.look(5.0 + THROUGHPUT_SPAN, EngineWork(generated=100)).throughput == 0


def test_who_looks_more_often_takes_nothing_from_others() -> None:
    """A scraper a minute and one a second read the same of an engine that does 50 a second."""
    alone, shared = Looks(), Looks()
    for second in range(301):
        work = EngineWork(50 * second, 10 * second, 4 * second)
        often = shared.look(second, work)
        if second % 60 == 0:
            rare, often = alone.look(second, work), shared.look(second, work)
            assert rare.throughput == often.throughput
            assert rare.hit_rate == often.hit_rate
        if second >= 2:
            assert often.throughput == pytest.approx(50)
            assert often.hit_rate == pytest.approx(0.4)


def test_the_hit_rate_is_that_of_the_last_minute_and_stays_where_there_are_no_prompts() -> None:
    looks = Looks()
    assert looks.look(0.0, EngineWork()).hit_rate is None
    assert looks.look(10.0, EngineWork(0, 100, 0)).hit_rate == 0
    assert looks.look(20.0, EngineWork(0, 200, 75)).hit_rate == 0.375
    assert looks.look(10.0 + HIT_RATE_SPAN, EngineWork(0, 200, 75)).hit_rate == 0.75
    assert looks.look(1000.0, EngineWork(0, 200, 75)).hit_rate == 0.75
    assert looks.look(1000.1, EngineWork(0, 250, 75)).hit_rate == 0


def test_the_first_look_tells_the_hit_rate_so_far() -> None:
    assert Looks().look(7.0, EngineWork(0, 64, 16)).hit_rate == 0.25


def test_looks_are_bounded() -> None:
    looks = Looks()
    for step in range(100_000):
        looks.look(step / 100, EngineWork(generated=step))
    assert len(looks._looks) <= HIT_RATE_SPAN / RESOLUTION + 2
