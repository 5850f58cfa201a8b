"""What goes on for long and is looked at often, told once."""

from __future__ import annotations


class Once:
    """Tells whether what is the matter is other than when it was told last.

    `is_told` says whether anything has been told that is not `over`.
    """

    def __init__(self) -> None:
        self._last: object = None

    @property
    def is_told(self) -> bool:
        """Whether something is the matter, and was told."""
        return self._last is not None

    def is_news(self, matter: object) -> bool:
        """Take what is the matter now; return whether it is to be told. It is never None."""
        was, self._last = self._last, matter
        return matter != was

    def over(self) -> None:
        """Take that nothing is the matter, so that the next time is news again."""
        self._last = None
