from __future__ import annotations

from typing import Any

import pytest

from smgd.sim.model import Model
from smgd.sim.pace import Pace
from smgd.sim.replies import Reply
from tests.sim.bench import EOS, Bench, ids_of

PROMPT = [7, 8, 9]


def stats(message: Any) -> tuple[int, int]:
    """Return how many requests run and wait."""
    return message[2]["num_running_reqs"], message[2]["num_waiting_reqs"]


def test_one_step_has_one_token_for_every_request(model: Model) -> None:
    bench = Bench(model)
    for request_id in "abc":
        bench.add(request_id, PROMPT, max_tokens=5)

    (message,) = bench.step()

    assert [(output[0], len(output[1])) for output in message[1]] == [("a", 1), ("b", 1), ("c", 1)]
    assert stats(message) == (3, 0)


def test_the_first_token_and_the_steps_have_their_times(model: Model) -> None:
    bench = Bench(model, pace=Pace(ttft=0.5, itl=0.1))
    bench.add("a", PROMPT, max_tokens=9)
    times = []
    for _ in range(3):
        bench.step()
        times.append(bench.now)

    assert times == pytest.approx([1000.5, 1000.6, 1000.7])


def test_a_new_request_joins_the_steps_of_the_others(model: Model) -> None:
    bench = Bench(model, pace=Pace(ttft=0.15, itl=0.1))
    bench.add("a", PROMPT, max_tokens=9)
    bench.step()
    bench.add("b", PROMPT, max_tokens=9)

    steps = [[output[0] for output in bench.step()[0][1]] for _ in range(3)]

    assert steps == [["a"], ["a", "b"], ["a", "b"]]


def test_a_reply_may_delay_its_first_token(model: Model) -> None:
    replies = [Reply(ids=(5,), delay=2.0)]
    bench = Bench(model, pace=Pace(ttft=0.5), replies=replies)
    bench.add("a", PROMPT, max_tokens=9)

    bench.step()

    assert bench.now == pytest.approx(1002.5)


def test_who_finds_no_room_waits(model: Model) -> None:
    bench = Bench(model, max_num_seqs=2)
    for request_id in "abc":
        bench.add(request_id, PROMPT, temperature=0.0, max_tokens=2)

    first, second, third = (bench.step()[0] for _ in range(3))

    assert (stats(first), stats(second), stats(third)) == ((2, 1), (1, 0), (1, 0))
    assert [output[0] for output in third[1]] == ["c"]
    queued, scheduled = third[1][0][7]
    assert (queued["type"], scheduled["type"]) == (1, 2)


def test_a_request_that_waits_can_be_aborted(model: Model) -> None:
    bench = Bench(model, max_num_seqs=1)
    bench.add("a", PROMPT, max_tokens=2)
    bench.add("b", PROMPT, max_tokens=2)

    assert bench.abort("b") == []
    assert bench.scheduler.live_ids() == {"a"}


def test_an_abort_makes_room_and_says_nothing(model: Model) -> None:
    bench = Bench(model, max_num_seqs=1)
    bench.add("a", PROMPT, max_tokens=50)
    bench.add("b", PROMPT, max_tokens=50)
    bench.step()

    assert bench.abort("a", "unknown") == []
    (message,) = bench.step()

    assert [output[0] for output in message[1]] == ["b"]
    assert bench.scheduler.counters.abort_ids == ["a", "unknown"]


def test_an_abort_of_unknown_ids_says_nothing(model: Model) -> None:
    assert Bench(model).abort("unknown") == []


def test_one_message_reports_that_nothing_runs(model: Model) -> None:
    bench = Bench(model)
    bench.add("a", PROMPT, max_tokens=1)

    last, idle = bench.step()

    assert last[1][0][5] == 1
    assert (stats(last), stats(idle)) == ((0, 0), (0, 0))
    assert idle[1] == []
    assert bench.core.next_step_at() is None


def test_two_requests_with_one_id_kill_it(model: Model) -> None:
    bench = Bench(model, max_num_seqs=1)
    bench.add("a", PROMPT)
    bench.add("b", PROMPT)

    bench.add("b", PROMPT)

    (breakdown,) = bench.breakdowns
    assert breakdown.kind == "dead"
    assert "duplicate request id b" in breakdown.reason


def test_an_id_may_be_used_again(model: Model) -> None:
    bench = Bench(model)
    for _ in range(2):
        bench.add("a", PROMPT, max_tokens=1)
        bench.run("a")

    assert bench.breakdowns == []


def test_deadly_prompts_that_wait_kill_it_when_they_are_scheduled(model: Model) -> None:
    bench = Bench(model, max_num_seqs=1)
    bench.add("a", PROMPT, max_tokens=1)
    bench.add("b", [])
    assert bench.breakdowns == []

    bench.step()

    assert [breakdown.kind for breakdown in bench.breakdowns] == ["dead"]


def test_the_same_prompt_gets_the_same_answer_whoever_runs_beside_it(model: Model) -> None:
    alone, crowded = Bench(model), Bench(model)
    alone.add("a", PROMPT, temperature=0.0, max_tokens=40)
    for other in range(5):
        crowded.add(f"o{other}", [other + 10], max_tokens=3 * other + 1)
    crowded.add("a", PROMPT, temperature=0.0, max_tokens=40)

    assert ids_of(alone.run("a")) == ids_of(crowded.run("a"))


def test_output_counts_as_prefix_of_the_next_turn(model: Model) -> None:
    bench = Bench(model)
    prompt = list(range(100, 120))
    bench.add("a", prompt, temperature=0.0, max_tokens=30)
    said = ids_of(bench.run("a"))

    bench.add("b", [*prompt, *said, 5], max_tokens=1)
    ((first,),) = [bench.run("b")]

    assert first[11]["num_cached_tokens"] == 48
    assert first[11]["num_computed_tokens"] == 3


@pytest.mark.parametrize("sampling", [{"skip_reading_prefix_cache": True}, {"prompt_logprobs": 0}])
def test_some_requests_do_not_read_the_prefix_cache(model: Model, sampling: Any) -> None:
    bench = Bench(model)
    prompt = list(range(100, 140))
    bench.add("a", prompt, max_tokens=1)
    bench.run("a")

    bench.add("b", prompt, max_tokens=1, **sampling)
    message, _ = bench.step()

    assert message[1][0][11]["num_cached_tokens"] == 0
    assert message[2]["prefix_cache_stats"]["requests"] == 0


def test_a_salt_separates_prefixes(model: Model) -> None:
    bench = Bench(model)
    prompt = list(range(100, 140))
    bench.add("a", prompt, max_tokens=1)
    bench.run("a")

    bench.call("reset_prefix_cache")
    bench.add("b", prompt, max_tokens=1)

    assert bench.run("b")[0][11]["num_cached_tokens"] == 0


def test_replies_are_found_by_the_decoded_prompt(model: Model) -> None:
    prompt = model.codec.encode("<|im_start|>user\nPlease greet me<|im_end|>\n")
    replies = [
        Reply(contains="nothing like it", ids=(1,)),
        Reply(contains="<|im_start|>user\nPlease", ids=(5, 6, 7), chunks=(2,)),
    ]
    bench = Bench(model, replies=replies)
    for request_id in "ab":
        bench.add(request_id, prompt, max_tokens=9, _eos_token_id=EOS)

    outputs = bench.run("a")

    assert [output[1] for output in outputs] == [[5, 6], [7, EOS]]
    assert outputs[-1][5:7] == [0, None]


def test_a_reply_without_an_end_token_uses_the_models(model: Model) -> None:
    bench = Bench(model, replies=[Reply(ids=(5,))])
    bench.add("a", PROMPT, max_tokens=9)

    assert ids_of(bench.run("a")) == [5, EOS]


@pytest.mark.parametrize(
    ("then", "kind"), [("exit", "exit"), ("kill", "kill"), ("hang", "hang"), ("sentinel", "dead")]
)
def test_replies_may_end_the_engine_in_mid_answer(model: Model, then: Any, kind: str) -> None:
    bench = Bench(model, replies=[Reply(ids=(5, 6), finish=None, then=then)])
    bench.add("a", PROMPT, max_tokens=9)

    (first,), (second,) = bench.step(), bench.step()

    assert [first[1][0][1], second[1][0][1]] == [[5], [6]]
    assert second[1][0][5] is None
    assert [breakdown.kind for breakdown in bench.breakdowns] == [kind]


def test_a_reply_may_end_the_engine_after_the_answer(model: Model) -> None:
    bench = Bench(model, replies=[Reply(ids=(5,), chunks=(2,), then="exit")])
    bench.add("a", PROMPT, max_tokens=9, _eos_token_id=EOS)

    message, _ = bench.step()

    assert message[1][0][5] == 0
    assert [breakdown.kind for breakdown in bench.breakdowns] == ["exit"]


def test_structured_text_obeys_its_rule(model: Model) -> None:
    bench = Bench(model)
    rule = {"regex": "(Paris|London)", "_backend": "xgrammar"}
    bench.add("a", PROMPT, max_tokens=20, _eos_token_id=EOS, structured_outputs=rule)

    outputs = bench.run("a")

    assert model.codec.decode(ids_of(outputs)) == "Paris"
    assert outputs[-1][5] == 0


def test_structured_text_without_an_end_token_runs_on(model: Model) -> None:
    bench = Bench(model)
    rule = {"json_object": True, "_backend": "guidance"}
    bench.add("a", PROMPT, max_tokens=40, structured_outputs=rule)

    outputs = bench.run("a")

    assert model.codec.decode(ids_of(outputs)).startswith('{"answer": "simulated"}')
    assert outputs[-1][5] == 1


def test_the_first_structured_request_chooses_the_backend(model: Model) -> None:
    bench = Bench(model)
    guided = {"choice": ["yes"], "_backend": "guidance"}
    bench.add("a", PROMPT, structured_outputs=guided, _eos_token_id=EOS)
    bench.run("a")

    bench.add("b", PROMPT, structured_outputs={**guided, "_backend": "xgrammar"}, _eos_token_id=EOS)

    assert bench.run("b")[-1][5] == 0


def test_a_rule_that_is_not_understood_is_answered_freely(model: Model) -> None:
    free, ruled = Bench(model), Bench(model)
    rule = {"regex": "[a-z]{300}", "_backend": "xgrammar"}
    free.add("a", PROMPT, temperature=0.0)
    ruled.add("a", PROMPT, temperature=0.0, structured_outputs=rule)

    assert ids_of(ruled.run("a")) == ids_of(free.run("a"))
