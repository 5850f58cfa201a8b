"""A daemon with managed engines is a house of the flows; what a supervisor says is captured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from tests.flows.conftest import build as build
from tests.launch.supervised import Lines


@pytest.fixture
def lines() -> Iterator[Lines]:
    with structlog.testing.capture_logs() as captured:
        yield captured
