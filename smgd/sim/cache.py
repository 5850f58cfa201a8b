"""The prefix cache: which full blocks of ids were seen before.

A block is known by the hash of its ids and of all blocks in front of it, as in vLLM, so what two
prompts share is exactly their common prefix, in whole blocks. The least recently used go first.
"""

from __future__ import annotations

from collections.abc import Iterator

BLOCK_SIZE = 16  # tokens; vLLM's default on GPUs


class PrefixCache:
    """Knows the blocks of at most `capacity` blocks' worth of texts."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: dict[int, None] = {}

    def match(self, ids: list[int], salt: str | None) -> int:
        """Return how many of a prompt's first tokens are cached: never all of them."""
        cached = 0
        for block in self._hashes(ids[: len(ids) - 1], salt):
            if block not in self._blocks:
                break
            cached += BLOCK_SIZE
        return cached

    def store(self, ids: list[int], salt: str | None) -> int:
        """Remember the full blocks of `ids`; return how many tokens were new."""
        new = 0
        for block in self._hashes(ids, salt):
            new += 0 if block in self._blocks else BLOCK_SIZE
            self._blocks.pop(block, None)
            self._blocks[block] = None  # the newest is last
        while len(self._blocks) > self._capacity:
            del self._blocks[next(iter(self._blocks))]
        return new

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()

    @staticmethod
    def _hashes(ids: list[int], salt: str | None) -> Iterator[int]:
        value = hash(salt)
        for start in range(0, len(ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
            value = hash((value, *ids[start : start + BLOCK_SIZE]))
            yield value


def blocks(tokens: int) -> int:
    """Return the number of blocks that so many tokens take."""
    return -(-tokens // BLOCK_SIZE)
