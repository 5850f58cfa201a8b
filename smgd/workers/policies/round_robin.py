"""Every ready worker of a model in turn, whatever its load."""

from __future__ import annotations

from collections.abc import Sequence

from smgd.core import GenerationRequest, Worker


class RoundRobin:
    """Counts turns per model, so that one model's traffic does not shift another's."""

    name = "round_robin"

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}

    def pick(self, candidates: Sequence[Worker], request: GenerationRequest) -> Worker:
        """Choose the next one in turn."""
        turn = self._turns.get(request.model, 0)
        self._turns[request.model] = turn + 1
        return candidates[turn % len(candidates)]

    def started(self, worker: Worker, request: GenerationRequest) -> None:
        """Do nothing: the turn was counted when it was given."""

    def ended(self, worker: Worker, request: GenerationRequest) -> None:
        """Do nothing."""
