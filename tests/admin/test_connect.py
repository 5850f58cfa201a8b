"""The command that `workers show` gives is the one that connects."""

from __future__ import annotations

from pathlib import Path

import pytest

from smgd.admin.connect import command
from smgd.engine.dialects import DIALECTS
from smgd.launch.commands import BACKENDS

HANDSHAKE = "tcp://127.0.0.1:22670"


def test_vllm() -> None:
    assert command("vllm", "meta-llama/Llama-3.1-8B-Instruct", 2, HANDSHAKE) == (
        "vllm serve meta-llama/Llama-3.1-8B-Instruct --headless --data-parallel-size 2"
        " --data-parallel-size-local 2 --data-parallel-address 127.0.0.1"
        " --data-parallel-rpc-port 22670"
    )


def test_tokenspeed() -> None:
    """Alone as documented; a group needs a rendezvous store, outside the range of handshakes."""
    before = "python -m tokenspeed.cli serve --headless --model m"
    behind = (
        " --data-parallel-address 127.0.0.1 --data-parallel-rpc-port 22670 --zmq-engine-index 0"
        " --grammar-backend xgrammar --enable-output-logprobs"
    )
    group = " --data-parallel-size 2 --dist-init-addr 127.0.0.1:31233"
    assert command("tokenspeed", "m", 1, HANDSHAKE) == before + behind
    assert command("tokenspeed", "m", 2, HANDSHAKE) == before + group + behind


def test_sglang() -> None:
    alone = (
        "python -m smg_grpc_servicer.sglang.headless --zmq-handshake-address tcp://127.0.0.1:22670"
        " --zmq-engine-index 0 --model-path m"
    )
    assert command("sglang", "m", 1, HANDSHAKE) == alone
    assert command("sglang", "m", 2, HANDSHAKE) == f"{alone} --dp-size 2"


def test_it_has_the_flags_of_the_engines_that_smgd_starts_itself() -> None:
    flags = BACKENDS["vllm"].flags.format(handshake_port=22670)
    assert command("vllm", "m", 1, HANDSHAKE).endswith(flags)


@pytest.mark.parametrize("runtime", DIALECTS)
def test_every_wire_has_a_command(runtime: str) -> None:
    assert "m" in command(runtime, "m", 1, HANDSHAKE)


def test_the_built_in_model_is_served_by_the_simulated_engine() -> None:
    assert command("vllm", "smgd-sim", 1, HANDSHAKE) == (
        "smgd-sim --handshake tcp://127.0.0.1:22670 --data-parallel-size 1"
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "[::]"])
def test_an_engine_dials_no_wildcard(host: str) -> None:
    assert "--data-parallel-address 127.0.0.1 " in command("vllm", "m", 1, f"tcp://{host}:1")


def test_a_directory_is_given_by_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("org/model", "./org/model", "~/org/model"):
        assert f" serve {tmp_path}/org/model " in command("vllm", name, 1, HANDSHAKE)
    for name in ("org/other", "m"):
        assert f" serve {name} " in command("vllm", name, 1, HANDSHAKE)


def test_a_path_with_a_space_is_one_word() -> None:
    assert "serve '/models/my model' " in command("vllm", "/models/my model", 1, HANDSHAKE)
