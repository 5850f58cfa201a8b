"""The ready worker with the lowest score: the same score that places requests on ranks.

What engines report is old when the next request comes, so requests in flight of ours are its floor;
they are counted by the worker itself. Workers that score the same take turns.

A decision looks at `WINDOW` workers at most, so that it costs the same however many there are. Up
to that number it is the least loaded of all; beyond, of a window that moves on with every request,
so that all workers are looked at equally often and an idle fleet is filled in turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from smgd.core import GenerationRequest, Worker
from smgd.engine import ranks
from smgd.workers.policies.scoreless import Scoreless

WINDOW = 16


class LeastLoad(Scoreless):
    """Keeps nothing but whose turn it is among equals."""

    name = "least_load"

    def __init__(self) -> None:
        self._turn = 0

    def pick(self, candidates: Sequence[Worker], request: GenerationRequest) -> Worker:
        """Choose the least loaded."""
        count = len(candidates)
        start = self._turn % count
        window = [candidates[(start + i) % count] for i in range(min(count, WINDOW))]
        scores = [ranks.score(worker.requests_active, worker.load) for worker in window]
        chosen = ranks.lowest(scores, 0)
        self._turn = start + chosen + 1
        return window[chosen]
