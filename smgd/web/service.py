"""What request handlers work with: the parts of the daemon, in one record."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from smgd.core import RequestIds
from smgd.dispatch import Dispatcher, Generation
from smgd.metrics import Metrics
from smgd.samples import ProcessSample
from smgd.text.catalog import Catalog
from smgd.text.stage import TextStage
from smgd.web.gate import Access, Gate
from smgd.workers.fleet import Fleet
from smgd.workers.record import Record
from smgd.workers.registry import Registry


class Running(msgspec.Struct, eq=False):
    """A request that engines run, for operators to look at and to abort.

    `id` is the id of the response, and unlike `access.id` never the client's own. `client` is its
    address.
    """

    id: str
    endpoint: str
    client: str
    access: Access
    stream: bool
    generation: Generation


class Service(msgspec.Struct, kw_only=True):
    """The daemon as handlers see it. `draining` is set first when it stops.

    `running` has the requests that engines run, by the id of their response.
    `process_of` returns how the engine of a worker's URL fares that smgd has started itself, None
    for any other. `started_at` is wall-clock seconds; `sse_keepalive` and `body_timeout` are
    seconds, `max_payload_size` bytes.
    """

    catalog: Catalog
    registry: Registry
    fleet: Fleet
    dispatcher: Dispatcher
    stage: TextStage
    metrics: Metrics
    gate: Gate
    ids: RequestIds
    wall_clock: Callable[[], float]
    started_at: int
    sse_keepalive: float
    body_timeout: float
    max_payload_size: int
    max_logprobs: int
    draining: bool = False
    running: dict[str, Running] = {}
    process_of: Callable[[str], ProcessSample | None] = lambda _: None

    def not_ready(self) -> str | None:
        """Return why this daemon should get no traffic, or None if it should.

        A worker that is ready needs its model's tokenizer; a model without one blocks nobody.
        """
        if self.draining:
            return "draining"
        if not self.registry.ready_count():
            return "insufficient healthy workers"
        if self._missing_tokenizers():
            return "tokenizer not yet registered"
        return None

    def missing(self) -> list[str]:
        """Say in words what it is that is missing while the daemon is not ready."""
        if self.draining:
            return []
        if not self.registry.ready_count():
            records = self.fleet.records.values()
            return [_state_of(record) for record in records] or ["there is no worker"]
        return [self.catalog.why_missing(model) for model in self._missing_tokenizers()]

    def _missing_tokenizers(self) -> list[str]:
        return [model for model in self.catalog.missing if self.registry.candidates(model)]


def _state_of(record: Record) -> str:
    """Say what a worker does in place of serving, and why if it does nothing more."""
    text = f"worker {record.spec.url} is {record.state}"
    return f"{text}: {record.reason}" if record.reason else text
