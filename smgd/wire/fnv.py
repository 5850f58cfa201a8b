"""The hash by which a gateway and an engine agree on a handshake port without talking."""

from __future__ import annotations

_OFFSET_BASIS = 0xCBF29CE484222325
_PRIME = 0x100000001B3
_MASK = 0xFFFFFFFFFFFFFFFF

HANDSHAKE_PORT_MIN = 20000
HANDSHAKE_PORT_COUNT = 10000


def fnv1a_64(data: bytes) -> int:
    """Return the 64-bit FNV-1a hash of `data`."""
    value = _OFFSET_BASIS
    for byte in data:
        value = ((value ^ byte) * _PRIME) & _MASK
    return value


def handshake_port(path: str) -> int:
    """Return the TCP port (20000..29999) for the socket path of a worker, without `ipc://`."""
    return HANDSHAKE_PORT_MIN + fnv1a_64(path.encode()) % HANDSHAKE_PORT_COUNT
