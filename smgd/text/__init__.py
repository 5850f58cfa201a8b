"""Text in and out: tokenizers, chat templates, models, incremental detokenizing, stop strings."""
