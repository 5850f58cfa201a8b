"""The settings of smgd as structs: the only place where a key is described.

Type and limits, default, unit and text of a key give the check of a file, the texts of errors,
`--help`, docs/configuration.md and smgd.toml.example. A key exists because something reads it.
Empty text stands for "not set", since TOML has no null.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from smgd.errors import ConfigError

RUNTIMES: Final = ("vllm",)

# Data-parallel engines of a worker: each costs memory and a task, also while it is only awaited.
MAX_ENGINES: Final = 1024

_SECONDS: Final = {"unit": "seconds"}
_BYTES: Final = {"unit": "bytes"}

_Port: TypeAlias = Annotated[int, Meta(ge=0, le=65535)]


class ServerConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The HTTP side: where clients connect, and how long and how much they may send."""

    host: Annotated[str, Meta(description="Address to listen on, IPv4 or IPv6.")] = "0.0.0.0"
    port: Annotated[_Port, Meta(description="Port to listen on; 0 takes any free one.")] = 30000
    backlog: Annotated[
        int, Meta(ge=1, description="Connections that may wait in the kernel to be accepted.")
    ] = 2048
    keep_alive_timeout: Annotated[
        float,
        Meta(
            gt=0,
            extra=_SECONDS,
            description="How long an idle connection is kept open for another request.",
        ),
    ] = 90
    header_timeout: Annotated[
        float,
        Meta(
            gt=0,
            extra=_SECONDS,
            description="How long a client may take to send the head of a request.",
        ),
    ] = 30
    body_timeout: Annotated[
        float,
        Meta(
            gt=0,
            extra=_SECONDS,
            description="How long a client may take to send a whole request body.",
        ),
    ] = 120
    write_timeout: Annotated[
        float,
        Meta(
            gt=0,
            extra=_SECONDS,
            description="How long a client may leave unread what is sent to it before the"
            " connection is cut and its request aborted.",
        ),
    ] = 30
    max_payload_size: Annotated[
        int,
        Meta(
            ge=1,
            extra=_BYTES,
            description="Largest request body; a larger one is answered with status 413.",
        ),
    ] = 32 * 1024 * 1024
    cors_allowed_origins: Annotated[
        tuple[str, ...],
        Meta(
            description="Origins (scheme://host[:port]) of web pages that may use smgd from a"
            ' browser; "*" alone: all of them.'
        ),
    ] = ()
    sse_keepalive: Annotated[
        float,
        Meta(
            gt=0,
            extra=_SECONDS,
            description="Silence after which a stream gets a comment line that keeps proxies from"
            " closing it; also the longest that the head of a stream waits for the first token.",
        ),
    ] = 15
    shutdown_grace: Annotated[
        float,
        Meta(
            ge=0,
            extra=_SECONDS,
            description="How long running requests may still take after a stop signal before they"
            " are aborted.",
        ),
    ] = 180
    http_path: Annotated[
        Literal["fast", "stock"],
        Meta(
            description="How HTTP/1.1 is spoken: fast parses with httptools and lets an engine's"
            " reader write to clients itself; stock is Hypercorn's own way, slower and otherwise"
            " alike."
        ),
    ] = "fast"
    drain_window: Annotated[
        float,
        Meta(
            ge=0,
            extra=_SECONDS,
            description="How long new connections are still accepted after a stop signal, while"
            " /readiness already answers 503, so that balancers can turn away first.",
        ),
    ] = 2


class TlsConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """HTTPS on the HTTP port, with HTTP/2 for clients that ask for it."""

    cert_path: Annotated[
        str,
        Meta(description="PEM file with the certificate and those that signed it; empty: no TLS."),
    ] = ""
    key_path: Annotated[str, Meta(description="PEM file with the certificate's private key.")] = ""


class AuthConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Who may use the HTTP port: with keys, nothing but the probes is answered without one."""

    api_keys: Annotated[
        tuple[str, ...],
        Meta(
            extra={"secret": True},
            description="Keys, of which a client has to send one. Everybody on the host can read"
            " a flag: better a file, or the environment variable SMGD_API_KEY in place of it.",
        ),
    ] = ()
    api_key_files: Annotated[
        tuple[str, ...],
        Meta(
            description="Files with further keys, one a line, read again at a reload; lines that"
            " begin with # are comments."
        ),
    ] = ()


class MetricsConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The listener that Prometheus scrapes."""

    host: Annotated[
        str, Meta(description="Address of the metrics listener; empty: that of server.host.")
    ] = ""
    port: Annotated[
        _Port, Meta(description="Port of the metrics listener; 0 takes any free one.")
    ] = 29000


class AdminConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The Unix socket that smgctl speaks to; one that systemd hands over takes its place."""

    socket: Annotated[
        str,
        Meta(
            description="Path of the socket; empty: smgd.sock in $RUNTIME_DIRECTORY, which systemd"
            " sets, and none elsewhere."
        ),
    ] = ""
    mode: Annotated[
        Literal["0600", "0660", "0666"],
        Meta(
            description="Mode of the socket. Whatever it is, only root, smgd's own user and members"
            " of the group are answered."
        ),
    ] = "0660"
    group: Annotated[
        str, Meta(description="Group of the socket, by name; empty: that of smgd itself.")
    ] = ""


class LogConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The log, on standard error: one line for each request and each change of a worker."""

    level: Annotated[
        Literal["debug", "info", "warn", "warning", "error"],
        Meta(
            description="Least severe level that is logged: debug, info, warn (or warning), error."
        ),
    ] = "info"
    json: Annotated[
        Literal["auto"] | bool,
        Meta(
            description="Whether a line is a JSON object or text; auto: text on a terminal,"
            " JSON elsewhere."
        ),
    ] = "auto"


class LimitsConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What requests may ask for, and what they may take of the daemon."""

    max_concurrent_requests: Annotated[
        int,
        Meta(
            ge=-1,
            description="Requests that may generate or tokenize at the same time, until the end of"
            " their answers; -1: 1024 times the cores, at least 4096; 0: no limit.",
        ),
    ] = -1
    queue_size: Annotated[
        int,
        Meta(
            ge=0,
            description="Requests above that which may wait for their turn; a further one is"
            " answered with status 429.",
        ),
    ] = 100
    queue_timeout_secs: Annotated[
        float,
        Meta(
            gt=0,
            extra=_SECONDS,
            description="How long a request waits for its turn before it is answered with status"
            " 503.",
        ),
    ] = 60
    max_logprobs: Annotated[
        int,
        Meta(
            ge=0,
            description="Most alternatives per token that a request may ask for; not above the"
            " --max-logprobs of the engines.",
        ),
    ] = 20
    tokenizer_inline_bytes: Annotated[
        int,
        Meta(
            ge=0,
            extra=_BYTES,
            description="Longest text that is tokenized on the event loop; a longer one goes to a"
            " thread, so that it does not hold up the streams.",
        ),
    ] = 12_288
    tokenizer_threads: Annotated[
        int, Meta(ge=1, description="Long texts that are tokenized at the same time.")
    ] = 2


class TimeoutsConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """How long an engine may take before something is done about it."""

    zmq_startup: Annotated[
        float,
        Meta(
            gt=0,
            extra=_SECONDS,
            description="How long to wait for each handshake message of an engine before the wait"
            " is reported; an engine that comes later is still served.",
        ),
    ] = 600
    send: Annotated[
        float,
        Meta(
            gt=0,
            extra=_SECONDS,
            description="How long sending to an engine may block before it counts as lost.",
        ),
    ] = 10
    silence: Annotated[
        float,
        Meta(
            gt=0,
            extra=_SECONDS,
            description="How long nothing may become of the requests of an engine, though it"
            " answers the heartbeat, before it counts as lost; prompts still to be read extend it.",
        ),
    ] = 300
    prefill_rate: Annotated[
        float,
        Meta(
            gt=0,
            extra={"unit": "tokens/second"},
            description="Speed of reading prompts at which an engine is not yet too slow: the"
            " prompts that it has still to read extend the silence by their length at this speed.",
        ),
    ] = 2000
    heartbeat: Annotated[
        float,
        Meta(
            gt=0,
            extra=_SECONDS,
            description="How long an engine with requests in flight may give no sign of life before"
            " it counts as lost; must be above its longest step, since it answers between steps.",
        ),
    ] = 60


class RoutingConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """How requests are spread over the workers of a model."""

    policy: Annotated[
        Literal["least_load", "power_of_two", "random", "round_robin"],
        Meta(description="How a worker is chosen among those that are ready."),
    ] = "least_load"
    migration: Annotated[
        Literal["best-effort", "exact", "off"],
        Meta(
            description="Which running requests go on with another worker when their engine is"
            " lost: best-effort all that can be continued, exact only those whose text is that of"
            " an undisturbed run, off none."
        ),
    ] = "best-effort"
    max_migrations: Annotated[
        int, Meta(ge=0, description="How many times one request may go on with another worker.")
    ] = 2


class HealthConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """When workers are given up, and how they leave."""

    disable_health_check: Annotated[
        bool,
        Meta(
            description="Ignored, with a warning for each worker: the connection to an engine says"
            " whether it is there, and there is no check to disable."
        ),
    ] = False
    remove_unhealthy_workers: Annotated[
        bool,
        Meta(
            description="Whether a worker whose engine stays down is removed. Nothing adds it"
            " again: left off, it serves as soon as its engine is back."
        ),
    ] = False
    check_interval: Annotated[
        float,
        Meta(
            gt=0,
            extra=_SECONDS,
            description="Time between two looks at workers that may be removed as unhealthy.",
        ),
    ] = 60
    failure_threshold: Annotated[
        int,
        Meta(
            ge=1,
            description="Bad looks that count: after 3 times as many a worker is removed whose"
            " engine was lost, after 10 times as many one whose engine has never come.",
        ),
    ] = 3
    drain_settle: Annotated[
        float,
        Meta(
            ge=0,
            extra=_SECONDS,
            description="How long the requests of a worker that is removed may still take.",
        ),
    ] = 5


class ModelConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A model that is served: one table for each, under its name."""

    path: Annotated[
        str,
        Meta(
            description="Directory or Hugging Face id of the model, for its tokenizer, chat"
            " template and stop tokens; empty: the name of the model."
        ),
    ] = ""
    tokenizer_path: Annotated[
        str,
        Meta(
            description="Directory or Hugging Face id of the tokenizer, if it is not the model's;"
            " empty: the model's path."
        ),
    ] = ""
    chat_template: Annotated[
        str,
        Meta(
            description="File with a Jinja chat template to use in place of the model's; empty:"
            " the model's."
        ),
    ] = ""
    aliases: Annotated[
        tuple[str, ...], Meta(description="Other names by which clients may ask for the model.")
    ] = ()


class WorkerConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A worker: one set of sockets that smgd binds, and the engine or engines that dial them."""

    url: Annotated[
        str,
        Meta(
            examples=["ipc:///tmp/smg-zmq/engine-0"],
            description="ipc://PATH: sockets are bound at PATH-in.sock and PATH-out.sock, in a"
            " directory that belongs to smgd's user.",
        ),
    ]
    runtime_type: Annotated[
        str,
        Meta(
            description=f"Engine behind the worker: {' or '.join(RUNTIMES)}. Empty:"
            f" {RUNTIMES[0]}, with a warning, since smgd cannot see what dials in."
        ),
    ] = ""
    model: Annotated[
        str,
        Meta(
            description="Name, alias or path of the model that the worker serves; empty: the only"
            " one."
        ),
    ] = ""
    zmq_handshake_address: Annotated[
        str,
        Meta(
            description="tcp://HOST:PORT that engines dial first; empty: 127.0.0.1 and a port in"
            " 20000..29999 computed from the url."
        ),
    ] = ""
    engine_count: Annotated[
        int,
        Meta(
            ge=1, le=MAX_ENGINES, description="Data-parallel engines that dial in to this worker."
        ),
    ] = 1


class LaunchConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What holds for all engines that smgd starts itself."""

    worker_base_port: Annotated[
        int,
        Meta(
            ge=1,
            le=65535,
            description="Number of the first engine, whose worker is ipc://DIR/engine-NUMBER; the"
            " others follow. An engine that needs ports of its own counts them from its number.",
        ),
    ] = 31000
    keep_engines: Annotated[
        bool,
        Meta(
            description="Whether engines are left running when smgd stops, for its next start to"
            " find; not possible in a systemd service, which ends all its processes."
        ),
    ] = False
    stop_grace: Annotated[
        float,
        Meta(
            gt=0,
            extra=_SECONDS,
            description="How long an engine may take to end after SIGTERM before all its processes"
            " are killed.",
        ),
    ] = 20


class EngineConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """An engine that smgd starts, watches and ends, with a worker for each replica."""

    backend: Annotated[
        Literal["vllm", "tokenspeed", "sglang", "sim"],
        Meta(description="What is started; sim is the simulated engine, which speaks as vLLM."),
    ] = "vllm"
    model: Annotated[
        str, Meta(description="Name of the model that the engine serves; empty: the only one.")
    ] = ""
    model_path: Annotated[
        str,
        Meta(
            description="Directory or Hugging Face id that the engine loads; empty: the model's"
            " path."
        ),
    ] = ""
    replicas: Annotated[
        int,
        Meta(
            ge=1,
            le=65535,
            description="Independent engines that are started, each with a worker and GPUs of its"
            " own.",
        ),
    ] = 1
    args: Annotated[
        tuple[str, ...],
        Meta(
            description="Further arguments of the engine; flags that smgd sets itself are dropped"
            " from them."
        ),
    ] = ()
    env: Annotated[
        dict[str, str],
        Meta(description="Environment variables of the engine, beside those of smgd."),
    ] = {}
    python: Annotated[
        str,
        Meta(
            description="Python interpreter that has the engine installed; empty: the one that"
            " runs smgd."
        ),
    ] = ""
    command: Annotated[
        tuple[str, ...],
        Meta(
            description="Command to start in place of the backend's own, with what it needs in"
            " braces: {handshake_address}, {handshake_port}, {model}, {worker_url}, {worker_port},"
            " {store_port}, {python}."
        ),
    ] = ()


ModelName: TypeAlias = Annotated[
    str,
    Meta(
        examples=["meta-llama/Llama-3.1-8B-Instruct"],
        description="Name of a model for clients; further names on the command line become its"
        " aliases, and without any the model's path is its name.",
    ),
]


class Config(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """All settings of a daemon, after file and flags were read."""

    server: ServerConfig = ServerConfig()
    tls: TlsConfig = TlsConfig()
    auth: AuthConfig = AuthConfig()
    metrics: MetricsConfig = MetricsConfig()
    admin: AdminConfig = AdminConfig()
    log: LogConfig = LogConfig()
    limits: LimitsConfig = LimitsConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    routing: RoutingConfig = RoutingConfig()
    health: HealthConfig = HealthConfig()
    launch: LaunchConfig = LaunchConfig()
    models: dict[ModelName, ModelConfig] = {}
    workers: tuple[WorkerConfig, ...] = ()
    engines: tuple[EngineConfig, ...] = ()

    @property
    def metrics_host(self) -> str:
        """Return the address of the metrics listener."""
        return self.metrics.host or self.server.host

    @property
    def own_addresses(self) -> list[str]:
        """Return what smgd itself listens on, as `HOST:PORT`; IPv6 in brackets."""
        own = (self.server.host, self.server.port), (self.metrics_host, self.metrics.port)
        return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in own]

    def model_path(self, name: str) -> str:
        """Return where the files of a configured model are: a directory or a Hugging Face id."""
        return self.models[name].path or name

    def tokenizer_path(self, name: str) -> str:
        """Return where the tokenizer of a configured model is."""
        return self.models[name].tokenizer_path or self.model_path(name)

    def model_of(self, worker: WorkerConfig) -> str:
        """Return the name of the model that `worker` serves; ConfigError if it is not known."""
        known = ", ".join(self.models)
        if worker.model:
            named = self._models_named(worker.model)
            if len(named) == 1:
                return named[0]
            if named:
                raise ConfigError(
                    f"worker {worker.url} serves the model at {worker.model!r}, but several are"
                    f" there: name one of {', '.join(named)}"
                )
            raise ConfigError(
                f"worker {worker.url} serves model {worker.model!r}, for which there is no"
                f' [models."{worker.model}"]; there is: {known or "none"}'
            )
        if len(self.models) == 1:
            return known
        hint = "give --model-path (smgd serve: --model) or [models.ID]"
        if known:
            hint = f"set its model to one of {known}"
        raise ConfigError(f"ZMQ worker {worker.url} has no model identity: {hint}")

    def _models_named(self, name: str) -> list[str]:
        """Return the models that have a name: an id, else an alias, else a path."""
        if name in self.models:
            return [name]
        by_alias = [key for key, model in self.models.items() if name in model.aliases]
        return by_alias or [key for key in self.models if self.model_path(key) == name]
