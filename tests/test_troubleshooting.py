"""docs/troubleshooting.md has every message that an operator can meet.

Messages are found in the source: the texts of errors that blame the configuration, a worker or a
model, what sessions notice, and what is logged as a warning or an error. A message is in the
document if its longest part between values is.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import smgd

ROOT = Path(smgd.__file__).parent
DOCUMENT = ROOT.parent / "docs" / "troubleshooting.md"

ERRORS = {
    "CommandError", "ConfigError", "ModelError", "Notice", "PeerGoneError", "SmgdError",
    "TransportError", "WorkerError", "WorkerExistsError", "WorkerNotFoundError",
}  # fmt: skip
LEVELS = {"warning", "error"}

# Answers to clients, the simulated engine, and details of `output skipped`.
ELSEWHERE = ("sim/", "api/", "web/app", "web/workers", "web/exchange", "wire/", "engine/dialects/v")


def parts(text: ast.expr) -> list[str]:
    """Return a text as it is between the values that are put into it."""
    match text:
        case ast.Constant(value=str(whole)):
            return [whole]
        case ast.JoinedStr(values=values):
            joined = "".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in values)
            return joined.split("\0")
    return []


def messages() -> Iterator[tuple[str, str]]:
    """Give each message: where it is, and its longest part."""
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(ELSEWHERE):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args and _tells(node.func):
                text = node.args[1] if _finds(node.func) else node.args[0]
                longest = max(parts(text), key=len, default="").strip()
                if len(longest) > 2:
                    yield f"{name}:{node.lineno}", longest


def _tells(function: ast.expr) -> bool:
    match function:
        case ast.Name(id=name):
            return name in ERRORS
        case ast.Attribute(value=ast.Name() | ast.Attribute(), attr=name):
            logs = name in LEVELS and "log" in ast.unparse(function.value).lower()
            return logs or _finds(function)
    return False


def _finds(function: ast.expr) -> bool:
    """Tell whether this is a method of `Findings`, whose first argument is the key to blame."""
    return ast.unparse(function) in ("found.broken", "found.note", "found.wrong")


def test_messages_are_found() -> None:
    found = {text for _, text in messages()}
    assert "engine session ended" in found
    assert len(found) > 60


def test_every_message_has_its_cause_and_cure() -> None:
    document = _plain(DOCUMENT.read_text().replace("\\|", "|"))
    missing = [f"{where}: {text}" for where, text in messages() if _plain(text) not in document]
    assert missing == [], "docs/troubleshooting.md needs a row for each of these"


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def test_no_row_is_without_a_cause_or_a_cure() -> None:
    for line in DOCUMENT.read_text().splitlines():
        if line.startswith("| ") and not line.startswith(("| message", "| seen", "| reason")):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert len(cells) == 3, line
            assert cells[0], line
            assert cells[1] or cells[2], line
