"""Every code of an error that a client may be answered with is in docs/api.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import smgd

ROOT = Path(smgd.__file__).parent
API = (ROOT.parent / "docs" / "api.md").read_text()


def codes() -> Iterator[tuple[str, str]]:
    """Give each code as it is written in the source: its status, and the code."""
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(
                    func=ast.Name(id="ApiError"),
                    args=[ast.Constant(value=status), ast.Constant(value=str(code)), *_],
                ):
                    yield str(status), code
                case ast.Call(
                    func=ast.Name(id="invalid_request"), args=[ast.Constant(value=str(code)), *_]
                ):
                    yield "400", code


def test_every_error_code_is_documented_with_its_status() -> None:
    rows = re.findall(r"^\| (\d{3}) \| ([^|]+) \|", API, re.MULTILINE)
    documented = {(status, code) for status, cell in rows for code in re.findall(r"`(\w+)`", cell)}
    found = set(codes())
    assert len(found) > 30
    assert sorted(found - documented) == []
