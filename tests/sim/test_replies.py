from __future__ import annotations

from pathlib import Path

import pytest

from smgd.errors import ConfigError
from smgd.sim.replies import Reply, find_reply, load_replies
from smgd.text.tokenizer import Tokenizer


def load(tmp_path: Path, tokenizer: Tokenizer, text: str) -> list[Reply]:
    path = tmp_path / "replies.jsonl"
    path.write_text(text)
    return load_replies(path, tokenizer)


def test_a_line_of_each_kind(tmp_path: Path, tokenizer: Tokenizer) -> None:
    replies = load(
        tmp_path,
        tokenizer,
        '{"contains": "hi", "text": "Hello.", "chunks": [2, 1], "delay_ms": 50}\n'
        "\n"
        '{"token_ids": [5, 6], "finish": "length"}\n'
        '{"then": "garbage"}\n'
        '{"text": "Oh", "then": "kill"}\n'
        '{"text": "Oh", "then": "kill", "finish": "stop"}\n'
        '{"contains": "slow", "delay_ms": 10}\n',
    )

    hello = tuple(tokenizer.encode("Hello."))
    oh = tuple(tokenizer.encode("Oh"))
    assert replies == [
        Reply(contains="hi", ids=hello, chunks=(2, 1), delay=0.05),
        Reply(ids=(5, 6), finish="length"),
        Reply(ids=(), then="garbage"),
        Reply(ids=oh, finish=None, then="kill"),
        Reply(ids=oh, finish="stop", then="kill"),
        Reply(contains="slow", ids=None, delay=0.01),
    ]


def test_the_first_line_that_fits_answers_every_time() -> None:
    first, second, rest = Reply(contains="a"), Reply(contains="b"), Reply()

    assert find_reply([first, second, rest], "cab") is first
    assert find_reply([first, second, rest], "cab") is first
    assert find_reply([first, second, rest], "b") is second
    assert find_reply([first, second, rest], "c") is rest
    assert find_reply([first, second], "c") is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "truncated"),
        ("[]", "Expected `object`"),
        ('{"txet": "a"}', "unknown field `txet`"),
        ('{"finish": "never"}', "Invalid enum value 'never'"),
        ('{"then": 3}', "Expected `str | null`"),
        ('{"chunks": []}', "length >= 1"),
        ('{"chunks": [0]}', "a number above 0"),
        ('{"token_ids": [-1]}', ">= 0"),
        ('{"text": "a", "token_ids": [1]}', "exclude each other"),
        ('{"delay_ms": -1}', ">= 0"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, tokenizer: Tokenizer, line: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, tokenizer, '{"text": "fine"}\n' + line + "\n")

    assert "replies.jsonl, line 2: " in str(caught.value)
    assert message in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"--replies: cannot read .*nowhere"):
        load_replies(tmp_path / "nowhere", tokenizer)
