"""smgd: a model gateway daemon in front of headless LLM engines."""

__version__ = "0.1.0"
