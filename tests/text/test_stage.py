"""The stage that keeps tokenizing off the loop where it would be long."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import islice, product
from pathlib import Path

import pytest
import trio
import trio.testing

from smgd.errors import ModelError
from smgd.text import segments, words
from smgd.text.model import load_model
from smgd.text.stage import (
    GAP_BYTES,
    GO_BYTES,
    QUICK_BYTES,
    THRESHOLD_BYTES,
    TextStage,
    _goes,
)
from smgd.text.tokenizer import Tokenizer
from tests.support import PATIENCE
from tests.text.make_model import make_backend, write_model
from tests.text.test_words import make as make_words


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(make_backend(adds_bos=True), {})


@pytest.mark.parametrize("length", [0, 5, 20])
async def test_same_ids_inline_and_in_a_thread(tokenizer: Tokenizer, length: int) -> None:
    stage = TextStage(threshold_bytes=10)
    text = "ab" * (length // 2)
    assert await stage.encode(tokenizer, text) == tokenizer.encode(text)
    with_bos = await stage.encode(tokenizer, text, add_special_tokens=True)
    assert with_bos == tokenizer.encode(text, add_special_tokens=True)
    assert with_bos[0] == tokenizer.id_of("<s>")


@pytest.mark.parametrize(
    ("text", "in_thread"),
    [("x" * 10, False), ("x" * 11, True), ("é" * 5, False), ("é" * 6, True)],
)
async def test_the_threshold_counts_double_beyond_ascii(
    tokenizer: Tokenizer, text: str, in_thread: bool
) -> None:
    limiter = trio.CapacityLimiter(1)
    stage = TextStage(threshold_bytes=10, limiter=limiter)
    # With the only thread taken, what needs one cannot go on.
    limiter.acquire_on_behalf_of_nowait("somebody else")
    finished = False

    async def encode() -> None:
        nonlocal finished
        await stage.encode(tokenizer, text)
        finished = True

    async with trio.open_nursery() as nursery:
        nursery.start_soon(encode)
        await trio.testing.wait_all_tasks_blocked()
        assert finished is not in_thread
        limiter.release_on_behalf_of("somebody else")
    assert finished


async def test_encoding_for_long_is_a_checkpoint_and_can_be_cancelled(tokenizer: Tokenizer) -> None:
    unknown = "".join(f"x{number}y" for number in range(QUICK_BYTES // 3))
    for stage in (TextStage(), TextStage(threshold_bytes=10)):  # on the loop, and in a thread
        with trio.testing.assert_checkpoints():
            await stage.encode(tokenizer, f"one{unknown}{stage.threshold_bytes}")
        with trio.CancelScope() as scope:
            scope.cancel()
            await stage.encode(tokenizer, f"two{unknown}{stage.threshold_bytes}")
        assert scope.cancelled_caught


async def test_encoding_a_few_words_takes_no_task_switch(tokenizer: Tokenizer) -> None:
    stage = TextStage()
    for text in ("a few words", "a few words", "a few more of them"):
        with trio.testing.assert_no_checkpoints():
            assert await stage.encode(tokenizer, text) == tokenizer.encode(text)


async def test_the_loop_goes_on_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    stage = TextStage()
    text = "some words and ab " * 60_000
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += bool(stage.limiter.borrowed_tokens)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        await stage.encode(tokenizer, text)
        nursery.cancel_scope.cancel()
    # Encoding that held the GIL (some 300 ms) would leave but a few.
    assert turns > 300


class Spy:
    """A tokenizer of words that notes what it encodes at one go on the loop, and in threads."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer(make_words(), {})
        self.on_loop: list[list[str]] = []
        self.in_threads: list[list[str]] = []
        self._encode = self.tokenizer.encode_units
        self.tokenizer.encode_units = self.encode  # type: ignore[method-assign]

    def encode(self, units: Sequence[str]) -> list[list[int]]:
        is_loop = threading.current_thread() is threading.main_thread()
        (self.on_loop if is_loop else self.in_threads).append(list(units))
        return self._encode(units)

    @property
    def pieces(self) -> int:
        """How many pieces have been looked up."""
        cache = self.tokenizer.segments
        assert cache is not None
        return cache.hits + cache.misses

    async def watch(self, text: str) -> Steps:
        """Encode a text, checking the ids, and tell how much was done in a step of the task."""
        expected = self.tokenizer.encode(text)
        steps = Steps(self)
        trio.lowlevel.add_instrument(steps)
        try:
            assert await TextStage().encode(self.tokenizer, text) == expected
            await trio.lowlevel.checkpoint()
        finally:
            trio.lowlevel.remove_instrument(steps)
        return steps


class Steps(trio.abc.Instrument):
    """Counts what is done between two checkpoints."""

    def __init__(self, spy: Spy) -> None:
        self._spy = spy
        self._pieces, self._calls = spy.pieces, len(spy.on_loop)
        self.count = self.most_pieces = self.most_calls = 0

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        pieces, calls = self._spy.pieces, len(self._spy.on_loop)
        self.count += 1
        self.most_pieces = max(self.most_pieces, pieces - self._pieces)
        self.most_calls = max(self.most_calls, calls - self._calls)
        self._pieces, self._calls = pieces, calls


def unknown_words(count: int) -> str:
    return "".join(f" {''.join(w)}" for w in islice(product("abcdefghijk", repeat=5), count))


@pytest.mark.parametrize(
    "text",
    ["<|a|>" * 20_000, "<|a|>x" * 20_000, "".join(f"<|end|>{i}" for i in range(20_000))],
    ids=["tokens", "the same between", "numbers between"],
)
async def test_a_text_of_many_special_tokens_gives_way(text: str) -> None:
    spy = Spy()
    for _ in range(2):
        steps = await spy.watch(text)
        assert steps.count >= text.count("<") / segments.MOST_PIECES
        assert steps.most_pieces <= segments.MOST_PIECES
        assert steps.most_calls <= 1
    assert all(sum(map(len, go)) <= GO_BYTES for go in spy.on_loop)


async def test_a_long_known_text_gives_way() -> None:
    spy = Spy()
    text = "the end of the line" * (4 * segments.BLOCK // 19)
    for _ in range(6):
        await spy.watch(text)
    cache = spy.tokenizer.segments
    assert cache is not None
    cache._ids.clear()
    steps = await spy.watch(text)
    assert steps.count >= len(text) / words.TURN
    steps = await spy.watch(text)
    assert steps.count >= 4  # known as a whole


async def test_short_units_are_encoded_on_the_loop_a_few_at_a_time() -> None:
    spy = Spy()
    steps = await spy.watch(unknown_words(1800))
    assert len(spy.on_loop) >= 3
    assert steps.most_calls == 1
    assert all(sum(map(len, go)) <= GO_BYTES for go in spy.on_loop)
    assert spy.in_threads == []


async def test_what_is_long_altogether_is_encoded_in_a_thread() -> None:
    spy = Spy()
    await spy.watch("<|a|>".join(unknown_words(6000 + i) for i in range(8)))
    encoded = sum(len(unit) for go in spy.on_loop for unit in go)
    assert encoded <= THRESHOLD_BYTES
    assert all(sum(map(len, go)) <= 2 * segments.BLOCK for go in spy.in_threads)
    assert len(spy.in_threads) >= 4


async def test_a_unit_without_a_place_to_cut_is_encoded_in_a_thread() -> None:
    spy = Spy()
    for odd in ("a'" * 3000, " " * 6000, "\u6f22" * 4000):
        await spy.watch(odd)
        assert spy.in_threads.pop() == [odd]
    assert spy.on_loop == []


def test_goes_are_bounded_and_complete() -> None:
    units = ["x" * (i * 37 % 900) for i in range(300)]
    goes = list(_goes(units))
    assert [unit for go in goes for unit in go] == units
    assert max(sum(map(len, go)) + GAP_BYTES * len(go) for go in goes) <= GO_BYTES
    assert list(_goes(["x" * 9999, "y"])) == [["x" * 9999], ["y"]]


async def test_whoever_leaves_does_not_wait_for_the_thread() -> None:
    stage = TextStage()
    release = threading.Event()
    with trio.move_on_after(0.01) as scope:
        await stage.load(lambda: release.wait(10))
    assert scope.cancelled_caught
    release.set()


async def test_loading_a_model(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "tiny")
    stage = TextStage()
    model = await stage.load(lambda: load_model(str(directory)))
    assert model.id == str(directory)  # as it was written, which is what smg does
    with pytest.raises(ModelError, match="there is no directory"):
        await stage.load(lambda: load_model("/no/such/model"))


async def test_loading_does_not_keep_prompts_waiting(tokenizer: Tokenizer) -> None:
    stage = TextStage(threshold_bytes=0)
    release = threading.Event()
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(stage.load, lambda: release.wait(2 * PATIENCE))
        await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(PATIENCE):
            assert await stage.encode(tokenizer, "ab") == [256]
        release.set()
