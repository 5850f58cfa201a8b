"""The routes that generate: raw handlers beside Quart, since they are the hot path.

`answer` is the whole life of a request in one function. The task that runs it is cancelled when the
client leaves; the generation's block then sends the ABORTs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import msgspec
import structlog

from smgd.api import QUERIES, SURFACES
from smgd.api.base import Plan, PlanContext, Query, QueryContext, Surface
from smgd.api.envelope import error_body, error_event
from smgd.dispatch import Generation, Sequence
from smgd.errors import ApiError, internal_error
from smgd.web import gate
from smgd.web.accounts import account, error_type, named_model
from smgd.web.exchange import Exchange, Handler
from smgd.web.service import Running, Service
from smgd.web.streaming import stream

log = structlog.get_logger("smgd.web")

# The error code of a stream that broke after its status had gone out; `cause` in the log tells why.
STREAM_ERROR = "stream_error"


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
        yield from (_Route(path, query.endpoint, gate.REQUEST, run) for path in query.paths)


def _handler(service: Service, route: _Route) -> Handler:
    """Return what runs a request through the gate, and answers for its errors."""
    house = service.gate
    admission = house.admission

    async def handle(exchange: Exchange) -> None:
        own_id = gate.new_id(route.id_prefix)
        body = b""
        access = house.enter(exchange.method, route.path, exchange.header, own_id, exchange.client)
        try:
            house.authenticate(access, exchange.header)
            if admission.admit(access):
                body = await _read(service, exchange)
            else:
                body = await _queued(service, exchange, access)
            await route.run(body, exchange, access, own_id)
        except ApiError as error:
            await _fail(service, route, exchange, access, error, body)
        except Exception:
            # One broken answer must not take its neighbours along: it fails alone, loudly.
            log.exception("request failed", request_id=access.id)
            await _fail(service, route, exchange, access, internal_error(), body)
        finally:
            if not exchange.finished:
                access.left()
            house.leave(access)

    return handle


async def _fail(
    service: Service,
    route: _Route,
    exchange: Exchange,
    access: gate.Access,
    error: ApiError,
    body: bytes,
) -> None:
    """Answer with an error, or end a stream that has begun with an error event."""
    model = access.fields.get("model") or named_model(service.catalog, body)
    service.metrics.failed(model, route.endpoint, error_type(error))
    if exchange.started:
        access.answered(200, STREAM_ERROR)
        access.fields["cause"] = error.code
        await exchange.end(route.error_event(error))
    else:
        access.answered(error.status, error.code)
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
                await stream(exchange, access, generation, plan, service.sse_keepalive)
            else:
                await _whole(exchange, access, generation, plan)
        finally:
            del service.running[response_id]
            account(service, surface.endpoint, access, generation, plan)


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
