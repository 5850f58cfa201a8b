"""The configuration: what can be set, read from a TOML file and from flags into one `Config`.

`schema` describes every key once; `keys` gives those descriptions as data, and the flag that writes
each key; `load` reads; `reference` writes docs/configuration.md and smgd.toml.example
(`python -m smgd.config docs|example`).
"""

from smgd.config.load import load
from smgd.config.schema import (
    AdminConfig,
    AuthConfig,
    Config,
    EngineConfig,
    HealthConfig,
    LaunchConfig,
    LimitsConfig,
    LogConfig,
    MetricsConfig,
    ModelConfig,
    RoutingConfig,
    ServerConfig,
    TimeoutsConfig,
    TlsConfig,
    WorkerConfig,
)

__all__ = [
    "AdminConfig",
    "AuthConfig",
    "Config",
    "EngineConfig",
    "HealthConfig",
    "LaunchConfig",
    "LimitsConfig",
    "LogConfig",
    "MetricsConfig",
    "ModelConfig",
    "RoutingConfig",
    "ServerConfig",
    "TimeoutsConfig",
    "TlsConfig",
    "WorkerConfig",
    "load",
]
