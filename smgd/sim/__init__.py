"""`smgd-sim`: an engine without a model that behaves on the wire as a headless vLLM does."""
