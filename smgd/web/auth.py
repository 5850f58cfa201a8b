"""API keys: which requests know a secret that the configuration has.

Keys are kept and compared as SHA-256 digests: a look-up of a digest takes a time that says nothing
about the keys, and no key stands in the memory of what handles requests. No text here, and no log
line, has a part of a key in it, neither a right one nor a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import sha256

from smgd.errors import ApiError

_HINT = "Send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'."


def missing_key() -> ApiError:
    """Return the 401 for a request without a key."""
    return ApiError(401, "invalid_api_key", f"This server needs an API key. {_HINT}")


def wrong_key() -> ApiError:
    """Return the 401 for a request whose key is none of ours."""
    return ApiError(401, "invalid_api_key", "The API key of this request is not valid here.")


class Keys:
    """The keys that are accepted; without any, everybody is."""

    __slots__ = ("_digests",)

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = frozenset(sha256(key.encode()).digest() for key in keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, header: Callable[[bytes], bytes | None]) -> None:
        """Raise `ApiError` 401 unless one of the two headers has a key of ours.

        Either may do: clients of OpenAI's API send the first, those of Anthropic's the second, and
        a proxy in front may add one that is its own.
        """
        found = [_bearer(header(b"authorization")), header(b"x-api-key")]
        offered = [key for key in found if key]
        if not offered:
            raise missing_key()
        if not any(sha256(key).digest() in self._digests for key in offered):
            raise wrong_key()


def _bearer(value: bytes | None) -> bytes | None:
    """Return the credentials of that scheme, whose name has no case (RFC 9110, 11.1)."""
    scheme, _, credentials = (value or b"").partition(b" ")
    return credentials.strip() if scheme.lower() == b"bearer" else None
