"""Every metric that smgd exports, and the only module that knows prometheus_client.

Names and labels are those operators of the field already have dashboards for. Values that exist
anyway (requests in flight, what engines report) are read from their owners when somebody scrapes,
so they cost nothing in between. What is counted on the request path is bound to its labels once
per (model, endpoint) and kept.

Label values are bounded: paths are route patterns or `other`, models are those configured or
`other`, workers are those registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from smgd.core import EngineCounts

# A series of creation times beside every counter doubles the page and nobody reads it.
disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Whole requests run up to an hour; the fine end serves the probes and tokenization.
DURATION_BUCKETS = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 30, 45, 60, 90, 120, 180,
    240, 300, 480, 900, 1200, 1800, 3600,
)  # fmt: skip
# Time to first token and between tokens: resolution where people compare engines.
TOKEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
    0.5, 0.75, 1, 1.5, 2.5, 5, 10, 30, 60, 300,
)  # fmt: skip


_COUNTED = {
    "aborts": "Requests that engines were told to abort",
    "adoptions": "Engines found again after a restart of smgd",
    "losses": "Times that an engine which took requests was lost",
}


class RankSample(msgspec.Struct, frozen=True):
    """What one engine rank reported last, and whether it takes requests."""

    rank: int
    ready: bool
    running: int
    waiting: int
    kv_usage: float


class WorkerSample(msgspec.Struct, frozen=True):
    """What is true of a worker at the moment of a scrape."""

    worker: str
    model: str
    healthy: bool
    requests_active: int
    ranks: list[RankSample]
    counts: EngineCounts


class _WorkerCollector(Collector):
    """Turns the registry's present state into gauges at scrape time."""

    def __init__(self, source: Callable[[], Iterable[WorkerSample]]) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        active = GaugeMetricFamily(
            "smg_worker_requests_active", "Requests in flight on the worker", labels=["worker"]
        )
        health = GaugeMetricFamily(
            "smg_worker_health", "1 while the worker is ready", labels=["worker"]
        )
        labels = ["worker", "model", "dp_rank"]
        running = GaugeMetricFamily(
            "smg_engine_running_requests", "Requests the engine runs", labels=labels
        )
        waiting = GaugeMetricFamily(
            "smg_engine_waiting_requests", "Requests waiting in the engine", labels=labels
        )
        usage = GaugeMetricFamily(
            "smg_engine_token_usage", "KV cache use of the engine, 0 to 1", labels=labels
        )
        ready = GaugeMetricFamily(
            "smg_engine_ready", "1 while the engine takes requests", labels=labels
        )
        counters = {
            name: CounterMetricFamily(f"smg_engine_{name}", text, labels=["worker"])
            for name, text in _COUNTED.items()
        }
        for sample in self._source():
            for name, family in counters.items():
                family.add_metric([sample.worker], getattr(sample.counts, name))
            active.add_metric([sample.worker], sample.requests_active)
            health.add_metric([sample.worker], float(sample.healthy))
            for rank in sample.ranks:
                values = [sample.worker, sample.model, str(rank.rank)]
                ready.add_metric(values, float(rank.ready))
                running.add_metric(values, rank.running)
                waiting.add_metric(values, rank.waiting)
                usage.add_metric(values, rank.kv_usage)
        yield from (active, health, ready, running, waiting, usage, *counters.values())


class EndpointMetrics:
    """The series of one (model, endpoint), bound once: what a request adds to when it ends."""

    __slots__ = ("input_tokens", "output_tokens", "requests", "tpot", "ttft")

    def __init__(self, metrics: Metrics, model: str, endpoint: str) -> None:
        self.requests = {
            streaming: metrics.requests.labels(model, endpoint, str(streaming).lower())
            for streaming in (False, True)
        }
        self.ttft = metrics.ttft.labels(model, endpoint)
        self.tpot = metrics.tpot.labels(model, endpoint)
        self.input_tokens = metrics.tokens.labels(model, endpoint, "input")
        self.output_tokens = metrics.tokens.labels(model, endpoint, "output")

    def finished(
        self,
        streaming: bool,
        prompt_tokens: int,
        completion_tokens: int,
        ttft: float | None,
        generation: float | None,
    ) -> None:
        """Count a generation that has ended. Times in seconds; None where no token came."""
        self.requests[streaming].inc()
        self.input_tokens.inc(prompt_tokens)
        self.output_tokens.inc(completion_tokens)
        if ttft is not None:
            self.ttft.observe(ttft)
        if generation is not None and completion_tokens > 1:
            self.tpot.observe(generation / (completion_tokens - 1))


class Metrics:
    """One registry for one daemon; nothing is global, so tests can have many."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._endpoints: dict[tuple[str, str], EndpointMetrics] = {}
        self._answers: dict[tuple[str, str, int, str], tuple[Counter, Counter, Histogram]] = {}
        reg = self.registry
        self.http_requests = Counter(
            "smg_http_requests_total", "HTTP requests", ["method", "path"], registry=reg
        )
        self.http_responses = Counter(
            "smg_http_responses_total",
            "HTTP responses; a client that left early counts as status 499",
            ["path", "status_code", "error_code"],
            registry=reg,
        )
        self.http_duration = Histogram(
            "smg_http_request_duration_seconds",
            "From the request's head to the end of the response",
            ["method", "path"],
            buckets=DURATION_BUCKETS,
            registry=reg,
        )
        self.requests = Counter(
            "smg_router_requests_total",
            "Requests given to engines",
            ["model", "endpoint", "streaming"],
            registry=reg,
        )
        self.tokens = Counter(
            "smg_router_tokens_total",
            "Tokens of finished requests",
            ["model", "endpoint", "token_type"],
            registry=reg,
        )
        self.ttft = Histogram(
            "smg_router_ttft_seconds",
            "From the request's head to the first token",
            ["model", "endpoint"],
            buckets=TOKEN_BUCKETS,
            registry=reg,
        )
        self.tpot = Histogram(
            "smg_router_tpot_seconds",
            "Mean time per token after the first",
            ["model", "endpoint"],
            buckets=TOKEN_BUCKETS,
            registry=reg,
        )
        self.unknown_fields = Counter(
            "smg_request_unknown_fields_total",
            "Request fields that neither OpenAI nor vLLM know, which were ignored",
            ["endpoint"],
            registry=reg,
        )
        self.migrations = Counter(
            "smg_router_migrations_total",
            "Requests whose engine was lost: gone on with another worker, or failed",
            ["model", "result"],
            registry=reg,
        )
        self.http_inflight = Gauge(
            "smg_http_inflight_requests", "HTTP requests being answered", registry=reg
        )

    def answered(
        self, method: str, route: str, status: int, error_code: str, seconds: float
    ) -> None:
        """Count an HTTP request that has ended; all of its labels are from bounded sets."""
        key = (method, route, status, error_code)
        bound = self._answers.get(key)
        if bound is None:
            bound = self._answers[key] = (
                self.http_requests.labels(method, route),
                self.http_responses.labels(route, str(status), error_code),
                self.http_duration.labels(method, route),
            )
        requests, responses, duration = bound
        requests.inc()
        responses.inc()
        duration.observe(seconds)

    def watch_workers(self, source: Callable[[], Iterable[WorkerSample]]) -> None:
        """Export the workers that `source` gives at each scrape."""
        self.registry.register(_WorkerCollector(source))

    def endpoint(self, model: str, endpoint: str) -> EndpointMetrics:
        """Return the bound series of a configured model and an endpoint."""
        key = (model, endpoint)
        bound = self._endpoints.get(key)
        if bound is None:
            bound = self._endpoints[key] = EndpointMetrics(self, model, endpoint)
        return bound

    def render(self) -> bytes:
        """Return all series as Prometheus text."""
        return generate_latest(self.registry)
