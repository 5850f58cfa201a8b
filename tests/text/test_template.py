"""Chat templates, compared with transformers' own rendering."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smgd.errors import TemplateError
from smgd.text.template import ChatTemplate
from smgd.text.tokenizer import Tokenizer
from tests.text.make_model import CONFIG, make_backend
from tests.text.reference import PreTrainedTokenizerFast

Messages = list[dict[str, Any]]

TEMPLATES = Path(__file__).parent.parent / "data" / "templates"
SOURCES = {path.stem: path.read_text() for path in sorted(TEMPLATES.glob("*.jinja"))}
SPECIAL = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "image_token": "<|im_start|>",
}
REFERENCE: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
    tokenizer_object=make_backend(), **SPECIAL
)
OURS = {name: ChatTemplate(source, SPECIAL) for name, source in SOURCES.items()}

HELLO: Messages = [{"role": "user", "content": "Hello!"}]
TALK: Messages = [
    {"role": "system", "content": "  Be brief. "},
    {"role": "user", "content": "What is 2 < 3 & 'x'? 日本語\n"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nTrue.  ", "name": "bot"},
    {"role": "user", "content": "{{ 7 * 7 }} {% raw %}"},
]
SKIPS: Messages = [{"role": "skip", "content": ""}, *TALK[1:], {"role": "assistant", "content": ""}]
THINKS: Messages = [*HELLO, {"role": "assistant", "content": "Hi", "reasoning_content": "polite"}]
ALTERNATING: Messages = [*HELLO, {"role": "assistant", "content": "Hi"}, *HELLO]
LOOK = [{"type": "text", "text": "Look: "}, {"type": "image"}, {"type": "text", "text": "🦊?"}]
PARTS: Messages = [
    {"role": "user", "content": LOOK},
    {"role": "assistant", "content": [{"type": "text", "text": "A fox."}]},
]
CALLS: Messages = [
    {"role": "user", "content": "Weather in Zürich?"},
    {
        "role": "assistant",
        "content": "One moment",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {
                    "name": "weather",
                    "arguments": {"city": "Zürich", "days": [1, 2.0], "b": None, "a": {"x": True}},
                },
            }
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Wetter für <Städte> & "Dörfer" 🌦',
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "age": {"type": "integer"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]
FOR = "{% for m in messages %}"
END = "{% endfor %}"
DOCUMENTS = [{"title": "Alps", "text": "High.\n"}, {"title": "Rhine", "text": ""}]


def reference(name: str, messages: Messages, **arguments: Any) -> str:
    rendered: str = REFERENCE.apply_chat_template(
        messages, chat_template=SOURCES[name], tokenize=False, **arguments
    )
    return rendered


def ours(name: str, messages: Messages, **arguments: Any) -> str:
    names = ("tools", "documents", "add_generation_prompt", "continue_final_message")
    known = {name: arguments.pop(name) for name in names if name in arguments}
    return OURS[name].render(messages, kwargs=arguments, **known)


# ------------------------------------------------------------------------ equal to transformers


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize(
    ("name", "messages", "arguments"),
    [
        *[
            (name, messages, {})
            for name in ("plain", "trimming", "features", "parts", "thinking")
            for messages in (HELLO, TALK, SKIPS, THINKS)
        ],
        ("features", TALK, {"enable_thinking": False}),
        ("features", HELLO, {"missing": [1, "é"], "pad_token": "<pad>", "tools": []}),
        ("thinking", THINKS, {"enable_thinking": False}),
        ("plain", HELLO, {"bos_token": "<other>"}),
        ("tools", CALLS, {"tools": TOOLS}),
        ("tools", CALLS, {}),
        ("tools", HELLO, {"documents": DOCUMENTS, "tools": []}),
        ("tools", TALK, {"documents": DOCUMENTS, "tools": TOOLS}),
        ("parts", PARTS, {}),
        ("parts_only", PARTS, {}),
        ("strict", ALTERNATING, {}),
        ("strict", [*HELLO, {"role": "assistant", "content": None}], {}),
    ],
)
def test_same_bytes_as_transformers(
    name: str, messages: Messages, arguments: dict[str, Any], add_generation_prompt: bool
) -> None:
    arguments["add_generation_prompt"] = add_generation_prompt
    assert ours(name, messages, **arguments) == reference(name, messages, **arguments)


@pytest.mark.parametrize(
    "source",
    [
        FOR + "{%- generation -%} {% set x = 2 %}{{ x }} \n{%- endgeneration -%}{{ x }}" + END,
        FOR + "\n  {% generation %}\n  {{ m.role }}\n  {% endgeneration %}\n" + END,
        FOR + "{% generation %}{{ loop.last }}{{ caller is defined }}{% endgeneration %}" + END,
        "{% macro say(c) %}{% generation %}{{ c }}{% endgeneration %}{% endmacro %}{{ say('é') }}",
    ],
)
def test_generation_blocks_are_scopes_as_in_transformers(source: str) -> None:
    want = REFERENCE.apply_chat_template(ALTERNATING, chat_template=source, tokenize=False)
    assert ChatTemplate(source, {}).render(ALTERNATING) == want


@pytest.mark.parametrize("name", ["plain", "trimming", "parts", "thinking"])
@pytest.mark.parametrize("text", ["Once upon", " spaced \n", "\n", "日本"])
def test_continuing_is_as_in_transformers(name: str, text: str) -> None:
    messages = [*HELLO, {"role": "assistant", "content": text}]
    want = reference(name, messages, continue_final_message=True)
    assert ours(name, messages, continue_final_message=True) == want
    assert want.rstrip().endswith(text.strip())


def test_continuing_a_list_of_parts_is_as_in_transformers() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b "}, {"type": "image"}]
    messages = [*HELLO, {"role": "assistant", "content": parts}]
    want = reference("parts", messages, continue_final_message=True)
    assert ours("parts", messages, continue_final_message=True) == want
    assert want.endswith("a b ")


TEXTS = st.text(max_size=30) | st.sampled_from(["</think>x", "<think>a</think>", "{{ x }}", " "])
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": TEXTS},
        optional={"name": TEXTS, "reasoning_content": TEXTS},
    ),
    min_size=1,
    max_size=5,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@pytest.mark.parametrize("name", ["plain", "trimming", "features", "parts", "thinking"])
@settings(max_examples=60, deadline=None)
@given(messages=MESSAGES, prompt=st.booleans())
def test_any_messages_as_in_transformers(name: str, messages: Messages, prompt: bool) -> None:
    want = reference(name, messages, add_generation_prompt=prompt)
    assert ours(name, messages, add_generation_prompt=prompt) == want


@settings(max_examples=60, deadline=None)
@given(arguments=st.dictionaries(st.text(max_size=5), JSON), description=st.text())
def test_any_json_as_in_transformers(arguments: dict[str, Any], description: str) -> None:
    function = {"name": "f", "description": description, "parameters": arguments}
    tools = [{"type": "function", "function": function}]
    call = {"function": {"name": "f", "arguments": arguments}}
    messages = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}]
    want = reference("tools", messages, tools=tools, add_generation_prompt=True)
    assert ours("tools", messages, tools=tools) == want


# ---------------------------------------------------------------------------------- refusals


KEYS = st.sampled_from(["role", "content", "tool_calls", "function", "arguments", "type", "text"])
ODD = st.dictionaries(KEYS, st.dictionaries(KEYS, JSON) | JSON | st.lists(JSON, max_size=2))


@pytest.mark.parametrize("name", SOURCES)
@settings(max_examples=40, deadline=None)
@given(messages=st.lists(ODD, max_size=3), continues=st.booleans())
def test_odd_messages_raise_nothing_else(name: str, messages: Messages, continues: bool) -> None:
    with suppress(TemplateError):
        assert isinstance(ours(name, messages, continue_final_message=continues), str)


def test_the_templates_own_words_are_the_error() -> None:
    with pytest.raises(TemplateError) as caught:
        ours("strict", [*HELLO, *HELLO])
    assert str(caught.value) == "Roles must alternate: message 1 is of user"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ messages[0].nothing.at_all }}", "UndefinedError: 'dict object' has no attribute"),
        ("{{ messages[7].role }}", "UndefinedError"),
        ("{{ 'x' + 1 }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ missing() }}", "UndefinedError: 'missing' is undefined"),
        ("{{ missing | tojson }}", "TypeError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{% for i in range(10000000) %}x{% endfor %}", "OverflowError: Range too big"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% set _ = messages[0].update({'role': 'x'}) %}", "SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages[0]['content'].__class__.__base__.__subclasses__() }}", "SecurityError"),
        ("{% include 'other' %}", "TypeError: no loader"),
        ("{{ strftime_now(1) }}", "TypeError"),
    ],
)
def test_whatever_fails_is_a_template_error(source: str, reason: str) -> None:
    with pytest.raises(TemplateError, match="Error: ") as caught:
        ChatTemplate(source, SPECIAL).render(HELLO)
    assert str(caught.value).startswith(reason)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    "expression",
    [
        "messages.__class__",
        "messages[0]['__class__']",
        "raise_exception.__globals__",
        "strftime_now.__code__",
        "(''|attr('__class__'))",
        "'{0.__class__}'.format(messages)",
        "messages | map(attribute='__class__') | join",
        "cycler.__init__",
    ],
)
def test_there_is_nothing_behind_an_attribute_trick(expression: str) -> None:
    assert ChatTemplate("{{ " + expression + " }}", SPECIAL).render(HELLO) == ""


@pytest.mark.parametrize(
    "source", ["{% for m in messages %}", "{{ 1 +", "{% generation %}x", "{{ x | nofilter }}"]
)
def test_a_source_that_does_not_compile(source: str) -> None:
    with pytest.raises(TemplateError, match=r"cannot be compiled: Template\w*Error"):
        ChatTemplate(source, SPECIAL)


def test_what_the_client_writes_is_never_a_template() -> None:
    assert "{{ 7 * 7 }} {% raw %}" in ours("plain", TALK)


def test_no_argument_takes_the_place_of_the_messages() -> None:
    with pytest.raises(TemplateError, match="must not be named messages"):
        OURS["plain"].render(HELLO, kwargs={"messages": []})


SETTINGS = ChatTemplate(
    "{{ tools }} {{ documents }} {{ add_generation_prompt }} "
    "{{ continue_final_message is defined }}{% for m in messages %} {{ m.content }}{% endfor %}",
    {},
)


@pytest.mark.parametrize(
    ("kwargs", "known", "text"),
    [
        ({"add_generation_prompt": False}, {}, "None None True False Hello!"),
        ({"add_generation_prompt": True}, {"add_generation_prompt": False},
         "None None False False Hello!"),
        ({"continue_final_message": True}, {}, "None None True False Hello!"),
        ({"continue_final_message": False}, {"continue_final_message": True},
         "None None False False Hello!"),
        ({"tools": ["a"]}, {}, "['a'] None True False Hello!"),
        ({"tools": ["a"]}, {"tools": ["b"]}, "['a'] None True False Hello!"),
        ({"tools": None}, {"tools": ["b"]}, "['b'] None True False Hello!"),
        ({"documents": ["a"]}, {}, "None ['a'] True False Hello!"),
        ({"documents": ["a"]}, {"documents": ["b"]}, "None ['b'] True False Hello!"),
    ],
)  # fmt: skip
def test_which_of_two_with_one_name_wins(
    kwargs: dict[str, Any], known: dict[str, Any], text: str
) -> None:
    given = dict(kwargs)
    assert SETTINGS.render(HELLO, kwargs=kwargs, **known) == text
    assert kwargs == given


def test_tools_among_the_arguments_choose_the_template_for_them() -> None:
    template = ChatTemplate("plain", {}, tool_use=ChatTemplate("{{ tools | length }} tools", {}))
    assert template.render(HELLO, kwargs={"tools": ["a"]}) == "1 tools"
    assert template.render(HELLO, kwargs={"tools": None}) == "plain"


@pytest.mark.parametrize(
    ("name", "last", "reason"),
    [
        ("plain", {"content": None}, "has no content"),
        ("plain", {}, "has no content"),
        ("parts", {"content": [{"type": "image"}]}, "has no text"),
        ("thinking", {"content": "<think>no</think> yes"}, "the template changes it"),
    ],
)
def test_what_cannot_be_continued(name: str, last: dict[str, Any], reason: str) -> None:
    messages = [*HELLO, {"role": "assistant", **last}]
    with pytest.raises(TemplateError, match=f"cannot be continued: .*{reason}"):
        OURS[name].render(messages, continue_final_message=True)
    with pytest.raises(ValueError, match="continue_final_message"):
        reference(name, messages, continue_final_message=True)


# -------------------------------------------------------------------------- fitting the messages


SAY = "{% macro say(r, x='') %}{% for p in x %}{% endfor %}{% endmacro %}"


@pytest.mark.parametrize("name", SOURCES)
def test_content_formats_of_the_templates_here(name: str) -> None:
    want = "openai" if name.startswith("parts") else "string"
    assert OURS[name].content_format == want


@pytest.mark.parametrize(
    "source",
    [
        FOR + "{% for p in m.content %}{% endfor %}" + END,
        FOR + "{% for p in m['content'] %}{% endfor %}" + END,
        FOR + "{% for p in m.get('content') %}{% endfor %}" + END,
        FOR + "{% for p in m.content | selectattr('type', 'equalto', 'x') %}{% endfor %}" + END,
        FOR + "{% set c = m.content or [] %}{% for p in c %}{% endfor %}" + END,
        FOR + "{% set c = m.content if m.content else x %}{% for p in c %}{% endfor %}" + END,
        "{% for m in messages[1:] %}{% for p in m.content[:2] %}{% endfor %}" + END,
        "{% set l = messages %}{% for m in l %}{% for p in m.content %}{% endfor %}" + END,
        "{% for i in range(2) %}{% set m = messages[i] %}{% for p in m.content %}{% endfor %}"
        + END,
        "{% for p in (messages | first).content %}" + END,
        FOR + "{{ m.content[0].text }}" + END,
        FOR + "{{ m.content[0]['text'] }}" + END,
        FOR + "{{ m.content | map(attribute='text') | join }}" + END,
        SAY + FOR + "{{ say(m.role, m.content) }}" + END,
        SAY + FOR + "{{ say(m.role, x=m.content) }}" + END,
    ],
)
def test_a_template_that_goes_through_content_reads_parts(source: str) -> None:
    assert ChatTemplate(source, {}).content_format == "openai"


@pytest.mark.parametrize(
    "source",
    [
        FOR + "{% set c = m.content %}{{ c is string }}" + END,
        FOR + "{% for line in m.content.split('x') %}{% endfor %}" + END,
        FOR + "{{ m.content[0] }}{{ m.content | length }}" + END,
        FOR + "{% for c in m.tool_calls %}{% endfor %}" + END,
        "{% for m in tools %}{% for p in m.content %}{% endfor %}" + END,
        SAY + FOR + "{{ say(m.content, 'x') }}" + END,
        "no variables",
    ],
)
def test_a_template_that_tests_or_cuts_content_takes_strings(source: str) -> None:
    assert ChatTemplate(source, {}).content_format == "string"


def test_parts_are_joined_for_a_template_that_takes_strings() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    joined = ours("plain", [{"role": "user", "content": parts}])
    assert joined == reference("plain", [{"role": "user", "content": "one\ntwo"}],
                               add_generation_prompt=True)  # fmt: skip


def test_a_part_that_is_not_text_is_refused_by_a_template_that_takes_strings() -> None:
    content = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(TemplateError, match="text only, not a content part of type 'image_url'"):
        ours("plain", [{"role": "user", "content": content}])


def test_strings_are_wrapped_for_a_template_that_only_reads_parts() -> None:
    wrapped = [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}]
    assert "Hello!" in ours("parts_only", HELLO)
    assert ours("parts_only", HELLO) == ours("parts_only", wrapped)


def test_tool_answers_in_parts_become_strings() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ '>' + m.content }}"
        "{% elif m.content is string %}{{ m.content }}"
        "{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "sunny"}, {"type": "text", "text": "warm"}]
    messages = [{"role": "user", "content": parts}, {"role": "tool", "content": parts}]
    assert ChatTemplate(source, {}).render(messages) == "sunnywarm>sunny\nwarm"


def test_content_format_can_be_overridden() -> None:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    parts = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    assert ChatTemplate(source, {}, content_format="openai").render(parts) == str(
        parts[0]["content"]
    )
    assert ChatTemplate(SOURCES["parts_only"], {}, content_format="string").content_format == (
        "string"
    )


@pytest.mark.parametrize("source", ["{{ 'x' + m.content }}", "{{ m.content.strip() }}"])
def test_parts_that_a_template_chokes_on_are_joined_after_all(source: str) -> None:
    template = ChatTemplate(
        "{% for m in messages %}" + source + "{% endfor %}", {}, content_format="openai"
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "user", "content": parts}]).removeprefix("x") == "a\nb"


def test_parts_that_cannot_be_joined_leave_the_first_error() -> None:
    template = ChatTemplate("{{ 'x' + messages[0].content }}", {}, content_format="openai")
    with pytest.raises(TemplateError, match="TypeError: can only concatenate str"):
        template.render([{"role": "user", "content": [{"type": "image"}]}])


@pytest.mark.parametrize("message", [{"role": "assistant"}, {"role": "assistant", "content": None}])
def test_missing_content_is_what_the_template_asks_about(message: dict[str, Any]) -> None:
    assert ours("strict", [*HELLO, message]).endswith("[silence]</s>")
    assert ours("trimming", [*HELLO, message]).endswith("[assistant] </s>[assistant]")
    assert ours("parts_only", [*HELLO, message]).count("<end>") == 2


def test_calls_are_fitted() -> None:
    def calls(*arguments: Any) -> Messages:
        made = [{"function": {"name": "f", "arguments": a}} for a in arguments]
        return [*HELLO, {"role": "assistant", "content": None, "tool_calls": made}]

    strings = calls('{"a": "é", "b": 1.0}', "", None, '{"nested": {"x": [1]}}')
    objects = calls({"a": "é", "b": 1.0}, {}, {}, {"nested": {"x": [1]}})
    before = repr(strings)
    assert ours("tools", strings) == ours("tools", objects)
    assert repr(strings) == before, "what the client sent must not change"


@pytest.mark.parametrize("arguments", ['{"city": "Zü', "[1, 2]", '"text"', "[" * 100_000])
def test_broken_arguments_do_not_end_a_conversation(arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}]
    as_text = "{% for m in messages %}{{ m.tool_calls[0].function.arguments }}{% endfor %}"
    assert ChatTemplate(as_text, {}).render(messages[1:]) == arguments
    # A template that needs an object gets an empty one.
    assert '"arguments": {}' in ours("tools", messages)


@pytest.mark.parametrize("calls", [[], None])
def test_an_empty_list_of_calls_is_no_call(calls: Any) -> None:
    source = "{{ 'tool_calls' in messages[0] }}"
    message = {"role": "assistant", "content": "x", "tool_calls": calls}
    assert ChatTemplate(source, {}).render([message]) == "False"


@pytest.mark.parametrize("calls", ["x", {"function": {}}, [1], [{}, "x"]])
def test_calls_of_another_type_are_refused(calls: Any) -> None:
    with pytest.raises(TemplateError, match="'tool_calls' must be an array of objects"):
        ours("tools", [{"role": "assistant", "tool_calls": calls}])


def test_calls_without_a_function_are_left_alone() -> None:
    source = "{{ messages[0].tool_calls[0].custom.name }}"
    message = {"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "c"}}]}
    assert ChatTemplate(source, {}).render([message]) == "c"


def test_developer_is_system_to_a_template_that_does_not_know_it() -> None:
    source = "{% for m in messages %}{{ m.role }}{% endfor %}"
    message = {"role": "developer", "content": "x"}
    assert ChatTemplate(source, {}).render([message]) == "system"
    aware = source + "{% if messages[0].role == 'developer' %}!{% endif %}"
    assert ChatTemplate(aware, {}).render([message]) == "developer!"


# ------------------------------------------------------------------------------------ the rest


def test_the_tool_use_template_takes_over_when_tools_are_given() -> None:
    tool_use = ChatTemplate("tools: {{ tools | length }} {{ x }}", {})
    template = ChatTemplate("default", {}, tool_use=tool_use)
    assert template.render(HELLO) == "default"
    assert template.render(HELLO, tools=[], kwargs={"x": 1}) == "tools: 0 1"
    assert template.render(HELLO, tools=TOOLS) == "tools: 1 "


def test_a_rendered_prompt_is_encoded_without_adding_bos_again() -> None:
    tokenizer = Tokenizer(make_backend(adds_bos=True), {"bos_token": "<s>"})
    bos = tokenizer.id_of("<s>")
    assert bos is not None
    prompt = ChatTemplate(SOURCES["plain"], tokenizer.special_tokens).render(HELLO)
    assert prompt.startswith("<s>")
    assert tokenizer.encode(prompt).count(bos) == 1
    assert tokenizer.encode("plain text", add_special_tokens=True).count(bos) == 1


def test_the_date_is_todays() -> None:
    assert "20" in ChatTemplate("{{ strftime_now('%Y') }}", {}).render(HELLO)


def test_special_tokens_of_the_test_are_those_of_the_configuration() -> None:
    assert REFERENCE.special_tokens_map == SPECIAL
    assert SPECIAL.keys() == {name for name in CONFIG if name.endswith("_token")}
