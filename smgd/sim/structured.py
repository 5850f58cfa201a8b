"""Structured outputs: an answer that obeys the rule, where that is easy to find.

A real engine masks the tokens that the grammar forbids. The simulator does not parse grammars; it
writes the smallest instance of a JSON schema, or the first of some literal alternatives, and for
any other rule it just speaks (`--replies` helps). What no backend would compile is refused as the
engine refuses it.
"""

from __future__ import annotations

import json
import re
from typing import Any

from smgd.errors import SmgdError
from smgd.sim.wire import StructuredOutputs

BACKENDS = frozenset({"xgrammar", "guidance", "outlines", "lm-format-enforcer"})

_MAX_DEPTH = 8  # of a recursive schema
_MAX_LENGTH = 1000  # of a string or an array, whatever the schema demands
_TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
_PLAIN = re.compile(r"[\w \-']+(\|[\w \-']+)*")
_LITERAL = r'"(?:[^"\\]|\\.)*"'
_ALTERNATIVES = re.compile(rf"(?:root ::=|start:)\s*({_LITERAL})(?:\s*\|\s*{_LITERAL})*\s*")


class NotCompiledError(SmgdError):
    """A rule that the engine's backend cannot compile: the request ends with an error."""


def scripted_text(rule: StructuredOutputs, backend: str | None) -> str | None:
    """Return a text that obeys a rule, or None for one that is not understood here.

    Raises `NotCompiledError`.
    """
    ((kind, value),) = rule.constraints().items()
    if kind == "choice":
        if backend == "xgrammar":
            raise NotCompiledError("xgrammar does not know `choice`: send a grammar")
        return str(value[0]) if value else None
    if kind == "regex":
        return _regex(value)
    if kind == "grammar":
        return _grammar(value)
    if kind == "json_object":
        return '{"answer": "simulated"}'
    return _json(value) if kind == "json" else _structural_tag(value)


def _regex(pattern: str) -> str | None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise NotCompiledError(f"regex: {error}") from error
    inner = pattern[1:-1] if pattern.startswith("(") and pattern.endswith(")") else pattern
    return inner.split("|")[0] if _PLAIN.fullmatch(inner) else None


def _grammar(text: str) -> str | None:
    if re.search(r"(::=|:)\s*(\n|$)", text) or not re.search(r"::=|:", text):
        raise NotCompiledError("grammar: a rule has no body")
    match = _ALTERNATIVES.fullmatch(text.strip())
    return str(json.loads(match[1])) if match else None


def _json(value: str | dict[str, Any]) -> str:
    schema = _parsed(value)
    try:
        return json.dumps(_instance(schema, schema, 0), ensure_ascii=False)
    except (AttributeError, TypeError, ValueError, KeyError, RecursionError) as error:
        raise NotCompiledError(f"schema: {type(error).__name__}: {error}") from error


def _structural_tag(value: str) -> str | None:
    rule = _parsed(value).get("format")
    if not isinstance(rule, dict):
        raise NotCompiledError("structural tag: it has no format")
    return _json(rule.get("json_schema", {})) if rule.get("type") == "json_schema" else None


def _parsed(value: str | dict[str, Any]) -> dict[str, Any]:
    try:
        schema = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise NotCompiledError(f"schema: {error}") from error
    if not isinstance(schema, dict):
        raise NotCompiledError("schema: not a JSON object")
    return schema


def _instance(schema: Any, root: dict[str, Any], depth: int) -> Any:
    """Return the smallest value that a schema allows, as far as its keywords are known here."""
    if not isinstance(schema, dict):
        return None
    if "$ref" in schema and depth < _MAX_DEPTH:
        return _instance(_resolve(schema["$ref"], root), root, depth + 1)
    for keyword in ("const", "default"):
        if keyword in schema:
            return schema[keyword]
    if schema.get("enum"):
        return schema["enum"][0]
    for keyword in ("anyOf", "oneOf", "allOf"):
        if schema.get(keyword):
            return _instance(schema[keyword][0], root, depth + 1)
    return _typed_instance(schema, root, depth)


def _typed_instance(schema: dict[str, Any], root: dict[str, Any], depth: int) -> Any:
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind not in _TYPES:
        raise NotCompiledError(f"schema: unknown type {kind!r}")
    if kind == "object":
        properties = schema.get("properties", {})
        wanted = schema.get("required", properties) if depth < _MAX_DEPTH else ()
        return {name: _instance(properties.get(name, {}), root, depth + 1) for name in wanted}
    if kind == "array":
        count = schema.get("minItems", 1 if depth < _MAX_DEPTH else 0)
        item = _instance(schema.get("items", {}), root, depth + 1)
        return [item] * min(count, _MAX_LENGTH)
    if kind == "string":
        text = "simulated".ljust(min(schema.get("minLength", 0), _MAX_LENGTH), "!")
        return text[: schema.get("maxLength", len(text))]
    low = schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
    return {"integer": int(low), "number": float(low), "boolean": True, "null": None}[kind]


def _resolve(reference: str, root: dict[str, Any]) -> Any:
    target: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        if not isinstance(target, dict) or part not in target:
            raise NotCompiledError(f"schema: nothing at {reference}")
        target = target[part]
    return target
