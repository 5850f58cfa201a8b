"""The commands of the admin socket: one row each, the struct of its arguments and its function.

All of them are synchronous: they look, or they set something going whose end `workers show` and
`status` tell. What they return becomes JSON.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
import structlog
import trio

from smgd import __version__
from smgd import log as logging
from smgd.admin.peer import Peer
from smgd.admin.protocol import Answer, Request
from smgd.admin.views import (
    ModelView,
    RequestView,
    StatusView,
    Views,
    WorkerDetail,
    WorkerView,
    masked,
)
from smgd.config import Config
from smgd.engine.paths import SCHEME
from smgd.errors import ApiError, SmgdError, WorkerNotFoundError
from smgd.text.loader import ModelLoader
from smgd.web.service import Service
from smgd.workers.record import Record
from smgd.workers.spec import WorkerPatch, WorkerSpec

log = structlog.get_logger("smgd.admin")


class CommandError(SmgdError):
    """A command cannot be carried out; the text says why and what to do."""


class Reloaded(msgspec.Struct, frozen=True):
    """What a reload has left undone: keys that take a restart, and what went wrong, for people."""

    restart_needed: list[str]
    not_changed: list[str]


class Control(msgspec.Struct, kw_only=True, frozen=True):
    """What commands work on.

    `config` returns the configuration in force, `drain` sets the end going, `reload` reads the
    configuration again and returns the keys that a restart is needed for; it raises `ConfigError`.
    `set_level` sets the level of the log. `listen` are the addresses of the listeners.
    """

    service: Service
    loader: ModelLoader
    config: Callable[[], Config]
    drain: Callable[[], None]
    reload: Callable[[], Reloaded]
    set_level: Callable[[str], None]
    listen: list[str]


class NoArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No arguments."""


class WorkerArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`worker`: a URL, the path in it, an id, or the beginning of one."""

    worker: str


class PatchArgs(WorkerArgs, frozen=True, forbid_unknown_fields=True):
    """What to change of a worker, as in `PATCH /workers/{id}`."""

    patch: WorkerPatch


class IdArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`id`: of a response, or a client's own id of a request."""

    id: str


class LevelArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`level`: None only asks for the one that is set."""

    level: str | None = None


class Command(msgspec.Struct, frozen=True):
    """One command: what its arguments are, and what it does."""

    args: type[msgspec.Struct]
    function: Callable[[Commands, Any], Any]


class Commands:
    """Carries out requests."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self.service = control.service
        self.fleet = control.service.fleet
        self.views = Views(control.service, control.loader)
        self._started = trio.current_time()
        self._caller: dict[str, int] = {}  # of the command that is being carried out, for the log

    def run(self, request: Request, peer: Peer) -> Answer:
        """Return what a command of `peer` has to say; a fault of ours is no end of the daemon's."""
        self._caller = {"uid": peer.uid, "pid": peer.pid}
        command = COMMANDS.get(request.command)
        if command is None:
            text = f"there is no command {request.command!r}; there are: {', '.join(COMMANDS)}"
            return Answer(error=text, kind="usage")
        try:
            args = msgspec.convert(request.args, command.args)
        except (msgspec.ValidationError, RecursionError) as error:
            return Answer(error=f"{request.command}: {error}", kind="usage")
        try:
            return Answer(result=command.function(self, args))
        except SmgdError as error:
            return Answer(error=str(error), kind="failed")
        except Exception:
            log.exception("admin command failed", command=request.command, **self._caller)
            return Answer(error="it failed by a fault of smgd's; its log has it", kind="failed")

    # ------------------------------------------------------------------------------- looking

    def status(self, _: NoArgs) -> StatusView:
        """Return how the daemon is."""
        service = self.service
        return StatusView(
            version=__version__,
            pid=os.getpid(),
            state="draining" if service.draining else "serving",
            uptime=round(trio.current_time() - self._started, 1),
            ready_workers=service.registry.ready_count(),
            workers=len(self.fleet.records),
            requests=len(service.running),
            models=service.catalog.ids,
            listen=self.control.listen,
            log_level=logging.current_level(),
            not_ready=service.not_ready(),
            missing=service.missing() if service.not_ready() else [],
        )

    def workers(self, _: NoArgs) -> list[WorkerView]:
        """Return all workers."""
        return self.views.workers()

    def worker(self, args: WorkerArgs) -> WorkerDetail:
        """Return one worker."""
        return self.views.worker(self._find(args.worker))

    def models(self, _: NoArgs) -> list[ModelView]:
        """Return all models."""
        return self.views.models()

    def requests(self, _: NoArgs) -> list[RequestView]:
        """Return the requests that run."""
        return self.views.requests()

    def config(self, _: NoArgs) -> dict[str, Any]:
        """Return the configuration in force, with its secrets hidden."""
        return masked(self.control.config())

    # ------------------------------------------------------------------------------- changing

    def add(self, spec: WorkerSpec) -> WorkerDetail:
        """Add a worker."""
        record = self.fleet.add(spec)
        self._note("workers add", worker=spec.url)
        return self.views.worker(record)

    def patch(self, args: PatchArgs) -> WorkerDetail:
        """Change a worker under its live connection."""
        record = self.fleet.patch(self._find(args.worker).id, args.patch)
        self._note("workers patch", worker=record.spec.url)
        return self.views.worker(record)

    def drain_worker(self, args: WorkerArgs) -> WorkerDetail:
        """Give a worker no new requests; it stays connected until it is removed."""
        record = self.fleet.drain(self._find(args.worker).id)
        self._note("workers drain", worker=record.spec.url)
        return self.views.worker(record)

    def remove(self, args: WorkerArgs) -> WorkerDetail:
        """Drain a worker, then release all it has."""
        record = self.fleet.remove(self._find(args.worker).id)
        self._note("workers remove", worker=record.spec.url)
        return self.views.worker(record)

    def abort(self, args: IdArgs) -> list[RequestView]:
        """End requests; their clients get an error. Returns what they were."""
        running = self.service.running.values()
        wanted = [r for r in running if args.id in (r.id, r.access.id)]
        if not wanted:
            raise CommandError(f"no request {args.id!r} is running (any more): smgctl requests")
        found = [view for view in self.views.requests() if view.id in {r.id for r in wanted}]
        for request in wanted:
            # Not a 5xx, nor 408, 409 or 429: SDKs would send those again by themselves.
            text = "The request was aborted by an operator of this server"
            request.generation.fail(ApiError(403, "request_aborted", text))
            self._note("abort", request_id=request.access.id)
        return found

    def drain(self, _: NoArgs) -> dict[str, Any]:
        """Stop in order, as SIGTERM does."""
        server = self.control.config().server
        self._note("drain")
        self.control.drain()
        return {
            "requests": len(self.service.running),
            "drain_window": server.drain_window,
            "shutdown_grace": server.shutdown_grace,
        }

    def reload(self, _: NoArgs) -> dict[str, list[str]]:
        """Read the configuration again, as SIGHUP does, and put back to work what was drained."""
        self._note("reload")
        done = self.control.reload()
        if done.not_changed:
            raise CommandError(f"reloaded, but not all of it: {'; '.join(done.not_changed)}")
        return {"restart_needed": done.restart_needed}

    def loglevel(self, args: LevelArgs) -> dict[str, str]:
        """Return the level of the log, after setting it if one is given."""
        if args.level is not None:
            if args.level not in logging.LEVELS:
                raise CommandError(f"level {args.level!r}: there are {', '.join(logging.LEVELS)}")
            self.control.set_level(args.level)
            self._note("loglevel", level=args.level)
        return {"level": logging.current_level()}

    def _note(self, command: str, **fields: Any) -> None:
        log.info("admin command", command=command, **fields, **self._caller)

    def _find(self, name: str) -> Record:
        """Return the worker that a name means. Raises `WorkerNotFoundError`, `CommandError`."""
        found = self._named(name)
        if not found:
            urls = ", ".join(record.spec.url for record in self.fleet.records.values())
            raise WorkerNotFoundError(f"no worker {name!r}; there are: {urls or 'none'}")
        if len(found) > 1:
            several = ", ".join(f"{record.id} ({record.spec.url})" for record in found)
            raise CommandError(f"{name!r} is several workers: {several}")
        return found[0]

    def _named(self, name: str) -> list[Record]:
        """Return what a name may mean; of two with one URL, the one that is on its way out last."""
        url = name if name.startswith(SCHEME) else SCHEME + name
        exact = self.fleet.records.get(name) or self.fleet.by_url(url)
        if exact is not None:
            return [exact]
        records = self.fleet.records.values()
        return [r for r in records if r.spec.url == url or (name and r.id.startswith(name))]


COMMANDS: Final[Mapping[str, Command]] = {
    "status": Command(NoArgs, Commands.status),
    "workers list": Command(NoArgs, Commands.workers),
    "workers show": Command(WorkerArgs, Commands.worker),
    "workers add": Command(WorkerSpec, Commands.add),
    "workers patch": Command(PatchArgs, Commands.patch),
    "workers drain": Command(WorkerArgs, Commands.drain_worker),
    "workers remove": Command(WorkerArgs, Commands.remove),
    "models": Command(NoArgs, Commands.models),
    "requests": Command(NoArgs, Commands.requests),
    "abort": Command(IdArgs, Commands.abort),
    "drain": Command(NoArgs, Commands.drain),
    "reload": Command(NoArgs, Commands.reload),
    "loglevel": Command(LevelArgs, Commands.loglevel),
    "config show": Command(NoArgs, Commands.config),
}
