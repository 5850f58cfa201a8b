"""Every series is documented, with its labels; labels are bounded."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import Metric

from smgd.core import EngineCounts
from smgd.metrics import Finished, Metrics, RankSample, WorkerSample

DOCS = (Path(__file__).parent.parent / "docs/metrics.md").read_text()


def every_series() -> list[Metric]:
    metrics = Metrics()
    ranks = [RankSample(0, True, 1, 2, 0.5)]
    counts = EngineCounts()
    metrics.watch_workers(lambda: [WorkerSample("ipc:///w", "m", True, 3, ranks, counts)])
    metrics.answered("GET", "/health", 200, "", 0.1)
    metrics.failed("m", "chat", "no_workers")
    metrics.failed("m", "chat", "backend_error")
    metrics.chosen("m", "least_load")
    metrics.endpoint("m", "chat").finished(
        Finished(
            streaming=True,
            prompt_tokens=3,
            completion_tokens=5,
            seconds=1.0,
            ttft=0.2,
            generation=0.8,
            queue=0.01,
            prefill=0.1,
        )
    )
    return list(metrics.registry.collect())


def test_every_series_is_documented() -> None:
    exported = {
        metric.name + ("_total" if metric.type == "counter" else "") for metric in every_series()
    }
    assert exported - set(re.findall(r"`(smg_[a-z_]+)`", DOCS)) == set()


def test_only_what_an_engine_did_counts_as_its_error() -> None:
    [errors] = [m for m in every_series() if m.name == "smg_worker_errors"]
    assert [s.labels["error_type"] for s in errors.samples] == ["backend_error"]


def test_the_mean_time_per_token_leaves_the_first_out() -> None:
    [tpot] = [m for m in every_series() if m.name == "smg_router_tpot_seconds"]
    [total] = [s.value for s in tpot.samples if s.name.endswith("_sum")]
    assert total == 0.8 / 4


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
        )
    )
    page = metrics.render().decode()
    assert "smg_router_ttft_seconds_count" in page
    assert re.search(r"^smg_router_ttft_seconds_count\{.*\} 0\.0$", page, re.MULTILINE)
    assert re.search(r'stage="queue"\} 0\.0$', page, re.MULTILINE)
