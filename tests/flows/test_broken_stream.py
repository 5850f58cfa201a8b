"""A stream whose rendering fails, fails alone: nobody beside it notices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import trio

from smgd.api import SURFACES
from smgd.api.base import Plan, PlanContext, Surface
from smgd.dispatch import Sequence
from smgd.web import hot
from tests.flows.client import Call
from tests.flows.conftest import Start
from tests.flows.house import House

SEEDS = range(10)
VICTIM = "break me"
TOKENS = 40

Spoil = Callable[[Any], None]


class Spoiled:
    """A plan of which single methods can be replaced."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)


def breaks_at(count: int) -> Spoil:
    """Spoil a plan: the so many-th `feed` raises."""

    def spoil(plan: Any) -> None:
        feed = plan.feed
        calls = 0

        def broken(sequence: Sequence) -> bytes:
            nonlocal calls
            calls += 1
            if calls == count:
                raise ZeroDivisionError("a bug in rendering")
            frames: bytes = feed(sequence)
            return frames

        plan.feed = broken

    return spoil


def breaks_at_the_end(plan: Any) -> None:
    """Spoil a plan: what follows the last token raises."""

    def broken() -> bytes:
        raise ZeroDivisionError("a bug in rendering")

    plan.end = broken


def spoiled(surface: Surface, spoil: Spoil) -> Surface:
    """Return a surface that spoils the plans of those who ask for it."""
    plan_of = surface.plan

    async def plan(request: Any, context: PlanContext) -> Plan:
        made: Plan = await plan_of(request, context)
        if VICTIM not in context.model.tokenizer.decode(made.requests[0].prompt_ids):
            return made
        victim: Any = Spoiled(made)
        spoil(victim)
        return victim  # type: ignore[no-any-return]

    return msgspec.structs.replace(surface, plan=plan)


async def stream_all(house: House, victim: dict[str, Any] | None) -> tuple[list[Call], Call | None]:
    """Run ten streams at a time, and the victim beside them."""
    calls: dict[int, Call] = {}
    victims: list[Call] = []

    async def healthy(seed: int) -> None:
        calls[seed] = await house.ask(
            "the sea", seed=seed, max_tokens=TOKENS, ignore_eos=True, stream=True
        )

    async def broken(fields: dict[str, Any]) -> None:
        victims.append(await house.ask(VICTIM, ignore_eos=True, **fields))

    async with trio.open_nursery() as nursery:
        for seed in SEEDS:
            nursery.start_soon(healthy, seed)
        if victim is not None:
            nursery.start_soon(broken, victim)
    return [calls[seed] for seed in SEEDS], victims[0] if victims else None


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("spoil", "begun"), [(breaks_at(1), False), (breaks_at(3), True), (breaks_at_the_end, True)]
)
async def test_a_broken_stream_fails_alone(
    start: Start, monkeypatch: pytest.MonkeyPatch, spoil: Spoil, begun: bool, stream: bool
) -> None:
    surfaces = tuple(spoiled(surface, spoil) for surface in SURFACES)
    monkeypatch.setattr(hot, "SURFACES", surfaces)
    house = await start("--itl-ms", "3")
    undisturbed, _ = await stream_all(house, None)
    await house.barrier()
    ended = spoil is breaks_at_the_end
    fields: dict[str, Any] = {"stream": stream, "max_tokens": 10 if ended else 5000}
    if not stream:
        fields["stop"] = "never said"  # so that the text is looked at as it comes
    beside, victim = await stream_all(house, fields)
    assert victim is not None
    assert [call.text() for call in beside] == [call.text() for call in undisturbed]
    assert all(call.done and call.finishes() == ["length"] for call in beside)

    if stream and begun:
        assert (victim.status, victim.done) == (200, True)
    else:
        assert (victim.status, victim.complete) == (500, True)
    error = victim.error
    assert (error["code"], error["type"]) == ("internal_error", "server_error")
    assert "bug" not in error["message"], "our insides are nobody's business"

    await house.barrier()
    assert len(house.tally.aborts) == (0 if ended else 1)
    [line] = [line for line in house.lines if line["log_level"] == "error"]
    assert line["exc_info"]
    assert line["request_id"]
    assert len(house.take_errors()) == 1
    assert (await house.readiness())[0] == 200
    code = "stream_error" if stream and begun else "internal_error"
    labels = {"error_code": code, "path": "/v1/chat/completions"}
    assert await house.metric("smg_http_responses_total", **labels) == 1
