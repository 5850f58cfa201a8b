from __future__ import annotations

import pytest

from smgd.text.model import Model, load_model


@pytest.fixture(scope="session")
def model() -> Model:
    return load_model("smgd-sim")
