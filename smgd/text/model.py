"""A model as smgd needs it: its tokenizer, its chat template, and what its configuration says.

Which ids end a text, and which sampling defaults apply, is read as vLLM's own server reads it: the
engines behind smgd hear of neither from anyone else.

- `eos_token_id` is the tokenizer's EOS. The ids of `eos_token_id` in generation_config.json, or
  without that file in config.json (text_config too), are joined to it, as further stop tokens.
- Sampling defaults are the keys that generation_config.json has; `max_new_tokens` is `max_tokens`.

A chat template is looked for where transformers and vLLM look: `--chat-template`, the files beside
the tokenizer, tokenizer_config.json.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from smgd.errors import ModelError, TemplateError
from smgd.text.hub import read_json, resolve
from smgd.text.template import ChatTemplate
from smgd.text.tokenizer import Tokenizer

T = TypeVar("T")

_NO_TEMPLATE = (
    "{{ raise_exception('this model has no chat template: start smgd with --chat-template,"
    " or use /v1/completions') }}"
)


_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
_Positive: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]
_Share: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1)]
_PositiveShare: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=1)]
_Penalty: TypeAlias = Annotated[float, msgspec.Meta(ge=-2, le=2)]


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """The model's own sampling parameters; None is what it says nothing about.

    Their ranges are those of requests (`engine/guard.py`): what an engine would not take must be
    found when the model is loaded, since no client can be blamed for it.
    """

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: _PositiveShare | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)] | None = None
    min_p: _Share | None = None
    repetition_penalty: _Positive | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)] | None = msgspec.field(
        default=None, name="max_new_tokens"
    )


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


class _TextConfig(msgspec.Struct):
    vocab_size: _Size | None = None
    max_position_embeddings: _Size | None = None
    eos_token_id: int | list[int] | None = None


class _Config(_TextConfig):
    text_config: _TextConfig | None = None


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What the configuration of a model says.

    `vocab_size`: prompt ids and stop ids must be below it. `context_length` (tokens) is what the
    model was made for, or None; engines may be set to less. `eos_token_id` is the one id that ends
    a text without being a stop reason; `eos_token_ids` are all ids that end one, that one included.
    """

    directory: Path
    vocab_size: int
    context_length: int | None
    eos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    sampling_defaults: SamplingDefaults

    @classmethod
    def read(cls, directory: Path, tokenizer: Tokenizer) -> ModelFiles:
        """Read config.json and generation_config.json, if there. Raises `ModelError`."""
        config = _read(directory / "config.json", _Config)
        generation_path = directory / "generation_config.json"
        generation = _read(generation_path, _GenerationConfig)
        text = config.text_config or config
        vocab_size = text.vocab_size or config.vocab_size or tokenizer.vocab_size
        # As vLLM: config.json speaks only where generation_config.json does not exist.
        sources = (generation,) if generation_path.exists() else (config, text)
        ids = {i for source in sources for i in _ids(source.eos_token_id)}
        if tokenizer.eos_token_id is not None:
            ids.add(tokenizer.eos_token_id)
        # An engine dies of an id beyond its vocabulary, and could not generate it anyway.
        within = sorted(i for i in ids if 0 <= i < vocab_size)
        return cls(
            directory=directory,
            vocab_size=vocab_size,
            context_length=text.max_position_embeddings or config.max_position_embeddings,
            eos_token_id=tokenizer.eos_token_id if tokenizer.eos_token_id in within else None,
            eos_token_ids=tuple(within),
            sampling_defaults=_read(generation_path, SamplingDefaults),
        )


def _read(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.convert(read_json(path), kind)
    except msgspec.ValidationError as error:
        raise ModelError(f"cannot use {path}: {error}") from error


def _ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


# ---------------------------------------------------------------------------- chat templates


def find_template(directory: Path, chosen: str | None, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the chat template of the model in a directory.

    `chosen` (`--chat-template`) is a file, the name of one of the model's templates, or a template
    itself. Without any, the template returned refuses every conversation. Raises `ModelError`.
    """
    named = _named_templates(directory)
    if chosen is not None:
        source = named[chosen] if chosen in named else _chosen_source(chosen, named)
        return _template(source, tokenizer, f"chat template {chosen!r}")
    if named and "default" not in named:
        names = ", ".join(sorted(named))
        text = f"{directory} has several chat templates and no default one: {names}"
        raise ModelError(f"{text}. Choose one with --chat-template")
    tool_use = None
    if "tool_use" in named:
        tool_use = _template(named["tool_use"], tokenizer, f"template tool_use of {directory}")
    source = named.get("default", _NO_TEMPLATE)
    return _template(source, tokenizer, f"chat template of {directory}", tool_use)


def _template(
    source: str, tokenizer: Tokenizer, what: str, tool_use: ChatTemplate | None = None
) -> ChatTemplate:
    try:
        return ChatTemplate(source, tokenizer.special_tokens, tool_use=tool_use)
    except TemplateError as error:
        raise ModelError(f"{what} {error}") from error


def _chosen_source(chosen: str, named: dict[str, str]) -> str:
    # Only a template has these, and it may be longer than a file name can be.
    if any(mark in chosen for mark in "{}\n"):
        return chosen
    try:
        path = Path(chosen).expanduser()
        found = path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # too long, or of a user that is not there
        raise ModelError(f"cannot look for the chat template {chosen}: {error}") from error
    if not found:
        names = ", ".join(sorted(named)) or "none"
        text = f"--chat-template {chosen}: there is no such file, and no template of that name"
        raise ModelError(f"{text} (the model's: {names})")
    return _read_template(path)


def _read_template(path: Path) -> str:
    """Return a template file's source; one that ends in .json holds it as a string or by key."""
    try:
        text = path.read_text(encoding="utf-8")
        value = msgspec.json.decode(text) if path.suffix == ".json" else text
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    source = value.get("chat_template") if isinstance(value, dict) else value
    if not isinstance(source, str):
        raise ModelError(f"cannot read {path}: it has no string 'chat_template'")
    return source


def _named_templates(directory: Path) -> dict[str, str]:
    """Return a model's templates by name; files win over tokenizer_config.json, as everywhere."""
    named = _configured(directory / "tokenizer_config.json")
    for name in ("chat_template.jinja", "chat_template.json"):
        if (directory / name).is_file():
            named = {"default": _read_template(directory / name)}
            break
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        named[path.stem] = _read_template(path)
    return named


def _configured(path: Path) -> dict[str, str]:
    value: Any = read_json(path).get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    try:
        rows = msgspec.convert(value or [], list[dict[str, str]])
        return {row["name"]: row["template"] for row in rows}
    except (msgspec.ValidationError, KeyError) as error:
        raise ModelError(f"cannot use {path}: chat_template: {error}") from error


# ----------------------------------------------------------------------------------- the model


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded model, shared by all requests."""

    id: str
    tokenizer: Tokenizer
    template: ChatTemplate
    files: ModelFiles


def load_model(
    model_path: str,
    *,
    tokenizer_path: str | None = None,
    chat_template: str | None = None,
    served_model_name: str | None = None,
) -> Model:
    """Load a model from a directory, by the built-in name, or by an id of Hugging Face's hub.

    Blocks, for seconds or as long as a download takes: call it in a thread. Tokenizer and template
    come from `tokenizer_path` if it is given. The configuration still comes from `model_path`,
    unless only the engines have that: then it is a mere name. Raises `ModelError`.
    """
    directory = tokenizer_directory = resolve(tokenizer_path or model_path)
    if tokenizer_path:
        directory = _resolve_or(model_path, tokenizer_directory)
    tokenizer = Tokenizer.from_directory(tokenizer_directory)
    return Model(
        id=served_model_name or model_path,
        tokenizer=tokenizer,
        template=find_template(tokenizer_directory, chat_template, tokenizer),
        files=ModelFiles.read(directory, tokenizer),
    )


def _resolve_or(model_path: str, default: Path) -> Path:
    try:
        return resolve(model_path)
    except ModelError:
        return default
