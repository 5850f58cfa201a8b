"""The routes that only tell: models, probes, version, metrics. A Quart-Trio application.

Everything here is small and rare; what generates lives in `web/hot.py`.
"""

from __future__ import annotations

from typing import Any

from quart import Response, current_app, g, request
from quart_trio import QuartTrio
from quart_trio.wrappers import TrioRequest
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from smgd import __version__
from smgd.api.envelope import error_body
from smgd.errors import ApiError, internal_error
from smgd.metrics import CONTENT_TYPE, Metrics
from smgd.web import control, gate, workers
from smgd.web.cors import is_preflight, preflight_headers
from smgd.web.exchange import Exchange, Routes, run_exchange, too_large, too_slow
from smgd.web.hyper import Receive, Scope, Send
from smgd.web.replies import json_response
from smgd.web.service import Service

# Of the routes that raw handlers serve.
HOT_METHODS = ("POST",)

# A body of any other method has no meaning (RFC 9110, 9.3), and is not read.
BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})

# Seconds; nothing on the metrics port has a body.
BODY_TIMEOUT = 5.0


def make_app(service: Service, hot: frozenset[str]) -> QuartTrio:
    """Return the application; `hot` are the paths that raw handlers serve, for honest 405s."""
    app = QuartTrio("smgd", static_folder=None)
    app.request_class = _request_class(service)
    app.config.update(
        RESPONSE_TIMEOUT=None,  # Quart's minute would cut an answer without a word
        BODY_TIMEOUT=service.body_timeout,
    )
    _frame(app, service, hot)
    _errors(app, service, hot)
    _probes(app, service)
    _models(app, service)
    workers.add_routes(app, service)
    control.add_routes(app, service)
    return app


def _request_class(service: Service) -> type[TrioRequest]:
    """Return the class of requests, whose bodies have the limit that holds when they come."""

    class LimitedRequest(TrioRequest):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"max_content_length": service.max_payload_size})

    return LimitedRequest


def _frame(app: QuartTrio, service: Service, hot: frozenset[str]) -> None:
    """Take every request through the gate, whether there is a route for it or not."""

    @app.before_request
    async def begin() -> Response | None:
        g.access = service.gate.enter(
            request.method,
            _route(hot),
            _header,
            gate.new_id(gate.REQUEST),
            request.remote_addr or "",
            request.path,
        )
        if service.gate.cors is not None and is_preflight(request.method, _header):
            return _with(Response("", 204), preflight_headers(g.access.cors, _header))
        service.gate.authenticate(g.access, _header)
        if request.url_rule is not None and request.method in BODY_METHODS:
            # Also where nobody looks at it: no route takes more than is allowed.
            await request.get_data(as_text=False)
        return None

    @app.after_request
    async def finish(response: Response) -> Response:
        access: gate.Access = g.access
        _with(response, gate.common_headers(access))
        access.answered(response.status_code, response.headers.get("x-smg-error-code", ""))
        return response

    @app.teardown_request
    async def close(_: BaseException | None) -> None:
        if "access" in g:
            service.gate.leave(g.access)


def _route(hot: frozenset[str]) -> str:
    """Return what metrics know the request at hand by: a route also where its method is wrong."""
    if request.url_rule is not None:
        return str(request.url_rule.rule)
    if request.path in hot:
        return request.path
    if isinstance(request.routing_exception, MethodNotAllowed):
        return _rule_of_another_method(request.routing_exception)
    return gate.OTHER


def _rule_of_another_method(error: MethodNotAllowed) -> str:
    [method, *_] = error.valid_methods or HOT_METHODS
    try:
        rule, _ = current_app.url_map.bind("").match(request.path, method, return_rule=True)
    except HTTPException:  # a redirect, to the path without its second slash
        return gate.OTHER
    return str(rule.rule)


def _header(name: bytes) -> bytes | None:
    """Return the value of a header of the request at hand, as it came."""
    value = request.headers.get(name.decode())
    return value.encode("latin-1") if value is not None else None


def _with(response: Response, headers: list[tuple[bytes, bytes]]) -> Response:
    for name, value in headers:
        response.headers[name.decode()] = value.decode("latin-1")
    return response


def _errors(app: QuartTrio, service: Service, hot: frozenset[str]) -> None:
    @app.errorhandler(ApiError)
    async def api_error(error: ApiError) -> Response:
        return _with(Response(error_body(error), error.status), gate.error_headers(g.access, error))

    @app.errorhandler(HTTPException)
    async def http_error(error: HTTPException) -> Response:
        status = error.code or 500
        if status == 404 and request.path not in hot:
            return await api_error(gate.unknown_url(request.method, request.path))
        if status in (404, 405):
            response = await api_error(gate.method_not_allowed(request.method, request.path))
            methods = getattr(error, "valid_methods", None) or HOT_METHODS
            response.headers["Allow"] = ", ".join(sorted(methods))
            return response
        if status == 413:
            return await api_error(too_large(service.max_payload_size))
        if status == 408:
            return await api_error(too_slow(service.body_timeout))
        code = (error.name or "error").lower().replace(" ", "_")
        return await api_error(ApiError(status, code, error.description or code))

    @app.errorhandler(Exception)
    async def unexpected(error: Exception) -> Response:
        gate.log.error("request failed", request_id=g.access.id, exc_info=error)
        return await api_error(internal_error())


def _probes(app: QuartTrio, service: Service) -> None:
    @app.get("/health")
    @app.get("/liveness")
    async def alive() -> Response:
        return Response("OK", content_type="text/plain; charset=utf-8")

    @app.get("/readiness")
    async def readiness() -> Response:
        reason = service.not_ready()
        if reason is not None:
            detail = {"missing": missing} if (missing := service.missing()) else {}
            return json_response({"status": "not ready", "reason": reason, **detail}, 503)
        healthy, total = service.registry.ready_count(), len(service.fleet.records)
        return json_response(
            {"status": "ready", "healthy_workers": healthy, "total_workers": total}
        )

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), content_type=CONTENT_TYPE)


def _models(app: QuartTrio, service: Service) -> None:
    def entry(model_id: str) -> dict[str, Any]:
        return {
            "id": model_id,
            "object": "model",
            "created": service.started_at,
            "owned_by": "self_hosted",
            "root": model_id,
            "parent": None,
            "max_model_len": service.registry.known_max_model_len(model_id),
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [entry(i) for i in service.catalog.ids]})

    @app.get("/v1/models/<path:name>")
    async def model(name: str) -> Response:
        return json_response(entry(service.catalog.resolve(name)))


def make_metrics_app(metrics: Metrics) -> Routes:
    """Return the application of the metrics port: one route, without Quart around it."""

    async def render(exchange: Exchange) -> None:
        headers = [(b"content-type", CONTENT_TYPE.encode())]
        await exchange.respond(200, headers, metrics.render())

    async def unknown(exchange: Exchange) -> None:
        error = gate.unknown_url(exchange.method, exchange.path)
        await exchange.respond(error.status, [gate.JSON], error_body(error))

    async def fallback(scope: Scope, receive: Receive, send: Send) -> None:
        await run_exchange(scope, receive, send, unknown, body_timeout=BODY_TIMEOUT)

    return Routes({("GET", "/metrics"): render}, fallback)
