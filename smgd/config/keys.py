"""The keys of the configuration as data, and the flags that write them.

Everything here is read from the structs of `schema`; help, docs, example and errors are made from
it, so that they cannot differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
from msgspec import NODEFAULT, UNSET, inspect
from msgspec.structs import FieldInfo, fields

from smgd.config.schema import Config, ModelName

MODEL: Final = 'models."ID"'

# Tables of which a file may have several.
ARRAYS: Final = ("workers", "engines")

# A flag is another way to write one key.
FLAGS: Final[Mapping[str, str]] = {
    "--worker-urls": "workers.url",
    "--backend": "workers.runtime_type",
    "--model-path": f"{MODEL}.path",
    "--tokenizer-path": f"{MODEL}.tokenizer_path",
    "--served-model-name": MODEL,
    "--chat-template": f"{MODEL}.chat_template",
    "--host": "server.host",
    "--port": "server.port",
    "--max-payload-size": "server.max_payload_size",
    "--cors-allowed-origins": "server.cors_allowed_origins",
    "--api-key": "auth.api_keys",
    "--max-concurrent-requests": "limits.max_concurrent_requests",
    "--queue-size": "limits.queue_size",
    "--queue-timeout-secs": "limits.queue_timeout_secs",
    "--prometheus-host": "metrics.host",
    "--prometheus-port": "metrics.port",
    "--admin-socket": "admin.socket",
    "--log-level": "log.level",
    "--log-json": "log.json",
    "--policy": "routing.policy",
    "--disable-health-check": "health.disable_health_check",
    "--remove-unhealthy-workers": "health.remove_unhealthy_workers",
    "--migration": "routing.migration",
    "--max-migrations": "routing.max_migrations",
    "--http-path": "server.http_path",
    "--tls-cert-path": "tls.cert_path",
    "--tls-key-path": "tls.key_path",
    "--zmq-startup-timeout-secs": "timeouts.zmq_startup",
    "--zmq-engine-count": "workers.engine_count",
}

# `smgd serve` starts what `--worker-urls` names elsewhere; `--backend` and models are the engines'.
SERVE_FLAGS: Final[Mapping[str, str]] = {
    "--backend": "engines.backend",
    "--model": "engines.model_path",
    "--data-parallel-size": "engines.replicas",
    "--engine-python": "engines.python",
    "--worker-base-port": "launch.worker_base_port",
    "--keep-engines": "launch.keep_engines",
    **{flag: path for flag, path in FLAGS.items() if not path.startswith("workers.")},
}
_FLAG_OF: Final = {path: flag for flags in (FLAGS, SERVE_FLAGS) for flag, path in flags.items()}


class Key(msgspec.Struct, frozen=True):
    """What there is to say about one key. `default` is UNSET for a key that must be given."""

    table: str
    name: str
    type: Any
    default: Any = UNSET

    @property
    def path(self) -> str:
        """Return table and name, as errors and docs write them."""
        return f"{self.table}.{self.name}"

    @property
    def flag(self) -> str | None:
        """Return the flag that writes the key."""
        return _FLAG_OF.get(self.path)

    @property
    def description(self) -> str:
        """Return the text that docs, example and help show."""
        return str((self._info.extra_json_schema or {})["description"])

    @property
    def allowed(self) -> str:
        """Return in words what the value may be, with its unit."""
        words = allowed(self._info)
        unit = (self._info.extra or {}).get("unit")
        return f"{unit}, {words}" if unit else words

    @property
    def secret(self) -> bool:
        """Tell whether values must not be shown."""
        return bool((self._info.extra or {}).get("secret"))

    @property
    def sample(self) -> Any:
        """Return the default or, for a key that must be given, an example."""
        if self.default is UNSET:
            return (self._info.extra_json_schema or {})["examples"][0]
        return self.default

    @property
    def _info(self) -> inspect.Metadata:
        info = inspect.type_info(self.type)
        if not isinstance(info, inspect.Metadata):
            raise TypeError(f"{self.path} has no description")
        return info


def tables() -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """Give each table as docs and errors name it, with the struct behind it."""
    for field in fields(Config):
        match inspect.type_info(field.type):
            case inspect.StructType(cls=cls):
                yield field.name, cls
            case inspect.VarTupleType(item_type=inspect.StructType(cls=cls)):
                yield field.name, cls
            case inspect.DictType(value_type=inspect.StructType(cls=cls)):
                yield MODEL, cls


def header(table: str) -> str:
    """Return the line that begins a table in a file."""
    return f"[[{table}]]" if table in ARRAYS else f"[{table}]"


def keys_of(table: str, struct: type[msgspec.Struct]) -> list[Key]:
    """Return the keys of one table."""
    return [Key(table, field.name, field.type, _default(field)) for field in fields(struct)]


def _default(field: FieldInfo) -> Any:
    if field.required:
        return UNSET
    return field.default if field.default_factory is NODEFAULT else field.default_factory()


def model_name() -> Key:
    """Return the key that is the name of a model's table."""
    table, _, name = MODEL.partition(".")
    return Key(table, name, ModelName)


def all_keys() -> dict[str, Key]:
    """Return every key by its path."""
    keys = [model_name(), *(key for table in tables() for key in keys_of(*table))]
    return {key.path: key for key in keys}


def toml(value: Any) -> str:
    """Return a value in TOML: JSON writes text, numbers, booleans and lists of them alike."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return msgspec.json.encode(value).decode()


def allowed(info: inspect.Type) -> str:
    """Say in words which values a type has."""
    match info:
        case inspect.Metadata(type=inner):
            return allowed(inner)
        case inspect.IntType(ge=low, le=high):
            return "an integer" + _limits(None, low, high)
        case inspect.FloatType(gt=above, ge=low, le=high):
            return "a number" + _limits(above, low, high)
        case inspect.BoolType():
            return "true or false"
        case inspect.LiteralType(values=values):
            return ", ".join(map(toml, values))
        case inspect.UnionType(types=types):
            return " or ".join(map(allowed, types))
        case inspect.VarTupleType(item_type=item):
            return f"a list of {allowed(item)}"
        case inspect.DictType(value_type=item):
            return f"a table of {allowed(item)}"
        case inspect.StrType():
            return "text"
    raise NotImplementedError(f"no words for {info}")


def _limits(above: float | None, low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f" from {low} to {high}"
    if low is not None:
        return f" from {low:g} up"
    return f" above {above:g}" if above is not None else ""
