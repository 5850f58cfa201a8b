"""Where a model's small files are: a directory, the built-in model, or Hugging Face's hub.

The hub's cache is asked first and the network only for what is not in it, so a daemon starts as it
did the last time, whatever the network does. Weights are never fetched: engines have their own.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from smgd.errors import ModelError

BUILTIN_MODEL = "smgd-sim"
BUILTIN_DIRECTORY = Path(__file__).parent / "builtin"

_PATTERNS = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template*",
    "additional_chat_templates/*.jinja",
]
# A cached snapshot with these has been fetched by something that serves models, not just peeked at.
_TELLING = ("config.json", "tokenizer.json", "tokenizer_config.json")


def is_path(name_or_path: str) -> bool:
    """Tell whether a model is given by its directory (there or not), rather than by a name."""
    if name_or_path == BUILTIN_MODEL:
        return False
    if name_or_path.startswith(("/", ".", "~")):
        return True
    try:
        return Path(name_or_path).exists()
    except (OSError, ValueError):  # longer than a path can be, or with characters of no path
        return False


def resolve(name_or_path: str) -> Path:
    """Return the directory that has a model's files. Blocks, for as long as the network does.

    The built-in model's name comes first, then directories, then ids of the hub. `HF_HUB_CACHE`,
    `HF_HUB_OFFLINE`, `HF_ENDPOINT` and `HF_TOKEN` are honoured as huggingface_hub does, when it is
    imported. Raises `ModelError`.
    """
    if name_or_path == BUILTIN_MODEL:
        return BUILTIN_DIRECTORY
    if not is_path(name_or_path):
        return _from_hub(name_or_path)
    return _directory(name_or_path)


def _directory(name: str) -> Path:
    try:
        path = Path(name).expanduser()
        found, is_directory = path.exists(), path.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        # A parent that this user may not enter; no such user; longer than a path can be.
        raise ModelError(f"cannot look for {name}: {error}") from error
    if not found:
        raise ModelError(f"there is no directory {name}")
    if not is_directory:
        raise ModelError(f"{name} is a file: give the model's directory, {path.parent}")
    if not os.access(path, os.R_OK | os.X_OK):
        raise ModelError(f"this user may not read the directory {name}")
    return path


def _from_hub(repo_id: str) -> Path:
    try:
        return _cached(repo_id) or Path(
            huggingface_hub.snapshot_download(repo_id, allow_patterns=_PATTERNS)
        )
    except Exception as error:  # which HTTP library raises what differs between the hub's versions
        raise ModelError(f"model '{repo_id}': {_advice(error)}") from error


def _cached(repo_id: str) -> Path | None:
    try:
        found = huggingface_hub.snapshot_download(
            repo_id, allow_patterns=_PATTERNS, local_files_only=True
        )
    except LocalEntryNotFoundError:
        return None
    snapshot = Path(found)
    return snapshot if all((snapshot / name).exists() for name in _TELLING) else None


def _advice(error: Exception) -> str:
    """Return what went wrong, and what the operator can do."""
    if isinstance(error, HFValidationError):
        return f"there is no such directory, and it cannot be an id of the hub: {error}"
    if isinstance(error, GatedRepoError):
        return "access is restricted: accept its terms on the hub and set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return "not on the hub, or private: check the spelling, or set HF_TOKEN"
    if constants.HF_HUB_OFFLINE:
        return (
            f"not in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids the network: "
            "fetch it first, or give a local directory"
        )
    return (
        f"not in the cache {constants.HF_HUB_CACHE}, and {constants.ENDPOINT} does not help "
        f"({_root(error)}): check the network, or give a local directory"
    )


def _root(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty if there is no such file. Raises `ModelError`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"cannot read {path}: it does not hold a JSON object")
    return value
