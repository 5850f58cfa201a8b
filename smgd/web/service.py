"""What request handlers work with: the parts of the daemon, in one record."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from smgd.core import RequestIds
from smgd.dispatch import Dispatcher
from smgd.metrics import Metrics
from smgd.text.catalog import Catalog
from smgd.text.stage import TextStage
from smgd.workers.registry import Registry


class Service(msgspec.Struct, kw_only=True):
    """The daemon as handlers see it. `draining` is set first when it stops.

    `started_at` is wall-clock seconds; `sse_keepalive` is seconds, `max_payload_size` bytes.
    """

    catalog: Catalog
    registry: Registry
    dispatcher: Dispatcher
    stage: TextStage
    metrics: Metrics
    ids: RequestIds
    wall_clock: Callable[[], float]
    started_at: int
    sse_keepalive: float
    max_payload_size: int
    max_logprobs: int
    draining: bool = False

    def not_ready(self) -> str | None:
        """Return why this daemon should get no traffic, or None if it should."""
        if self.draining:
            return "draining"
        if not self.registry.ready_count():
            return "insufficient healthy workers"
        if self.catalog.missing:
            return "tokenizer not yet registered"
        return None
