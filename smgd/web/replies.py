"""Answers of Quart routes."""

from __future__ import annotations

from typing import Any

import msgspec
from quart import Response

encode_json = msgspec.json.Encoder().encode


def json_response(value: Any, status: int = 200) -> Response:
    """Return an answer with a JSON body."""
    return Response(encode_json(value), status, content_type="application/json")
