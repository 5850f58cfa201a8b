"""What is measured: one row per cell, and the targets, as smgd / smg.

Figures: `us_token` and `us_request` are CPU of the gateway divided by what the engine emitted or
finished; `core` is CPU as a share of one core, in percent; `ttft_*`, `itl_*` are milliseconds;
`pss` and `rss` are MB. A target is (done at, stretch).
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from tests.bench.prompts import Kind

Target: TypeAlias = tuple[float, float | None]


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """`figures` are those that go into the table; `quick` cells are in `make bench-quick`.

    `interval_ms` is between two steps of the engine, each of which gives every stream a token.
    """

    name: str
    figures: dict[str, Target | None]
    quick: bool = False
    interval_ms: float = 0.0


class Idle(Cell, frozen=True, kw_only=True):
    """A ready worker, no request."""


class Closed(Cell, frozen=True, kw_only=True):
    """`streams` connections in a closed loop, besides `stalled` that read nothing."""

    streams: int
    tokens: int = 256
    stream: bool = True
    prompt: Kind = "short"
    stop: bool = False
    stalled: int = 0


class Open(Cell, frozen=True, kw_only=True):
    """`rate` streams a second, whose latencies are measured, and beside them one of these:
    `beside` long prompts a second, `burst` short requests at once, `stalled` readers."""

    rate: float
    tokens: int
    prompt: Kind = "short"
    beside: float = 0.0
    burst: int = 0
    stalled: int = 0


def _token(done: float | None = None, stretch: float | None = None) -> dict[str, Target | None]:
    return {"us_token": None if done is None else (done, stretch)}


def _request(done: float | None = None, stretch: float | None = None) -> dict[str, Target | None]:
    return {"us_request": None if done is None else (done, stretch)}


# Idle and 1000 streams come first: every round starts the programs anew, and memory grows.
CELLS: list[Cell] = [
    Idle(
        name="idle, a worker is ready", quick=True, figures={"core": None, "pss": None, "rss": None}
    ),
    Closed(
        name="1000 streams x 20 tok/s",
        quick=True,
        streams=1000,
        interval_ms=50,
        figures={"core": (0.6, 0.5), "pss": (0.8, 0.6), "rss": None},
    ),
    Closed(
        name="64 streams x 100 tok/s",
        quick=True,
        streams=64,
        interval_ms=10,
        figures=_token(0.75, 0.6),
    ),
    Closed(
        name="256 streams x 100 tok/s",
        quick=True,
        streams=256,
        interval_ms=10,
        figures=_token(0.7, 0.55),
    ),
    Closed(name="64 streams, flooded", quick=True, streams=64, figures=_token(0.7, 0.5)),
    Closed(
        name="64 streams x 100 tok/s, a stop string",
        quick=True,
        streams=64,
        interval_ms=10,
        stop=True,
        figures=_token(0.9, 0.7),
    ),
    Closed(name="1 stream x 200 tok/s", streams=1, interval_ms=5, figures=_token()),
    Closed(name="16 streams x 100 tok/s", streams=16, interval_ms=10, figures=_token()),
    Closed(
        name="64 streams x 100 tok/s, 32 tokens",
        streams=64,
        interval_ms=10,
        tokens=32,
        figures=_token(),
    ),
    Closed(
        name="64 x 100 tok/s beside 8 stalled readers",
        streams=64,
        interval_ms=10,
        stalled=8,
        figures=_token(),
    ),
    Closed(name="4096 streams x 5 tok/s", streams=4096, interval_ms=200, figures=_token()),
    Closed(
        name="not streamed, 256 tokens, 64 x 100 tok/s",
        streams=64,
        interval_ms=10,
        stream=False,
        figures=_token(),
    ),
    Closed(
        name="not streamed, 32 tokens, c=64",
        streams=64,
        tokens=32,
        stream=False,
        figures=_request(),
    ),
    Closed(
        name="not streamed, 1 token, c=1", streams=1, tokens=1, stream=False, figures=_request()
    ),
    Closed(
        name="not streamed, 1 token, c=16",
        quick=True,
        streams=16,
        tokens=1,
        stream=False,
        figures=_request(1.4, 1.1),
    ),
    Closed(
        name="not streamed, 1 token, c=256", streams=256, tokens=1, stream=False, figures=_request()
    ),
    Closed(
        name="streamed, 1 token, c=16", quick=True, streams=16, tokens=1, figures=_request(1.4, 1.1)
    ),
    Closed(name="streamed, 1 token, c=256", streams=256, tokens=1, figures=_request()),
    Closed(
        name="2,000-token prompts, all different",
        quick=True,
        streams=16,
        tokens=1,
        stream=False,
        prompt="2k",
        figures=_request(1.15, 1.0),
    ),
    Closed(
        name="30,000-token prompts, all different",
        streams=2,
        tokens=1,
        stream=False,
        prompt="30k",
        figures=_request(),
    ),
    Closed(
        name="the same 2,000-token prompt",
        quick=True,
        streams=16,
        tokens=1,
        stream=False,
        prompt="2k-same",
        figures=_request(0.35, 0.2),
    ),
    Closed(
        name="last turn of a ten-turn chat",
        quick=True,
        streams=16,
        tokens=1,
        stream=False,
        prompt="chat",
        figures=_request(0.35, 0.2),
    ),
    Open(
        name="50 req/s, short prompts",
        quick=True,
        rate=50,
        tokens=16,
        figures={"ttft_p50": (1.2, 1.0), "ttft_p99": None},
    ),
    Open(
        name="50 req/s, 2,000-token prompts",
        quick=True,
        rate=50,
        tokens=16,
        prompt="2k",
        figures={"ttft_p50": (1.2, 0.9), "ttft_p99": None},
    ),
    Open(
        name="20 ms streams",
        rate=20,
        tokens=64,
        interval_ms=20,
        figures={"itl_p50": None, "itl_p99": None},
    ),
    Open(
        name="20 ms streams beside 30,000-token prompts",
        quick=True,
        rate=20,
        tokens=64,
        interval_ms=20,
        beside=6,
        figures={"itl_p50": None, "itl_p99": (1.0, None)},
    ),
    Open(
        name="20 ms streams beside 8 stalled readers",
        rate=20,
        tokens=64,
        interval_ms=20,
        stalled=8,
        figures={"itl_p50": None, "itl_p99": None},
    ),
    Open(
        name="20 ms streams, 1000 arrivals at once",
        rate=20,
        tokens=64,
        interval_ms=20,
        burst=1000,
        figures={"itl_p50": None, "itl_p99": None, "itl_max": None},
    ),
]
