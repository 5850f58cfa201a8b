"""Turn the GGUF file of the small test model into a directory that vLLM loads.

Runs under the engine environment's Python, started by build.py:

    convert.py FILE.gguf DIRECTORY
"""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

# "The capital of France is", and the token of " Paris".
PROMPT = [504, 3575, 282, 4649, 314]
ANSWER = 7042

BOS, EOS = 1, 2


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    # Both file names below are local; without this a missing one would be looked for on a hub.
    os.environ["HF_HUB_OFFLINE"] = "1"
    convert(source, target)
    check(target)


def convert(source: Path, target: Path) -> None:
    """Write weights, configuration, tokenizer and chat template.

    The weights go to safetensors directly, because transformers refuses to save a model that came
    from a quantised file, though its loader has expanded every tensor by then.
    """
    transformers, torch = package("transformers"), package("torch")
    origin = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    # float32 first: rounded once, at the end, whatever the loader computes with.
    model = transformers.AutoModelForCausalLM.from_pretrained(**origin, dtype=torch.float32)
    save_weights(model, target / "model.safetensors")
    save_config(model.config, target)
    transformers.AutoTokenizer.from_pretrained(**origin).save_pretrained(target)
    # The file does not say that a turn ends with EOS; without it the engine never stops.
    transformers.GenerationConfig(
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=EOS
    ).save_pretrained(target)


def save_weights(model: Any, path: Path) -> None:
    bfloat16 = package("torch").bfloat16
    # A tied output layer is the embedding under a second name, which safetensors refuses.
    skipped = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    weights = {
        name: tensor.to(bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name not in skipped
    }
    package("safetensors.torch").save_file(weights, path, metadata={"format": "pt"})


def save_config(loaded: Any, target: Path) -> None:
    """Save the configuration without its traces of the quantised file, which would be acted on."""
    values = loaded.to_dict()
    for key in ("quantization_config", "_name_or_path", "dtype", "torch_dtype"):
        values.pop(key, None)
    config = type(loaded).from_dict(values)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = "bfloat16"
    config.save_pretrained(target)


def check(target: Path) -> None:
    """Load the result and ask it something.

    A conversion that mixes up tensors still loads; better to fail here than in a test of
    something else.
    """
    transformers, torch = package("transformers"), package("torch")
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    with torch.inference_mode():
        best = int(model(torch.tensor([PROMPT])).logits[0, -1].argmax())
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    prompt = tokenizer("The capital of France is")["input_ids"]
    if (prompt, best) != (PROMPT, ANSWER):
        raise SystemExit(f"the converted model is wrong: {prompt} -> {best}")
    if not tokenizer.chat_template:
        raise SystemExit("the converted model has no chat template")


def package(name: str) -> Any:
    """Import late and untyped: the checkout's own environment has none of these packages."""
    return importlib.import_module(name)


if __name__ == "__main__":
    main()
