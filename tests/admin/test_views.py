"""Secrets do not leave the daemon, whatever table they are in."""

from __future__ import annotations

from smgd.admin.views import MASK, masked
from smgd.config import Config, EngineConfig, ServerConfig, TlsConfig


def test_secrets_in_an_engines_environment_and_arguments() -> None:
    engine = EngineConfig(
        env={"HF_TOKEN": "hf_x", "VLLM_API_KEY": "sk-x", "CUDA_VISIBLE_DEVICES": "0"},
        args=("--api-key", "sk-x", "--hf-token=hf_x", "--max-num-seqs", "4", "--token"),
    )
    [shown] = masked(Config(engines=(engine,)))["engines"]
    assert shown["env"] == {"HF_TOKEN": MASK, "VLLM_API_KEY": MASK, "CUDA_VISIBLE_DEVICES": "0"}
    assert shown["args"] == [
        "--api-key", MASK, f"--hf-token={MASK}", "--max-num-seqs", "4", "--token"
    ]  # fmt: skip


def test_what_only_sounds_like_a_secret_is_shown() -> None:
    shown = masked(Config(tls=TlsConfig(key_path="/k.pem"), server=ServerConfig(port=1)))
    assert shown["tls"]["key_path"] == "/k.pem"
    assert shown["server"]["port"] == 1
    assert shown["models"] == {}
