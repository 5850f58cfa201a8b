"""The ready worker with the lowest score: the same score that places requests on ranks.

What engines report is old when the next request comes, so requests in flight of ours are its floor;
they are counted by the worker itself. Workers that score the same take turns.
"""

from __future__ import annotations

from collections.abc import Sequence

from smgd.core import GenerationRequest, Worker
from smgd.engine import ranks


class LeastLoad:
    """Keeps nothing but whose turn it is among equals."""

    name = "least_load"

    def __init__(self) -> None:
        self._turn = 0

    def pick(self, candidates: Sequence[Worker], request: GenerationRequest) -> Worker:
        """Choose the least loaded."""
        scores = [ranks.score(worker.requests_active, worker.load) for worker in candidates]
        chosen = ranks.lowest(scores, self._turn)
        self._turn = chosen + 1
        return candidates[chosen]

    def started(self, worker: Worker, request: GenerationRequest) -> None:
        """Do nothing: the worker knows what is in flight."""

    def ended(self, worker: Worker, request: GenerationRequest) -> None:
        """Do nothing."""
