from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from smgd.sim.model import MIN_RUN, Model, Rules, Sequence
from smgd.sim.prose import SENTENCES
from smgd.text.tokenizer import Tokenizer

EOS = 2
GREEDY = Rules(temperature=0.0)

prompts = st.lists(st.integers(3, 4000), min_size=1, max_size=40)
rules = st.builds(
    Rules,
    temperature=st.sampled_from([0.0, 0.7, 2.0]),
    seed=st.none() | st.integers(-5, 2**63),
    top_k=st.sampled_from([0, 1, 3]),
    top_p=st.sampled_from([1.0, 0.6]),
    bias=st.dictionaries(st.integers(0, 4000), st.floats(-100, 100), max_size=3),
)


def chat(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")


def speak(model: Model, prompt: list[int], rules: Rules = GREEDY) -> Iterator[int]:
    sequence = Sequence(model, prompt, rules)
    while True:
        token = sequence.propose()
        yield token
        sequence.append(token)


def answer(model: Model, prompt: list[int], rules: Rules = GREEDY) -> list[int]:
    ids: list[int] = []
    for token in speak(model, prompt, rules):
        ids.append(token)
        if token == EOS:
            break
    return ids


@settings(deadline=None, max_examples=60)
@given(prompt=prompts, rules=rules, cut=st.integers(1, 70))
def test_a_text_that_was_cut_goes_on_as_it_would_have(
    model: Model, prompt: list[int], rules: Rules, cut: int
) -> None:
    whole = list(islice(speak(model, prompt, rules), 80))

    rest = list(islice(speak(model, prompt + whole[:cut], rules), 80 - cut))

    assert rest == whole[cut:]


def test_answers_end_after_some_sentences(model: Model, tokenizer: Tokenizer) -> None:
    answers = [answer(model, chat(tokenizer, f"Question {i}")) for i in range(60)]

    lengths = [len(ids) for ids in answers]
    assert min(lengths) > MIN_RUN
    assert max(lengths) < 1000
    assert len({tuple(ids) for ids in answers}) > 50
    for ids in answers:
        assert tokenizer.decode(ids[:-1])[-1] in '.?!"'


def test_answers_are_readable(model: Model, tokenizer: Tokenizer) -> None:
    words = {word for sentence in SENTENCES for word in sentence.split()}

    text = tokenizer.decode(list(islice(speak(model, chat(tokenizer, "Tell me all")), 4000)))

    assert "\ufffd" not in text
    said = text.split()
    assert sum(word in words for word in said) > 0.97 * len(said)
    assert "\n" in text


def test_every_id_of_the_prompt_matters(model: Model, tokenizer: Tokenizer) -> None:
    prompt = chat(tokenizer, "What is the capital of France?")
    other = [prompt[1], prompt[0], *prompt[2:]]

    assert answer(model, prompt) != answer(model, other)


def test_seeds_of_engine_and_request_change_the_text(model: Model, tokenizer: Tokenizer) -> None:
    prompt = chat(tokenizer, "Hello")
    other_engine = Model(tokenizer, vocab_size=4096, eos_token_id=EOS, seed=1)
    warm = [Rules(temperature=1.0, seed=seed) for seed in (None, 1, 2, -1)]

    texts = {tuple(answer(model, prompt, rule)) for rule in warm}

    assert len(texts) == 4
    assert answer(model, prompt, warm[1]) == answer(model, prompt, warm[1])
    assert answer(other_engine, prompt) != answer(model, prompt)


def test_a_seed_means_nothing_to_a_greedy_request(model: Model) -> None:
    seeded = Rules(temperature=0.0, seed=5)

    assert answer(model, [7, 8, 9], seeded) == answer(model, [7, 8, 9])


def test_without_an_end_token_a_text_never_ends(tokenizer: Tokenizer) -> None:
    endless = Model(tokenizer, vocab_size=4096, eos_token_id=None)

    assert EOS not in islice(speak(endless, [7, 8, 9]), 2000)


def test_who_overhears_the_end_token_goes_on(model: Model) -> None:
    ids = list(islice(speak(model, [7, 8, 9]), 3000))

    assert ids.count(EOS) > 5
    assert EOS not in ids[:MIN_RUN]


@settings(deadline=None, max_examples=30)
@given(prompt=prompts)
def test_probabilities_are_those_of_a_distribution(model: Model, prompt: list[int]) -> None:
    distribution = Sequence(model, prompt, GREEDY).distribution()
    ids = list(distribution.ids())

    assert sorted(ids) == list(range(model.vocab_size))
    assert [distribution.rank(token) for token in ids] == list(range(1, model.vocab_size + 1))
    logprobs = [distribution.logprob(rank) for rank in range(1, model.vocab_size + 1)]
    assert logprobs == sorted(logprobs, reverse=True)
    assert math.fsum(map(math.exp, logprobs)) == pytest.approx(1.0)


def test_a_greedy_token_has_rank_1_and_rows_agree(model: Model) -> None:
    sequence = Sequence(model, [7, 8, 9], GREEDY)
    distribution = sequence.distribution()
    token = sequence.propose()

    ids, logprobs, rank = distribution.row(token, 3)
    some = distribution.row_of(ids[2], [ids[3], token])

    assert rank == 1
    assert ids[:2] == [token, token]
    assert logprobs[0] == logprobs[1] > logprobs[2] > logprobs[3]
    assert some == ([ids[2], ids[3], token], [logprobs[2], logprobs[3], logprobs[0]], 2)


def test_the_whole_prompt_can_be_looked_back_on(model: Model) -> None:
    said = list(islice(speak(model, [7, 8, 9]), 40))
    live = Sequence(model, [7, 8, 9], GREEDY)
    rows = []
    for token in said:
        rows.append(live.distribution().row(token, 2))
        live.append(token)

    passed = Sequence(model, [7, 8, 9, *said], GREEDY, whole=True).passed

    assert [distribution.row(token, 2) for token, distribution in passed[3:]] == rows


def test_bias_pulls_and_pushes(model: Model) -> None:
    favourite = Rules(temperature=0.0, bias={77: 100.0})
    usual = next(speak(model, [7, 8, 9]))
    banned = Rules(temperature=0.0, bias={usual: -100.0})

    assert list(islice(speak(model, [7, 8, 9], favourite), 3)) == [77, 77, 77]
    assert next(speak(model, [7, 8, 9], banned)) != usual


def test_only_allowed_ids_are_said(model: Model) -> None:
    allowed = Rules(temperature=1.0, allowed=[5, 6, 7])

    assert set(islice(speak(model, [7, 8, 9], allowed), 60)) == {5, 6, 7}


def test_bad_words_are_not_said(model: Model) -> None:
    first, second, third = islice(speak(model, [7, 8, 9]), 3)

    one = list(islice(speak(model, [7, 8, 9], Rules(temperature=0.0, bad_words=[[first]])), 50))
    three = Rules(temperature=0.0, bad_words=[[first, second, third]])
    said = list(islice(speak(model, [7, 8, 9], three), 3))

    assert first not in one
    assert said[:2] == [first, second]
    assert said[2] != third


def test_masked_ids_are_not_said(model: Model) -> None:
    sequence = Sequence(model, [7, 8, 9], GREEDY)
    usual = sequence.propose()

    assert sequence.propose([usual]) != usual


@pytest.mark.parametrize(
    "narrow", [Rules(top_k=1), Rules(top_p=0.01), Rules(min_p=1.0)], ids=["top_k", "top_p", "min_p"]
)
def test_narrow_sampling_is_greedy(model: Model, narrow: Rules) -> None:
    assert answer(model, [7, 8, 9], narrow) == answer(model, [7, 8, 9])


class Foreign:
    """A tokenizer of quite another kind: single characters, with a mark for spaces."""

    def __init__(self) -> None:
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", fuse_unk=True))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        backend.decoder = tokenizers.decoders.Metaspace()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=600, special_tokens=["<unk>", "</s>"], show_progress=False
        )
        backend.train_from_iterator([*SENTENCES, "\n"], trainer=trainer)
        self.backend = backend

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)


def test_it_speaks_with_any_tokenizer() -> None:
    codec = Foreign()
    model = Model(codec, vocab_size=600, eos_token_id=1)

    text = codec.decode(list(islice(speak(model, codec.encode("Say something.")), 600)))

    words = {word for sentence in SENTENCES for word in sentence.split()}
    said = text.split()
    assert sum(word in words for word in said) > 0.7 * len(said)
