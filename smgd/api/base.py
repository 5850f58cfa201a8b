"""What an API surface is: one module that decodes bodies, plans sequences and renders answers.

A surface registers itself as one row of `smgd.api.SURFACES`. The web layer knows only this file:
it reads a body, asks for a plan, runs the plan's requests and writes what the plan renders.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec

from smgd.api.envelope import Usage, error_body, error_event
from smgd.core import GenerationRequest, RequestIds
from smgd.dispatch import Sequence
from smgd.errors import ApiError
from smgd.text.model import Model
from smgd.text.stage import TextStage


class PlanContext(msgspec.Struct, frozen=True):
    """What a surface needs to turn a request into sequences.

    `max_model_len` is the smallest context (tokens) among the ready workers of the model;
    `max_logprobs` is the most alternatives per token that may be asked for;
    `created` is wall-clock seconds; `response_id` is what the client sees as the answer's id.
    """

    model: Model
    max_model_len: int
    max_logprobs: int
    stage: TextStage
    ids: RequestIds
    response_id: str
    created: int


class Plan(Protocol):
    """One request on its way: what to run, and how to render what comes.

    All methods are synchronous; `feed` may be called by the engine's reader. `eager` plans must be
    fed whenever there is news (stop strings), others may wait for the end if nothing is streamed.
    `done` is true once every sequence has its finish.
    """

    requests: list[GenerationRequest]
    stream: bool
    eager: bool
    done: bool

    def feed(self, sequence: Sequence) -> bytes:
        """Take a sequence's news; return the frames they make: none if not streamed."""
        ...

    def end(self) -> bytes:
        """Return what follows the last finish: closing frames, or the whole body."""
        ...

    def usage(self) -> Usage:
        """Return the tokens so far."""
        ...

    def finish_reasons(self) -> str:
        """Return the finish reasons so far, for the log."""
        ...


class Asked(Protocol):
    """What every surface's requests have, and their answering looks at."""

    @property
    def model(self) -> str | None:
        """The name of the model."""
        ...

    @property
    def stream(self) -> bool | None:
        """Whether the answer is to be streamed."""
        ...


class Surface(msgspec.Struct, frozen=True):
    """One row of the table: a route and the functions behind it.

    `decode` returns the request and the names of unknown fields, or raises `ApiError`.
    """

    path: str
    endpoint: str
    id_prefix: str
    decode: Callable[[bytes], tuple[Asked, list[str]]]
    plan: Callable[[Any, PlanContext], Awaitable[Plan]]
    error_body: Callable[[ApiError], bytes] = error_body
    error_event: Callable[[ApiError], bytes] = error_event


class QueryContext(msgspec.Struct, frozen=True):
    """What a query works with. `max_model_len` (tokens) is None while no worker is ready."""

    model: Model
    max_model_len: int | None
    stage: TextStage


class Query(msgspec.Struct, frozen=True):
    """A route that answers by itself, without an engine, under one or more paths."""

    paths: tuple[str, ...]
    endpoint: str
    decode: Callable[[bytes], tuple[Any, list[str]]]
    run: Callable[[Any, QueryContext], Awaitable[bytes]]
