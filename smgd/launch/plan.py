"""What has to be started for a configuration: each engine's worker, command and environment.

Everything is computed beforehand, from the configuration and a few facts about the host, so that
`check-config` tells what would go wrong and nothing has been started yet when it does. Engines are
numbered through all `[[engines]]`, from `launch.worker_base_port`: the number makes the socket
path, the path makes the handshake port (`engine.paths`), and so the same configuration always gives
the same addresses.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import msgspec

from smgd.config import Config, EngineConfig, WorkerConfig
from smgd.engine.dialects import dialect_for
from smgd.engine.paths import SCHEME, derive, dialled
from smgd.errors import ConfigError, WorkerError
from smgd.launch.commands import (
    BACKENDS,
    Command,
    Site,
    build,
    fill,
    gpu_count,
    unknown_names,
)
from smgd.wire.fnv import HANDSHAKE_PORT_COUNT, HANDSHAKE_PORT_MIN

SOCKET_DIRECTORY = "SMGD_ZMQ_SOCKET_DIR"
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"

# A rendezvous store takes its port and the next few, so each engine has a block of them.
STORE_OFFSET = 233
STORE_BLOCK = 16
_LAST_PORT = 65535


class Host(msgspec.Struct, frozen=True):
    """What a plan depends on beside the configuration.

    `has_terminal` tells whether there is a controlling terminal, `python` is the interpreter that
    runs smgd.
    """

    environ: Mapping[str, str]
    uid: int
    has_terminal: bool
    python: str

    @classmethod
    def here(cls) -> Host:
        """Return the facts about this process."""
        return cls(dict(os.environ), os.getuid(), _has_terminal(), sys.executable)

    @property
    def socket_directory(self) -> str:
        """Return the directory in which the engines' sockets lie."""
        given = self.environ.get(SOCKET_DIRECTORY, "").rstrip("/")
        return given or f"/tmp/smgd-zmq-{self.uid}"  # noqa: S108

    @property
    def is_service(self) -> bool:
        """Tell whether a service manager started us: it ends every process that we leave.

        The variable alone does not say so: a desktop's terminals inherit it.
        """
        return "INVOCATION_ID" in self.environ and not self.has_terminal


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One engine to start. `env` is what its environment has beside that of smgd.

    `runtime` and `model` (a path or an id) are what its worker takes it for.
    """

    name: str
    url: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    runtime: str = ""
    model: str = ""

    @property
    def path(self) -> str:
        """Return what the paths of its files begin with, sockets and others."""
        return self.url.removeprefix(SCHEME)


class Plan(msgspec.Struct, frozen=True):
    """What to start: workers, the engines that dial them, and what the operator should know.

    `directory` is where the sockets of such engines lie.
    """

    directory: str
    workers: tuple[WorkerConfig, ...] = ()
    engines: tuple[EngineSpec, ...] = ()
    warnings: tuple[str, ...] = ()


def plan(config: Config, host: Host) -> Plan:
    """Return what `[[engines]]` ask for. Raises `ConfigError`, with a line for each mistake."""
    if not config.engines:
        return Plan(host.socket_directory)
    if wrong := list(_unusable(config.engines)):
        raise ConfigError("\n".join(f"{key}: {text}" for key, text in wrong))
    for _, error in mistakes(config, host):
        raise error
    numbered = list(_numbered(config))
    workers = [_worker(engine, number, host) for number, engine in numbered]
    gpus = _gpus(config.engines, host.environ.get(VISIBLE_GPUS))
    specs: list[EngineSpec] = []
    warnings: dict[str, None] = {}
    for (number, engine), worker, devices in zip(numbered, workers, gpus, strict=True):
        command = _command(config, engine, worker, number, host)
        spec = EngineSpec(
            name=_name(number),
            url=worker.url,
            argv=command.argv,
            env=engine.env | ({VISIBLE_GPUS: devices} if devices else {}),
            runtime=worker.runtime_type,
            model=config.model_path(config.model_of(worker)),
        )
        specs.append(spec)
        for flag in command.dropped:
            warnings[f"{engine.backend} argument {flag} is dropped: smgd sets it itself"] = None
    for spec in _without_program(specs, host):
        warnings[f"there is no program {spec.argv[0]} to start {spec.name} with"] = None
    return Plan(host.socket_directory, tuple(workers), tuple(specs), tuple(warnings))


def mistakes(config: Config, host: Host) -> Iterator[tuple[str, ConfigError]]:
    """Give why what `[[engines]]` ask for cannot be planned, each with the key to blame."""
    if not config.engines:
        return
    for key, text in _unusable(config.engines):
        yield key, ConfigError(text)
    if config.launch.keep_engines and host.is_service:
        kept = ConfigError(
            "--keep-engines (launch.keep_engines) cannot be kept under systemd: when a service"
            " stops, systemd ends every process of its control group (KillMode=), so the engines"
            " would end with smgd; give the engines a unit of their own instead"
        )
        yield "launch.keep_engines", kept
    judges: dict[str, Callable[[], object]] = {}
    number = config.launch.worker_base_port
    for index, engine in enumerate(config.engines):
        worker = _worker(engine, number, host)
        judges[f"engines[{index}].backend"] = partial(dialect_for, worker.runtime_type, worker.url)
        judges[f"engines[{index}].model"] = partial(config.model_of, worker)
        number += engine.replicas
    judges["launch.worker_base_port"] = partial(_check_ports, config, host)
    judges["engines"] = partial(_gpus, config.engines, host.environ.get(VISIBLE_GPUS))
    for key, judge in judges.items():
        try:
            judge()
        except ConfigError as error:
            yield key, error


def _without_program(specs: Iterable[EngineSpec], host: Host) -> Iterator[EngineSpec]:
    """Give the first engine for each program that cannot be found as the guardian's exec looks."""
    seen: set[str] = set()
    for spec in specs:
        program, path = spec.argv[0], spec.env.get("PATH", host.environ.get("PATH"))
        if program not in seen and shutil.which(program, path=path) is None:
            yield spec
        seen.add(program)


def store_port(base_port: int, index: int) -> int:
    """Return where the store of the `index`-th engine goes: outside the range of handshakes."""
    port = base_port + STORE_OFFSET + index * STORE_BLOCK
    if HANDSHAKE_PORT_MIN - STORE_BLOCK < port < HANDSHAKE_PORT_MIN + HANDSHAKE_PORT_COUNT:
        port += HANDSHAKE_PORT_COUNT + STORE_BLOCK
    return port


def _numbered(config: Config) -> Iterator[tuple[int, EngineConfig]]:
    """Give every engine that is to run, with its number."""
    base = number = config.launch.worker_base_port
    for engine in config.engines:
        for _ in range(engine.replicas):
            if store_port(base, number - base) + STORE_BLOCK > _LAST_PORT:
                raise ConfigError(
                    f"there are no ports left for {_name(number)}: lower --worker-base-port"
                    " (launch.worker_base_port)"
                )
            yield number, engine
            number += 1


def _unusable(engines: Iterable[EngineConfig]) -> Iterator[tuple[str, str]]:
    """Give what no process can be started with, and its key. Values are not shown: may be secret.

    No argument and no variable of a process can hold NUL, and a variable's name ends at its `=`.
    """
    for number, engine in enumerate(engines):
        where = f"engines[{number}]"
        for name, value in engine.env.items():
            if not name or "=" in name or "\0" in name + value:
                text = "is no variable: its name is empty or has a = in it, or there is a NUL"
                yield f"{where}.env", f"{name!r} {text}"
        words = {
            "args": engine.args,
            "command": engine.command,
            "model_path": (engine.model_path,),
            "python": (engine.python,),
        }
        for key, given in words.items():
            if "\0" in "".join(given):
                yield f"{where}.{key}", "there is a NUL in it"
        if engine.command and not engine.command[0]:
            yield f"{where}.command", "its first word is empty, so there is nothing to start"
        for name in unknown_names(engine.command):
            known = ", ".join(f"{{{field}}}" for field in Site.__struct_fields__)
            yield f"{where}.command", f"{{{name}}} means nothing here; there are {known}"


def _name(number: int) -> str:
    return f"engine-{number}"


def _worker(engine: EngineConfig, number: int, host: Host) -> WorkerConfig:
    url = f"{SCHEME}{host.socket_directory}/{_name(number)}"
    runtime = BACKENDS[engine.backend].runtime
    return WorkerConfig(url=url, runtime_type=runtime, model=engine.model)


def _command(
    config: Config, engine: EngineConfig, worker: WorkerConfig, number: int, host: Host
) -> Command:
    handshake = _handshake(worker)
    base = config.launch.worker_base_port
    site = Site(
        python=engine.python or host.python,
        model=engine.model_path or config.model_path(config.model_of(worker)),
        worker_url=worker.url,
        worker_port=number,
        handshake_address=handshake,
        handshake_port=dialled(handshake)[1],
        store_port=store_port(base, number - base),
    )
    if engine.command:
        return Command((*fill(engine.command, site), *engine.args))
    return build(BACKENDS[engine.backend], site, engine.args)


def _check_ports(config: Config, host: Host) -> None:
    """Raise `ConfigError` for socket paths that cannot be, or that derive one port."""
    claimed: dict[str, str] = {}
    for number, engine in _numbered(config):
        worker = _worker(engine, number, host)
        handshake = _handshake(worker)
        if handshake in claimed:
            raise ConfigError(
                f"ZMQ handshake port collision on {handshake}: {claimed[handshake]} and"
                f" {worker.url}; change --worker-base-port (launch.worker_base_port)"
            )
        claimed[handshake] = worker.url


def _handshake(worker: WorkerConfig) -> str:
    try:
        return derive(worker.url).handshake
    except WorkerError as error:
        raise ConfigError(str(error)) from error


# ------------------------------------------------------------------------------------- GPUs


def _gpus(engines: Sequence[EngineConfig], visible: str | None) -> list[str]:
    """Return for each engine which GPUs are its own, as `shares` does.

    Those that an engine's `env` names are divided among its replicas, the `visible` ones among the
    other engines.
    """
    common = [_gpus_of(e) for e in engines if VISIBLE_GPUS not in e.env for _ in range(e.replicas)]
    rest = iter(shares(common, visible))
    devices: list[str] = []
    for engine in engines:
        if VISIBLE_GPUS in engine.env:
            own = engine.env[VISIBLE_GPUS]
            devices += shares([_gpus_of(engine)] * engine.replicas, own)
        else:
            devices += [next(rest) for _ in range(engine.replicas)]
    return devices


def _gpus_of(engine: EngineConfig) -> int:
    if not BACKENDS[engine.backend].uses_gpus:
        return 0
    return gpu_count((*engine.command, *engine.args))


def shares(counts: Sequence[int], visible: str | None) -> list[str]:
    """Divide GPUs among engines that take so many, in order; "" for one that is told nothing.

    `visible` is the list to divide, None for the numbers from 0 up. An engine that has them all to
    itself is told nothing: its devices may not be called so. Raises `ConfigError` for a list that
    is too short, or has an empty name.
    """
    total = sum(counts)
    if sum(map(bool, counts)) < 2 or (visible is not None and visible.strip() in ("", "-1")):
        return [""] * len(counts)
    names = list(map(str, range(total))) if visible is None else visible.split(",")
    names = [name.strip() for name in names]
    if "" in names:
        raise ConfigError(
            f"{VISIBLE_GPUS}={visible} has an empty name in it: which GPUs are meant?"
        )
    if len(names) < total:
        raise ConfigError(
            f"the engines take {total} GPUs ({' + '.join(map(str, counts))}), and"
            f" {VISIBLE_GPUS}={visible} has {len(names)}"
        )
    rest = iter(names)
    return [",".join(next(rest) for _ in range(count)) for count in counts]


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
