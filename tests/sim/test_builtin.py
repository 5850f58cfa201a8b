"""The built-in model's files: reproducible, consistent, and understood by transformers as well."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smgd.errors import TemplateError
from smgd.sim.prose import SENTENCES
from smgd.text.hub import BUILTIN_DIRECTORY
from smgd.text.template import ChatTemplate
from smgd.text.tokenizer import Tokenizer

TOOLS = Path(__file__).parent.parent.parent / "tools"

USER = {"role": "user", "content": "What is 2 + 2?"}
CALL = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": '{"a": 2}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Add "}, {"type": "text", "text": "2."}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "4"},
    {"role": "assistant", "content": "It is 4."},
]
RENDERED = """\
<|im_start|>system
Be brief.

These functions may be called:
{"name": "add", "parameters": {"type": "object"}}
A call is written as
<tool_call>
{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}
</tool_call><|im_end|>
<|im_start|>user
Add 2.<|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "add", "arguments": {"a": 2}}
</tool_call>
<tool_call>
{"name": "add", "arguments": {"a": 2}}
</tool_call><|im_end|>
<|im_start|>tool
4<|im_end|>
<|im_start|>assistant
It is 4.<|im_end|>
<|im_start|>assistant
"""


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("train_builtin", TOOLS / "train_builtin.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("builtin_corpus", None)


@pytest.fixture
def template() -> ChatTemplate:
    return ChatTemplate((BUILTIN_DIRECTORY / "chat_template.jinja").read_text(), {})


def config(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((BUILTIN_DIRECTORY / name).read_text())
    return value


def test_training_again_gives_the_same_files(training: ModuleType) -> None:
    for name, text in training.files(training.train()).items():
        assert (BUILTIN_DIRECTORY / name).read_text(encoding="utf-8") == text, name


def test_the_files_agree(tokenizer: Tokenizer) -> None:
    model = config("config.json")

    assert tokenizer.vocab_size == model["vocab_size"] == 4096
    assert tokenizer.eos_token_id == model["eos_token_id"] == 2
    assert config("generation_config.json")["eos_token_id"] == 2
    assert model["max_position_embeddings"] == 8192
    assert tokenizer.decode([2], skip_special_tokens=False) == "<|im_end|>"


def test_nothing_is_put_in_front(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("Hello", add_special_tokens=True) == tokenizer.encode("Hello")


@given(text=st.text())
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)

    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_are_hidden_and_markers_are_not(tokenizer: Tokenizer) -> None:
    for text in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"):
        (token,) = tokenizer.encode(text)
        assert tokenizer.decode([token]) == ""
    for text in ("<think>", "</think>", "<tool_call>", "</tool_call>"):
        (token,) = tokenizer.encode(text)
        assert tokenizer.decode([token]) == text


def test_english_takes_few_tokens(tokenizer: Tokenizer) -> None:
    tokens = sum(len(tokenizer.encode(sentence)) for sentence in SENTENCES)

    assert sum(map(len, SENTENCES)) / tokens > 3.5


def test_digits_are_single(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("2024")) == 4


def test_the_template_knows_all_roles(template: ChatTemplate) -> None:
    assert template.render(CONVERSATION, tools=[TOOL]) == RENDERED


def test_the_template_without_a_system_message(template: ChatTemplate) -> None:
    plain = "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n"

    assert template.render([USER], add_generation_prompt=False) == plain
    assert template.render([USER]) == plain + "<|im_start|>assistant\n"
    thinking = template.render([USER], kwargs={"enable_thinking": True})
    assert thinking == plain + "<|im_start|>assistant\n<think>\n"


def test_the_template_takes_instructions_in_mid_conversation(template: ChatTemplate) -> None:
    note = {"role": "developer", "content": "Now in French."}

    text = template.render([note, USER, note])

    assert text.count("<|im_start|>system\nNow in French.<|im_end|>\n") == 2


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "narrator", "content": "x"}, "knows no role 'narrator'"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "not parts of type 'image_url'"),
    ],
)
def test_the_template_says_what_it_cannot_do(
    template: ChatTemplate, message: dict[str, Any], reason: str
) -> None:
    with pytest.raises(TemplateError, match=reason):
        template.render([message])


def test_transformers_reads_it_alike(tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    fast = transformers.AutoTokenizer.from_pretrained(BUILTIN_DIRECTORY)
    text = "<|im_start|>user\nDéjà vu: 12 <think>🙂</think><|im_end|>"

    assert fast(text).input_ids == tokenizer.encode(text)
    assert fast.eos_token_id == tokenizer.eos_token_id
    prompt = fast.apply_chat_template(
        CONVERSATION, tools=[TOOL], tokenize=False, add_generation_prompt=True
    )
    assert prompt == RENDERED
