from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from smgd.sim.structured import NotCompiledError, scripted_text
from smgd.sim.wire import StructuredOutputs


def text_of(backend: str = "xgrammar", **rule: Any) -> str | None:
    return scripted_text(msgspec.convert(rule, StructuredOutputs), backend)


SCHEMA: dict[str, Any] = {
    "type": "object",
    "$defs": {"unit": {"enum": ["km", "mi"]}},
    "properties": {
        "city": {"type": "string", "maxLength": 3},
        "code": {"type": "string", "minLength": 12},
        "days": {"type": "integer", "minimum": 3},
        "factor": {"type": "number", "exclusiveMinimum": 2},
        "unit": {"$ref": "#/$defs/unit"},
        "is_new": {"type": "boolean"},
        "parent": {"type": ["null", "string"]},
        "anything": {"type": "array", "items": True},
        "either": {"anyOf": [{"const": 7}, {"type": "string"}]},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 2},
        "left_out": {"type": "string"},
    },
}
SCHEMA["required"] = [name for name in SCHEMA["properties"] if name != "left_out"]


@pytest.mark.parametrize("given", [SCHEMA, json.dumps(SCHEMA)], ids=["map", "text"])
def test_a_schema_gets_its_smallest_instance(given: Any) -> None:
    text = text_of(json=given)

    assert json.loads(text or "") == {
        "city": "sim", "code": "simulated!!!", "days": 3, "factor": 3.0, "unit": "km",
        "is_new": True, "parent": None, "anything": [None],
        "either": 7, "tags": ["simulated", "simulated"],
    }  # fmt: skip


def test_a_recursive_schema_comes_to_an_end() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}

    assert json.loads(text_of(json=node) or "")["next"]


def test_other_rules_that_are_understood() -> None:
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}}

    assert json.loads(text_of(json_object=True) or "")
    assert text_of(regex="(Paris|London)") == "Paris"
    assert text_of(grammar='root ::= "y\\"es" | "no"') == 'y"es'
    assert text_of("guidance", grammar='start: "yes" | "no"') == "yes"
    assert text_of("guidance", choice=["a", "b"]) == "a"
    assert json.loads(text_of(structural_tag=json.dumps(tag)) or "")["days"] == 3


@pytest.mark.parametrize(
    "rule", [{"regex": "[a-z]{3}"}, {"grammar": "root ::= word+\nword ::= [a-z]"}]
)
def test_rules_that_are_not_understood_are_no_error(rule: dict[str, Any]) -> None:
    assert text_of(**rule) is None


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"regex": "((("}, "regex: "),
        ({"grammar": "root ::= "}, "no body"),
        ({"grammar": "nonsense"}, "no body"),
        ({"json": '{"type":"nonsense"}'}, "unknown type 'nonsense'"),
        ({"json": "{"}, "schema: "),
        ({"json": "3"}, "not a JSON object"),
        ({"json": {"$ref": "#/nowhere"}}, "nothing at #/nowhere"),
        ({"structural_tag": "["}, "schema: "),
        ({"structural_tag": "{}"}, "it has no format"),
        ({"json": "[" * 100_000}, "schema: "),
        ({"json": {"type": "array", "minItems": "many"}}, "schema: TypeError"),
        ({"choice": ["a"]}, "does not know `choice`"),
    ],
)
def test_what_no_backend_compiles(rule: dict[str, Any], message: str) -> None:
    with pytest.raises(NotCompiledError) as caught:
        text_of(**rule)

    assert message in str(caught.value)
