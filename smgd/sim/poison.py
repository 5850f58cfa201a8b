"""What kills vLLM's main loop when it comes to run it (class D), as measured.

A front end must let none of this through. The texts are those of vLLM's log, so that who reads the
simulator's can look them up.
"""

from __future__ import annotations

import msgspec

from smgd.sim.faults import MainLoopError
from smgd.sim.wire import AddRequest, SamplingParams


class Limits(msgspec.Struct, frozen=True):
    """What a model can take: the length of prompt and output together, in tokens; its ids."""

    max_model_len: int
    vocab_size: int

    def check(self, request: AddRequest) -> tuple[list[int], SamplingParams]:
        """Return the prompt and the parameters of a request that the engine survives.

        Raises `MainLoopError` for any other.
        """
        sampling = request.sampling_params
        if sampling is None or request.pooling_params is not None:
            raise MainLoopError("Unsupported task: this model generates text")
        prompt = request.prompt_token_ids
        if not prompt:
            raise MainLoopError("Stop argument for islice() must be None or an integer: no prompt")
        self._check_prompt(prompt)
        self._check_sampling(sampling)
        return prompt, sampling

    def _check_prompt(self, prompt: list[int]) -> None:
        length, limit = len(prompt), self.max_model_len
        if length > limit:
            raise MainLoopError(
                f"could not broadcast input array from shape ({length},) into shape ({limit},)"
            )
        if length == limit:
            raise MainLoopError("Sampled token IDs exceed the max model length")
        if not all(0 <= token < self.vocab_size for token in prompt):
            raise MainLoopError("index out of range in self: an id of the prompt")

    def _check_sampling(self, sampling: SamplingParams) -> None:
        stops = [*(sampling.stop_token_ids or ()), *sampling.all_stop_token_ids]
        used = [*(sampling.logit_bias or ()), *(sampling.allowed_token_ids or ())]
        used += sampling.logprob_token_ids or ()
        used += stops if sampling.min_tokens else ()
        if not all(0 <= token < self.vocab_size for token in used):
            raise MainLoopError("index out of bounds: an id of the sampling parameters")
        if max(sampling.logprobs or 0, sampling.prompt_logprobs or 0) > self.vocab_size:
            raise MainLoopError("selected index k out of range: logprobs")
