"""Plans whose engine is the test."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from smgd.api.base import Plan, PlanContext
from smgd.core import Policy, RequestIds
from smgd.dispatch import Dispatcher, Sequence
from smgd.text.model import Model
from smgd.text.stage import TextStage
from tests.support import FirstPolicy, MemoryWorker


def context(model: Model, max_model_len: int = 256) -> PlanContext:
    return PlanContext(
        model=model,
        max_model_len=max_model_len,
        max_logprobs=20,
        stage=TextStage(),
        ids=RequestIds("t"),
        response_id="id-1",
        created=1700000000,
    )


class Run:
    """A plan on a worker without an engine: `send` is what the engine says."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.worker = MemoryWorker(model_id="smgd-sim")
        dispatcher = Dispatcher(
            lambda _: [self.worker], cast("Policy", FirstPolicy()), RequestIds("t")
        )
        self.generation = dispatcher.generation(plan.requests, "mine")
        for sequence in self.generation.sequences:
            dispatcher.start(sequence)

    def send(self, *ids: int, index: int = 0, **rest: Any) -> bytes:
        sequence: Sequence = self.generation.sequences[index]
        self.worker.send(self.plan.requests[index].id, *ids, **rest)
        return self.plan.feed(sequence)

    def done(self) -> bool:
        return self.plan.done

    def whole(self) -> Any:
        assert self.plan.done
        return msgspec.json.decode(self.plan.end())


def frames(data: bytes) -> list[Any]:
    """Return what an SSE client reads."""
    blocks = data.decode().split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    texts = [block.removeprefix("data: ") for block in blocks]
    return [text if text == "[DONE]" else msgspec.json.decode(text) for text in texts]
