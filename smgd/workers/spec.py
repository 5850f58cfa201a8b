"""What a worker is asked to be: the worker API's schema, and what can be judged at once.

Only what smgd does something with, or shows, is named here; other fields of the schema belong to
workers that are reached over HTTP or gRPC, and are ignored like unknown ones.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType, structs

from smgd.config import WorkerConfig
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

_Count = Annotated[int, Meta(ge=0)]
_Seconds = Annotated[float, Meta(ge=0)]


class ModelCard(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model that a worker serves."""

    id: Annotated[str, Meta(min_length=1)]
    aliases: tuple[str, ...] = ()
    tokenizer_path: str = ""
    chat_template: str = ""


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    """A worker's own health settings; None leaves the daemon's."""

    failure_threshold: Annotated[int, Meta(ge=1)] | None = None
    drain_settle_secs: _Seconds | None = None
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

    url: str
    models: tuple[ModelCard, ...] = ()
    worker_type: Literal["regular", "prefill", "decode", "encode"] = "regular"
    connection_mode: Literal["http", "grpc", "zmq"] | None = None
    runtime_type: str | None = None
    runtime: str | None = None
    labels: dict[str, str] = {}
    priority: _Count = 50
    cost: _Seconds = 1.0
    max_connection_attempts: _Count = 20
    dp_size: Annotated[int, Meta(ge=1)] | None = None
    dp_rank: int | None = None
    zmq_handshake_address: str | None = None
    health: Health = Health()

    @property
    def declared_runtime(self) -> str | None:
        """The runtime that was named, under either name; None for `unspecified`."""
        name = self.runtime_type or self.runtime
        return None if name == "unspecified" else name

    @property
    def names_model(self) -> bool:
        """Whether a model is named by its id, not only by where its files are."""
        return bool(self.models) or "model" in self.labels

    @property
    def wanted_model(self) -> ModelSource | None:
        """The model that card and labels name, as if it had to be loaded; None if they name none.

        `labels.model_path` says where it is and, unless a card or `labels.model` does, its id.
        """
        card = self.models[0] if self.models else None
        name = card.id if card else self.labels.get("model", "")
        path = self.labels.get("model_path", "") or name
        if not path:
            return None
        tokenizer = self.labels.get("tokenizer_path", "") or (card.tokenizer_path if card else "")
        return ModelSource(
            id=name or path,
            path=path,
            tokenizer_path=tokenizer,
            chat_template=card.chat_template if card else "",
            aliases=card.aliases if card else (),
        )


class WorkerPatch(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `PATCH /workers/{id}`: what can change under a live connection.

    Labels are merged into those that are there. `api_key` is taken and not kept: engines that dial
    in over ZMQ have none.
    """

    priority: _Count | UnsetType = UNSET
    cost: _Seconds | UnsetType = UNSET
    labels: dict[str, str] = {}
    health: Health = Health()
    api_key: str | None = None

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
        runtime_type=worker.runtime_type,
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
    addresses = derive(url, spec.zmq_handshake_address)
    try:
        dialect = dialect_for(spec.declared_runtime or DEFAULT_RUNTIME, url)
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


def model_of(spec: WorkerSpec, loader: ModelLoader) -> ModelSource:
    """Return the model that a worker serves: the one it names, else the only one.

    Raises `WorkerError` if it cannot be told.
    """
    wanted = spec.wanted_model
    if wanted is not None:
        return loader.find(wanted.id if spec.names_model else wanted.path) or wanted
    known = list(loader.sources.values())
    if len(known) == 1:
        return known[0]
    hint = "set labels.model_path"
    if known:
        hint += f" to one of {', '.join(source.id for source in known)}, or to a new one"
    raise WorkerError(f"ZMQ worker {spec.url} has no model identity: {hint}")


def load(spec: WorkerSpec, model: ModelSource, loader: ModelLoader) -> None:
    """Load a worker's model, if it is not known. Raises `WorkerError` for a name that is taken."""
    try:
        loader.add(model)
    except ModelError as error:
        raise WorkerError(f"ZMQ worker {spec.url} cannot serve its model: {error}") from error
