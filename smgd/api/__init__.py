"""API surfaces: how clients ask, and how they are answered. One module and one row each."""

from __future__ import annotations

from smgd.api import chat
from smgd.api.base import Surface

SURFACES: tuple[Surface, ...] = (chat.SURFACE,)
