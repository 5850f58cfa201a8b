"""What is known of one worker: its spec, its parts, and how its registration goes."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from smgd.core import WorkerState
from smgd.engine.paths import Addresses
from smgd.text.loader import ModelSource
from smgd.workers.spec import Wire, WorkerSpec
from smgd.workers.zmq import ZmqWorker


class Record:
    """A worker as operators see it: what it was asked to be, and what has become of it.

    `reason` is why it could not be registered. `since` is the wall-clock second in which it was
    added, failed or began to drain. `leaving` is whether it is being removed. `before` are those
    with its URL whose end it waits for. `gone` is set when its sockets and files are released.
    """

    def __init__(self, spec: WorkerSpec, wire: Wire, model: ModelSource, worker: ZmqWorker) -> None:
        self.spec = spec
        self.model = model
        self._wire = wire
        self.worker = worker
        self.reason = ""
        self.leaving = False
        self.since = 0
        self.before: Sequence[Record] = ()
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

    @property
    def waits(self) -> str:
        """Which predecessor it waits for before it can be registered, for people; mostly none."""
        for before in self.before:
            if not before.gone.is_set():
                if before.id == self.id:
                    return "waits until the requests on its former connection have ended"
                return f"waits until worker {before.id} at the same URL has drained"
        return ""
