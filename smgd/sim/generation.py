"""One request from its first token to its last: what comes next, and when it stops.

Tokens come from a script first, if there is one, and then from the model; who has chosen a token
makes no difference to how it is reported: its log-probability is what the model would have given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Literal, TypeAlias

from smgd.sim.model import Distribution, LogprobRow, Model, Rules
from smgd.sim.model import Sequence as TokenSequence
from smgd.sim.outputs import (
    FINISH_ABORT,
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_REPETITION,
    FINISH_STOP,
    Output,
)
from smgd.sim.replies import Reply, Then
from smgd.sim.wire import RepetitionDetection, SamplingParams

Ending: TypeAlias = Literal["stop", "length", "abort", "error", "cut off", "free"]

_FORCED = {"stop": FINISH_STOP, "length": FINISH_LENGTH}
_ALONE = {"abort": FINISH_ABORT, "error": FINISH_ERROR}  # these carry no tokens


class Script:
    """The tokens that a request must get, how many a step, and what comes after them.

    "free" is the model's turn; all others end the request, "cut off" without saying so.
    """

    def __init__(
        self,
        ids: Sequence[int] = (),
        ending: Ending = "free",
        chunks: Sequence[int] = (1,),
        then: Then | None = None,
    ) -> None:
        self.ids: Iterator[int] = iter(ids)
        self.left = len(ids)
        self.ending = ending
        self.chunks = cycle(chunks)
        self.then = then

    @classmethod
    def of(cls, reply: Reply, eos_token_id: int | None) -> Script:
        """Return what a scripted reply prescribes; `eos_token_id` is appended for "stop"."""
        if reply.ids is None:
            return cls(chunks=reply.chunks)
        eos = (eos_token_id,) if reply.finish == "stop" and eos_token_id is not None else ()
        return cls((*reply.ids, *eos), reply.finish or "cut off", reply.chunks, reply.then)

    @property
    def is_over(self) -> bool:
        """Tell whether nothing more may be said."""
        return self.left == 0 and self.ending != "free"


class Generation:
    """A request that runs; `output_ids` is what it has got so far."""

    def __init__(
        self,
        request_id: str,
        prompt: list[int],
        sampling: SamplingParams,
        model: Model,
        script: Script,
        *,
        max_model_len: int,
        min_tokens_first: bool,
    ) -> None:
        self.id = request_id
        self.prompt_length = len(prompt)
        self.script = script
        self.output_ids: list[int] = []
        self._sampling = sampling
        self._model = model
        self._min_tokens_first = min_tokens_first
        room = max_model_len - len(prompt)
        self._limit = min(sampling.max_tokens or room, room)
        wants_prompt = sampling.prompt_logprobs is not None
        self._sequence = TokenSequence(model, prompt, _rules(sampling), whole=wants_prompt)

    @property
    def ids(self) -> list[int]:
        """All ids, the prompt's first."""
        return self._sequence.ids

    def prompt_logprobs(self) -> list[LogprobRow] | None:
        """Return a row for each token of the prompt but the first, if they are wanted."""
        wanted = self._sampling.prompt_logprobs
        if wanted is None:
            return None
        count = self._count(wanted)
        return [distribution.row(token, count) for token, distribution in self._sequence.passed[1:]]

    def step(self) -> Output:
        """Return the next output: as many tokens as the script's rhythm says, often one."""
        output = Output(request_id=self.id)
        if self._wants_logprobs:
            output.logprobs = []
        for _ in range(next(self.script.chunks)):
            if self.script.is_over:
                break
            self._emit(output)
            if output.finish is not None:
                return output
        if self.script.is_over:
            self._end(output)
        return output

    def _emit(self, output: Output) -> None:
        distribution = self._sequence.distribution()
        token = self._next()
        if output.logprobs is not None:
            output.logprobs.append(self._row(distribution, token))
        self._sequence.append(token)
        self.output_ids.append(token)
        output.ids.append(token)
        output.finish, output.stop_reason = self._stop(token)

    def _next(self) -> int:
        if self.script.left:
            self.script.left -= 1
            return next(self.script.ids)
        early = len(self.output_ids) < self._sampling.min_tokens
        return self._sequence.propose(self._sampling.all_stop_token_ids if early else ())

    def _end(self, output: Output) -> None:
        ending = self.script.ending
        if ending in _FORCED:
            output.finish = _FORCED[ending]
        elif ending in _ALONE and not output.ids:
            output.finish = _ALONE[ending]

    def _stop(self, token: int) -> tuple[int | None, int | str | None]:
        """Return finish and stop reason after a token, checked in vLLM's order."""
        sampling, count = self._sampling, len(self.output_ids)
        if self._min_tokens_first and count < sampling.min_tokens:
            return None, None
        if token == sampling.eos_token_id:
            return FINISH_STOP, None
        if token in (sampling.stop_token_ids or ()):
            return FINISH_STOP, token
        if count >= self._limit:
            return FINISH_LENGTH, None
        if sampling.repetition_detection and _repeats(
            self.output_ids, sampling.repetition_detection
        ):
            return FINISH_REPETITION, "repetition_detected"
        return None, None

    @property
    def _wants_logprobs(self) -> bool:
        return self._sampling.logprobs is not None or bool(self._sampling.logprob_token_ids)

    def _row(self, distribution: Distribution, token: int) -> LogprobRow:
        if self._sampling.logprob_token_ids:
            return distribution.row_of(token, self._sampling.logprob_token_ids)
        return distribution.row(token, self._count(self._sampling.logprobs or 0))

    def _count(self, wanted: int) -> int:
        return self._model.vocab_size if wanted == -1 else wanted


def _rules(sampling: SamplingParams) -> Rules:
    return Rules(
        temperature=sampling.temperature,
        top_k=max(sampling.top_k, 0),
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        bias=sampling.logit_bias or {},
        allowed=sampling.allowed_token_ids or [],
        bad_words=[word for word in sampling.bad_words_token_ids or () if word],
    )


def _repeats(ids: list[int], rule: RepetitionDetection) -> bool:
    """Tell whether `ids` end with a pattern that stands there `min_count` times."""
    for size in range(rule.min_pattern_size, rule.max_pattern_size + 1):
        length = size * rule.min_count
        if len(ids) >= length and ids[-length:] == ids[-size:] * rule.min_count:
            return True
    return False
