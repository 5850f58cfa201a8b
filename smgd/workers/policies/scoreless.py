"""What the policies have in common that look at the workers anew for each request."""

from __future__ import annotations

from smgd.core import GenerationRequest, Worker


class Scoreless:
    """Keeps no score of what runs: the workers know that themselves."""

    def started(self, worker: Worker, request: GenerationRequest) -> None:
        """Do nothing."""

    def ended(self, worker: Worker, request: GenerationRequest) -> None:
        """Do nothing."""
