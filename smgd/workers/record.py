"""What is known of one worker: its spec, its parts, and how its registration goes."""

from __future__ import annotations

import trio

from smgd.core import WorkerState
from smgd.engine.paths import Addresses
from smgd.text.loader import ModelSource
from smgd.workers.spec import Wire, WorkerSpec
from smgd.workers.zmq import ZmqWorker


class Record:
    """A worker as operators see it: what it was asked to be, and what has become of it.

    `reason` is why it could not be registered. `since` is the wall-clock second in which it was
    added, failed or began to drain. `gone` is set when its sockets and files are released;
    `engines_stay` is whether its engines lived on then, for the next worker with its URL.
    """

    def __init__(self, spec: WorkerSpec, wire: Wire, model: ModelSource, worker: ZmqWorker) -> None:
        self.spec = spec
        self.model = model
        self._wire = wire
        self.worker = worker
        self.reason = ""
        self.leaving = False
        self.engines_stay = False
        self.since = 0
        self.gone = trio.Event()
        self.scope = trio.CancelScope()

    @property
    def id(self) -> str:
        """The worker's id."""
        return self.worker.id

    @property
    def addresses(self) -> Addresses:
        """Where its engines dial."""
        return self._wire.addresses

    def keeps(self, wire: Wire, model: ModelSource) -> bool:
        """Tell whether connection and model would be the same, save for the model's name."""
        mine = self._wire
        return (
            (wire.addresses, wire.engines) == (mine.addresses, mine.engines)
            and wire.dialect.name == mine.dialect.name
            and model.path == self.model.path
        )

    @property
    def state(self) -> WorkerState:
        """Where it is in its life; `failed` if it could not be registered."""
        if self.reason:
            return "failed"
        return "draining" if self.leaving else self.worker.state
