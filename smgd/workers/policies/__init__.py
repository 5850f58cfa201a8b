"""How a worker is chosen: one module and one row for each policy."""

from __future__ import annotations

from collections.abc import Callable

from smgd.core import Policy
from smgd.errors import ConfigError
from smgd.workers.policies.least_load import LeastLoad
from smgd.workers.policies.power_of_two import PowerOfTwo
from smgd.workers.policies.random_choice import Random
from smgd.workers.policies.round_robin import RoundRobin

POLICIES: dict[str, Callable[[], Policy]] = {
    "least_load": LeastLoad,
    "power_of_two": PowerOfTwo,
    "random": Random,
    "round_robin": RoundRobin,
}


def policy_for(name: str) -> Policy:
    """Return a policy by its name. Raises `ConfigError`, naming those that there are."""
    if name not in POLICIES:
        raise ConfigError(f"unknown policy {name!r}: choose one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]()
