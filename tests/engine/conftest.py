"""One smgd and one engine for all tests here.

smgd is never started again. An engine that a test has ended, on purpose or not, is started anew for
the next test.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.engine import build
from tests.engine.rig import Engine, Gateway, start_engine

OLDER = "0.27.1"

MISSING = """\
tests/engine needs vLLM's CPU build and a small model; missing: {names}.
Build them with `make engine`, or set these variables to what you have (tests/engine/README.md)."""


def pytest_configure() -> None:
    """Fail at once and as a whole where there is no engine: tests that were named must not skip."""
    paths = _paths()
    missing = [n for n in (build.PYTHON_NAME, build.MODEL_NAME) if not _exists(paths, n)]
    if missing:
        raise pytest.UsageError(MISSING.format(names=", ".join(missing)))


def _paths() -> dict[str, Path]:
    names = (build.PYTHON_NAME, build.MODEL_NAME, build.overlay_name(OLDER))
    chosen = {name: Path(os.environ[name]) for name in names if os.environ.get(name)}
    return build.find(build.cache_root()) | chosen


def _exists(paths: dict[str, Path], name: str) -> bool:
    return name in paths and paths[name].exists()


@pytest.fixture(scope="session")
def model() -> Path:
    """The model's directory."""
    return _paths()[build.MODEL_NAME]


@pytest.fixture(scope="session")
def python() -> Path:
    """The interpreter of the environment with the engine."""
    return _paths()[build.PYTHON_NAME]


@pytest.fixture(scope="session")
def older_python() -> Path:
    """The interpreter of the environment with the older engine; skips where that was not built."""
    name = build.overlay_name(OLDER)
    if not _exists(_paths(), name):
        pytest.skip(f"no vLLM {OLDER}: build it with `make engine ARGS='--also {OLDER}'`")
    return _paths()[name]


@pytest.fixture(scope="session")
def rig_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where sockets and logs are."""
    return tmp_path_factory.mktemp("rig")


@pytest.fixture(scope="session")
def gateway(rig_directory: Path, model: Path) -> Iterator[Gateway]:
    """The one smgd of the test run."""
    gateway = Gateway(rig_directory, model)
    try:
        yield gateway
    finally:
        code = gateway.close()
    assert code == 0, gateway.family.tail()


@pytest.fixture(scope="session")
def engine_process(
    gateway: Gateway, rig_directory: Path, python: Path, model: Path
) -> Iterator[Engine]:
    """The engine whether it runs or not; every process of it is ended with the test run."""
    engine = Engine(python, model, gateway.engine_port, rig_directory / "engine.log")
    try:
        yield engine
    finally:
        engine.stop()


@pytest.fixture
def engine(engine_process: Engine, gateway: Gateway) -> Engine:
    """The engine, served. A test that has lost it must not take the next one along."""
    if not (engine_process.whole() and gateway.ready()):
        start_engine(engine_process, gateway)
    return engine_process


@pytest.fixture(scope="session")
def client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    """OpenAI's own client; it does not try again, since what it would hide is what is tested."""
    with openai.OpenAI(
        base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client
