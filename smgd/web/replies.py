"""Answers of Quart routes."""

from __future__ import annotations

from typing import Any

from quart import Response

from smgd.web.gate import encode_json


def json_response(value: Any, status: int = 200) -> Response:
    """Return an answer with a JSON body."""
    return Response(encode_json(value), status, content_type="application/json")
