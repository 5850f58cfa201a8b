"""Scripted answers: `--replies FILE`, one JSON object a line.

A line answers a prompt that contains its `contains`; without that key it answers every prompt. The
first line that fits is taken, and lines are never used up, so the order of requests does not
matter. Keys:

    contains   text that the decoded prompt must contain
    text       the answer, or
    token_ids  the answer's ids; with neither, the model speaks (if nothing else is said, see below)
    chunks     tokens per output message, over and over: [1, 3, 0] (default [1])
    finish     stop (default, with EOS), length, abort, error
    delay_ms   milliseconds before the first token, on top of --ttft-ms
    then       what happens when the answer is over: exit (status 0), kill (SIGKILL), hang (nothing
               is answered or read any more), garbage (three messages that are not msgpack),
               sentinel (ENGINE_CORE_DEAD)

With `then`, and unless `finish` is given too, the answer is cut off: exit, kill, hang and sentinel
strike after its last token, and the request never finishes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec

from smgd.errors import UNDECODABLE, ConfigError
from smgd.sim.model import Codec

Finish: TypeAlias = Literal["stop", "length", "abort", "error"]
Then: TypeAlias = Literal["exit", "kill", "hang", "garbage", "sentinel"]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    contains: str = ""
    text: str | None = None
    token_ids: list[_Count] | None = None
    chunks: Annotated[tuple[_Count, ...], msgspec.Meta(min_length=1)] = (1,)
    finish: Finish | None = None
    delay_ms: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    then: Then | None = None

    def __post_init__(self) -> None:
        if self.text is not None and self.token_ids is not None:
            raise ValueError("`text` and `token_ids` exclude each other")
        if not any(self.chunks):
            raise ValueError("`chunks` must have a number above 0")


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, ready to be given; the delay is in seconds.

    `ids` is None if the model shall speak; `finish` is None if the answer is cut off.
    """

    contains: str = ""
    ids: tuple[int, ...] | None = None
    chunks: tuple[int, ...] = (1,)
    finish: Finish | None = "stop"
    delay: float = 0.0
    then: Then | None = None


_decoder = msgspec.json.Decoder(_Line)


def load_replies(path: Path, codec: Codec) -> list[Reply]:
    """Read a replies file. Raises `ConfigError`, naming the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--replies: cannot read {path}: {error}") from error
    return [
        _parse(line, codec, f"--replies: {path}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]


def find_reply(replies: list[Reply], prompt: str) -> Reply | None:
    """Return the first reply that fits a prompt."""
    return next((reply for reply in replies if reply.contains in prompt), None)


def _parse(text: str, codec: Codec, where: str) -> Reply:
    try:
        line = _decoder.decode(text)
    except UNDECODABLE as error:
        raise ConfigError(f"{where}: {error}") from error
    ids = line.token_ids if line.text is None else codec.encode(line.text)
    if ids is None and (line.finish is not None or line.then is not None):
        ids = []
    finish: Finish | None = "stop" if line.then in (None, "garbage") else None
    return Reply(
        contains=line.contains,
        ids=None if ids is None else tuple(ids),
        chunks=line.chunks,
        finish=line.finish or finish,
        delay=line.delay_ms / 1000,
        then=line.then,
    )
