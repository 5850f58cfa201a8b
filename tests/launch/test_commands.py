"""The exact command of every backend, and what becomes of the user's arguments in it."""

from __future__ import annotations

import shlex
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smgd.config import EngineConfig
from smgd.launch.commands import (
    BACKENDS,
    Command,
    Site,
    build,
    fill,
    gpu_count,
    unknown_names,
)

SITE = Site(
    python="python",
    model="org/model",
    worker_url="ipc:///run/e/engine-31000",
    worker_port=31000,
    handshake_address="tcp://127.0.0.1:22670",
    handshake_port=22670,
    store_port=31233,
)

VLLM = (
    "python -m vllm.entrypoints.cli.main serve org/model --headless"
    " --data-parallel-size 1 --data-parallel-size-local 1"
    " --data-parallel-address 127.0.0.1 --data-parallel-rpc-port 22670"
)
TOKENSPEED = (
    "python -m tokenspeed.cli serve --headless --model org/model"
    " --port 31000 --dist-init-addr 127.0.0.1:31233"
    " --data-parallel-address 127.0.0.1 --data-parallel-rpc-port 22670"
    " --zmq-engine-index 0"
)
SGLANG = (
    "python -m smg_grpc_servicer.sglang.headless"
    " --zmq-handshake-address tcp://127.0.0.1:22670 --zmq-engine-index 0"
    " --model-path org/model --port 31000"
)
SIM = "python -m smgd.sim.cli --handshake tcp://127.0.0.1:22670 --model-path org/model"


def command(backend: str, args: str = "") -> tuple[str, tuple[str, ...]]:
    built = build(BACKENDS[backend], SITE, shlex.split(args))
    return shlex.join(built.argv), built.dropped


def test_the_table_has_the_backends_of_the_configuration() -> None:
    annotated, *_ = get_args(get_type_hints(EngineConfig, include_extras=True)["backend"])
    assert set(get_args(annotated)) == BACKENDS.keys()


@pytest.mark.parametrize(
    ("backend", "line"),
    [
        ("vllm", VLLM),
        ("tokenspeed", f"{TOKENSPEED} --grammar-backend xgrammar --enable-output-logprobs"),
        ("sglang", SGLANG),
        ("sim", f"{SIM} --log-level warning"),
    ],
)
def test_the_command_of_each_backend(backend: str, line: str) -> None:
    assert command(backend) == (line, ())


def test_a_model_path_with_spaces_and_braces_is_one_word() -> None:
    site = Site(
        **{f: getattr(SITE, f) for f in SITE.__struct_fields__} | {"model": "/a b/{python}"}
    )
    assert "/a b/{python}" in build(BACKENDS["vllm"], site, []).argv


def test_the_users_arguments_come_last_and_stay_as_they_are() -> None:
    args = """--max-model-len 2048 --hf-overrides '{"a": "{model}"}' -tp 2 --enforce-eager"""
    line, dropped = command("vllm", args)
    assert shlex.split(line) == shlex.split(VLLM) + shlex.split(args)
    assert dropped == ()


@pytest.mark.parametrize(
    ("backend", "args", "dropped"),
    [
        ("vllm", "--headless", ("--headless",)),
        ("vllm", "--data-parallel-size 4", ("--data-parallel-size 4",)),
        ("vllm", "--data_parallel_size=4", ("--data_parallel_size=4",)),
        ("vllm", "-dp 4 -dpp=1", ("-dp 4", "-dpp=1")),
        ("vllm", "--model x", ("--model x",)),
        ("vllm", "--data-parallel-address", ("--data-parallel-address",)),
        ("tokenspeed", "--zmq-engine-index 3 --port 1", ("--zmq-engine-index 3", "--port 1")),
        ("tokenspeed", "--data-parallel-size 2", ("--data-parallel-size 2",)),
        ("sglang", "--dp-size 2 --model m", ("--dp-size 2", "--model m")),
        ("sim", "--worker-url ipc:///x", ("--worker-url ipc:///x",)),
    ],
)
def test_what_the_launcher_sets_is_dropped_from_the_users(
    backend: str, args: str, dropped: tuple[str, ...]
) -> None:
    assert command(backend, args) == (command(backend)[0], dropped)


def test_what_stands_around_a_dropped_flag_stays() -> None:
    line, dropped = command("vllm", "--seed 1 --headless --data-parallel-size --swap 2 -dp 3 --x")
    assert line == f"{VLLM} --seed 1 --swap 2 --x"
    assert dropped == ("--headless", "--data-parallel-size", "-dp 3")


@pytest.mark.parametrize(
    ("args", "rest"),
    [
        ("--grammar-backend llguidance", "--enable-output-logprobs --grammar-backend llguidance"),
        ("--grammar_backend=none", "--enable-output-logprobs --grammar_backend=none"),
        ("--enable-output-logprobs", "--grammar-backend xgrammar --enable-output-logprobs"),
        ("--no-enable-output-logprobs", "--grammar-backend xgrammar --no-enable-output-logprobs"),
    ],
)
def test_the_users_own_value_wins_over_a_default(args: str, rest: str) -> None:
    assert command("tokenspeed", args) == (f"{TOKENSPEED} {rest}", ())


def test_names_in_braces_are_filled_in_and_other_braces_stay() -> None:
    words = [
        "{python}",
        "--port={handshake_port}",
        "{unknown}",
        '{"a": {}}',
        "{worker_url}-{model}",
    ]
    assert list(fill(words, SITE)) == [
        "python",
        "--port=22670",
        "{unknown}",
        '{"a": {}}',
        "ipc:///run/e/engine-31000-org/model",
    ]


def test_names_in_braces_that_mean_nothing_are_told_from_other_braces() -> None:
    words = ["{handshak_port}", "{model} {x}", '{"a": {}}', "${shell} {1} {A}", "{print $1}", "{x}"]
    assert unknown_names(words) == ["handshak_port", "x"]
    assert list(fill(["${model}"], SITE)) == ["${model}"]


@pytest.mark.parametrize(
    ("args", "count"),
    [
        ("", 1),
        ("--tensor-parallel-size 4", 4),
        ("--tensor_parallel_size=4", 4),
        ("-tp 2 -pp 3", 6),
        ("--tp-size 2 --pp-size 2", 4),
        ("-tp 2 -pcp 2", 4),
        ("--prefill-context-parallel-size=4 -pp 2", 8),
        ("--tp 8 --attn-tp-size 4", 8),
        ("--tensor-parallel-size", 1),
        ("--tensor-parallel-size auto", 1),
        ("--max-tp 7 -tpx 7", 1),
    ],
)
def test_how_many_gpus_an_engine_takes(args: str, count: int) -> None:
    assert gpu_count(args.split()) == count


words = st.lists(
    st.sampled_from(
        ["--headless", "-dp", "--data-parallel-size", "--x", "--x=1", "1", "", "=", "-"]
    )
)


@given(words, st.sampled_from(sorted(BACKENDS)))
def test_any_arguments_make_a_command_and_none_gets_lost(args: list[str], backend: str) -> None:
    built = build(BACKENDS[backend], SITE, args)
    own = build(BACKENDS[backend], SITE, [])
    assert built.argv[: len(own.argv)] == own.argv
    rest = [*built.argv[len(own.argv) :], *" ".join(built.dropped).split()]
    assert sorted(filter(None, rest)) == sorted(filter(None, args))
    assert isinstance(built, Command)
