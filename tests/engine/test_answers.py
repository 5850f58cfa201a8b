"""What a client gets from a real engine: right texts, right counts, and every parameter at work.

The measure for texts is transformers, which shares nothing with the path that is tested.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.engine.rig import BLOCK_SIZE, MAX_MODEL_LEN, MODEL_NAME, Engine, Gateway, wait_until

CAPITAL = "What is the capital of France?"
PARIS = 7042  # " Paris"
ANSWER = "The capital of France is Paris."

# Chats of which the reference is sure (`margins`), so that another way of rounding changes nothing.
CHATS: dict[str, dict[str, Any]] = {
    "one": {"messages": [{"role": "user", "content": CAPITAL}], "max_tokens": 32},
    "long": {
        "messages": [{"role": "user", "content": "List the months of the year."}],
        "max_tokens": 40,
    },
    "cut": {
        "messages": [{"role": "user", "content": "Count from one to ten."}],
        "max_tokens": 40,
    },
    "turns": {
        "messages": [
            {"role": "user", "content": "My name is Anna."},
            {"role": "assistant", "content": "Hello Anna!"},
            {"role": "user", "content": "What is my name?"},
        ],
        "max_tokens": 16,
    },
    # Every emoji is three tokens, and the last one of the answer is cut in two.
    "emoji": {
        "messages": [{"role": "user", "content": "😀 😀 😀 😀 😀 😀"}],
        "max_tokens": 20,
    },
    "accents": {
        "messages": [
            {"role": "system", "content": "You are a helpful AI assistant named SmolLM."},
            {"role": "user", "content": 'Is "naïve café 😀" a word? Answer yes or no.'},
        ],
        "max_tokens": 16,
    },
}

pytestmark = pytest.mark.usefixtures("engine")


@pytest.fixture(scope="session")
def reference(python: Path, model: Path) -> dict[str, dict[str, Any]]:
    """What transformers answers to every chat."""
    done = subprocess.run(
        [python, Path(__file__).with_name("reference.py")],
        input=json.dumps({"model": str(model), "chats": list(CHATS.values())}),
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # more would spin against the engine's
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(CHATS, json.loads(done.stdout), strict=True))


def ask(
    client: openai.OpenAI, content: str = CAPITAL, *, stream: bool = False, **fields: Any
) -> Any:
    """Ask greedily, unless `fields` say otherwise; those that OpenAI does not know go along."""
    return client.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": content}],
        stream=stream,
        extra_body={"temperature": 0, **fields},
    )


def text_of(answer: Any) -> str:
    """Return the text of the only choice."""
    [choice] = answer.choices
    return str(choice.message.content)


# --------------------------------------------------------------------------- against transformers


@pytest.mark.parametrize("name", CHATS)
def test_greedy_is_what_transformers_says(
    name: str, client: openai.OpenAI, reference: dict[str, dict[str, Any]]
) -> None:
    expected = reference[name]
    answer = client.chat.completions.create(
        model=MODEL_NAME, temperature=0, logprobs=True, top_logprobs=2, **CHATS[name]
    )
    [choice] = answer.choices
    assert choice.message.content == expected["text"], expected["margins"]
    assert answer.usage.prompt_tokens == len(expected["prompt_ids"])
    assert answer.usage.completion_tokens == len(expected["ids"])
    assert answer.usage.total_tokens == len(expected["prompt_ids"]) + len(expected["ids"])
    ended = len(expected["ids"]) < CHATS[name]["max_tokens"]
    assert choice.finish_reason == ("stop" if ended else "length")
    assert choice.stop_reason is None


@pytest.mark.parametrize("name", CHATS)
def test_logprobs_are_those_of_the_tokens_that_transformers_generates(
    name: str, client: openai.OpenAI, reference: dict[str, dict[str, Any]]
) -> None:
    expected = reference[name]
    answer = client.chat.completions.create(
        model=MODEL_NAME, temperature=0, logprobs=True, top_logprobs=2, **CHATS[name]
    )
    rows = answer.choices[0].logprobs.content
    shown = [(t, m) for t, m in zip(expected["tokens"], expected["margins"], strict=True)]
    assert len(rows) == len(shown)
    for row, (token, margin) in zip(rows, shown, strict=True):
        assert bytes(row.bytes).decode(errors="replace") == token
        best, second = row.top_logprobs
        assert (best.token, best.logprob) == (row.token, row.logprob)
        assert best.logprob - second.logprob == pytest.approx(margin, abs=0.5)


@pytest.mark.parametrize("name", CHATS)
def test_streamed_is_the_same_as_whole(name: str, client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL_NAME, temperature=0, **CHATS[name])
    chunks = list(
        client.chat.completions.create(
            model=MODEL_NAME,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            **CHATS[name],
        )
    )
    *frames, last = chunks
    assert last.choices == []
    assert last.usage == whole.usage
    assert "".join(f.choices[0].delta.content or "" for f in frames) == text_of(whole)
    assert frames[0].choices[0].delta.role == "assistant"
    reasons = [f.choices[0].finish_reason for f in frames]
    assert reasons == [None] * (len(frames) - 1) + [whole.choices[0].finish_reason]
    assert len({f.id for f in chunks}) == 1


@pytest.mark.parametrize("name", CHATS)
def test_token_ids_as_a_prompt_are_what_the_chat_template_makes_of_the_messages(
    name: str, client: openai.OpenAI, reference: dict[str, dict[str, Any]]
) -> None:
    expected = reference[name]
    answer = client.completions.create(
        model=MODEL_NAME,
        prompt=expected["prompt_ids"],
        max_tokens=CHATS[name]["max_tokens"],
        temperature=0,
    )
    assert answer.choices[0].text == expected["text"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected["prompt_ids"])


@pytest.mark.parametrize("name", CHATS)
def test_tokenize_gives_the_ids_that_the_engine_gets(
    name: str, gateway: Gateway, reference: dict[str, dict[str, Any]]
) -> None:
    expected = reference[name]
    body = {"messages": CHATS[name]["messages"]}
    tokenized = gateway.post("/tokenize", body).json()
    assert tokenized["tokens"] == expected["prompt_ids"]
    assert tokenized["max_model_len"] == MAX_MODEL_LEN
    body = {"tokens": expected["ids"], "skip_special_tokens": True}
    assert gateway.post("/detokenize", body).json()["prompt"] == expected["text"]


def test_the_model_has_the_context_of_the_engine(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, getattr(model, "max_model_len", None)) == (MODEL_NAME, MAX_MODEL_LEN)


def test_a_text_prompt_is_continued_as_it_stands(client: openai.OpenAI) -> None:
    prompts: list[Any] = ["The capital of France is", [504, 3575, 282, 4649, 314]]
    texts = [
        client.completions.create(model=MODEL_NAME, prompt=p, max_tokens=2, temperature=0)
        for p in prompts
    ]
    assert [t.choices[0].text for t in texts] == [" Paris.", " Paris."]
    assert [t.usage and t.usage.prompt_tokens for t in texts] == [5, 5]


def test_many_at_once_get_the_same_as_one_alone(client: openai.OpenAI) -> None:
    """More than the engine runs at a time, so that some wait in its queue."""
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda _: ask(client), range(24)))
    assert {text_of(answer) for answer in answers} == {ANSWER}


# -------------------------------------------------------------------------------------- usage


def test_a_prompt_that_was_seen_before_is_counted_as_cached(client: openai.OpenAI) -> None:
    prompt = f"{time.time_ns()}: " + "The quick brown fox jumps over the lazy dog. " * 40
    first, second, salted = (
        ask(client, prompt, max_tokens=1, cache_salt=salt).usage for salt in (None, None, "mine")
    )
    blocks = (second.prompt_tokens - 1) // BLOCK_SIZE
    assert blocks >= 2
    assert first.prompt_tokens_details.cached_tokens < BLOCK_SIZE
    assert second.prompt_tokens_details.cached_tokens == blocks * BLOCK_SIZE
    assert salted.prompt_tokens_details.cached_tokens == 0


def test_choices_share_the_prompt_in_usage(client: openai.OpenAI) -> None:
    usage = ask(client, n=3, temperature=1, max_tokens=4, ignore_eos=True).usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (37, 12)


def test_continuous_usage_counts_up(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(ask(client, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[-1], chunks[-1].usage.prompt_tokens) == (8, 37)


# ---------------------------------------------------------------------------------- where it ends


def test_eos_ends_an_answer(client: openai.OpenAI) -> None:
    answer = ask(client)
    [choice] = answer.choices
    assert (text_of(answer), choice.finish_reason, choice.stop_reason) == (ANSWER, "stop", None)
    assert answer.usage.completion_tokens == 8


@pytest.mark.parametrize(
    "limits",
    [
        {"max_tokens": 3},
        {"max_completion_tokens": 3},
        {"max_completion_tokens": 3, "max_tokens": 6},
    ],
)
def test_max_tokens_ends_an_answer(limits: dict[str, Any], client: openai.OpenAI) -> None:
    answer = ask(client, **limits)
    assert (text_of(answer), answer.choices[0].finish_reason) == ("The capital of", "length")
    assert answer.usage.completion_tokens == 3


def test_ignore_eos_goes_on(client: openai.OpenAI) -> None:
    answer = ask(client, ignore_eos=True, max_tokens=12)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (12, "length")
    assert text_of(answer).startswith(ANSWER)
    assert "<|im_end|>" not in text_of(answer)
    shown = ask(client, ignore_eos=True, max_tokens=12, skip_special_tokens=False)
    assert text_of(shown).startswith(ANSWER + "<|im_end|>")


def test_min_tokens_holds_eos_back(client: openai.OpenAI) -> None:
    answer = ask(client, min_tokens=20, max_tokens=60)
    assert answer.usage.completion_tokens >= 20
    assert text_of(answer).startswith("The capital of France is Paris")


def test_a_stop_token_ends_an_answer_and_is_not_shown(client: openai.OpenAI) -> None:
    [choice] = ask(client, stop_token_ids=[PARIS, 3]).choices
    assert choice.message.content == "The capital of France is"
    assert (choice.finish_reason, choice.stop_reason) == ("stop", PARIS)


def test_min_tokens_masks_stop_tokens(client: openai.OpenAI) -> None:
    answer = ask(client, stop_token_ids=[PARIS], min_tokens=7, max_tokens=30)
    assert answer.usage.completion_tokens >= 7
    assert "Paris" not in text_of(answer)[: len("The capital of France is Paris")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "matched", "before"),
    [
        (" Paris", " Paris", "The capital of France is"),  # one token: the engine stops by itself
        ("France is P", "France is P", "The capital of "),  # over tokens, and ends within one
        (["ranc", "never"], "ranc", "The capital of F"),
        (["Paris.", "capital of"], "capital of", "The "),
    ],
)
def test_stop_strings(
    stop: str | list[str], matched: str, before: str, stream: bool, client: openai.OpenAI
) -> None:
    """With `ignore_eos` the engine would go on for some ten seconds if it were not told."""
    fields: dict[str, Any] = {"stop": stop, "ignore_eos": True, "max_tokens": 600}
    for included, text in ((False, before), (True, before + matched)):
        began = time.monotonic()
        fields["include_stop_str_in_output"] = included
        if stream:
            choices = [f.choices[0] for f in ask(client, stream=True, **fields)]
            shown = "".join(c.delta.content or "" for c in choices)
        else:
            choices = ask(client, **fields).choices
            shown = choices[0].message.content
        assert shown == text
        assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("stop", matched)
        assert time.monotonic() - began < 3


def test_a_stop_string_frees_the_engine(
    client: openai.OpenAI, engine: Engine, gateway: Gateway
) -> None:
    wait_until(engine.idle, 5, "an idle engine")
    began = time.time()
    answer = ask(client, stop="France is P", ignore_eos=True, max_tokens=1500)
    answered = time.time() - began
    idle = engine.idle_since(began, within=2)
    print(f"the engine was idle {(idle - answered) * 1000:.0f} ms after the answer")
    assert answer.usage.completion_tokens == 6
    assert gateway.gauge("smg_engine_running_requests") == 0


def test_min_tokens_holds_stop_strings_back(client: openai.OpenAI) -> None:
    answer = ask(client, stop=[" of", " Paris"], min_tokens=5)
    assert (text_of(answer), answer.choices[0].stop_reason) == (
        "The capital of France is",
        " Paris",
    )


# ------------------------------------------------------------------------------------- sampling


def test_a_seed_repeats_and_another_differs(client: openai.OpenAI) -> None:
    def story(seed: int) -> str:
        fields: dict[str, Any] = {"temperature": 1.5, "max_tokens": 24, "seed": seed}
        return text_of(ask(client, "Tell me a story.", **fields))

    assert story(11) == story(11)
    assert len({story(11), story(12), story(13)}) == 3


def test_choice_i_has_seed_plus_i(client: openai.OpenAI) -> None:
    # Few tokens: two in a batch round differently from one alone, and in the end that shows.
    fields: dict[str, Any] = {"temperature": 1.5, "max_tokens": 6, "ignore_eos": True}
    both = ask(client, "Tell me a story.", n=2, seed=70, **fields)
    alone = [ask(client, "Tell me a story.", seed=seed, **fields) for seed in (70, 71)]
    assert [c.index for c in both.choices] == [0, 1]
    assert [c.message.content for c in both.choices] == [text_of(a) for a in alone]


def test_streamed_choices_are_told_apart(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"n": 3, "seed": 70, "temperature": 1.5, "max_tokens": 12}
    whole = ask(client, "Tell me a story.", **fields)
    texts, reasons = ["", "", ""], [""] * 3
    for chunk in ask(client, "Tell me a story.", stream=True, **fields):
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] += choice.finish_reason or ""
    assert texts == [c.message.content for c in whole.choices]
    assert reasons == [c.finish_reason for c in whole.choices]


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_a_narrow_choice_is_greedy(narrow: dict[str, Any], client: openai.OpenAI) -> None:
    assert text_of(ask(client, temperature=1.7, seed=5, **narrow)) == ANSWER


@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 1.8}]
)
def test_penalties_end_repetition(penalty: dict[str, Any], client: openai.OpenAI) -> None:
    content = CHATS["emoji"]["messages"][0]["content"]
    plain, other = (
        text_of(ask(client, content, max_tokens=12, **fields)) for fields in ({}, penalty)
    )
    assert plain == "😀😀😀😀"
    assert other != plain


def test_logit_bias_bans_and_forces(client: openai.OpenAI) -> None:
    banned = text_of(ask(client, logit_bias={PARIS: -100}, max_tokens=20))
    assert banned.startswith("The capital of France is")
    assert " Paris" not in banned
    assert text_of(ask(client, logit_bias={PARIS: 100}, max_tokens=3)) == " Paris Paris Paris"


def test_only_allowed_tokens_are_generated(client: openai.OpenAI) -> None:
    answer = ask(client, allowed_token_ids=[PARIS], temperature=1, max_tokens=3)
    assert text_of(answer) == " Paris Paris Paris"


def test_a_conversation_can_be_continued(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL_NAME,
        temperature=0,
        messages=[
            {"role": "user", "content": CAPITAL},
            {"role": "assistant", "content": "The capital of France is"},
        ],
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    assert text_of(answer) == " Paris."
