"""The text pipeline: one machine for streams and whole answers, exact counts, one finish."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smgd.core import (
    CallStart,
    Content,
    Delta,
    Event,
    Finish,
    FinishReason,
    GenerationRequest,
    OutputWishes,
    Parser,
    Piece,
    Reasoning,
    Sampling,
    Special,
    StopRules,
    TokenLogprobs,
)
from smgd.text.pipeline import PipelineOutput, TextPipeline
from smgd.text.vocab import Vocabulary
from tests.text import small


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(small.byte_level())


def tok(text: str) -> list[int]:
    """One token for each byte; special and other added tokens are taken whole."""
    ids: list[int] = []
    for part in small.byte_level().pre_tokenizer.pre_tokenize_str(text):
        ids += [small.id_of(small.byte_level(), char) for char in part[0]]
    return ids


def special(text: str) -> int:
    return small.id_of(small.byte_level(), text)


END = special("<|end|>")
CALL = special("<|call|>")


def request(
    *strings: str,
    include: bool = False,
    token_strings: dict[int, str] | None = None,
    output: OutputWishes | None = None,
    prompt_ids: list[int] | None = None,
    **sampling: Any,
) -> GenerationRequest:
    return GenerationRequest(
        id="r",
        model="m",
        prompt_ids=prompt_ids or [1],
        sampling=Sampling(max_tokens=100, **sampling),
        stop=StopRules(strings, include, token_strings or {}),
        output=output or OutputWishes(),
    )


class Toy:
    """A parser: a `<|call|>` switches between content and reasoning; one character lags."""

    def __init__(self) -> None:
        self.thinking = False
        self.held = ""

    def feed(self, pieces: list[Piece]) -> list[Event]:
        assert pieces
        events: list[Event] = []
        for piece in pieces:
            if isinstance(piece, Special):
                events += self.finish()
                self.thinking ^= piece.id == CALL
                continue
            assert piece
            text, self.held = (self.held + piece)[:-1], (self.held + piece)[-1:]
            events += self._event(text)
        return events

    def finish(self) -> list[Event]:
        held, self.held = self.held, ""
        return self._event(held)

    def _event(self, text: str) -> list[Event]:
        if not text:
            return []
        return [Reasoning(text) if self.thinking else Content(text)]


def joined(events: Sequence[Event]) -> list[Event]:
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, Content) and isinstance(last, Content):
            merged[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            merged[-1] = Reasoning(last.text + event.text)
        else:
            merged.append(event)
    return merged


def row(token_id: int) -> TokenLogprobs:
    return TokenLogprobs([token_id], [-0.5], 1)


class Seen:
    """All that a client would have seen of a run."""

    def __init__(self, pipeline: TextPipeline, deltas: Sequence[Delta]) -> None:
        outputs = [pipeline.feed(delta) for delta in deltas]
        self.outputs = outputs
        self.text = "".join(output.text for output in outputs)
        self.events = joined([event for output in outputs for event in output.events])
        self.finishes = [output.finish for output in outputs if output.finish]
        self.aborts = [output.abort for output in outputs].count(True)
        self.token_ids = [i for output in outputs for i in output.token_ids]
        self.rows = [r for output in outputs for r in output.logprobs]
        self.tokens = pipeline.completion_tokens

    def all_but_abort(self) -> tuple[Any, ...]:
        return (
            self.text, self.events, self.finishes, self.token_ids, self.rows, self.tokens,
        )  # fmt: skip


def deltas(
    chunks: Sequence[list[int]],
    finish: FinishReason | None = None,
    stop_reason: int | str | None = None,
) -> list[Delta]:
    """Make the outputs of an engine; the last one ends the sequence."""
    made = [Delta(ids, logprobs=[row(i) for i in ids]) for ids in chunks]
    made[-1].finish, made[-1].stop_reason = finish, stop_reason
    return made


def run(
    asked: GenerationRequest,
    ids: Sequence[int],
    finish: FinishReason | None = "length",
    *,
    parser: Parser | None = None,
    stop_reason: int | str | None = None,
) -> Seen:
    """Feed ids one by one."""
    pipeline = TextPipeline(vocabulary(), asked, parser)
    return Seen(pipeline, deltas([[i] for i in ids], finish, stop_reason))


# ------------------------------------------------------------------------------ any batching


IDS = st.lists(
    st.one_of(
        st.sampled_from([tok(c)[0] for c in "ab<"]),
        st.sampled_from([END, CALL, *tok("é"), special("<tool>"), 10_000]),
        st.integers(0, 430),
    ),
    max_size=20,
)
STOPS = st.lists(st.text(alphabet="ab<>éend|tol", min_size=1, max_size=4), max_size=3)


@given(
    ids=IDS,
    cuts=st.lists(st.integers(0, 20), max_size=6),
    strings=STOPS,
    include=st.booleans(),
    skip=st.booleans(),
    min_tokens=st.integers(0, 6),
    finish=st.sampled_from(["stop", "length", "abort"]),
    parsed=st.booleans(),
)
def test_any_batching_gives_the_same(
    ids: list[int],
    cuts: list[int],
    strings: list[str],
    include: bool,
    skip: bool,
    min_tokens: int,
    finish: FinishReason,
    parsed: bool,
) -> None:
    asked = request(
        *strings,
        include=include,
        min_tokens=min_tokens,
        stop_token_ids=tok("b"),
        output=OutputWishes(skip_special_tokens=skip, logprobs=0),
    )
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    # No empty parts: the token that stops an engine comes with its last word.
    chunks = [ids[a:b] for a, b in pairwise(bounds) if a < b] or [[]]
    seen = [
        Seen(TextPipeline(vocabulary(), asked, Toy() if parsed else None), deltas(cut, finish))
        for cut in (chunks, [ids], [[i] for i in ids] or [[]])
    ]
    assert seen[0].all_but_abort() == seen[1].all_but_abort() == seen[2].all_but_abort()
    for each in seen:
        assert len(each.finishes) == 1
        assert each.tokens == len(each.token_ids) == len(each.rows)
        assert each.token_ids == ids[: each.tokens]
        assert each.aborts <= (each.finishes[0].reason == "stop")
        if parsed:
            assert each.events[-1] == each.finishes[0]
            assert [event for event in each.events if isinstance(event, Finish)] == each.finishes


@given(ids=IDS, skip=st.booleans())
def test_without_stops_the_text_is_what_decode_gives(ids: list[int], skip: bool) -> None:
    asked = request(output=OutputWishes(skip_special_tokens=skip))
    seen = run(asked, ids or [10_000])
    assert seen.text == vocabulary().backend.decode(ids, skip_special_tokens=skip)


# ----------------------------------------------------------------------------- stop strings


def test_a_stop_string_ends_the_sequence_and_tells_the_engine_once() -> None:
    asked = request("lo w", output=OutputWishes(logprobs=0))
    seen = run(asked, tok("hello world"), None)
    assert seen.text == "hel"
    assert seen.finishes == [Finish("stop", "lo w")]
    assert seen.aborts == 1
    assert seen.tokens == len("hello w")
    assert seen.rows == [row(i) for i in tok("hello w")]


def test_tokens_after_the_one_that_completed_the_stop_do_not_count() -> None:
    pipeline = TextPipeline(vocabulary(), request("lo w", output=OutputWishes(logprobs=0)))
    seen = Seen(pipeline, deltas([tok("hello world, how are you")]))
    assert (seen.text, seen.tokens, seen.aborts) == ("hel", len("hello w"), 1)
    assert seen.token_ids == tok("hello w")
    assert seen.rows == [row(i) for i in tok("hello w")]


def test_a_stop_string_may_be_kept() -> None:
    seen = run(request("lo w", include=True), tok("hello world"), None)
    assert (seen.text, seen.finishes) == ("hello w", [Finish("stop", "lo w")])


@pytest.mark.parametrize("finish", ["length", "stop", "abort"])
def test_a_stop_string_wins_over_the_engines_own_word(finish: FinishReason) -> None:
    seen = run(request("end"), tok("the end"), finish)
    assert (seen.text, seen.finishes) == ("the ", [Finish("stop", "end")])
    assert seen.aborts == 0  # the engine knows that it is over


def test_what_was_held_for_a_stop_string_is_given_at_the_end() -> None:
    seen = run(request("never"), tok("I nev"))
    assert [output.text for output in seen.outputs] == ["I", " ", "", "", "nev"]
    assert seen.finishes == [Finish("length")]


@pytest.mark.parametrize(
    ("min_tokens", "text"),
    [(0, "a"), (2, "a"), (3, "axb"), (4, "axb"), (5, "axbxbx"), (6, "axbxbx")],
)
def test_stops_count_only_after_min_tokens(min_tokens: int, text: str) -> None:
    """A stop string must end after the first `min_tokens` tokens; it may begin in them."""
    seen = run(request("xb", min_tokens=min_tokens), tok("axbxbx"), "length")
    assert seen.text == text


def test_after_the_end_everything_is_ignored() -> None:
    pipeline = TextPipeline(vocabulary(), request("b"))
    assert pipeline.feed(Delta(tok("ab"))).finish == Finish("stop", "b")
    assert pipeline.feed(Delta(tok("abc"), finish="length")) == PipelineOutput()
    assert pipeline.feed_text(tok("abc")) == ""
    assert pipeline.completion_tokens == 2


# ------------------------------------------------------------------------------ stop tokens


@pytest.mark.parametrize(
    ("include", "skip", "text"),
    [
        (False, True, "hi"),
        (False, False, "hi"),
        (True, True, "hi"),
        (True, False, "hi<|end|>"),
    ],
)
def test_the_eos_token_counts_and_is_shown_only_if_asked(
    include: bool, skip: bool, text: str
) -> None:
    output = OutputWishes(skip_special_tokens=skip, logprobs=0)
    asked = request("zz", include=include, eos_token_id=END, output=output)
    seen = run(asked, [*tok("hi"), END], "stop")
    assert (seen.text, seen.finishes, seen.tokens) == (text, [Finish("stop")], 3)
    assert len(seen.rows) == 3


def test_a_stop_token_that_is_a_word_is_left_out_and_reported() -> None:
    dot = tok(".")[0]
    asked = request(stop_token_ids=[dot])
    seen = run(asked, tok("Paris."), "stop", stop_reason=dot)
    assert (seen.text, seen.finishes, seen.tokens) == ("Paris", [Finish("stop", dot)], 6)


def test_an_engine_that_does_not_say_which_token_it_was() -> None:
    dot = tok(".")[0]
    asked = request(stop_token_ids=[dot], eos_token_id=END)
    assert run(asked, tok("Paris."), "stop").finishes == [Finish("stop", dot)]
    assert run(asked, [*tok("Paris"), END], "stop").finishes == [Finish("stop")]


def test_a_special_token_that_ended_it_is_left_out_even_if_we_were_not_told_of_it() -> None:
    asked = request(output=OutputWishes(skip_special_tokens=False))
    assert run(asked, [*tok("hi"), END], "stop").text == "hi"


def test_the_last_token_of_a_finished_grammar_is_no_stop_token() -> None:
    asked = request(stop_token_ids=tok("x"), eos_token_id=END)
    seen = run(asked, tok('{"a":1}'), "stop")
    assert (seen.text, seen.finishes) == ('{"a":1}', [Finish("stop")])


def test_a_stop_string_sent_as_a_stop_token_is_reported_as_the_string() -> None:
    dot = tok(".")[0]
    asked = request(".", stop_token_ids=[dot], token_strings={dot: "."})
    seen = run(asked, tok("Paris."), "stop", stop_reason=dot)
    assert (seen.text, seen.finishes) == ("Paris", [Finish("stop", ".")])
    assert (seen.aborts, seen.tokens) == (0, 6)
    kept = request(".", include=True, stop_token_ids=[dot], token_strings={dot: "."})
    seen = run(kept, tok("Paris."), "stop", stop_reason=dot)
    assert (seen.text, seen.finishes) == ("Paris.", [Finish("stop", ".")])


def test_a_stop_token_that_says_more_than_its_stop_string_is_cut_exactly() -> None:
    known = Vocabulary(small.gemma())
    space_fo = small.id_of(known.backend, "▁fo")
    asked = request("fo", stop_token_ids=[space_fo], token_strings={space_fo: "fo"})
    ids = [small.id_of(known.backend, "a"), space_fo]
    output = TextPipeline(known, asked).feed(Delta(ids, finish="stop", stop_reason=space_fo))
    assert (output.text, output.finish, output.abort) == ("a ", Finish("stop", "fo"), False)


def test_a_hidden_stop_token_is_reported_as_the_string_it_stands_for() -> None:
    asked = request("<|end|>", stop_token_ids=[END], token_strings={END: "<|end|>"})
    for parser in (None, Toy()):
        seen = run(asked, [*tok("ab"), END], "stop", stop_reason=END, parser=parser)
        assert seen.text == "ab" or seen.events[0] == Content("ab")
        assert (seen.finishes, seen.tokens) == ([Finish("stop", "<|end|>")], 3)


def test_an_engines_own_stop_reason_passes() -> None:
    seen = run(request(), tok("aaa"), "repetition", stop_reason="repetition_detected")
    assert seen.finishes == [Finish("repetition", "repetition_detected")]


# ------------------------------------------------------------------------- flush and finish


def test_an_unfinished_character_is_flushed_at_the_end() -> None:
    seen = run(request(), tok("é")[:1])
    assert (seen.text, seen.finishes, seen.tokens) == ("\ufffd", [Finish("length")], 1)


def test_a_finish_without_tokens_flushes_too() -> None:
    pipeline = TextPipeline(vocabulary(), request("never"), Toy())
    assert pipeline.feed(Delta(tok("n"))).events == []
    output = pipeline.feed(Delta([], finish="stop"))
    assert output.events == [Content("n"), Finish("stop")]
    assert output.finish == Finish("stop")


def test_detokenizer_matcher_and_parser_are_flushed_in_this_order() -> None:
    seen = run(request("yz"), [*tok("xy"), tok("é")[0]], parser=Toy())
    assert seen.events == [Content("xy\ufffd"), Finish("length")]


def test_the_flush_can_complete_a_stop_string() -> None:
    seen = run(request("y\ufffd"), [*tok("xy"), tok("é")[0]])
    assert (seen.text, seen.finishes) == ("x", [Finish("stop", "y\ufffd")])


def test_a_stop_string_in_reasoning_ends_the_request_with_clean_fields() -> None:
    seen = run(request("9.8"), [CALL, *tok("9.11 and 9.8"), CALL, *tok("ans")], parser=Toy())
    assert seen.events == [Reasoning("9.11 and "), Finish("stop", "9.8")]
    assert seen.tokens == 1 + len("9.11 and 9.8")


# ------------------------------------------------------------------- parsers, special tokens


def test_a_parser_sees_special_tokens_in_place_and_text_never_merges_across() -> None:
    ids = [*tok("ab"), CALL, *tok("c"), CALL, *tok("d<|call|>")]
    seen = run(request(), ids, parser=Toy())
    want = [Content("ab"), Reasoning("c"), Content("d<|call|>"), Finish("length")]
    assert seen.events == want
    assert seen.text == ""


def test_with_a_parser_no_stop_string_reaches_across_a_special_token() -> None:
    ids = [*tok("xa"), CALL, *tok("b")]
    seen = run(request("ab"), ids, parser=Toy())
    assert seen.events == [Content("xa"), Reasoning("b"), Finish("length")]
    assert run(request("ab"), ids).finishes == [Finish("stop", "ab")]  # one text, no parser


@pytest.mark.parametrize(("include", "specials"), [(False, 0), (True, 1)])
def test_a_visible_special_token_can_hold_a_stop_string(include: bool, specials: int) -> None:
    class Counting(Toy):
        count = 0

        def feed(self, pieces: list[Piece]) -> list[Event]:
            self.count += sum(isinstance(piece, Special) for piece in pieces)
            return super().feed(pieces)

    parser = Counting()
    asked = request("|end", include=include, output=OutputWishes(skip_special_tokens=False))
    seen = run(asked, [*tok("ab"), END, *tok("c")], parser=parser)
    assert seen.events == [Content("ab"), Finish("stop", "|end")]
    assert (parser.count, seen.tokens) == (specials, 3)
    hidden = run(request("|end"), [*tok("ab"), END, *tok("c")], parser=Toy())
    assert hidden.finishes == [Finish("length")]


def test_events_of_other_kinds_pass_as_they_are() -> None:
    class Calls:
        def feed(self, pieces: list[Piece]) -> list[Event]:
            return [CallStart(0, None, "now")]

        def finish(self) -> list[Event]:
            return []

    output = TextPipeline(vocabulary(), request(), Calls()).feed(Delta(tok("x"), finish="stop"))
    assert output.events == [CallStart(0, None, "now"), Finish("stop")]


# -------------------------------------------------------------------------------- logprobs


def test_rows_of_held_text_ride_on_the_next_output_that_shows_something() -> None:
    seen = run(request("never", output=OutputWishes(logprobs=0)), tok("x nest"))
    counts = [(output.text, len(output.logprobs)) for output in seen.outputs]
    assert counts == [("x", 1), (" ", 1), ("", 0), ("", 0), ("nes", 3), ("t", 1)]


def test_rows_wait_for_an_event_when_there_is_a_parser() -> None:
    seen = run(request(output=OutputWishes(logprobs=0)), tok("abc"), parser=Toy())
    assert [len(output.logprobs) for output in seen.outputs] == [0, 2, 1]


def test_rows_of_a_stop_without_text_ride_on_the_finish() -> None:
    seen = run(request("ab", output=OutputWishes(logprobs=0)), tok("ab"), None)
    assert [(o.text, len(o.logprobs)) for o in seen.outputs] == [("", 0), ("", 2)]


# ---------------------------------------------------------------------------- the plain path


def test_only_a_request_that_wishes_nothing_special_is_plain() -> None:
    assert TextPipeline(vocabulary(), request()).plain
    assert not TextPipeline(vocabulary(), request(), Toy()).plain
    assert TextPipeline(vocabulary(), request("x")).plain
    for wishes in (OutputWishes(logprobs=0), OutputWishes(token_ids=True)):
        assert not TextPipeline(vocabulary(), request(output=wishes)).plain


@given(
    ids=IDS,
    cuts=st.lists(st.integers(0, 20), max_size=6),
    strings=STOPS,
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
    as_json=st.booleans(),
)
def test_the_plain_path_and_the_general_one_agree(
    ids: list[int],
    cuts: list[int],
    strings: list[str],
    include: bool,
    min_tokens: int,
    as_json: bool,
) -> None:
    asked = request(*strings, include=include, min_tokens=min_tokens)
    wishing = request(
        *strings, include=include, min_tokens=min_tokens, output=OutputWishes(token_ids=True)
    )
    general = run(wishing, ids or [10_000])
    plain = TextPipeline(vocabulary(), asked)
    text = ""
    *firsts, last = cut_up(ids or [10_000], cuts)
    for part in firsts:
        text += fed_as_json(plain, part) if as_json else plain.feed_text(part)
    assert plain.finish is None or plain.finish.stop_reason in strings
    output = plain.feed(Delta(last, finish="length"))
    assert text + output.text == general.text
    assert [plain.finish] == general.finishes
    assert plain.completion_tokens == general.tokens


def fed_as_json(pipeline: TextPipeline, ids: Sequence[int]) -> str:
    text: str = json.loads(b'"%b"' % pipeline.feed_json(ids))
    return text


def cut_up(ids: list[int], cuts: list[int]) -> list[list[int]]:
    places = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    return [ids[start:end] for start, end in pairwise(places)]


def test_the_text_may_continue_the_prompts() -> None:
    backend = small.llama()
    ids = backend.encode("is it").ids
    asked = request(prompt_ids=ids)
    known = Vocabulary(backend)
    assert TextPipeline(known, asked).feed_text(ids) == "is it"
    assert TextPipeline(known, asked, continues_prompt=True).feed_text(ids) == " is it"
