"""What holds for all tests: no verdict depends on how fast the machine is, or whether it stalls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, settings

from tests.support import SteadyClock

settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

# The real engine is a program that keeps its own time.
ENGINE_TESTS = Path(__file__).parent / "engine"


def run_steadily(
    main: Callable[[], Awaitable[Any]],
    clock: trio.abc.Clock | None,
    instruments: Sequence[trio.abc.Instrument],
) -> Any:
    """Run a test; its clock is one that does not count stalls, unless it has chosen one."""
    return trio.run(main, clock=clock or SteadyClock(), instruments=instruments)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give all async tests that clock."""
    for item in items:
        if item.get_closest_marker("trio") and ENGINE_TESTS not in item.path.parents:
            item.add_marker(pytest.mark.trio(run=run_steadily), append=False)
