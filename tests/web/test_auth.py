"""Keys: which headers bring one, and what is told to whom."""

from __future__ import annotations

import pytest

from smgd.errors import ApiError
from smgd.web.auth import Keys

KEYS = Keys(["sk-one", "sk-two"])


def check(headers: dict[str, str]) -> None:
    found = {name.encode(): value.encode() for name, value in headers.items()}
    KEYS.check(found.get)


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer sk-one"},
        {"authorization": "bearer sk-two"},
        {"authorization": "BEARER  sk-two "},
        {"x-api-key": "sk-one"},
        {"authorization": "Bearer other", "x-api-key": "sk-one"},
        {"authorization": "Bearer sk-one", "x-api-key": "other"},
        {"authorization": "Basic c2s6", "x-api-key": "sk-one"},
    ],
)
def test_a_key_of_ours_in_either_header_will_do(headers: dict[str, str]) -> None:
    check(headers)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "sk-one"},
        {"authorization": "Basic sk-one"},
        {"x-api-key": ""},
    ],
)
def test_without_a_key(headers: dict[str, str]) -> None:
    with pytest.raises(ApiError, match=r"^This server needs an API key\. Send it as") as caught:
        check(headers)
    error = caught.value
    assert (error.status, error.code, error.type, error.param) == (
        401, "invalid_api_key", "invalid_request_error", None,
    )  # fmt: skip


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer sk-three"},
        {"authorization": "Bearer SK-ONE"},
        {"authorization": "Bearer sk-one sk-two"},
        {"x-api-key": "Bearer sk-one"},
        {"authorization": "Bearer sk-onë"},
        {"authorization": "Bearer other-1", "x-api-key": "other-2"},
    ],
)
def test_with_a_key_that_is_none_of_ours(headers: dict[str, str]) -> None:
    with pytest.raises(ApiError, match="is not valid here") as caught:
        check(headers)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    assert not any(value in caught.value.message for value in headers.values())


def test_keys_know_whether_there_are_any() -> None:
    assert KEYS
    assert not Keys()


def test_the_keys_themselves_are_not_kept() -> None:
    assert not any(b"sk-" in digest for digest in KEYS._digests)
    assert "sk-" not in repr(KEYS)
