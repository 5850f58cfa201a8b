"""Headers of HTTP, as all of the web layer passes them around: names in lower case, all bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Headers: TypeAlias = list[tuple[bytes, bytes]]

# Returns the value of a request's header by its name.
Header: TypeAlias = Callable[[bytes], bytes | None]
