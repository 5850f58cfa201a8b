"""What is read from its owners when somebody scrapes: workers, engines, caches, ages of requests.

None of it costs anything in between. Owners give samples, plain structs; the collectors here turn
them into series. A series ends with its worker or model, so that labels stay bounded by these.

Rates are for those who look once and want a number: they are taken over the latest seconds, from
looks that are kept. Several scrapers share the looks and do not disturb each other, since nothing
is reset when somebody looks. The counters beside them are for `rate()`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from smgd.core import EngineCounts, EngineWork

CONNECTION_MODE = "zmq"
WORKER_TYPE = "regular"

# Seconds. What an engine generates is a matter of moments; prompts are rarer than tokens.
THROUGHPUT_SPAN = 10.0
HIT_RATE_SPAN = 60.0
# Looks closer together than this are one, which bounds how many are kept.
RESOLUTION = 0.5

# Seconds; not cumulative: requests older than `gt` and at most `le` old.
AGE_BOUNDS = (30, 60, 180, 300, 600, 1200, 3600, 7200, 14400, 28800, 86400)


class RankSample(msgspec.Struct, frozen=True):
    """What one engine rank reported last, whether it takes requests, and what it has done."""

    rank: int
    ready: bool
    running: int
    waiting: int
    kv_usage: float
    work: EngineWork


class WorkerSample(msgspec.Struct, frozen=True):
    """What is true of a worker at the moment of a scrape."""

    worker: str
    model: str
    healthy: bool
    requests_active: int
    ranks: list[RankSample]
    counts: EngineCounts


class LookupSample(msgspec.Struct, frozen=True):
    """How often pieces of a model's prompts were found tokenized already, and how often not."""

    model: str
    hits: int
    misses: int


class Rates(msgspec.Struct, frozen=True):
    """Generated tokens per second, and the share of prompt tokens found in the prefix cache.

    Either is None where it is not known: at the first look, and before the first prompt.
    """

    throughput: float | None
    hit_rate: float | None


class Looks:
    """What an engine had done at earlier looks, as far back as the longest span reaches."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, EngineWork]] = deque()
        self._hit_rate: float | None = None

    def look(self, now: float, work: EngineWork) -> Rates:
        """Take what the engine has done by `now` (seconds); return the latest rates.

        The share of prompts stays what it was while there are none.
        """
        looks = self._looks
        if looks and _is_another(looks[-1][1], work):
            looks.clear()
        if not looks:
            self._hit_rate = _hit_rate(EngineWork(), work)
        if not looks or now - looks[-1][0] >= RESOLUTION:
            looks.append((now, work))
        while len(looks) > 1 and now - looks[1][0] >= HIT_RATE_SPAN:
            looks.popleft()
        _, before = self._latest(now - HIT_RATE_SPAN)
        if work.prefix_queries > before.prefix_queries:
            self._hit_rate = _hit_rate(before, work)
        at, before = self._latest(now - THROUGHPUT_SPAN)
        if now - at < RESOLUTION:
            return Rates(None, self._hit_rate)
        return Rates((work.generated - before.generated) / (now - at), self._hit_rate)

    def _latest(self, until: float) -> tuple[float, EngineWork]:
        """Return the latest look that was not after `until`, or the first of all."""
        return next((look for look in reversed(self._looks) if look[0] <= until), self._looks[0])


def _hit_rate(before: EngineWork, now: EngineWork) -> float | None:
    queries = now.prefix_queries - before.prefix_queries
    return (now.prefix_hits - before.prefix_hits) / queries if queries else None


def _is_another(before: EngineWork, now: EngineWork) -> bool:
    """Tell whether the counts are those of another worker, which has taken the place of one."""
    return now.generated < before.generated or now.prefix_queries < before.prefix_queries


_ENGINE_COUNTS = {
    "aborts": "Requests that engines were told to abort",
    "adoptions": "Engines found again after a restart of smgd",
    "losses": "Times that an engine which took requests was lost",
}
_ENGINE_LABELS = ("worker", "model", "dp_rank")


class _EngineFamilies:
    """The series of engines, one of each per rank."""

    def __init__(self) -> None:
        self.ready = _gauge("smg_engine_ready", "1 while the engine takes requests")
        self.running = _gauge("smg_engine_running_requests", "Requests the engine runs")
        self.waiting = _gauge("smg_engine_waiting_requests", "Requests waiting in the engine")
        self.usage = _gauge("smg_engine_token_usage", "KV cache use of the engine, 0 to 1")
        self.throughput = _gauge(
            "smg_engine_gen_throughput",
            "Tokens per second that have come from the engine, over the last 10 seconds",
        )
        self.hit_rate = _gauge(
            "smg_engine_cache_hit_rate",
            "Share of prompt tokens found in the prefix cache, 0 to 1, over the last minute",
        )
        self.generated = _counter(
            "smg_engine_generated_tokens", "Tokens that have come from the engine"
        )
        self.queries = _counter(
            "smg_engine_prefix_cache_queries",
            "Prompt tokens that the engine looked for in its prefix cache",
        )
        self.hits = _counter(
            "smg_engine_prefix_cache_hits", "Prompt tokens that the engine found there"
        )

    def add(self, worker: WorkerSample, rank: RankSample, rates: Rates) -> None:
        """Add one engine's values."""
        labels = [worker.worker, worker.model, str(rank.rank)]
        self.ready.add_metric(labels, float(rank.ready))
        self.running.add_metric(labels, rank.running)
        self.waiting.add_metric(labels, rank.waiting)
        self.usage.add_metric(labels, rank.kv_usage)
        self.generated.add_metric(labels, rank.work.generated)
        self.queries.add_metric(labels, rank.work.prefix_queries)
        self.hits.add_metric(labels, rank.work.prefix_hits)
        if rates.throughput is not None:
            self.throughput.add_metric(labels, rates.throughput)
        if rates.hit_rate is not None:
            self.hit_rate.add_metric(labels, rates.hit_rate)

    def families(self) -> Iterable[Metric]:
        """Return all of them."""
        return vars(self).values()


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=_ENGINE_LABELS)


def _counter(name: str, text: str) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, labels=_ENGINE_LABELS)


class WorkerCollector(Collector):
    """Turns the registry's present state into series. `clock` gives seconds."""

    def __init__(
        self, source: Callable[[], Iterable[WorkerSample]], clock: Callable[[], float]
    ) -> None:
        self._source = source
        self._clock = clock
        self._looks: dict[tuple[str, int], Looks] = {}

    def collect(self) -> Iterator[Metric]:
        samples = list(self._source())
        yield from _worker_families(samples)
        yield from self._engine_families(samples)

    def _engine_families(self, samples: list[WorkerSample]) -> Iterable[Metric]:
        engines = _EngineFamilies()
        now = self._clock()
        before, self._looks = self._looks, {}  # those of workers that are gone go, too
        for sample in samples:
            for rank in sample.ranks:
                key = sample.worker, rank.rank
                looks = self._looks[key] = before.get(key) or Looks()
                engines.add(sample, rank, looks.look(now, rank.work))
        return engines.families()


def _worker_families(samples: list[WorkerSample]) -> Iterator[Metric]:
    pool = GaugeMetricFamily(
        "smg_worker_pool_size",
        "Workers of the model, ready or not",
        labels=["worker_type", "connection_mode", "model"],
    )
    for model, size in Counter(sample.model for sample in samples).items():
        pool.add_metric([WORKER_TYPE, CONNECTION_MODE, model], size)
    active = GaugeMetricFamily(
        "smg_worker_requests_active", "Requests in flight on the worker", labels=["worker"]
    )
    health = GaugeMetricFamily(
        "smg_worker_health", "1 while the worker is ready", labels=["worker"]
    )
    requests = CounterMetricFamily(
        "smg_worker_requests", "Requests sent to the worker", labels=["worker", "model"]
    )
    counters = {
        name: CounterMetricFamily(f"smg_engine_{name}", text, labels=["worker"])
        for name, text in _ENGINE_COUNTS.items()
    }
    for sample in samples:
        active.add_metric([sample.worker], sample.requests_active)
        health.add_metric([sample.worker], float(sample.healthy))
        requests.add_metric([sample.worker, sample.model], sample.counts.requests)
        for name, family in counters.items():
            family.add_metric([sample.worker], getattr(sample.counts, name))
    yield from (pool, active, health, requests, *counters.values())


class ProcessSample(msgspec.Struct, frozen=True, omit_defaults=True):
    """An engine that smgd has started itself, as a process. `pid` is that of its guardian.

    `starts` counts processes, `restarts` the times that one had to be started again; `last_end`
    says why the latest of them.
    """

    state: str
    starts: int
    restarts: int
    pid: int | None = None
    last_end: str = ""


class ProcessCollector(Collector):
    """Counts the restarts of engines that smgd has started itself; they are given by worker."""

    def __init__(self, source: Callable[[], Mapping[str, ProcessSample]]) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        restarts = CounterMetricFamily(
            "smg_engine_restarts",
            "Times that an engine which smgd has started itself had to be started again",
            labels=["worker"],
        )
        for worker, process in self._source().items():
            restarts.add_metric([worker], process.restarts)
        yield restarts


class LookupCollector(Collector):
    """Counts what the caches of tokenizers found."""

    def __init__(self, source: Callable[[], Iterable[LookupSample]]) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        lookups = CounterMetricFamily(
            "smg_tokenizer_cache_lookups",
            "Pieces of prompts, by whether they had been tokenized before",
            labels=["model", "result"],
        )
        for sample in self._source():
            lookups.add_metric([sample.model, "hit"], sample.hits)
            lookups.add_metric([sample.model, "miss"], sample.misses)
        yield lookups


class LogCollector(Collector):
    """Counts the log lines that were lost, which a log that nobody reads cannot tell."""

    def __init__(self, lost: Callable[[], int]) -> None:
        self._lost = lost

    def collect(self) -> Iterator[Metric]:
        text = "Log lines that were not written: nobody read them, or it failed"
        yield CounterMetricFamily("smg_log_lines_lost", text, value=self._lost())


class GateSample(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests are in which part of the HTTP side, and how admission has treated all.

    `ages` are those of the requests that are being answered, in seconds.
    """

    ages: list[float]
    running: int
    waiting: int
    allowed: int
    full: int
    timeouts: int


class GateCollector(Collector):
    """Turns the present state of the HTTP side into series at scrape time."""

    def __init__(self, source: Callable[[], GateSample]) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        now = self._source()
        rejected = CounterMetricFamily(
            "smg_admission_queue_rejected",
            "Requests that the admission queue refused",
            labels=["reason"],
        )
        rejected.add_metric(["full"], now.full)
        rejected.add_metric(["timeout"], now.timeouts)
        results = CounterMetricFamily(
            "smg_http_rate_limit",
            "Requests that admission let through, and those that it refused",
            labels=["result"],
        )
        results.add_metric(["allowed"], now.allowed)
        results.add_metric(["rejected"], now.full + now.timeouts)
        gauges = {
            "smg_http_inflight_requests": ("HTTP requests being answered", len(now.ages)),
            "smg_admission_inflight": ("Requests that have a permit", now.running),
            "smg_admission_queue_depth": ("Requests that wait for a permit", now.waiting),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=value)
        yield from (rejected, results, _age_family(now.ages))


def _age_family(ages: Iterable[float]) -> Metric:
    """Return how many requests are how old, given the age of each in seconds."""
    family = GaugeMetricFamily(
        "smg_http_inflight_request_age_count",
        "HTTP requests being answered that are older than `gt` and at most `le` seconds old",
        labels=["gt", "le"],
    )
    found = Counter(bisect_left(AGE_BOUNDS, age) for age in ages)
    bounds = ["0", *map(str, AGE_BOUNDS), "+Inf"]
    for place, labels in enumerate(pairwise(bounds)):
        family.add_metric(labels, found[place])
    return family
