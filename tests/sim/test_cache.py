from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from smgd.sim.cache import BLOCK_SIZE, PrefixCache, blocks

ids = st.lists(st.integers(0, 3), max_size=80)


def test_only_whole_blocks_count_and_never_the_last_token() -> None:
    cache = PrefixCache(100)
    prompt = list(range(40))

    assert cache.match(prompt, None) == 0
    assert cache.store(prompt, None) == 32
    assert cache.match(prompt, None) == 32
    assert cache.match(prompt[:32], None) == 16
    assert cache.match(prompt[:33], None) == 32
    assert cache.store(prompt, None) == 0


def test_a_salt_is_a_cache_of_its_own() -> None:
    cache = PrefixCache(100)
    cache.store(list(range(40)), "a")

    assert cache.match(list(range(40)), "b") == cache.match(list(range(40)), None) == 0
    assert cache.match(list(range(40)), "a") == 32


def test_the_oldest_blocks_go_first() -> None:
    cache = PrefixCache(2)
    cache.store([1] * 32, None)
    cache.store([2] * 16, None)

    assert cache.match([2] * 17, None) == 16
    assert cache.match([1] * 33, None) == 0


def test_clearing() -> None:
    cache = PrefixCache(10)
    cache.store([1] * 32, None)

    cache.clear()

    assert cache.match([1] * 33, None) == 0


@given(first=ids, second=ids)
def test_what_is_cached_is_the_common_prefix(first: list[int], second: list[int]) -> None:
    cache = PrefixCache(1000)
    cache.store(first, None)

    common = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    usable = min(common, max(0, len(second) - 1))
    assert cache.match(second, None) == usable // BLOCK_SIZE * BLOCK_SIZE


def test_blocks_are_rounded_up() -> None:
    assert [blocks(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
