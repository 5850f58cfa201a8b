"""The less loaded of two ready workers drawn by lot: nearly as even as looking at all of them.

Where several gateways share engines, each of them sees only a part of the load, and the one worker
that looks idle would get everything from all of them at once; two draws spread that. The score is
that of `least_load`. Of equal ones the first drawn wins, so ties are as random as the draw.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from smgd.core import GenerationRequest, Worker
from smgd.engine import ranks
from smgd.workers.policies.scoreless import Scoreless


class PowerOfTwo(Scoreless):
    """Draws two; `rng` is for tests."""

    name = "power_of_two"

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()  # noqa: S311 - it guards nothing

    def pick(self, candidates: Sequence[Worker], request: GenerationRequest) -> Worker:
        """Choose the less loaded of two different ones."""
        count = len(candidates)
        first = self._rng.randrange(count)
        if count == 1:
            return candidates[first]
        second = (first + self._rng.randrange(1, count)) % count
        pair = candidates[first], candidates[second]
        return min(pair, key=lambda worker: ranks.score(worker.requests_active, worker.load))
