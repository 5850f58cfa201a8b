"""Invariant: any body is read or refused with `ApiError` 400; what is read plans without surprise.

An input is a body for every route at once. What decodes is planned with the built-in model: that
too gives a plan whose every sequence passes the guard or is refused with 400, never another error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import trio
from runner import run

from smgd.api import QUERIES, SURFACES
from smgd.api.base import PlanContext, QueryContext
from smgd.core import EngineInfo, RequestIds
from smgd.engine import guard
from smgd.engine.dialects.vllm import VllmDialect
from smgd.errors import ApiError
from smgd.text.model import Model, load_model
from smgd.text.stage import TextStage

CONTEXT_TOKENS = 512


@cache
def model() -> Model:
    """Return the built-in model."""
    return load_model("smgd-sim")


async def plan(surface: Any, request: Any) -> None:
    """Plan a request and put it through the guard and the codec."""
    context = PlanContext(
        model=model(),
        max_model_len=CONTEXT_TOKENS,
        max_logprobs=20,
        stage=TextStage(),
        ids=RequestIds(),
        response_id="x",
        created=0,
    )
    info = EngineInfo(max_model_len=CONTEXT_TOKENS)
    for sequence in (await surface.plan(request, context)).requests:
        guard.check(sequence, info, model().files.vocab_size)
        VllmDialect().encode_add(sequence, info)


async def query(route: Any, request: Any) -> None:
    """Answer a request that needs no engine."""
    await route.run(request, QueryContext(model(), None, TextStage()))


def check(data: bytes) -> None:
    """Raise for a body that is answered with anything but 200 or 400."""
    routes: list[tuple[Any, Callable[[Any, Any], Any]]] = [(s, plan) for s in SURFACES]
    routes += [(q, query) for q in QUERIES]
    for route, go_on in routes:
        try:
            request, _ = route.decode(data)
            trio.run(go_on, route, request)
        except ApiError as error:
            if error.status != 400:
                raise


if __name__ == "__main__":
    run("requests", check)
