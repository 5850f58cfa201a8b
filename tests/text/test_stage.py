"""The stage that keeps tokenizing off the loop where it would be long."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import trio
import trio.testing

from smgd.errors import ModelError
from smgd.text.model import load_model
from smgd.text.stage import QUICK_BYTES, TextStage
from smgd.text.tokenizer import Tokenizer
from tests.text.make_model import make_backend, write_model


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
        while stage.limiter.borrowed_tokens or turns == 0:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage.encode, tokenizer, text)
        nursery.start_soon(count)
    # Encoding that held the GIL (some 300 ms) would leave but a few.
    assert turns > 300


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
            nursery.start_soon(stage.load, lambda: release.wait(10))
        await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(5):
            assert await stage.encode(tokenizer, "ab") == [256]
        release.set()
