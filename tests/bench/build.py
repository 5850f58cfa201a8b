"""What the benchmark needs from outside: the peer's environment, wrk, a model's tokenizer.

The environment lies outside the checkout, under the hash of its pins, in `$SMGD_BENCH_CACHE`, else
`$XDG_CACHE_HOME/smgd-bench`, else `~/.cache/smgd-bench`; it takes 0.2 GB and half a minute, once.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from smgd.text.hub import BUILTIN_DIRECTORY
from tests.engine import build as engine

REQUIREMENTS = Path(__file__).parent / "requirements.txt"

NO_WRK = """\
wrk, which makes the load, is not installed. On Debian and Ubuntu:
  apt-get update && apt-get install -y wrk
Elsewhere: https://github.com/wg/wrk"""


class NeedError(Exception):
    """Something is missing; the text says what, and how to get it."""


def cache_root() -> Path:
    """Return where the environment and the results are kept."""
    if chosen := os.environ.get("SMGD_BENCH_CACHE"):
        return Path(chosen).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).resolve() / "smgd-bench"


def peer_python() -> Path:
    """Return the interpreter that has smg, which is installed if need be. Raises `NeedError`."""
    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    venv = root / f"smg-{engine.digest(REQUIREMENTS.read_bytes(), engine.interpreter())}"
    try:
        with engine.locked(root / "lock"), engine.stamped(venv, "") as wanted:
            if wanted:
                engine.create_venv(venv)
                with engine.timed("installing smg"):
                    engine.pip_install(engine.python_of(venv), "-r", str(REQUIREMENTS))
    except engine.BuildError as error:
        raise NeedError(str(error)) from error
    return engine.python_of(venv)


def wrk() -> str:
    """Return the load generator's path. Raises `NeedError`."""
    found = shutil.which("wrk")
    if found is None:
        raise NeedError(NO_WRK)
    return found


def default_model() -> Path:
    """Return the real model of `make engine` if that was built, else the built-in one."""
    real = engine.cache_root() / "models" / engine.MODEL
    return real if (real / engine.STAMP).is_file() else BUILTIN_DIRECTORY
