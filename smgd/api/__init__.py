"""API surfaces: how clients ask, and how they are answered. One module and one row each."""

from __future__ import annotations

from smgd.api import chat, completions, tokenize
from smgd.api.base import Query, Surface

SURFACES: tuple[Surface, ...] = (chat.SURFACE, completions.SURFACE)

QUERIES: tuple[Query, ...] = tokenize.QUERIES
