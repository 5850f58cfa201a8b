"""What is counted as requests end, and the registry of all metrics that smgd exports.

Names and labels are those operators of the field already have dashboards for. Values that exist
anyway (requests in flight, what engines report) are read from their owners when somebody scrapes,
see `samples`. What is counted on the request path is bound to its labels once per (model, endpoint)
and kept, and counted some requests at a time.

Label values are bounded: paths are route patterns or `other`, models are those configured,
`other` or `unknown`, workers are those registered.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import msgspec
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from smgd.samples import (
    CONNECTION_MODE,
    WORKER_TYPE,
    GateCollector,
    GateSample,
    LogCollector,
    LookupCollector,
    LookupSample,
    ProcessCollector,
    ProcessSample,
    WorkerCollector,
    WorkerSample,
)

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
    0.5, 0.75, 1, 1.5, 2.5, 5, 10, 30, 60, 300, 900, 3600,
)  # fmt: skip


# What this gateway is, in the words of the field's dashboards: (router_type, backend_type).
KIND = ("zmq", "regular")
WORKER_ERRORS = frozenset({"backend_error"})

# Labels of requests for no model of ours, and of those that did not get as far as to name one.
NO_MODELS = frozenset({"other", "unknown"})

# Ended requests that are counted together: well under a millisecond of work.
NOTES = 32


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a generation that has ended. Times in seconds; None where it is not known.

    `seconds` is from the request's head to the end, `ttft` to the first token, `generation` from
    there to the last one that came. `queue`, `prefill` and `decode` are the engine's own figures:
    until it was scheduled, from there to the first token, and from there to the last.
    """

    streaming: bool
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    ttft: float | None
    generation: float | None
    queue: float | None
    prefill: float | None
    decode: float | None


class EndpointMetrics:
    """The series of one (model, endpoint), bound once: what a request adds to when it ends."""

    __slots__ = (
        "_duration", "_generation", "_input_tokens", "_output_tokens", "_requests", "_stages",
        "_tpot", "_ttft",
    )  # fmt: skip

    def __init__(self, metrics: Metrics, model: str, endpoint: str) -> None:
        labels = (*KIND, model, endpoint)
        self._requests = {
            streaming: metrics.requests.labels(
                *KIND, CONNECTION_MODE, model, endpoint, str(streaming).lower()
            )
            for streaming in (False, True)
        }
        self._duration = metrics.duration.labels(*KIND, CONNECTION_MODE, model, endpoint)
        self._ttft = metrics.ttft.labels(*labels)
        self._tpot = metrics.tpot.labels(*labels)
        self._generation = metrics.generation.labels(*labels)
        self._input_tokens = metrics.tokens.labels(*labels, "input")
        self._output_tokens = metrics.tokens.labels(*labels, "output")
        self._stages = {
            stage: metrics.stages.labels(KIND[0], stage) for stage in ("queue", "prefill", "decode")
        }

    def finished(self, what: Finished) -> None:
        """Count a generation that has ended."""
        self._requests[what.streaming].inc()
        self._duration.observe(what.seconds)
        self._input_tokens.inc(what.prompt_tokens)
        self._output_tokens.inc(what.completion_tokens)
        _observe(self._ttft, what.ttft)
        _observe(self._generation, what.generation)
        if what.generation is not None and what.completion_tokens > 1:
            self._tpot.observe(what.generation / (what.completion_tokens - 1))
        _observe(self._stages["queue"], what.queue)
        _observe(self._stages["prefill"], what.prefill)
        _observe(self._stages["decode"], what.decode)


def _observe(series: Histogram, seconds: float | None) -> None:
    if seconds is not None:
        series.observe(seconds)


class _Settling(Collector):
    """Has nothing to show, but has everything counted before others show it."""

    def __init__(self, settle: Callable[[], None]) -> None:
        self._settle = settle

    def collect(self) -> Iterator[Metric]:
        self._settle()
        return iter(())


class Metrics:
    """One registry for one daemon; nothing is global, so tests can have many."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._noted: list[tuple[Callable[..., None], tuple[object, ...]]] = []
        self.registry.register(_Settling(self._look))  # the first to be asked at a scrape
        self._models: set[str] = set()  # that have series
        self._gone: set[str] = set()  # of them, those that were served no more at the last look
        self._served: Callable[[], Collection[str]] = lambda: self._models
        self._endpoints: dict[tuple[str, str], EndpointMetrics] = {}
        self._answers: dict[tuple[str, str, int, str], tuple[Counter, Counter, Histogram]] = {}
        self._selections: dict[tuple[str, str], Counter] = {}
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
        kind = ["router_type", "backend_type"]
        self.requests = Counter(
            "smg_router_requests_total",
            "Requests given to engines",
            [*kind, "connection_mode", "model", "endpoint", "streaming"],
            registry=reg,
        )
        self.duration = Histogram(
            "smg_router_request_duration_seconds",
            "From the request's head to the end of the answer, of requests given to engines",
            [*kind, "connection_mode", "model", "endpoint"],
            buckets=DURATION_BUCKETS,
            registry=reg,
        )
        self.errors = Counter(
            "smg_router_request_errors_total",
            "Requests that were answered with an error",
            [*kind, "connection_mode", "model", "endpoint", "error_type"],
            registry=reg,
        )
        self.stages = Histogram(
            "smg_router_stage_duration_seconds",
            "Where a request's time went, by the engine's own clock",
            ["router_type", "stage"],
            buckets=TOKEN_BUCKETS,
            registry=reg,
        )
        labels = [*kind, "model", "endpoint"]
        self.tokens = Counter(
            "smg_router_tokens_total",
            "Tokens of finished requests",
            [*labels, "token_type"],
            registry=reg,
        )
        self.ttft = Histogram(
            "smg_router_ttft_seconds",
            "From the request's head to the first token",
            labels,
            buckets=TOKEN_BUCKETS,
            registry=reg,
        )
        self.tpot = Histogram(
            "smg_router_tpot_seconds",
            "Mean time per token after the first",
            labels,
            buckets=TOKEN_BUCKETS,
            registry=reg,
        )
        self.generation = Histogram(
            "smg_router_generation_duration_seconds",
            "From the first token to the last",
            labels,
            buckets=DURATION_BUCKETS,
            registry=reg,
        )
        self.selections = Counter(
            "smg_worker_selection_total",
            "Sequences given to a worker, by the policy that chose it",
            ["worker_type", "connection_mode", "model", "policy"],
            registry=reg,
        )
        self.worker_errors = Counter(
            "smg_worker_errors_total",
            "Requests that failed by their engine: it was lost, or reported an error",
            ["worker_type", "connection_mode", "error_type"],
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
        self.connections = Gauge(
            "smg_http_connections_active", "Open connections of clients", registry=reg
        )
        self._of_models = (
            self.requests, self.duration, self.errors, self.tokens, self.ttft, self.tpot,
            self.generation, self.selections, self.migrations,
        )  # fmt: skip

    def _note(self, count: Callable[..., None], *what: object) -> None:
        """Call `count` with `what` at the latest when somebody looks.

        To count one request takes some hundred lines of the library, which nothing else runs. Many
        at a time find them in the processor's caches, and cost a third.
        """
        self._noted.append((count, what))
        if len(self._noted) >= NOTES:
            self.settle()

    def settle(self) -> None:
        """Count what was noted."""
        noted, self._noted = self._noted, []
        for count, what in noted:
            count(*what)

    def _look(self) -> None:
        self.settle()
        self._forget_models()

    def answered(
        self, method: str, route: str, status: int, error_code: str, seconds: float
    ) -> None:
        """Count an HTTP request that has ended; all of its labels are from bounded sets."""
        self._note(self._answered, method, route, status, error_code, seconds)

    def finished(self, model: str, endpoint: str, what: Finished) -> None:
        """Count a generation that has ended, of a configured model."""
        self._note(self.endpoint(model, endpoint).finished, what)

    def _answered(
        self, method: str, route: str, status: int, error_code: str, seconds: float
    ) -> None:
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

    def failed(self, model: str, endpoint: str, error_type: str) -> None:
        """Count a request that was answered with an error.

        `model` is an id of ours, or `other` or `unknown`.
        """
        if model not in NO_MODELS:
            self._models.add(model)
        self.errors.labels(*KIND, CONNECTION_MODE, model, endpoint, error_type).inc()
        if error_type in WORKER_ERRORS:
            self.worker_errors.labels(WORKER_TYPE, CONNECTION_MODE, error_type).inc()

    def chosen(self, model: str, policy: str) -> None:
        """Count that a policy gave a sequence to a worker."""
        bound = self._selections.get((model, policy))
        if bound is None:
            labels = (WORKER_TYPE, CONNECTION_MODE, model, policy)
            bound = self._selections[model, policy] = self.selections.labels(*labels)
        bound.inc()

    def watch_models(self, served: Callable[[], Collection[str]]) -> None:
        """Export the series of those models alone that `served` names, or they would add up."""
        self._served = served

    def _forget_models(self) -> None:
        """End the series of models that are served no more.

        At the second look that finds them gone: the first still shows their last requests.
        """
        gone = self._models - {*self._served()}
        for model in gone & self._gone:
            self._forget_model(model)
        self._gone = gone

    def _forget_model(self, model: str) -> None:
        self._models.discard(model)
        for metric in self._of_models:
            metric.remove_by_labels({"model": model})
        self._endpoints = {k: bound for k, bound in self._endpoints.items() if k[0] != model}
        self._selections = {k: bound for k, bound in self._selections.items() if k[0] != model}

    def watch_workers(
        self, source: Callable[[], Iterable[WorkerSample]], clock: Callable[[], float]
    ) -> None:
        """Export the workers that `source` gives at each scrape; `clock` gives seconds."""
        self.registry.register(WorkerCollector(source, clock))

    def watch_processes(self, source: Callable[[], Mapping[str, ProcessSample]]) -> None:
        """Export how the engines fare that `source` gives at each scrape, by worker."""
        self.registry.register(ProcessCollector(source))

    def watch_lookups(self, source: Callable[[], Iterable[LookupSample]]) -> None:
        """Export how the tokenizers' caches fare, as `source` says at each scrape."""
        self.registry.register(LookupCollector(source))

    def watch_connections(self, count: Callable[[], int]) -> None:
        """Export the number of connections that `count` returns at each scrape."""
        self.connections.set_function(count)

    def watch_log(self, lost: Callable[[], int]) -> None:
        """Export how many log lines `lost` says that nobody read in time."""
        self.registry.register(LogCollector(lost))

    def watch_gate(self, source: Callable[[], GateSample]) -> None:
        """Export the state of the HTTP side that `source` gives at each scrape."""
        self.registry.register(GateCollector(source))

    def endpoint(self, model: str, endpoint: str) -> EndpointMetrics:
        """Return the bound series of a configured model and an endpoint."""
        key = (model, endpoint)
        bound = self._endpoints.get(key)
        if bound is None:
            self._forget_models()  # also where nobody scrapes
            self._models.add(model)
            bound = self._endpoints[key] = EndpointMetrics(self, model, endpoint)
        return bound

    def render(self) -> bytes:
        """Return all series as Prometheus text."""
        return generate_latest(self.registry)
