"""What a tokenizer says of its own parts: normalizers, pre-tokenizers, decoders."""

from __future__ import annotations

import json
from typing import Any


def describe(component: Any) -> dict[str, Any] | None:
    """Return a component's description, None where there is no such component.

    Its pickled state is the JSON; `Tokenizer.to_str` would write out the whole vocabulary.
    """
    return None if component is None else json.loads(component.__getstate__())


def flat(step: dict[str, Any] | None, members: str) -> list[dict[str, Any]]:
    """Return a description as a list: that of a sequence is that of its `members`, in order."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [inner for member in step[members] for inner in flat(member, members)]


def steps(component: Any, members: str) -> list[dict[str, Any]]:
    """Return the descriptions of a component's parts; of itself if it has none."""
    return flat(describe(component), members)
