"""What a worker is asked to be: the worker API's schema, and what can be judged at once.

Only what smgd does something with, or shows, is named here; other fields of the schema belong to
workers that are reached over HTTP or gRPC, and are ignored like unknown ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType, structs

from smgd.config import WorkerConfig
from smgd.config.schema import MAX_ENGINES
from smgd.core import Dialect
from smgd.engine.dialects import dialect_for
from smgd.engine.paths import SCHEME, Addresses, derive
from smgd.errors import ConfigError, ModelError, WorkerError
from smgd.text.loader import ModelLoader, ModelSource

# Of the worker API's schema; smgd serves the last of them.
SCHEMES = ("http://", "https://", "grpc://", "grpcs://", SCHEME)
# Labels that say which model a worker serves.
MODEL_LABELS = ("model", "model_path", "tokenizer_path")
# What a worker without a declared runtime is taken for.
DEFAULT_RUNTIME = "vllm"

UNSPECIFIED = "unspecified"
# Seconds; a day. Whoever wants to wait for ever has `smgctl workers drain`.
MAX_DRAIN_SETTLE = 86400

_Count: TypeAlias = Annotated[int, Meta(ge=0)]
_Cost: TypeAlias = Annotated[float, Meta(ge=0)]
# Characters. What is longer is no name and no path (Linux: PATH_MAX), and comes back in every error
# and list; a chat template may be spelt out in place of its path.
_Word: TypeAlias = Annotated[str, Meta(max_length=256)]
_Text: TypeAlias = Annotated[str, Meta(max_length=4096)]
_Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=4096)]
_Template: TypeAlias = Annotated[str, Meta(max_length=1 << 18)]
_Labels: TypeAlias = Annotated[dict[_Word, _Text], Meta(max_length=256)]

# Tells why a model cannot be changed by a worker, None if it can.
Holder: TypeAlias = Callable[[ModelSource], str | None]


class ModelCard(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model that a worker serves."""

    id: _Name
    aliases: Annotated[tuple[_Name, ...], Meta(max_length=256)] = ()
    tokenizer_path: _Text = ""
    chat_template: _Template = ""


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    """A worker's own health settings; None leaves the daemon's."""

    failure_threshold: Annotated[int, Meta(ge=1)] | None = None
    drain_settle_secs: Annotated[float, Meta(ge=0, le=MAX_DRAIN_SETTLE)] | None = None
    disable_health_check: bool | None = None

    def over(self, other: Health) -> Health:
        """Return `other` with what is set here."""
        mine = {name: value for name, value in structs.asdict(self).items() if value is not None}
        return structs.replace(other, **mine)


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `POST /workers` and `PUT /workers/{id}`.

    `dp_size` is the number of engines that dial in. `priority`, `cost` and
    `max_connection_attempts` are only kept and shown.
    """

    url: _Text
    models: tuple[ModelCard, ...] = ()
    worker_type: Literal["regular", "prefill", "decode", "encode"] = "regular"
    connection_mode: Literal["http", "grpc", "zmq"] | None = None
    runtime_type: _Word | None = None
    runtime: _Word | None = None
    labels: _Labels = {}
    priority: _Count = 50
    cost: _Cost = 1.0
    max_connection_attempts: _Count = 20
    dp_size: Annotated[int, Meta(ge=1, le=MAX_ENGINES)] | None = None
    dp_rank: int | None = None
    zmq_handshake_address: _Word | None = None
    health: Health = Health()

    @property
    def declared_runtimes(self) -> list[str]:
        """The runtimes that were named, under either name; `unspecified` is none."""
        names = dict.fromkeys((self.runtime_type, self.runtime))
        return [name for name in names if name and name != UNSPECIFIED]

    @property
    def card(self) -> ModelCard | None:
        """The first of its model cards; `judge` refuses further ones."""
        return self.models[0] if self.models else None

    @property
    def tokenizer_path(self) -> str:
        """Where the tokenizer of its model is, empty if it does not say."""
        return self.labels.get("tokenizer_path") or (self.card.tokenizer_path if self.card else "")

    @property
    def names_model(self) -> bool:
        """Whether a model is named by its id, not only by where its files are."""
        return bool(self.models or self.labels.get("model"))

    @property
    def wanted_model(self) -> ModelSource | None:
        """The model that card and labels name, as if it had to be loaded; None if they name none.

        `labels.model_path` says where it is and, unless a card or `labels.model` does, its id.
        """
        card = self.card
        name = card.id if card else self.labels.get("model", "")
        path = self.labels.get("model_path", "") or name
        if not path:
            return None
        return ModelSource(
            id=name or path,
            path=path,
            tokenizer_path=self.tokenizer_path,
            chat_template=card.chat_template if card else "",
            aliases=card.aliases if card else (),
        )


class WorkerPatch(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `PATCH /workers/{id}`: what can change under a live connection.

    Labels are merged into those that are there. `api_key` is taken and not kept: engines that dial
    in over ZMQ have none.
    """

    priority: _Count | UnsetType = UNSET
    cost: _Cost | UnsetType = UNSET
    labels: _Labels = {}
    health: Health = Health()
    api_key: str | None = None

    @property
    def is_health_only(self) -> bool:
        """Whether it changes nothing but health settings."""
        return self == WorkerPatch(health=self.health, api_key=self.api_key)

    def apply(self, spec: WorkerSpec) -> WorkerSpec:
        """Return a spec with the changes made."""
        given = {"priority": self.priority, "cost": self.cost}
        return structs.replace(
            spec,
            labels=spec.labels | self.labels,
            health=self.health.over(spec.health),
            **{name: value for name, value in given.items() if value is not UNSET},
        )


class Wire(msgspec.Struct, frozen=True):
    """What follows from a spec alone: where engines dial, and how they speak."""

    addresses: Addresses
    dialect: Dialect
    engines: int


def spec_of(worker: WorkerConfig, model: ModelSource) -> WorkerSpec:
    """Return the spec of a worker of the configuration, which serves `model`."""
    card = ModelCard(model.id, model.aliases, model.tokenizer_path, model.chat_template)
    return WorkerSpec(
        url=worker.url,
        models=(card,),
        labels={"model_path": model.path},
        runtime_type=worker.runtime_type or None,
        dp_size=worker.engine_count,
        zmq_handshake_address=worker.zmq_handshake_address or None,
    )


def judge(spec: WorkerSpec) -> Wire:
    """Refuse what can be seen to be wrong without the other workers. Raises `WorkerError`."""
    url = spec.url
    if not url.startswith(SCHEMES):
        raise WorkerError(f"worker URL must start with one of {', '.join(SCHEMES)}: {url!r}")
    if not url.startswith(SCHEME):
        if spec.zmq_handshake_address is not None:
            raise WorkerError(f"zmq_handshake_address is for ZMQ workers only; {url} is none")
        raise WorkerError(
            f"worker {url} cannot be served: smgd serves {SCHEME}<path> workers only, whose"
            " engines dial in over ZMQ"
        )
    if spec.connection_mode not in (None, "zmq"):
        raise WorkerError(
            f"worker {url} has connection_mode {spec.connection_mode}, but {SCHEME} is zmq"
        )
    _judge_kind(spec)
    _judge_names(spec)
    addresses = derive(url, spec.zmq_handshake_address)
    runtimes = spec.declared_runtimes or [DEFAULT_RUNTIME]
    if len(runtimes) > 1:
        raise WorkerError(
            f"ZMQ worker {url} has two runtimes, runtime_type {runtimes[0]} and runtime"
            f" {runtimes[1]}: give one of them"
        )
    try:
        dialect = dialect_for(runtimes[0], url)
    except ConfigError as error:
        raise WorkerError(str(error)) from error
    return Wire(addresses, dialect, spec.dp_size or 1)


def _judge_kind(spec: WorkerSpec) -> None:
    if spec.worker_type != "regular":
        raise WorkerError(
            f"ZMQ worker {spec.url} cannot serve worker type {spec.worker_type}: only regular"
        )
    if spec.dp_rank is not None:
        raise WorkerError(
            f"ZMQ worker {spec.url} cannot have a dp_rank: smgd chooses the engine for each "
            "request; set dp_size to the number of engines"
        )
    if len(spec.models) > 1:
        raise WorkerError(
            f"ZMQ worker {spec.url} has {len(spec.models)} models, but an engine serves one"
        )


def _judge_names(spec: WorkerSpec) -> None:
    names = (spec.card.id, *spec.card.aliases) if spec.card else ()
    for name in names:
        if names.count(name) > 1:
            raise WorkerError(f"ZMQ worker {spec.url} gives its model the name {name!r} twice")


def model_of(spec: WorkerSpec, loader: ModelLoader, holder: Holder) -> ModelSource:
    """Return the model that a worker serves: the one it names, else the only one.

    One that nobody else holds becomes what the worker says of it. Raises `WorkerError` if it cannot
    be told which it is, or if it cannot be what the worker says.
    """
    wanted = spec.wanted_model
    known = _known(spec, wanted, loader)
    if known is None:
        if wanted is None:
            raise _no_identity(spec, loader)
        return wanted
    said = _said(spec, known)
    held = holder(known)
    if held is None:
        return structs.replace(known, **said)
    for field, value in said.items():
        if value and not _agrees(known, field, value):
            raise WorkerError(
                f"ZMQ worker {spec.url} cannot have another {field} for model {known.id!r} than"
                f" {getattr(known, field)!r}, since the model {held}: leave {value!r:.200} out, or"
                " give the model another name (labels.model)"
            )
    return known


def _known(spec: WorkerSpec, wanted: ModelSource | None, loader: ModelLoader) -> ModelSource | None:
    if wanted is None:
        sources = list(loader.sources.values())
        return sources[0] if len(sources) == 1 else None
    if spec.names_model:
        return loader.named(wanted.id)
    return loader.at(wanted.path) or loader.named(wanted.path)


def _said(spec: WorkerSpec, known: ModelSource) -> dict[str, Any]:
    """Return what a worker says of a model that is known: fields of `ModelSource`."""
    said: dict[str, Any] = {}
    path = spec.labels.get("model_path", "")
    if path and (spec.names_model or path not in known.names):
        said = {"path": path, "tokenizer_path": ""}
    if spec.tokenizer_path:
        said["tokenizer_path"] = spec.tokenizer_path
    if spec.card is not None:
        said["chat_template"] = spec.card.chat_template
        # Under one of its aliases it keeps the others.
        before = () if spec.card.id == known.id else known.aliases
        said["aliases"] = tuple(dict.fromkeys((*before, *spec.card.aliases)))
    return said


def _agrees(known: ModelSource, field: str, value: Any) -> bool:
    if field == "aliases":
        return known.names.issuperset(value)
    if field == "tokenizer_path" and not known.tokenizer_path:
        return bool(value == known.path)
    return bool(value == getattr(known, field))


def _no_identity(spec: WorkerSpec, loader: ModelLoader) -> WorkerError:
    hint = "set labels.model_path"
    if loader.sources:
        hint += f" to one of {', '.join(loader.sources)}, or to a new one"
    return WorkerError(f"ZMQ worker {spec.url} has no model identity: {hint}")


def load(spec: WorkerSpec, model: ModelSource, loader: ModelLoader) -> None:
    """Load a worker's model, if it is not known as it is to be.

    Raises `WorkerError` for a name that is taken.
    """
    try:
        loader.change(model)
    except ModelError as error:
        raise WorkerError(f"ZMQ worker {spec.url} cannot serve its model: {error}") from error
