"""What is read from a model's files: ids that end a text, defaults, templates, and the whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from smgd.core import EngineInfo, GenerationRequest, Sampling
from smgd.engine import guard
from smgd.errors import ApiError, ModelError, TemplateError
from smgd.text.hub import BUILTIN_DIRECTORY
from smgd.text.model import Model, ModelFiles, SamplingDefaults, find_template, load_model
from smgd.text.tokenizer import Tokenizer
from tests.text.make_model import CONFIG, write_model

EOS = 258  # "</s>" of the test tokenizer
HELLO = [{"role": "user", "content": "Hello!"}]


def read(directory: Path, **files: Any) -> ModelFiles:
    write_model(directory, **files)
    return ModelFiles.read(directory, Tokenizer.from_directory(directory))


# ------------------------------------------------------------------------------------ eos ids


@pytest.mark.parametrize(
    ("config", "generation", "want"),
    [
        ({}, None, (EOS,)),
        ({"eos_token_id": EOS}, None, (EOS,)),
        ({"eos_token_id": [1, 7]}, None, (1, 7, EOS)),
        ({}, {"eos_token_id": 9}, (9, EOS)),
        ({}, {"eos_token_id": [EOS, 9, 3]}, (3, 9, EOS)),
        ({"eos_token_id": 1}, {"eos_token_id": [2, 1]}, (1, 2, EOS)),
        ({"eos_token_id": 1}, {"eos_token_id": 2}, (2, EOS)),
        ({"eos_token_id": 1}, {"temperature": 0.5}, (EOS,)),
        ({"eos_token_id": 1, "text_config": {"eos_token_id": [4]}}, None, (1, 4, EOS)),
        ({"eos_token_id": None}, {"eos_token_id": None}, (EOS,)),
    ],
)
def test_the_ids_that_end_a_text_are_those_of_vllm(
    tmp_path: Path, config: dict[str, Any], generation: Any, want: tuple[int, ...]
) -> None:
    files = read(tmp_path, config={"vocab_size": 300, **config}, generation_config=generation)
    assert files.eos_token_id == EOS
    assert files.eos_token_ids == want


def test_without_an_eos_token_the_others_still_stop(tmp_path: Path) -> None:
    files = read(tmp_path, tokenizer_config={}, generation_config={"eos_token_id": [5, 6]})
    assert files.eos_token_id is None
    assert files.eos_token_ids == (5, 6)


def test_ids_that_the_engine_does_not_have_are_left_out(tmp_path: Path) -> None:
    files = read(tmp_path, config={"vocab_size": EOS, "eos_token_id": [-1, 1, EOS - 1, EOS, 999]})
    assert files.eos_token_id is None
    assert files.eos_token_ids == (1, EOS - 1)


# ------------------------------------------------------------------------- sizes and defaults


@pytest.mark.parametrize(
    ("config", "vocab_size", "context_length"),
    [
        ({"vocab_size": 300, "max_position_embeddings": 4096}, 300, 4096),
        ({"text_config": {"vocab_size": 500, "max_position_embeddings": 64}}, 500, 64),
        ({"vocab_size": 300, "text_config": {"vocab_size": 500}}, 500, None),
        ({"vocab_size": 300, "max_position_embeddings": 8, "text_config": {}}, 300, 8),
        ({"rope": float("inf"), "text_config": None}, 262, None),
        (None, 262, None),
    ],
)
def test_sizes(tmp_path: Path, config: Any, vocab_size: int, context_length: int | None) -> None:
    files = read(tmp_path, config=config)
    assert files.vocab_size == vocab_size
    assert files.context_length == context_length
    assert files.directory == tmp_path


def test_sampling_defaults_are_the_keys_that_are_there(tmp_path: Path) -> None:
    generation = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": None,
        "max_new_tokens": 77,
        "repetition_penalty": 1,
        "do_sample": True,
        "transformers_version": "5",
    }
    defaults = read(tmp_path, generation_config=generation).sampling_defaults
    assert defaults == SamplingDefaults(
        temperature=0.6, top_k=20, max_tokens=77, repetition_penalty=1.0
    )
    assert defaults.min_p is None
    assert defaults.top_p is None


def test_all_sampling_defaults(tmp_path: Path) -> None:
    names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty",
             "frequency_penalty")  # fmt: skip
    values = {name: index / 8 for index, name in enumerate(names)}
    defaults = read(tmp_path, generation_config=values).sampling_defaults
    assert {name: getattr(defaults, name) for name in names} == values


def test_no_generation_config_is_no_defaults(tmp_path: Path) -> None:
    assert read(tmp_path).sampling_defaults == SamplingDefaults()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -5), ("temperature", 2.5), ("temperature", float("nan")),
        ("temperature", "hot"), ("temperature", True), ("top_p", 7), ("top_p", 0), ("top_p", -0.1),
        ("top_k", -2), ("top_k", 1.5), ("top_k", 2**63), ("min_p", -0.1), ("min_p", 1.1),
        ("repetition_penalty", 0), ("repetition_penalty", float("inf")), ("presence_penalty", -3),
        ("presence_penalty", 3), ("frequency_penalty", 2.1), ("frequency_penalty", [1]),
        ("max_new_tokens", 0), ("max_new_tokens", -1), ("max_new_tokens", "all"),
    ],
)  # fmt: skip
def test_a_default_that_no_engine_takes_is_found_on_loading(
    tmp_path: Path, name: str, value: Any
) -> None:
    path = tmp_path / "generation_config.json"
    with pytest.raises(ModelError, match=rf"^cannot use {path}: .* - at `\$\.{name}`$"):
        read(tmp_path, generation_config={name: value})


EDGES = [-2.1, -2, -1, -1e-9, 0, 1e-9, 0.5, 1, 1.1, 2, 2.1, 1e300, 2**63 - 1, 2**63]


@pytest.mark.parametrize("name", sorted(SamplingDefaults.__struct_fields__))
def test_defaults_have_the_ranges_that_the_guard_has(name: str) -> None:
    (field,) = [f for f in msgspec.structs.fields(SamplingDefaults) if f.name == name]
    info = EngineInfo(max_model_len=2**70)
    for value in [int(edge) for edge in EDGES] if name in ("top_k", "max_tokens") else EDGES:
        sampling = msgspec.structs.replace(Sampling(max_tokens=5), **{name: value})
        try:
            msgspec.convert({field.encode_name: value}, SamplingDefaults)
        except msgspec.ValidationError:
            with pytest.raises(ApiError, match=f"{name} must be"):
                guard_sampling(sampling, info)
        else:
            guard_sampling(sampling, info)


def guard_sampling(sampling: Sampling, info: EngineInfo) -> None:
    guard.check(GenerationRequest(id="r", model="m", prompt_ids=[1], sampling=sampling), info, None)


@pytest.mark.parametrize(
    ("files", "where"),
    [
        ({"config": {"vocab_size": -1}}, r"config\.json: .*`\$\.vocab_size`"),
        ({"config": {"text_config": {"max_position_embeddings": -1}}}, r"max_position_embeddings`"),
        ({"config": {"vocab_size": "many"}}, r"config\.json: .*`\$\.vocab_size`"),
        ({"config": {"eos_token_id": ["</s>"]}}, r"config\.json: .*`\$\.eos_token_id\["),
        ({"generation_config": {"top_k": [1]}}, r"generation_config\.json: .*`\$\.top_k`"),
        ({"generation_config": {"eos_token_id": "</s>"}}, r"config\.json: .*`\$\.eos_token_id`"),
    ],
)
def test_a_configuration_of_other_types(tmp_path: Path, files: Any, where: str) -> None:
    with pytest.raises(ModelError, match="cannot use .*" + where):
        read(tmp_path, **files)


# ---------------------------------------------------------------------------------- templates


def template_text(directory: Path, chosen: str | None = None, tools: Any = None) -> str:
    tokenizer = Tokenizer.from_directory(directory)
    return find_template(directory, chosen, tokenizer).render(HELLO, tools=tools)


def write_templates(directory: Path, **templates: str) -> Path:
    extra = directory / "additional_chat_templates"
    extra.mkdir()
    for name, source in templates.items():
        (extra / f"{name}.jinja").write_text(source, encoding="utf-8")
    return directory


def test_a_template_in_the_configuration(tmp_path: Path) -> None:
    write_model(tmp_path, tokenizer_config=CONFIG | {"chat_template": "config {{ eos_token }}"})
    assert template_text(tmp_path) == "config </s>"


def test_template_files_win_over_the_configuration(tmp_path: Path) -> None:
    write_model(tmp_path, tokenizer_config=CONFIG | {"chat_template": "config"})
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert template_text(tmp_path) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja é", encoding="utf-8")
    assert template_text(tmp_path) == "jinja é"


def test_named_templates(tmp_path: Path) -> None:
    rows = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"},
            {"name": "rag", "template": "documents"}]  # fmt: skip
    write_model(tmp_path, tokenizer_config=CONFIG | {"chat_template": rows})
    assert template_text(tmp_path) == "plain"
    assert template_text(tmp_path, tools=[]) == "tools"
    assert template_text(tmp_path, "rag", tools=[]) == "documents"
    assert template_text(tmp_path, "default", tools=[]) == "plain"


def test_named_templates_in_files(tmp_path: Path) -> None:
    write_model(tmp_path, tokenizer_config=CONFIG | {"chat_template": "config"})
    write_templates(tmp_path, tool_use="tools", rag="documents")
    assert template_text(tmp_path) == "config"
    assert template_text(tmp_path, tools=[]) == "tools"
    assert template_text(tmp_path, "rag") == "documents"


def test_several_templates_and_no_default(tmp_path: Path) -> None:
    write_templates(write_model(tmp_path), tool_use="tools", rag="documents")
    with pytest.raises(ModelError, match=r"no default one: rag, tool_use\. Choose one with"):
        template_text(tmp_path)
    assert template_text(tmp_path, "rag") == "documents"


def test_a_chosen_template(tmp_path: Path) -> None:
    write_model(tmp_path, tokenizer_config=CONFIG | {"chat_template": "config"})
    path = tmp_path / "mine.txt"
    path.write_text("mine {{ messages | length }}\n")
    assert template_text(tmp_path, str(path)) == "mine 1"
    path = tmp_path / "mine.json"
    path.write_text('"a string"')
    assert template_text(tmp_path, str(path)) == "a string"
    assert template_text(tmp_path, "inline {{ messages[0].role }}") == "inline user"
    assert template_text(tmp_path, "two\nlines") == "two\nlines"
    assert template_text(tmp_path, "{# long #}" + 5000 * "x") == 5000 * "x"


def test_a_chosen_template_that_is_not_there(tmp_path: Path) -> None:
    write_model(tmp_path, tokenizer_config=CONFIG | {"chat_template": "config"})
    with pytest.raises(ModelError, match=r"no such file, and .* \(the model's: default\)"):
        template_text(tmp_path, "typo.jinja")


def test_a_model_without_a_template_refuses_to_chat(tmp_path: Path) -> None:
    write_model(tmp_path, tokenizer_config=CONFIG | {"chat_template": None})
    with pytest.raises(TemplateError, match="no chat template: start smgd with --chat-template"):
        template_text(tmp_path)


@pytest.mark.parametrize("chosen", [None, "{% if %}"])
def test_a_template_that_does_not_compile(tmp_path: Path, chosen: str | None) -> None:
    write_model(tmp_path, tokenizer_config=CONFIG | {"chat_template": "{% for %}"})
    what = f"chat template of {tmp_path}" if chosen is None else f"chat template '{chosen}'"
    with pytest.raises(ModelError, match=f"^{what} cannot be compiled: ") as error:
        template_text(tmp_path, chosen)
    assert isinstance(error.value.__cause__, TemplateError)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", b"\xff"),
        ("chat_template.json", b"{"),
        ("chat_template.json", b'{"x": 1}'),
        ("chat_template.json", b"[]"),
    ],
)
def test_a_broken_template_file(tmp_path: Path, name: str, content: bytes) -> None:
    write_model(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=f"cannot read {tmp_path / name}: "):
        template_text(tmp_path)


@pytest.mark.parametrize("value", [["x"], [{"name": "default"}], {"default": "x"}, 7])
def test_a_broken_template_in_the_configuration(tmp_path: Path, value: Any) -> None:
    write_model(tmp_path, tokenizer_config=CONFIG | {"chat_template": value})
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: chat_template: "):
        template_text(tmp_path)


# --------------------------------------------------------------------------------- load_model


def test_a_model_in_a_directory(tmp_path: Path) -> None:
    directory = write_model(
        tmp_path / "my-model", tokenizer_config=CONFIG | {"chat_template": "{{ bos_token }}hi"}
    )
    model = load_model(str(directory))
    assert model.id == str(directory)  # as vLLM's own server and smg name it
    assert model.files.vocab_size == 300
    assert model.files.eos_token_id == EOS
    assert model.template.render(HELLO) == "<s>hi"
    assert model.tokenizer.encode("ab") == [256]


def test_a_served_name(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    assert load_model(str(directory), served_model_name="org/name").id == "org/name"


def test_the_tokenizer_from_elsewhere(tmp_path: Path) -> None:
    model_path = tmp_path / "model"
    model_path.mkdir()
    (model_path / "config.json").write_text('{"vocab_size": 999}')
    tokenizer_path = write_model(
        tmp_path / "tokenizer", tokenizer_config=CONFIG | {"chat_template": "elsewhere"}
    )
    model = load_model(str(model_path), tokenizer_path=str(tokenizer_path))
    assert model.id == str(model_path)
    assert model.files.vocab_size == 999
    assert model.template.render(HELLO) == "elsewhere"
    assert load_model(
        str(model_path), tokenizer_path=str(tokenizer_path), chat_template="{{ 1 }}"
    ).template.render(HELLO) == "1"  # fmt: skip


def test_a_model_that_only_the_engine_has(tmp_path: Path) -> None:
    tokenizer_path = write_model(tmp_path / "tokenizer")
    model = load_model("/only/there/big-model", tokenizer_path=str(tokenizer_path))
    assert model.id == "/only/there/big-model"
    assert model.files.directory == tokenizer_path
    with pytest.raises(ModelError, match="there is no directory /only/there/big-model"):
        load_model("/only/there/big-model")


def test_the_built_in_model() -> None:
    model = load_model("smgd-sim")
    assert isinstance(model, Model)
    assert model.id == "smgd-sim"
    assert model.files.directory == BUILTIN_DIRECTORY
    assert model.files.eos_token_id in model.files.eos_token_ids
    assert model.tokenizer.decode(model.tokenizer.encode("The old map.")) == "The old map."
