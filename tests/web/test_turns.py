"""Turns: how many tasks may go on before the loop looks at its sockets again."""

from __future__ import annotations

import trio

from smgd.web.turns import Turnstile
from tests.support import PATIENCE


async def test_a_burst_is_spread_over_turns_in_order() -> None:
    turns = Turnstile(3)
    turn = 0
    entered: list[tuple[int, int]] = []

    async def arrive(number: int) -> None:
        await turns.enter()
        entered.append((turn, number))

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as house:
            house.start_soon(turns.run)
            await trio.testing.wait_all_tasks_blocked()
            async with trio.open_nursery() as arrivals:
                for number in range(20):
                    arrivals.start_soon(arrive, number)
                while len(entered) < 20:
                    await trio.lowlevel.checkpoint()
                    turn += 1
            house.cancel_scope.cancel()
    by_turn = [[n for at, n in entered if at == t] for t in sorted({at for at, _ in entered})]
    # The usher's turn may be before or after ours in trio's shuffled order: two fall together.
    assert all(len(numbers) <= 6 for numbers in by_turn)
    assert len(by_turn) >= 4
    # Who could not enter at once goes in order of arrival, and nobody is left out.
    waited = [number for _, number in entered[3:]]
    assert len(set(waited)) == 17
    assert sorted(number for _, number in entered) == list(range(20))


async def test_without_a_crowd_nobody_waits() -> None:
    turns = Turnstile(2)
    async with trio.open_nursery() as house:
        house.start_soon(turns.run)
        with trio.testing.assert_no_checkpoints():
            await turns.enter()
            await turns.enter()
        with trio.testing.assert_checkpoints():
            await turns.enter()
        with trio.testing.assert_no_checkpoints():
            await turns.enter()
        house.cancel_scope.cancel()


async def test_who_leaves_while_waiting_takes_nobodys_turn() -> None:
    turns = Turnstile(1)
    entered: list[str] = []

    async def arrive(name: str) -> None:
        await turns.enter()
        entered.append(name)

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as house:
            await turns.enter()
            async with trio.open_nursery() as leaving:
                for _ in range(10):
                    leaving.start_soon(arrive, "left")
                await trio.testing.wait_all_tasks_blocked()
                leaving.cancel_scope.cancel()
            house.start_soon(arrive, "stayed")
            await trio.testing.wait_all_tasks_blocked()
            house.start_soon(turns.run)
            await trio.testing.wait_all_tasks_blocked()
            assert entered == ["stayed"]
            house.start_soon(arrive, "next")
            await trio.testing.wait_all_tasks_blocked()
            assert entered == ["stayed", "next"]
            house.cancel_scope.cancel()
