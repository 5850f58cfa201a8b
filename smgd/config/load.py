"""From a TOML file and flags to one `Config`, and all that is wrong with them.

Three steps: the file alone is sifted key by key; flags replace keys (`override`); what only shows
when all is known, such as two workers with one URL, is looked for last (`contradictions`). A step
goes on with what is right, so that the mistakes of all steps are told at once, one line each, with
the key, what was found, what is allowed, and for an unknown key the nearest that exists.

The walk over the keys is ours, since the errors of msgspec do not carry the value that was found or
the name of a model's table; the values themselves are left to it.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import UNSET
from msgspec.structs import fields, replace

from smgd.config.findings import Findings
from smgd.config.keys import ARRAYS, MODEL, Key, all_keys, header, keys_of, tables, toml
from smgd.config.schema import RUNTIMES, Config, EngineConfig, ModelConfig, WorkerConfig
from smgd.errors import ConfigError

_SHOWN: Final = 60  # characters of a wrong value that its error shows
_KEY: Final = re.compile(r"[!-~]+")
_ORIGIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[A-Za-z0-9._:\[\]-]+")
_ANY_HOST: Final = {"0.0.0.0", "::"}


def load(file: Path | None = None, flags: Mapping[str, Any] | None = None) -> Config:
    """Read `file` and lay `flags` (values by the path of their key) over it.

    Raises ConfigError with one line for each mistake. What a host says of it, `smgd.checks` knows.
    """
    found = Findings()
    config = read(file, flags or {}, found)
    found.check()
    return config


def read(file: Path | None, flags: Mapping[str, Any], found: Findings) -> Config:
    """Return what file and flags say, as far as it can be used; `found` gets what is wrong.

    Raises ConfigError for a file of which nothing can be said, and for flags that do not fit it.
    """
    config = Config()
    if file is not None:
        found.prefix = f"{file}: "
        config = msgspec.convert(_sifted(_tables_of(_read(file), str(file)), found), Config)
        found.look_at(file)
    if flags:
        found.prefix = ""
    config = with_key_files(override(config, flags), found)
    contradictions(config, found)
    return config


def parse(text: str, file: str) -> Config:
    """Return what a configuration file says; `file` is its name for errors."""
    return convert(_tables_of(text, file), file)


def convert(data: dict[str, Any], file: str) -> Config:
    """Return what the tables of a file say."""
    found = Findings(f"{file}: ")
    sifted = _sifted(data, found)
    found.check()
    return msgspec.convert(sifted, Config)


def with_key_files(config: Config, found: Findings) -> Config:
    """Return `config` with the API keys that are in files among the others.

    A file that cannot be read, or has no key, is a mistake: keys were meant to be needed.
    """
    files = config.auth.api_key_files
    keys = (*config.auth.api_keys, *(key for file in files for key in _keys_in(file, found)))
    return replace(config, auth=replace(config.auth, api_keys=keys))


def _keys_in(file: str, found: Findings) -> list[str]:
    where = "auth.api_key_files"
    content = found.read(where, file)
    if content is None:
        return []
    try:
        lines = [line.strip() for line in content.decode("ascii").splitlines()]
    except UnicodeDecodeError as exc:
        found.wrong(where, f"{file} does not hold keys: byte {exc.start} is not ASCII")
        return []
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        found.wrong(where, f"there is no key in {file}")
    return keys


def override(config: Config, flags: Mapping[str, Any]) -> Config:
    """Return `config` with the keys that are in `flags` replaced.

    Flags describe one model. They change the only model of the file, or make one; ConfigError if
    the file has several.
    """
    changed: dict[str, Any] = {}
    for path, value in flags.items():
        table, _, name = path.partition(".")
        if table not in ("models", *ARRAYS):
            value = tuple(value) if isinstance(value, list) else value
            before = changed.get(table, getattr(config, table))
            changed[table] = replace(before, **{name: value})
    return replace(
        config,
        **changed,
        models=_override_model(config.models, flags),
        workers=_override_workers(config.workers, flags),
        engines=_override_engines(config.engines, flags),
    )


def contradictions(config: Config, found: Findings) -> None:
    """Find what is wrong with settings that are each allowed."""
    hosts = {config.server.host, config.metrics_host}
    if 0 != config.server.port == config.metrics.port and (len(hosts) == 1 or hosts & _ANY_HOST):
        text = f"server.port is {config.server.port}, too"
        found.wrong("metrics.port", text, "server.port")
    _name_contradictions(config, found)
    _gate_contradictions(config, found)
    first: dict[str, int] = {}
    for number, worker in enumerate(config.workers):
        if first.setdefault(worker.url, number) != number:
            text = f"workers[{first[worker.url]}] has the url {worker.url}, too"
            found.broken(f"workers[{number}].url", text)
        _worker_contradictions(config, number, worker, found)


def _name_contradictions(config: Config, found: Findings) -> None:
    owners: dict[str, list[str]] = {}
    for key, model in config.models.items():
        for name in (key, *model.aliases):
            owners.setdefault(name, []).append(key)
    for name, keys in owners.items():
        if not name:
            found.wrong(f'models."{keys[0]}"', "a model or an alias has no name")
        elif len(keys) > 1:
            found.wrong(f'models."{keys[-1]}"', f"{len(keys)} models have the name {name!r}")


def _gate_contradictions(config: Config, found: Findings) -> None:
    """Find what is wrong with keys and origins. A key is never shown."""
    keys = config.auth.api_keys
    for number, key in enumerate(keys, 1):
        if not _KEY.fullmatch(key):
            found.wrong(
                "auth.api_keys",
                f"key {number} of {len(keys)} is empty, or has something other than visible ASCII"
                " characters in it",
            )
    origins = config.server.cors_allowed_origins
    if "*" in origins and len(origins) > 1:
        found.wrong("server.cors_allowed_origins", "* means all origins, so it stands alone")
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            found.wrong(
                "server.cors_allowed_origins",
                f"{origin!r} is no origin, such as https://chat.example.org or"
                " http://localhost:3000, without a path",
            )


def _worker_contradictions(
    config: Config, number: int, worker: WorkerConfig, found: Findings
) -> None:
    if worker.runtime_type not in ("", *RUNTIMES):
        only = f"only {' and '.join(RUNTIMES)} {'is' if len(RUNTIMES) == 1 else 'are'} supported"
        found.wrong(
            f"workers[{number}].runtime_type",
            f"ZMQ worker {worker.url} has unsupported runtime {worker.runtime_type}: {only}"
            " over the ZMQ direct backend",
        )
    try:
        config.model_of(worker)
    except ConfigError as exc:
        found.wrong(f"workers[{number}].model", str(exc))


# ------------------------------------------------------------------------ the file, key by key


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{file}: cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{file}: this is not TOML: not UTF-8 at byte {exc.start}") from exc


def _tables_of(text: str, file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as exc:  # also of integers without end, or nested so deep
        raise ConfigError(f"{file}: this is not TOML: {exc}") from exc


def _sifted(data: dict[str, Any], found: Findings) -> dict[str, Any]:
    """Return what can be used of the tables of a file; `found` gets what is wrong with the rest."""
    good: dict[str, Any] = {}
    structs = dict(tables())
    for name, value in data.items():
        kind = MODEL if name == "models" else name
        match name, value:
            case "models", dict():
                where = {key: f'models."{key}"' for key in value}
                good[name] = {k: _sifted_table(where[k], kind, t, found) for k, t in value.items()}
            case (("workers" | "engines"), list()):
                places = [(f"{name}[{n}]", table) for n, table in enumerate(value)]
                good[name] = [_sifted_table(where, kind, t, found) for where, t in places]
            case _, _ if kind not in structs:
                found.broken(name, _unknown(name, [field.name for field in fields(Config)]))
            case _, dict() if kind not in (MODEL, *ARRAYS):
                good[name] = _sifted_table(name, kind, value, found)
            case _:
                found.broken(name, _not_a_table(kind, value))
    return good


def _sifted_table(where: str, kind: str, table: Any, found: Findings) -> dict[str, Any]:
    """Return the keys of one table that have a value which is allowed.

    One that must be given, and is not, is empty text: the table keeps its place among the others.
    """
    known = {key.name: key for key in keys_of(kind, dict(tables())[kind])}
    if not isinstance(table, dict):
        found.broken(where, _not_a_table(kind, table))
        table = {}
    for name in (name for name in table if name not in known):
        found.broken(f"{where}.{name}", _unknown(f"{where}.{name}", [*known]))
    good: dict[str, Any] = {}
    for name, key in known.items():
        if name in table and _fits(table[name], key):
            good[name] = table[name]
        elif name in table:
            text = _found(table[name], key.allowed, hidden=key.secret)
            found.broken(f"{where}.{name}", text)
        elif key.default is UNSET:
            found.broken(f"{where}.{name}", f"must be given, such as {toml(key.sample)}")
        if key.default is UNSET:
            good.setdefault(name, "")
    return good


def _fits(value: Any, key: Key) -> bool:
    try:
        msgspec.convert(value, key.type)
    except msgspec.ValidationError:
        return False
    return True


def _not_a_table(kind: str, value: Any) -> str:
    hidden = any(key.secret for key in keys_of(kind, dict(tables())[kind]))
    return _found(value, f"a table {header(kind)}", hidden=hidden)


def _found(value: Any, allowed: str, *, hidden: bool) -> str:
    text = "something else" if hidden else toml(value)
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return f"found {shown}, allowed is {allowed}"


def _unknown(where: str, known: list[str]) -> str:
    """Say that there is no such key, and which it might have been."""
    name = where.rpartition(".")[2]
    elsewhere = [path for path in all_keys() if path.endswith(f".{name}")]
    near = difflib.get_close_matches(name, known, n=1) or elsewhere
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    return f"there is no such key{hint} There are: {', '.join(known)}"


# ----------------------------------------------------------------------------------- flags


def _override_workers(
    workers: tuple[WorkerConfig, ...], flags: Mapping[str, Any]
) -> tuple[WorkerConfig, ...]:
    """`--worker-urls` are the workers, in place of the file's; other flags are for all of them."""
    if "workers.url" in flags:
        workers = tuple(WorkerConfig(url=url) for url in flags["workers.url"])
    given = ("runtime_type", "engine_count")
    common = {name: flags[f"workers.{name}"] for name in given if f"workers.{name}" in flags}
    return tuple(replace(worker, **common) for worker in workers)


def _override_engines(
    engines: tuple[EngineConfig, ...], flags: Mapping[str, Any]
) -> tuple[EngineConfig, ...]:
    """Change the only engine, or make one."""
    changed = {
        path.removeprefix("engines."): value
        for path, value in flags.items()
        if path.startswith("engines.")
    }
    if not changed:
        return engines
    if len(engines) > 1:
        raise ConfigError(
            f"flags describe one engine, and the file has {len(engines)} tables [[engines]]:"
            " set it there"
        )
    return (replace(engines[0] if engines else EngineConfig(), **changed),)


def _override_model(
    models: dict[str, ModelConfig], flags: Mapping[str, Any]
) -> dict[str, ModelConfig]:
    """Change the only model, or make one; a new name leaves the path of the old one.

    What an engine loads is the model if no other is named.
    """
    if not models and "engines.model_path" in flags:
        flags = {f"{MODEL}.path": flags["engines.model_path"], **flags}
    names = flags.get(MODEL, ())
    changed = {
        path.removeprefix(f"{MODEL}."): value
        for path, value in flags.items()
        if path.startswith(f"{MODEL}.")
    }
    if not names and not changed:
        return models
    if len(models) > 1:
        raise ConfigError(
            f"flags describe one model, and the file has {len(models)} ({', '.join(models)}):"
            " set it there"
        )
    name, model = next(iter(models.items()), ("", ModelConfig()))
    model = replace(model, **changed)
    path = model.path or name
    if not path:
        raise ConfigError("--model-path is missing: which model do the other flags describe?")
    if names:
        name, *aliases = names
        model = replace(model, path=path, aliases=tuple(aliases) or model.aliases)
    return {name or path: model}
