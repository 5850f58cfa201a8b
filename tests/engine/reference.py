"""What transformers says: greedy continuations of chats, with nothing of ours or vLLM's involved.

Runs under the engine environment's Python. Standard input is JSON, `{"model": DIRECTORY, "chats":
[{"messages": [...], "max_tokens": N}, ...]}`; standard output is one object for each chat:
`prompt_ids`, `ids` (EOS included), `tokens` (the text of each id alone), `text` of all without
special tokens, and `margins`: for each id by how much its logit was above the next best. bf16
rounds differently in different kernels, so where that is next to nothing two right implementations
may disagree.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any


def main() -> None:
    job = json.load(sys.stdin)
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Late and untyped: the checkout's own environment has no torch.
    transformers: Any = importlib.import_module("transformers")
    torch: Any = importlib.import_module("torch")
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["model"])
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.bfloat16)
    answers = [answer(model, tokenizer, chat) for chat in job["chats"]]
    json.dump(answers, sys.stdout)


def answer(model: Any, tokenizer: Any, chat: dict[str, Any]) -> dict[str, Any]:
    """Continue one chat greedily."""
    prompt = tokenizer.apply_chat_template(
        chat["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(
        **prompt,
        max_new_tokens=chat["max_tokens"],
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    prompt_ids = prompt["input_ids"][0].tolist()
    ids = out.sequences[0].tolist()[len(prompt_ids) :]
    best = [scores[0].float().topk(2).values.tolist() for scores in out.scores]
    return {
        "prompt_ids": prompt_ids,
        "ids": ids,
        "tokens": [tokenizer.decode([i]) for i in ids],
        "text": tokenizer.decode(ids, skip_special_tokens=True),
        "margins": [first - second for first, second in best],
    }


if __name__ == "__main__":
    main()
