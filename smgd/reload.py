"""From a configuration to the parts that run, at the start and again at SIGHUP.

`reload` compares the configuration in force with the one that was read again and changes what can
be changed under traffic: models, workers, and the keys of `setters`. Every other key that differs
is named in the log, and stays as it is. Values are not logged: some are secrets.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import structlog
from msgspec import structs

from smgd import log as logging
from smgd.admin.commands import Reloaded
from smgd.config import Config, TimeoutsConfig, WorkerConfig
from smgd.config.keys import ARRAYS, MODEL, keys_of, tables
from smgd.engine.link import LinkSettings
from smgd.engine.liveness import Patience
from smgd.errors import ConfigError, ModelError, WorkerError
from smgd.text.loader import ModelLoader, ModelSource
from smgd.web.auth import Keys
from smgd.web.cors import Cors
from smgd.web.gate import Gate
from smgd.web.service import Service
from smgd.workers.fleet import Fleet, FleetSettings
from smgd.workers.spec import WorkerSpec, spec_of

log = structlog.get_logger("smgd.reload")

FIXED = "cannot change while smgd runs: restart it"
Setter = Callable[[Any], None]


# ------------------------------------------------------------------- what a configuration says


def source_of(config: Config, name: str) -> ModelSource:
    """Return where a configured model comes from; without a path of its own, its name is one."""
    model = config.models[name]
    return ModelSource(
        id=name,
        path=config.model_path(name),
        tokenizer_path=model.tokenizer_path,
        chat_template=model.chat_template,
        aliases=model.aliases,
        configured=True,
    )


def sources_of(config: Config) -> list[ModelSource]:
    """Return where all configured models come from."""
    return [source_of(config, name) for name in config.models]


def spec_in(config: Config, worker: WorkerConfig) -> WorkerSpec:
    """Return what a configured worker is to be."""
    return spec_of(worker, source_of(config, config.model_of(worker)))


def fleet_settings(config: Config) -> FleetSettings:
    """Return what a configuration says of all workers."""
    return FleetSettings(
        link=_link_settings(config),
        max_logprobs=config.limits.max_logprobs,
        health=config.health,
        own=config.own_addresses,
    )


def set_gate(gate: Gate, config: Config) -> None:
    """Make the gate of the HTTP port what a configuration says."""
    origins, limits = config.server.cors_allowed_origins, config.limits
    limit = limits.max_concurrent_requests
    gate.keys = Keys(config.auth.api_keys)
    gate.cors = Cors(origins) if origins else None
    gate.admission.configure(
        automatic_limit() if limit < 0 else limit, limits.queue_size, limits.queue_timeout_secs
    )


def automatic_limit() -> int:
    """Return how many requests may run at the same time if the configuration does not say.

    Far above what engines run at once, since they have queues of their own: it bounds memory.
    """
    return max(4096, 1024 * len(os.sched_getaffinity(0)))


def _link_settings(config: Config) -> LinkSettings:
    timeouts = config.timeouts
    return LinkSettings(
        startup_timeout=timeouts.zmq_startup,
        send_timeout=timeouts.send,
        patience=Patience(
            heartbeat=timeouts.heartbeat,
            silence=timeouts.silence,
            prefill_rate=timeouts.prefill_rate,
        ),
    )


# ----------------------------------------------------------------------------- under traffic


class Parts(msgspec.Struct):
    """What of a running daemon can be changed. `managed` are the workers of `[[engines]]`."""

    service: Service
    fleet: Fleet
    loader: ModelLoader
    managed: Sequence[WorkerConfig] = ()


def reload(
    running: Config, wanted: Config, parts: Parts, *, revive: bool
) -> tuple[Config, Reloaded]:
    """Make the daemon what `wanted` says, as far as that goes; return what is in force then.

    A worker that could not be changed keeps its former table, so that the next reload tries again.
    With `revive` also what somebody has taken out of service by hand: workers that were told to
    drain, and engines whose workers were removed. A reload that renews a certificate at night must
    not end a maintenance.
    """
    in_force = _change_settings(running, wanted, parts)
    failed = _change_models(running, wanted, parts)
    workers, reasons = _change_workers(running, wanted, parts.fleet, revive)
    failed += reasons
    if revive:
        for worker in parts.managed:
            failed += _change_worker(wanted, worker, parts.fleet, changed=False, revive=True)
    if running.engines != wanted.engines:
        log.warning(FIXED, key="engines")
    log.info("configuration reloaded", workers=len(workers), models=len(wanted.models))
    in_force = structs.replace(in_force, models=wanted.models, workers=workers)
    return in_force, Reloaded(_fixed(in_force, wanted), failed)


def setters(parts: Parts) -> Mapping[str, Setter]:
    """Return the keys that can change under traffic, and how."""
    service, settings = parts.service, parts.fleet.settings

    def set_max_logprobs(value: int) -> None:
        service.max_logprobs = settings.max_logprobs = value

    def set_payload_size(value: int) -> None:
        service.max_payload_size = value

    def set_keepalive(value: float) -> None:
        service.sse_keepalive = value

    def set_inline_bytes(value: int) -> None:
        service.stage.threshold_bytes = value

    def set_threads(value: int) -> None:
        service.stage.limiter.total_tokens = value

    return {
        "log.level": logging.set_level,
        "limits.max_logprobs": set_max_logprobs,
        "limits.tokenizer_inline_bytes": set_inline_bytes,
        "limits.tokenizer_threads": set_threads,
        "server.max_payload_size": set_payload_size,
        "server.sse_keepalive": set_keepalive,
        "server.drain_window": _read_when_needed,
        "server.cors_allowed_origins": _read_when_needed,
        "auth.api_keys": _read_when_needed,
        "auth.api_key_files": _read_when_needed,
        "limits.max_concurrent_requests": _read_when_needed,
        "limits.queue_size": _read_when_needed,
        "limits.queue_timeout_secs": _read_when_needed,
        "health.disable_health_check": _read_when_needed,
        "health.remove_unhealthy_workers": _read_when_needed,
        "health.check_interval": _read_when_needed,
        "health.drain_settle": _read_when_needed,
        "health.failure_threshold": _read_when_needed,
    }


# Set for workers that are added from then on.
FOR_NEW_WORKERS = frozenset(f"timeouts.{name}" for name in TimeoutsConfig.__struct_fields__)


def _read_when_needed(_: Any) -> None:
    """Do nothing: the configuration in force, the gate and the fleet are set in any case."""


def _change_settings(running: Config, wanted: Config, parts: Parts) -> Config:
    """Set what can be set; return the running configuration with that in it."""
    live = setters(parts)
    for table, name in differences(running, wanted):
        key, value = f"{table}.{name}", getattr(getattr(wanted, table), name)
        if key in FOR_NEW_WORKERS:
            log.info("changed for workers that are added from now on", key=key)
        elif key in live:
            live[key](value)
            log.info("changed", key=key)
        else:
            log.warning(FIXED, key=key)
            continue
        changed = structs.replace(getattr(running, table), **{name: value})
        running = structs.replace(running, **{table: changed})
    set_gate(parts.service.gate, running)
    parts.fleet.settings.link = _link_settings(running)
    parts.fleet.settings.health = running.health
    parts.fleet.settings_changed()
    return running


def differences(one: Config, other: Config) -> Iterator[tuple[str, str]]:
    """Give table and name of every key that differs, save for models, workers and engines."""
    for table, struct in tables():
        if table in (MODEL, *ARRAYS):
            continue
        for key in keys_of(table, struct):
            if getattr(getattr(one, table), key.name) != getattr(getattr(other, table), key.name):
                yield table, key.name


def _fixed(in_force: Config, wanted: Config) -> list[str]:
    keys = [f"{table}.{name}" for table, name in differences(in_force, wanted)]
    return keys if in_force.engines == wanted.engines else [*keys, "engines"]


def _change_models(running: Config, wanted: Config, parts: Parts) -> list[str]:
    """Load what is new or different; what is not wanted goes with its last worker.

    Returns what has failed, for people.
    """
    sources = {source.id: source for source in sources_of(wanted)}
    for source in sources_of(running):
        if source.id not in sources:
            parts.fleet.release_model(source.id)
    failed = []
    for source in sources.values():
        try:
            parts.loader.change(source)
        except ModelError as error:
            log.error("model not changed", model=source.id, reason=str(error))  # noqa: TRY400
            failed.append(f"model {source.id}: {error}")
    return failed


def _change_workers(
    running: Config, wanted: Config, fleet: Fleet, revive: bool
) -> tuple[tuple[WorkerConfig, ...], list[str]]:
    """Return the tables that are in force then, and what has failed, for people."""
    urls = {worker.url for worker in wanted.workers}
    for worker in running.workers:
        record = fleet.by_url(worker.url)
        if worker.url not in urls and record is not None:
            fleet.remove(record.id)
    before = {worker.url: worker for worker in running.workers}
    in_force: list[WorkerConfig] = []
    failed: list[str] = []
    for worker in wanted.workers:
        former = before.get(worker.url)
        reasons = _change_worker(wanted, worker, fleet, changed=worker != former, revive=revive)
        failed += reasons
        if not reasons:
            in_force.append(worker)
        elif former is not None:
            in_force.append(former)
    return tuple(in_force), failed


def _change_worker(
    wanted: Config, worker: WorkerConfig, fleet: Fleet, *, changed: bool, revive: bool
) -> list[str]:
    """Add a worker that is not there; replace one whose table has changed, or that was drained.

    Returns what has failed, for people.
    """
    record = fleet.by_url(worker.url)
    try:
        spec = spec_in(wanted, worker)
        if record is None or record.state == "failed":
            fleet.add(spec)
        elif changed or (revive and record.state == "draining"):
            fleet.replace(record.id, spec)
        elif record.state == "draining":
            log.info("worker stays drained; smgctl reload lets it serve again", worker=worker.url)
    except (ConfigError, WorkerError) as error:
        log.error("worker not changed", worker=worker.url, reason=str(error))  # noqa: TRY400
        return [f"worker {worker.url}: {error}"]
    return []
