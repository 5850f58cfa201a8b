"""Routes about engines as a whole, as clients of gateways of this kind expect them.

What a headless engine cannot be asked over ZMQ is skipped or refused in those clients' words.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import cast

from quart import Response, request
from quart_trio import QuartTrio

from smgd import __version__
from smgd.errors import ApiError
from smgd.web.accounts import error_type, named_model
from smgd.web.replies import json_response
from smgd.web.service import Service

# What clients ask of engines with an HTTP server of their own, and where smgd has it.
ELSEWHERE = {
    "/health_generate": "/readiness tells whether requests are served",
    "/engine_metrics": "GET /metrics has the engines' figures",
}
# Each with what metrics call it.
EMBEDDING_ROUTES = {
    "/v1/embeddings": "embeddings",
    "/v1/classify": "classify",
    "/v1/rerank": "rerank",
    "/rerank": "rerank",
}


def add_routes(app: QuartTrio, service: Service) -> None:
    """Add the routes."""
    _engine_control(app, service)
    _information(app, service)
    _embeddings(app, service)
    for path in ELSEWHERE:
        app.add_url_rule(path, path, _elsewhere, methods=["GET"])


def _embeddings(app: QuartTrio, service: Service) -> None:
    async def refuse() -> Response:
        text = "ZMQ backend does not support embeddings yet"
        error = ApiError(501, "unsupported_backend", text)
        body = cast("bytes", await request.get_data(as_text=False))
        model = named_model(service.catalog, body)
        service.metrics.failed(model, EMBEDDING_ROUTES[request.path], error_type(error))
        raise error

    for path in EMBEDDING_ROUTES:
        app.add_url_rule(path, path, refuse, methods=["POST"])


async def _elsewhere() -> Response:
    text = f"{request.path} is not implemented for ZMQ workers: {ELSEWHERE[request.path]}"
    raise ApiError(501, "unsupported_backend", text)


def _engine_control(app: QuartTrio, service: Service) -> None:
    @app.post("/flush_cache")
    async def flush_cache() -> Response:
        total = len(service.fleet.records)
        skipped = f"({total} ZMQ workers skipped: no cache-flush RPC)"
        return json_response(
            {
                "status": "success",
                "message": f"No cache-flush-capable workers available {skipped}",
                "workers_flushed": 0,
                "total_http_workers": 0,
                "total_grpc_workers": 0,
                "total_zmq_workers_skipped": total,
                "total_workers": total,
            }
        )

    @app.post("/start_profile")
    async def start_profile() -> Response:
        return _not_profiled(service, "start")

    @app.post("/stop_profile")
    async def stop_profile() -> Response:
        return _not_profiled(service, "stop")


def _not_profiled(service: Service, verb: str) -> Response:
    call = f"{verb}_profile"
    failed = [
        {
            "worker": worker.url,
            "error": f"{call} failed for worker {worker.url}: {call} is not supported over ZMQ",
        }
        for worker in service.registry.workers.values()
    ]
    body = {
        "status": "partial_success" if failed else "success",
        "message": f"Profile {verb}: 0 succeeded, {len(failed)} failed",
        "workers_profiled": 0,
        "total_workers": len(failed),
        "successful": [],
        "failed": failed,
    }
    return json_response(body, 206 if failed else 200)


def _information(app: QuartTrio, service: Service) -> None:
    @app.get("/get_loads")
    @app.get("/loads")
    async def loads() -> Response:
        found = [
            {
                "worker": sample.worker,
                "dp_rank": rank.rank,
                "num_running_reqs": rank.running,
                "num_waiting_reqs": rank.waiting,
                "token_usage": rank.kv_usage,
            }
            for sample in service.registry.samples()
            if sample.healthy
            for rank in sample.ranks
        ]
        now = datetime.fromtimestamp(service.wall_clock(), UTC).isoformat()
        body = {"timestamp": now, "version": f"smgd-{__version__}"}
        return json_response({**body, "dp_rank_count": len(found), "loads": found})

    @app.get("/get_model_info")
    async def model_info() -> Response:
        """Tell of the model that `?model=` names, by default the only one."""
        model = service.catalog.get(request.args.get("model"))
        source = service.fleet.model(model.id)
        return json_response(
            {
                "model_path": str(model.files.directory),
                "served_model_name": model.id,
                "aliases": source.aliases if source is not None else (),
                "is_generation": True,
                "vocab_size": model.files.vocab_size,
                "max_model_len": service.registry.known_max_model_len(model.id),
            }
        )

    @app.get("/get_server_info")
    async def server_info() -> Response:
        return json_response(
            {
                "version": __version__,
                "started_at": service.started_at,
                "ready": service.not_ready() is None,
                "models": service.catalog.ids,
                "healthy_workers": service.registry.ready_count(),
                "total_workers": len(service.fleet.records),
            }
        )
