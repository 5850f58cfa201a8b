"""Every ready worker of a model in turn, whatever its load."""

from __future__ import annotations

from collections.abc import Sequence

from smgd.core import GenerationRequest, Worker
from smgd.workers.policies.scoreless import Scoreless

# Models whose turn is known. They come and go by the worker API, and nobody tells of their end.
MAX_MODELS = 1024


class RoundRobin(Scoreless):
    """Counts turns per model, so that one model's traffic does not shift another's."""

    name = "round_robin"

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}

    def pick(self, candidates: Sequence[Worker], request: GenerationRequest) -> Worker:
        """Choose the next one in turn."""
        turn = self._turns.get(request.model, 0)
        if not turn and len(self._turns) >= MAX_MODELS:
            del self._turns[next(iter(self._turns))]
        self._turns[request.model] = turn + 1
        return candidates[turn % len(candidates)]
