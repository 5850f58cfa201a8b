from __future__ import annotations

from typing import Any

import msgspec
import pytest

from smgd.sim.faults import MainLoopError
from smgd.sim.poison import Limits
from smgd.sim.wire import AddRequest

LIMITS = Limits(max_model_len=20, vocab_size=100)


def request(ids: list[int] | None, pooling: Any = None, **sampling: Any) -> AddRequest:
    fields = ["r", ids, None, None if pooling else sampling, pooling, 0.0, None, None, None]
    return msgspec.convert(fields, AddRequest)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"stop_token_ids": [100]},  # harmless without min_tokens
        {"stop_token_ids": [99], "min_tokens": 1},
        {"allowed_token_ids": []},
        {"logprobs": 100},
        {"logprobs": -1},
    ],
)
def test_what_the_engine_survives(sampling: dict[str, Any]) -> None:
    prompt, params = LIMITS.check(request([0, 99] + [5] * 17, **sampling))

    assert len(prompt) == 19
    assert params.max_tokens == 16


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request([]), "islice"),
        (request(None), "islice"),
        (request([5] * 20), "exceed the max model length"),
        (request([5] * 21), r"shape \(21,\) into shape \(20,\)"),
        (request([5, 100]), "index out of range"),
        (request([5, -1]), "index out of range"),
        (request([5], stop_token_ids=[100], min_tokens=1), "out of bounds"),
        (request([5], _all_stop_token_ids=[100], min_tokens=1), "out of bounds"),
        (request([5], logit_bias={100: 1.0}), "out of bounds"),
        (request([5], allowed_token_ids=[100]), "out of bounds"),
        (request([5], logprob_token_ids=[100]), "out of bounds"),
        (request([5], logprobs=101), "index k"),
        (request([5], prompt_logprobs=101), "index k"),
        (request([5], pooling=[None]), "Unsupported task"),
    ],
)
def test_what_kills_it(bad: AddRequest, message: str) -> None:
    with pytest.raises(MainLoopError, match=message):
        LIMITS.check(bad)
