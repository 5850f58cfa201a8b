from __future__ import annotations

from itertools import islice
from typing import Any

import msgspec
import pytest

from smgd.sim.generation import Generation, Script
from smgd.sim.model import Model
from smgd.sim.outputs import Output
from smgd.sim.replies import Reply
from smgd.sim.wire import SamplingParams

EOS = 2
PROMPT = [7, 8, 9]
STOP, LENGTH, ABORT, ERROR, REPETITION = range(5)


def params(**fields: Any) -> SamplingParams:
    """Return parameters as they come off the wire, greedy unless said otherwise."""
    return msgspec.convert({"temperature": 0.0, **fields}, SamplingParams)


def generation(
    model: Model,
    sampling: SamplingParams,
    script: Script | None = None,
    *,
    max_model_len: int = 1000,
    min_tokens_first: bool = False,
) -> Generation:
    return Generation(
        "r",
        PROMPT,
        sampling,
        model,
        script or Script(),
        max_model_len=max_model_len,
        min_tokens_first=min_tokens_first,
    )


def finish(run: Generation) -> Output:
    """Make steps until the request has finished; return the last output."""
    for output in iter(run.step, None):
        if output.finish is not None:
            return output
    raise AssertionError


def test_the_end_token_stops_without_a_reason(model: Model) -> None:
    run = generation(model, params(max_tokens=900, _eos_token_id=EOS))

    last = finish(run)

    assert (last.finish, last.stop_reason) == (STOP, None)
    assert last.ids == [EOS]


def test_a_stop_id_is_the_reason_unless_it_is_the_end_token(model: Model) -> None:
    by_id = finish(generation(model, params(max_tokens=900, stop_token_ids=[EOS])))
    by_both = params(max_tokens=900, stop_token_ids=[EOS], _eos_token_id=EOS)

    assert (by_id.finish, by_id.stop_reason) == (STOP, EOS)
    assert finish(generation(model, by_both)).stop_reason is None


def test_without_the_end_token_only_length_stops(model: Model) -> None:
    run = generation(model, params(max_tokens=900))

    assert finish(run).finish == LENGTH
    assert len(run.output_ids) == 900
    assert EOS in run.output_ids


def test_max_tokens_is_16_by_default_and_the_context_is_a_limit_too(model: Model) -> None:
    by_default = generation(model, params())
    by_context = generation(model, params(max_tokens=50), max_model_len=13)

    assert finish(by_default).finish == finish(by_context).finish == LENGTH
    assert len(by_default.output_ids) == 16
    assert len(by_context.output_ids) == 10


def test_stopping_comes_before_length(model: Model) -> None:
    (first,) = generation(model, params(max_tokens=1)).step().ids

    assert generation(model, params(max_tokens=1, stop_token_ids=[first])).step().finish == STOP


def test_min_tokens_masks_what_stops(model: Model) -> None:
    free = generation(model, params(max_tokens=900, _eos_token_id=EOS))
    finish(free)
    length = len(free.output_ids)
    sampling = params(
        max_tokens=900, min_tokens=length + 1, _eos_token_id=EOS, _all_stop_token_ids=[EOS]
    )

    run = generation(model, sampling)
    finish(run)

    assert run.output_ids[: length - 1] == free.output_ids[:-1]
    assert EOS not in run.output_ids[:length]


@pytest.mark.parametrize("is_old", [False, True])
def test_the_versions_differ_if_the_mask_is_missing(model: Model, is_old: bool) -> None:
    sampling = params(max_tokens=900, min_tokens=899, _eos_token_id=EOS)

    run = generation(model, sampling, min_tokens_first=is_old)
    finish(run)

    assert (len(run.output_ids) >= 899) is is_old


def test_repetition_is_detected(model: Model) -> None:
    rule = {"max_pattern_size": 3, "min_pattern_size": 2, "min_count": 3}
    script = Script([5, 6, 7] * 4, "cut off")

    run = generation(model, params(max_tokens=90, repetition_detection=rule), script)

    last = finish(run)
    assert (last.finish, last.stop_reason) == (REPETITION, "repetition_detected")
    assert run.output_ids == [5, 6, 7] * 3


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("stop", [([5, 6], None), ([EOS], STOP)]),
        ("length", [([5, 6], LENGTH)]),
        ("abort", [([5, 6], None), ([], ABORT)]),
        ("error", [([5, 6], None), ([], ERROR)]),
    ],
)
def test_scripts_end_as_they_say(model: Model, end: Any, expected: list[Any]) -> None:
    reply = Reply(ids=(5, 6), chunks=(2,), finish=end)

    run = generation(model, params(max_tokens=90), Script.of(reply, EOS))

    outputs = [run.step() for _ in expected]
    assert [(output.ids, output.finish) for output in outputs] == expected


def test_a_script_of_nothing_ends_at_once(model: Model) -> None:
    only_eos = generation(model, params(), Script.of(Reply(ids=()), EOS)).step()
    nothing = generation(model, params(), Script.of(Reply(ids=(), finish="length"), EOS)).step()

    assert (only_eos.ids, only_eos.finish) == ([EOS], STOP)
    assert (nothing.ids, nothing.finish) == ([], LENGTH)


def test_scripts_obey_the_limits_of_the_request(model: Model) -> None:
    script = Script.of(Reply(ids=(5, 6, 7, 8)), EOS)

    run = generation(model, params(max_tokens=3), script)

    assert finish(run).finish == LENGTH
    assert run.output_ids == [5, 6, 7]


def test_chunks_set_the_rhythm(model: Model) -> None:
    reply = Reply(ids=tuple(range(10, 19)), chunks=(3, 0, 1))

    run = generation(model, params(max_tokens=90), Script.of(reply, EOS))

    sizes = [len(run.step().ids) for _ in range(7)]
    assert sizes == [3, 0, 1, 3, 0, 1, 2]
    assert run.output_ids[-1] == EOS


def test_after_a_free_script_the_model_goes_on(model: Model) -> None:
    run = generation(model, params(max_tokens=30), Script([5, 6]))
    finish(run)
    alone = Generation(
        "r", [*PROMPT, 5, 6], params(max_tokens=28), model, Script(),
        max_model_len=1000, min_tokens_first=False,
    )  # fmt: skip
    finish(alone)

    assert run.output_ids == [5, 6, *alone.output_ids]


def test_logprobs_of_a_scripted_token_are_the_models(model: Model) -> None:
    script = Script([4000], "stop")

    output = generation(model, params(logprobs=2), script).step()

    assert output.logprobs is not None
    ((ids, logprobs, rank),) = output.logprobs
    assert ids[0] == 4000
    assert rank > 2
    assert logprobs[0] < logprobs[2] < logprobs[1] <= 0


def test_all_logprobs_means_the_whole_vocabulary(model: Model) -> None:
    output = generation(model, params(logprobs=-1)).step()

    assert output.logprobs is not None
    ((ids, _, rank),) = output.logprobs
    assert len(ids) == model.vocab_size + 1
    assert ids[rank] == ids[0] == output.ids[0]


def test_prompt_logprobs_have_a_row_for_all_tokens_but_the_first(model: Model) -> None:
    rows = generation(model, params(prompt_logprobs=1)).prompt_logprobs()

    assert rows is not None
    assert [row[0][0] for row in rows] == PROMPT[1:]
    assert {len(row[0]) for row in rows} == {2}
    assert generation(model, params()).prompt_logprobs() is None


def test_every_token_has_its_row(model: Model) -> None:
    script = Script.of(Reply(chunks=(4,), ids=None), EOS)

    output = generation(model, params(logprobs=0), script).step()

    assert output.logprobs is not None
    assert [row[0] for row in output.logprobs] == [[token] for token in output.ids]
    assert len(list(islice(output.ids, 5))) == 4
