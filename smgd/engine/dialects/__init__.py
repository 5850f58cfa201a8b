"""The engine wires that smgd speaks: one module and one row each.

The handshake does not say which engine has dialled in, so the operator names it (`--backend`).
"""

from __future__ import annotations

from collections.abc import Callable

from smgd.core import Dialect
from smgd.engine.dialects.vllm import VllmDialect
from smgd.errors import ConfigError

DIALECTS: dict[str, Callable[[], Dialect]] = {
    "vllm": VllmDialect,
}


def dialect_for(backend: str, worker: str) -> Dialect:
    """Return the dialect of a backend name; `worker` is a URL for the text of the `ConfigError`."""
    if backend not in DIALECTS:
        known = " and ".join(sorted(DIALECTS)) + (" is" if len(DIALECTS) == 1 else " are")
        raise ConfigError(
            f"ZMQ worker {worker} has unsupported runtime {backend}: "
            f"only {known} supported over the ZMQ direct backend"
        )
    return DIALECTS[backend]()
