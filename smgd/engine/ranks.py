"""Which of several equal engines should get the next request: a score each, the lowest wins.

The score is the one that vLLM and its other gateways use, so that placement stays the same when one
is exchanged for another. Engines report load only while they produce output, and a report is
old when the next request comes; our own count of what is in flight is the floor that keeps a burst
from going to one engine. Used for the ranks within a worker and, by a policy, for workers.
"""

from __future__ import annotations

from collections.abc import Sequence

from smgd.core import EngineLoad

# A waiting request weighs more the fuller the KV cache is: it will wait for memory, not for a step.
_KV_PENALTY = 6
_KV_HARMLESS = 0.5


def score(in_flight: int, load: EngineLoad) -> float:
    """Return how busy an engine is: requests, plus a penalty for a queue behind a full cache."""
    pressure = max(0.0, load.kv_usage - _KV_HARMLESS)
    return max(in_flight, load.running + load.waiting) + load.waiting * _KV_PENALTY * pressure


def lowest(scores: Sequence[float], first: int) -> int:
    """Return the index of the lowest of `scores`, which are not empty.

    Of equal ones it is the first at or, cyclically, after `first`.
    """
    count = len(scores)
    return min(range(count), key=lambda index: (scores[index], (index - first) % count))


def settled(load: EngineLoad) -> EngineLoad:
    """Return the load of an engine whose last request has ended: nobody will report the zeros."""
    return EngineLoad(kv_usage=load.kv_usage)
