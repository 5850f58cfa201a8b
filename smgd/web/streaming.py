"""How a stream is written: by the engine's reader while the socket takes it, else by the task."""

from __future__ import annotations

import trio

from smgd.api.base import Plan
from smgd.core import Write
from smgd.dispatch import Generation, Sequence
from smgd.web import gate
from smgd.web.exchange import Exchange, SinkClosed

KEEPALIVE = b": keep-alive\n\n"


class Direct:
    """The hook while the engine's reader writes the client's socket itself: no task wakes.

    The task has to come back for the end of the stream, for a socket that takes no more, and for a
    sequence that smgd stopped: `rest` is then what was rendered and not written.
    """

    __slots__ = ("exchange", "generation", "plan", "rest", "stuck", "wrote")

    def __init__(self, exchange: Exchange, plan: Plan, generation: Generation) -> None:
        self.exchange = exchange
        self.plan = plan
        self.generation = generation
        self.rest = b""
        self.stuck = False
        self.wrote = False

    def __call__(self, sequence: Sequence) -> Write | None:
        """Render a sequence's news; return what writes them, unless the task must wake."""
        if self.stuck or sequence.finish is not None:
            sequence.touch()
            return None
        data = self.plan.feed(sequence)
        if self.plan.done:
            self.rest += data
            self.stuck = True
            sequence.touch()
            return None
        if not data:
            return None
        self.rest += data
        return self.write

    def write(self) -> None:
        """Write what is rendered, or wake the task."""
        if self.stuck:
            return  # the task writes it
        data, self.rest = self.rest, b""
        if not data:
            return  # another choice's news of the same drain took it along
        self.wrote = True
        try:
            self.stuck = bool(self.exchange.write_nowait(data))
        except SinkClosed:
            self.stuck = True  # the client is gone; the task's own write finds the same
        if self.stuck:
            self.generation.wake()

    async def news(self, keepalive: float) -> list[Sequence] | None:
        """Wait for what the task must do; None after a silence of `keepalive` seconds.

        Writes are not timed: that one happened is noticed at the next look, two looks a period, so
        a silence lasts at most half as long again.
        """
        self.stuck = False
        generation = self.generation
        generation.set_hook(self if self.exchange.can_write_nowait else None)
        quiet = 0
        try:
            while quiet < 2:
                self.wrote = False
                with trio.move_on_after(keepalive / 2):
                    return await generation.wait()
                quiet = 0 if self.wrote else quiet + 1
            return None
        finally:
            generation.set_hook(None)


async def stream(
    exchange: Exchange,
    access: gate.Access,
    generation: Generation,
    plan: Plan,
    keepalive: float,
) -> None:
    """Write frames as they come. The head waits for the first of them, or for the first error.

    `keepalive` is in seconds: after a silence that long a comment is sent.
    """
    direct = Direct(exchange, plan, generation)
    while True:
        news = await direct.news(keepalive)
        if news is None:
            data = KEEPALIVE
        else:
            data, direct.rest = direct.rest, b""
            data += b"".join([plan.feed(sequence) for sequence in news])
        if generation.error is not None:
            if data and exchange.started:
                await exchange.write(data)  # what came before the error is the client's
            raise generation.error
        if plan.done:
            break
        if data or direct.stuck:
            await _start(exchange, access)
            await exchange.write(data)
    await _start(exchange, access)
    await exchange.end(data + plan.end())


async def _start(exchange: Exchange, access: gate.Access) -> None:
    if exchange.started:
        return
    access.answered(200)
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        # Proxies of nginx's kind would otherwise collect the stream.
        (b"x-accel-buffering", b"no"),
        *gate.common_headers(access),
    ]
    await exchange.start(200, headers)
