"""Where a worker is in its life, as a state machine without I/O.

| from               | to        | when                                                          |
|--------------------|-----------|---------------------------------------------------------------|
| pending, not_ready | ready     | handshake complete, or `success_threshold` good probes in a row |
| pending            | failed    | 10 x `failure_threshold` probes, whatever their mix             |
| ready              | not_ready | engine lost, or `failure_threshold` bad probes in a row         |
| not_ready          | failed    | 3 x `failure_threshold` bad probes in a row                     |
| any but failed     | draining  | removal was asked for                                           |

`failed` and `draining` are final. A worker whose connection is watched (ZMQ) is moved by handshake
and loss alone, at once and in both directions, and an engine that comes back after hours is served.
It is probed only where workers are to be given up (`remove_unhealthy_workers`), and never fails
elsewhere.
"""

from __future__ import annotations

import msgspec

from smgd.core import WorkerState

PENDING_PROBES = 10  # of failure_threshold: how long a worker may stay pending
FAILED_PROBES = 3  # of failure_threshold: how long a worker may stay not ready


class Thresholds(msgspec.Struct, frozen=True):
    """Probes in a row that count as a change."""

    success: int = 2
    failure: int = 3


class Lifecycle:
    """The state of one worker; every method returns whether it has changed.

    `thresholds` may be set at any time.
    """

    def __init__(self) -> None:
        self.state: WorkerState = "pending"
        self.thresholds = Thresholds()
        self._good = 0  # probes in a row
        self._bad = 0
        self._probes = 0  # since the state began

    def handshake_complete(self) -> bool:
        """Take the word of the engine itself."""
        return self.state in ("pending", "not_ready") and self._enter("ready")

    def engine_lost(self) -> bool:
        """Take the loss of the connection to the engine."""
        return self.state == "ready" and self._enter("not_ready")

    def probed(self, healthy: bool) -> bool:
        """Take the result of one probe."""
        self._probes += 1
        self._good = self._good + 1 if healthy else 0
        self._bad = 0 if healthy else self._bad + 1
        failure = self.thresholds.failure
        if self.state == "ready":
            return self._bad >= failure and self._enter("not_ready")
        if self.state not in ("pending", "not_ready"):
            return False
        if self._good >= self.thresholds.success:
            return self._enter("ready")
        if self.state == "pending":
            return self._probes >= PENDING_PROBES * failure and self._enter("failed")
        return self._bad >= FAILED_PROBES * failure and self._enter("failed")

    def removed(self) -> bool:
        """Take the wish to remove the worker: no new traffic from now on."""
        return self.state not in ("failed", "draining") and self._enter("draining")

    def _enter(self, state: WorkerState) -> bool:
        self.state = state
        self._good = self._bad = self._probes = 0
        return True
