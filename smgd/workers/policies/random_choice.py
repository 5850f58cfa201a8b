"""Any ready worker, each as likely as the others: no state, no order that clients could guess."""

from __future__ import annotations

import random
from collections.abc import Sequence

from smgd.core import GenerationRequest, Worker
from smgd.workers.policies.scoreless import Scoreless


class Random(Scoreless):
    """Draws; `rng` is for tests."""

    name = "random"

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()  # noqa: S311 - it guards nothing

    def pick(self, candidates: Sequence[Worker], request: GenerationRequest) -> Worker:
        """Choose one by lot."""
        return candidates[self._rng.randrange(len(candidates))]
