"""The field rule: honoured, refused by name, harmless, or unknown and counted."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smgd.api.fields import HARMLESS, REFUSED, FieldRules, decode
from smgd.errors import ApiError


class Body(msgspec.Struct, kw_only=True):
    prompt: str
    top_k: int | None = None
    ratio: float | None = None
    stop: list[str] | None = None
    bias: dict[int, float] | None = None


RULES = FieldRules.of(Body, {"tools": ([],), "best_of": (1,)})
DECODER = msgspec.json.Decoder(Body)


def read(**fields: Any) -> tuple[Body, list[str]]:
    return decode(DECODER, msgspec.json.encode({"prompt": "x", **fields}), RULES)


def refusal(body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decode(DECODER, body, RULES)
    assert caught.value.status == 400
    return caught.value


def test_honoured_fields_are_read_and_null_is_absent() -> None:
    assert read(top_k=3)[0] == Body(prompt="x", top_k=3)
    assert read(top_k=None, ratio=None, stop=None, bias=None)[0] == Body(prompt="x")


def test_a_refused_field_is_named() -> None:
    error = refusal(b'{"prompt": "x", "tools": [{"type": "function"}]}')
    assert (error.code, error.param) == ("unsupported_parameter", "tools")
    assert "'tools' is not supported" in error.message


@pytest.mark.parametrize("name", sorted(RULES.refused))
def test_every_refused_field_is_refused_and_its_neutral_values_pass(name: str) -> None:
    error = refusal(msgspec.json.encode({"prompt": "x", name: {"something": "else"}}))
    assert (error.code, error.param) == ("unsupported_parameter", name)
    for neutral in (None, *RULES.refused[name]):
        assert read(**{name: neutral}) == (Body(prompt="x"), [])


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_harmless_fields_are_ignored_and_not_counted(name: str) -> None:
    assert read(**{name: {"any": "thing"}}) == (Body(prompt="x"), [])


def test_unknown_fields_are_ignored_and_named_for_the_count() -> None:
    body, unknown = read(frobnicate=1, foo=None)
    assert body == Body(prompt="x")
    assert sorted(unknown) == ["foo", "frobnicate"]


def test_what_a_surface_honours_is_not_refused() -> None:
    class Own(msgspec.Struct):
        bad_words: list[str] | None = None

    assert "bad_words" in REFUSED
    assert "bad_words" not in FieldRules.of(Own, {}).refused


@pytest.mark.parametrize("body", [b"", b"{", b"nope", b'{"prompt": NaN}', b"\xff\xfe"])
def test_a_body_that_is_no_json(body: bytes) -> None:
    assert refusal(body).code == "invalid_json"


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"{}", "missing_required_parameter", "prompt"),
        (b'{"prompt": null}', "missing_required_parameter", "prompt"),
        (b'{"prompt": 1}', "invalid_type", "prompt"),
        (b'{"prompt": "x", "top_k": "3"}', "invalid_type", "top_k"),
        (b'{"prompt": "x", "top_k": true}', "invalid_type", "top_k"),
        (b'{"prompt": "x", "stop": ["a", 1]}', "invalid_type", "stop[1]"),
        (b'{"prompt": "x", "bias": {"a": 1}}', "invalid_type", "bias"),
        (b"[]", "invalid_type", None),
        (b"null", "invalid_type", None),
    ],
)
def test_a_wrong_type_blames_its_field(body: bytes, code: str, param: str | None) -> None:
    error = refusal(body)
    assert (error.code, error.param) == (code, param)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
names = st.sampled_from([*Body.__struct_fields__, *RULES.refused, *HARMLESS]) | st.text()


def status_of(body: bytes) -> int:
    try:
        decode(DECODER, body, RULES)
    except ApiError as error:
        return error.status
    return 200


@given(st.dictionaries(names, json_values))
def test_any_object_is_read_or_refused_with_a_400(fields: dict[str, Any]) -> None:
    assert status_of(msgspec.json.encode(fields)) in (200, 400)


@given(st.binary())
def test_any_bytes_are_read_or_refused_with_a_400(body: bytes) -> None:
    assert status_of(body) in (200, 400)
