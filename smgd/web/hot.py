"""The routes that generate: raw handlers beside Quart, since they are the hot path.

`answer` is the whole life of a request in one function. The task that runs it is cancelled when the
client leaves; the generation's block then sends the ABORTs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import msgspec
import structlog
import trio

from smgd.api import QUERIES, SURFACES
from smgd.api.base import Plan, PlanContext, Query, QueryContext, Surface
from smgd.api.envelope import error_body, error_event
from smgd.core import Timings, Write
from smgd.dispatch import Generation, Sequence
from smgd.errors import ApiError, internal_error
from smgd.metrics import Finished
from smgd.web import gate
from smgd.web.exchange import Exchange, SinkClosed
from smgd.web.service import Running, Service

log = structlog.get_logger("smgd.web")

KEEPALIVE = b": keep-alive\n\n"

Handler = Callable[[Exchange], Awaitable[None]]


class _Route(msgspec.Struct, frozen=True):
    """A raw route: where it is, and the life of a request to it.

    `run` is given the body, the access, and the id that the answer has unless the client sent one.
    """

    path: str
    endpoint: str
    id_prefix: str
    run: Callable[[bytes, Exchange, gate.Access, str], Awaitable[None]]
    error_body: Callable[[ApiError], bytes] = error_body
    error_event: Callable[[ApiError], bytes] = error_event


def handlers(service: Service) -> dict[tuple[str, str], Handler]:
    """Return the raw handlers by method and path."""
    return {("POST", route.path): _handler(service, route) for route in _routes(service)}


def _routes(service: Service) -> Iterator[_Route]:
    for surface in SURFACES:
        yield _Route(
            surface.path,
            surface.endpoint,
            surface.id_prefix,
            partial(answer, service, surface),
            surface.error_body,
            surface.error_event,
        )
    for query in QUERIES:
        run = partial(answer_query, service, query)
        yield from (_Route(path, query.endpoint, "req-", run) for path in query.paths)


def _handler(service: Service, route: _Route) -> Handler:
    """Return what runs a request through the gate, and answers for its errors."""
    house = service.gate
    admission = house.admission

    async def handle(exchange: Exchange) -> None:
        own_id = gate.new_id(route.id_prefix)
        access = house.enter(exchange.method, route.path, exchange.header, own_id, exchange.client)
        try:
            house.authenticate(access, exchange.header)
            if admission.admit(access):
                body = await _read(service, exchange)
            else:
                body = await _queued(service, exchange, access)
            await route.run(body, exchange, access, own_id)
        except ApiError as error:
            await _fail(service, route, exchange, access, error)
        except Exception:
            # One broken answer must not take its neighbours along: it fails alone, loudly.
            log.exception("request failed", request_id=access.id)
            await _fail(service, route, exchange, access, internal_error())
        finally:
            if not exchange.finished:
                access.left()
            house.leave(access)

    return handle


async def _fail(
    service: Service, route: _Route, exchange: Exchange, access: gate.Access, error: ApiError
) -> None:
    """Answer with an error, or end a stream that has begun with an error event."""
    nobody = "other" if error.code == "model_not_found" else "unknown"
    model = access.fields.get("model", nobody)
    service.metrics.failed(model, route.endpoint, _error_type(error))
    access.answered(200 if exchange.started else error.status, error.code)
    if exchange.started:
        await exchange.end(route.error_event(error))
    else:
        headers = gate.error_headers(access, error)
        await exchange.respond(error.status, headers, route.error_body(error))


async def _queued(service: Service, exchange: Exchange, access: gate.Access) -> bytes:
    """Wait for a permit in the queue; return the body, which is not read before.

    But over HTTP/2 it is: a body that nobody reads would hold up the running streams of the same
    connection, and only behind the body can it be seen that the client has reset this one.
    """
    turn = service.gate.park(access)
    shared = exchange.http_version == "2"
    body = await _read(service, exchange) if shared else b""
    await service.gate.wait(access, turn)
    return body if shared else await _read(service, exchange)


async def answer_query(
    service: Service,
    query: Query,
    body: bytes,
    exchange: Exchange,
    access: gate.Access,
    _own_id: str,
) -> None:
    """Answer a request that needs no engine. Raises `ApiError`."""
    request, unknown = query.decode(body)
    _count_unknown(service, query.endpoint, unknown, access)
    model = service.catalog.get(request.model)
    length = service.registry.known_max_model_len(model.id)
    answered = await query.run(request, QueryContext(model, length, service.stage))
    access.answered(200)
    await exchange.respond(200, [gate.JSON, *gate.common_headers(access)], answered)


def _count_unknown(
    service: Service, endpoint: str, unknown: list[str], access: gate.Access
) -> None:
    if unknown:
        service.metrics.unknown_fields.labels(endpoint).inc(len(unknown))
        log.debug("unknown fields ignored", fields=sorted(unknown)[:8], request_id=access.id)


async def _read(service: Service, exchange: Exchange) -> bytes:
    gate.check_content_type(exchange.header(b"content-type"))
    gate.check_content_encoding(exchange.header(b"content-encoding"))
    return await exchange.read_body(service.max_payload_size)


async def answer(
    service: Service,
    surface: Surface,
    body: bytes,
    exchange: Exchange,
    access: gate.Access,
    response_id: str,
) -> None:
    """Plan, run and answer one request. Raises `ApiError` for all that is not a 200."""
    request, unknown = surface.decode(body)
    model = service.catalog.get(request.model)
    access.fields.update(model=model.id, stream=bool(request.stream))
    _count_unknown(service, surface.endpoint, unknown, access)
    context = PlanContext(
        model=model,
        max_model_len=service.registry.max_model_len(model.id),
        max_logprobs=service.max_logprobs,
        stage=service.stage,
        ids=service.ids,
        response_id=response_id,
        created=int(service.wall_clock()),
    )
    plan = await surface.plan(request, context)
    async with service.dispatcher.generation(plan.requests, access.id) as generation:
        service.running[response_id] = Running(
            response_id, surface.endpoint, exchange.client, access, plan.stream, generation
        )
        try:
            if plan.stream:
                await _stream(service, exchange, access, generation, plan)
            else:
                await _whole(exchange, access, generation, plan)
        finally:
            del service.running[response_id]
            _account(service, surface, access, generation, plan)


async def _whole(
    exchange: Exchange, access: gate.Access, generation: Generation, plan: Plan
) -> None:
    def feed(sequence: Sequence) -> None:
        plan.feed(sequence)
        if plan.done:
            sequence.touch()

    generation.set_hook(feed if plan.eager else _wait_for_finish)
    while not plan.done:
        for sequence in await generation.wait():
            plan.feed(sequence)
        if generation.error is not None:
            raise generation.error
    access.answered(200)
    await exchange.respond(200, [gate.JSON, *gate.common_headers(access)], plan.end())


def _wait_for_finish(sequence: Sequence) -> None:
    if sequence.finish is not None:
        sequence.touch()


class _Direct:
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


async def _stream(
    service: Service, exchange: Exchange, access: gate.Access, generation: Generation, plan: Plan
) -> None:
    """Write frames as they come. The head waits for the first of them, or for the first error."""
    direct = _Direct(exchange, plan, generation)
    while True:
        news = await direct.news(service.sse_keepalive)
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


def _account(
    service: Service, surface: Surface, access: gate.Access, generation: Generation, plan: Plan
) -> None:
    usage = plan.usage()
    first = [s.first_token_at for s in generation.sequences if s.first_token_at is not None]
    now = trio.current_time()
    ttft = min(first) - access.started if first else None
    queue, prefill = _engine_times(generation.sequences[0].timings)
    service.metrics.finished(
        plan.requests[0].model,
        surface.endpoint,
        Finished(
            streaming=plan.stream,
            prompt_tokens=usage.prompt,
            completion_tokens=usage.completion,
            seconds=now - access.started,
            ttft=ttft,
            generation=now - min(first) if first else None,
            queue=queue,
            prefill=prefill,
        ),
    )
    first_sequence = generation.sequences[0]
    worker = first_sequence.worker
    access.fields.update(
        worker=worker.url if worker else None,
        engine_request=first_sequence.running.id,
        prompt_tokens=usage.prompt,
        completion_tokens=usage.completion,
        cached_tokens=usage.cached,
        finish_reason=plan.finish_reasons() or None,
        ttft_ms=round(ttft * 1000, 1) if ttft is not None else None,
    )


def _engine_times(timings: Timings | None) -> tuple[float | None, float | None]:
    """Return how long a sequence waited in the engine, and how long its prompt took (seconds)."""
    if timings is None or timings.queued is None or timings.scheduled is None:
        return None, None
    first = timings.first_token
    return timings.scheduled - timings.queued, None if first is None else first - timings.scheduled


def _error_type(error: ApiError) -> str:
    """Return the field's word for the kind of an error."""
    known = {
        "no_available_workers": "no_workers",
        "engine_lost": "backend_error",
        "shutting_down": "unavailable",
        "tokenizer_not_found": "unavailable",
        "request_timeout": "timeout",
        "admission_queue_full": "unavailable",
        "admission_queue_timeout": "timeout",
        "engine_error": "backend_error",
    }
    other = "validation_error" if error.status < 500 else "internal_error"
    return known.get(error.code, other)
