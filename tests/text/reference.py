"""transformers, which tokenizers and templates here are compared with."""

from __future__ import annotations

import os

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # there is no torch, nor need of it

from transformers import AutoTokenizer, PreTrainedTokenizerFast

__all__ = ["AutoTokenizer", "PreTrainedTokenizerFast"]
