"""From a TOML file and flags to one checked `Config`.

Three steps: the file alone is checked key by key (`parse`); flags replace keys (`override`); what
only shows when all is known, such as two workers with one URL, is looked for last
(`contradictions`). Every mistake of a step is told at once, one line each, with the key, what was
found, what is allowed, and for an unknown key the nearest that exists.

The walk over the keys is ours, since the errors of msgspec do not carry the value that was found or
the name of a model's table; the values themselves are left to it.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import UNSET
from msgspec.structs import fields, replace

from smgd.config.keys import ARRAYS, MODEL, Key, all_keys, header, keys_of, tables, toml
from smgd.config.schema import RUNTIMES, Config, EngineConfig, ModelConfig, WorkerConfig
from smgd.errors import ConfigError

_SHOWN: Final = 60  # characters of a wrong value that its error shows
_KEY: Final = re.compile(r"[!-~]+")
_ORIGIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[A-Za-z0-9._:\[\]-]+")
_ANY_HOST: Final = {"0.0.0.0", "::"}


def load(file: Path | None = None, flags: Mapping[str, Any] | None = None) -> Config:
    """Read `file` and lay `flags` (values by the path of their key) over it.

    Raises ConfigError with one line for each mistake.
    """
    config = Config() if file is None else parse(_read(file), str(file))
    config = with_key_files(override(config, flags or {}))
    if found := list(contradictions(config)):
        raise _error(found, str(file) if file and not flags else None)
    return config


def parse(text: str, file: str) -> Config:
    """Return what a configuration file says; `file` is its name for errors."""
    try:
        return convert(tomllib.loads(text), file)
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"{file}: this is not TOML: {exc}") from exc


def convert(data: dict[str, Any], file: str) -> Config:
    """Return what the tables of a file say."""
    if found := list(_mistakes(data)):
        raise _error(found, file)
    return msgspec.convert(data, Config)


def with_key_files(config: Config) -> Config:
    """Return `config` with the API keys that are in files among the others.

    Raises ConfigError for a file that cannot be read, or has no key: keys were meant to be needed.
    """
    files = config.auth.api_key_files
    keys = (*config.auth.api_keys, *(key for file in files for key in _keys_in(file)))
    return replace(config, auth=replace(config.auth, api_keys=keys))


def _keys_in(file: str) -> list[str]:
    try:
        text = Path(file).read_text(encoding="ascii")
    except OSError as exc:
        raise ConfigError(f"auth.api_key_files: {file} cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        where = f"byte {exc.start} is not ASCII"
        raise ConfigError(f"auth.api_key_files: {file} does not hold keys: {where}") from None
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"auth.api_key_files: there is no key in {file}")
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


def contradictions(config: Config) -> Iterator[str]:
    """Give what is wrong with settings that are each allowed."""
    hosts = {config.server.host, config.metrics_host}
    if 0 != config.server.port == config.metrics.port and (len(hosts) == 1 or hosts & _ANY_HOST):
        yield f"server.port and metrics.port are both {config.server.port}"
    names = Counter(name for key, model in config.models.items() for name in (key, *model.aliases))
    yield from (f"{n} models have the name {name!r}" for name, n in names.items() if n > 1)
    if "" in names:
        yield "a model or an alias has no name"
    yield from _gate_contradictions(config)
    urls = Counter(worker.url for worker in config.workers)
    yield from (f"{n} workers have the url {url}" for url, n in urls.items() if n > 1)
    for worker in config.workers:
        yield from _worker_contradictions(config, worker)


def _gate_contradictions(config: Config) -> Iterator[str]:
    """Give what is wrong with keys and origins. A key is never shown."""
    for number, key in enumerate(config.auth.api_keys, 1):
        if not _KEY.fullmatch(key):
            yield (
                f"auth.api_keys: key {number} of {len(config.auth.api_keys)} is empty, or has"
                " something other than visible ASCII characters in it"
            )
    origins = config.server.cors_allowed_origins
    if "*" in origins and len(origins) > 1:
        yield "server.cors_allowed_origins: * means all origins, so it stands alone"
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            yield (
                f"server.cors_allowed_origins: {origin!r} is no origin, such as"
                " https://chat.example.org or http://localhost:3000, without a path"
            )


def _worker_contradictions(config: Config, worker: WorkerConfig) -> Iterator[str]:
    if worker.runtime_type not in RUNTIMES:
        only = f"only {' and '.join(RUNTIMES)} {'is' if len(RUNTIMES) == 1 else 'are'} supported"
        yield (
            f"ZMQ worker {worker.url} has unsupported runtime {worker.runtime_type}: {only}"
            " over the ZMQ direct backend"
        )
    try:
        config.model_of(worker)
    except ConfigError as exc:
        yield str(exc)


# ------------------------------------------------------------------------ the file, key by key


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{file}: cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{file}: this is not TOML: not UTF-8 at byte {exc.start}") from exc


def _error(mistakes: list[str], file: str | None) -> ConfigError:
    lines = dict.fromkeys(f"{file}: {text}" if file else text for text in mistakes)
    return ConfigError("\n".join(lines))


def _mistakes(data: dict[str, Any]) -> Iterator[str]:
    structs = dict(tables())
    for where, table, value in _tables_in(data):
        if table not in structs:
            yield _unknown(where, [field.name for field in fields(Config)])
            continue
        keys = keys_of(table, structs[table])
        if not isinstance(value, dict) or where in ("models", *ARRAYS):
            hidden = any(key.secret for key in keys)
            yield _found(where, value, f"a table {header(table)}", hidden=hidden)
        else:
            yield from _key_mistakes(keys, value, where)


def _tables_in(data: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Give each table of a file: where it is, the name of its kind, and what is in it."""
    for name, value in data.items():
        match name, value:
            case "models", dict():
                yield from ((f'models."{key}"', MODEL, table) for key, table in value.items())
            case (("workers" | "engines"), list()):
                yield from ((f"{name}[{n}]", name, table) for n, table in enumerate(value))
            case "models", _:
                yield name, MODEL, value
            case _:
                yield name, name, value


def _key_mistakes(keys: list[Key], table: dict[str, Any], where: str) -> Iterator[str]:
    known = {key.name: key for key in keys}
    yield from (_unknown(f"{where}.{name}", [*known]) for name in table if name not in known)
    for name, key in known.items():
        if name not in table:
            if key.default is UNSET:
                yield f"{where}.{name}: must be given, such as {toml(key.sample)}"
            continue
        try:
            msgspec.convert(table[name], key.type)
        except msgspec.ValidationError:
            yield _found(f"{where}.{name}", table[name], key.allowed, hidden=key.secret)


def _found(where: str, value: Any, allowed: str, *, hidden: bool) -> str:
    text = "something else" if hidden else toml(value)
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return f"{where}: found {shown}, allowed is {allowed}"


def _unknown(where: str, known: list[str]) -> str:
    """Say that there is no such key, and which it might have been."""
    name = where.rpartition(".")[2]
    elsewhere = [path for path in all_keys() if path.endswith(f".{name}")]
    near = difflib.get_close_matches(name, known, n=1) or elsewhere
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    return f"{where}: there is no such key{hint} There are: {', '.join(known)}"


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
