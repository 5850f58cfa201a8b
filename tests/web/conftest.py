"""Fixtures of the tests in this package; what they are made of is in `servers.py`."""

from __future__ import annotations

from functools import partial
from typing import Literal

import pytest

from tests.web.servers import Serving, running_server


@pytest.fixture(params=["stock", "fast"])
def http_path(request: pytest.FixtureRequest) -> Literal["fast", "stock"]:
    path: Literal["fast", "stock"] = request.param
    return path


@pytest.fixture
def serving(http_path: Literal["fast", "stock"]) -> Serving:
    """Return `serving(app, **settings)`: a context in which a server runs."""
    return partial(running_server, http_path=http_path)
