"""Frames recorded from real engines, with their meaning (tests/data/vllm-*.json)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

VERSIONS = ("0.27.1", "0.32")
_DATA = Path(__file__).parent.parent / "data"


class Message(msgspec.Struct, frozen=True):
    """One recorded message. `meaning` is its payload decoded without a schema."""

    case: str
    direction: str
    socket: str
    frames: list[bytes]
    meaning: Any

    def __str__(self) -> str:
        return f"{self.case}:{self.direction}:{self.socket}"


def messages(version: str, socket: str, direction: str = "E->F") -> Iterator[Message]:
    """Return the recorded messages of one kind of socket (`input0` is an `input`)."""
    for case in json.loads((_DATA / f"vllm-{version}.json").read_text()):
        for message in case["messages"]:
            if message["dir"] == direction and message["socket"].startswith(socket):
                meaning = message.get("decoded")
                if isinstance(meaning, dict) and "msg" in meaning:
                    meaning = meaning["msg"]
                frames = [bytes.fromhex(frame) for frame in message["frames"]]
                yield Message(case["name"], direction, message["socket"], frames, meaning)


def message(version: str, case: str, socket: str, direction: str = "E->F") -> Message:
    """Return the first message of a case."""
    return next(m for m in messages(version, socket, direction) if m.case == case)
