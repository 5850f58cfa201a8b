"""From `[[engines]]` to workers and commands: addresses, ports, GPUs, and what is refused."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from smgd.config import WorkerConfig
from smgd.config.load import convert
from smgd.engine.dialects import DIALECTS
from smgd.engine.dialects.vllm import VllmDialect
from smgd.errors import ConfigError
from smgd.launch import plan as module
from smgd.launch.plan import EngineSpec, Host, Plan, plan, shares, store_port
from smgd.wire.fnv import HANDSHAKE_PORT_COUNT, HANDSHAKE_PORT_MIN, handshake_port

HANDSHAKE_PORTS = range(HANDSHAKE_PORT_MIN, HANDSHAKE_PORT_MIN + HANDSHAKE_PORT_COUNT)


def host(has_terminal: bool = True, **environ: str) -> Host:
    return Host(environ, 1000, has_terminal, "/venv/bin/python")


def planned(
    *engines: Mapping[str, Any], on: Host | None = None, launch: Mapping[str, Any] | None = None
) -> Plan:
    data = {"models": {"m": {"path": "/m"}}, "engines": list(engines), "launch": launch or {}}
    return plan(convert(data, "test"), on or host())


def line(spec: EngineSpec) -> str:
    return shlex.join(spec.argv)


# ------------------------------------------------------------------------------- addresses


def test_without_engines_there_is_nothing_to_start() -> None:
    assert planned() == Plan("/tmp/smgd-zmq-1000")


def test_a_replica_is_a_worker_and_an_engine_that_dials_it() -> None:
    result = planned({"replicas": 2, "args": ["--max-model-len", "2048"]})
    assert result.workers == (
        WorkerConfig(url="ipc:///tmp/smgd-zmq-1000/engine-31000", runtime_type="vllm"),
        WorkerConfig(url="ipc:///tmp/smgd-zmq-1000/engine-31001", runtime_type="vllm"),
    )
    for spec, worker in zip(result.engines, result.workers, strict=True):
        assert spec.url == worker.url
        port = handshake_port(spec.path)
        assert line(spec) == (
            "/venv/bin/python -m vllm.entrypoints.cli.main serve /m --headless"
            " --data-parallel-size 1 --data-parallel-size-local 1 --data-parallel-address 127.0.0.1"
            f" --data-parallel-rpc-port {port} --max-model-len 2048"
        )
    assert [spec.name for spec in result.engines] == ["engine-31000", "engine-31001"]


def test_engines_are_numbered_through_all_tables() -> None:
    result = planned({"replicas": 2}, {"backend": "sim"}, launch={"worker_base_port": 40000})
    assert [spec.name for spec in result.engines] == [
        "engine-40000",
        "engine-40001",
        "engine-40002",
    ]


@pytest.mark.parametrize("given", ["/run/e", "/run/e/", "/run/e//"])
def test_the_socket_directory_is_that_of_the_environment(given: str) -> None:
    result = planned({}, on=host(SMGD_ZMQ_SOCKET_DIR=given))
    assert result.workers[0].url == "ipc:///run/e/engine-31000"


def test_an_engine_may_load_something_else_than_its_model_and_run_elsewhere() -> None:
    [spec] = planned({"model_path": "/quantized", "python": "/vllm/bin/python"}).engines
    assert line(spec).startswith("/vllm/bin/python -m vllm.entrypoints.cli.main serve /quantized ")


def test_engines_of_several_models() -> None:
    data = {
        "models": {"a": {"path": "/a"}, "org/b": {}},
        "engines": [{"backend": "sim", "model": "a"}, {"backend": "sim", "model": "org/b"}],
    }
    result = plan(convert(data, "test"), host())
    assert [worker.model for worker in result.workers] == ["a", "org/b"]
    assert ["/a" in spec.argv for spec in result.engines] == [True, False]
    assert "org/b" in result.engines[1].argv


def test_a_command_of_ones_own_gets_what_it_needs_and_nothing_else() -> None:
    command = ["run-engine", "--dial={handshake_address}", "--load", "{model}", "{store_port}"]
    result = planned({"command": command, "args": ["--headless"], "env": {"A": "1"}})
    [spec] = result.engines
    address = f"tcp://127.0.0.1:{handshake_port(spec.path)}"
    assert line(spec) == f"run-engine --dial={address} --load /m 31233 --headless"
    assert spec.env == {"A": "1"}


def test_what_is_dropped_is_told_once_for_all_replicas() -> None:
    result = planned({"replicas": 2, "args": ["--headless", "-dp", "4"]})
    assert result.warnings == (
        "vllm argument --headless is dropped: smgd sets it itself",
        "vllm argument -dp 4 is dropped: smgd sets it itself",
        "there is no program /venv/bin/python to start engine-31000 with",
    )


def test_a_program_is_looked_for_as_it_will_be_for_the_start(tmp_path: Path) -> None:
    (tmp_path / "engine").touch(0o755)
    (tmp_path / "notes").touch(0o644)
    for command, there in (("engine", True), ("notes", False), (f"{tmp_path}/engine", True)):
        engine = {"command": [command], "env": {"PATH": str(tmp_path)}}
        assert (planned(engine).warnings == ()) == there
    on = host(PATH=str(tmp_path))
    assert planned({"command": ["engine"]}, on=on).warnings == ()
    assert planned({"command": [str(tmp_path)]}, on=on).warnings == (
        f"there is no program {tmp_path} to start engine-31000 with",
    )


def test_an_engine_knows_what_its_worker_takes_it_for() -> None:
    [spec] = planned({"model_path": "/quantized"}).engines
    assert (spec.runtime, spec.model) == ("vllm", "/m")


# ------------------------------------------------------------------------------- what is refused


def test_replicas_whose_paths_derive_one_port_are_refused() -> None:
    seen: dict[int, int] = {}
    for number in itertools.count(31000):
        other = seen.setdefault(handshake_port(f"/e/engine-{number}"), number)
        if other != number:
            break
    engines = {"backend": "sim", "replicas": number - other + 1}
    with pytest.raises(ConfigError) as caught:
        planned(engines, on=host(SMGD_ZMQ_SOCKET_DIR="/e"), launch={"worker_base_port": other})
    port = handshake_port(f"/e/engine-{number}")
    assert str(caught.value) == (
        f"ZMQ handshake port collision on tcp://127.0.0.1:{port}: ipc:///e/engine-{other} and"
        f" ipc:///e/engine-{number}; change --worker-base-port (launch.worker_base_port)"
    )


@pytest.mark.parametrize("backend", ["tokenspeed", "sglang"])
def test_a_backend_is_served_as_soon_as_its_dialect_is(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(DIALECTS, backend, raising=False)
    refusal = (
        f"ZMQ worker ipc:///tmp/smgd-zmq-1000/engine-31000 has unsupported runtime {backend}: only"
    )
    with pytest.raises(ConfigError, match=refusal):
        planned({"backend": backend})
    monkeypatch.setitem(DIALECTS, backend, VllmDialect)
    assert planned({"backend": backend}).workers[0].runtime_type == backend


def test_a_model_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'there is no \[models."x"\]'):
        planned({"model": "x"})
    with pytest.raises(ConfigError, match="has no model identity"):
        plan(convert({"engines": [{}]}, "test"), host())


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"env": {"A=B": "secret"}}, "env: 'A=B' is no variable: its name is empty or has a ="),
        ({"env": {"": "secret"}}, "env: '' is no variable"),
        ({"env": {"A": "sec\0ret"}}, "env: 'A' is no variable"),
        ({"args": ["a\0b"]}, "args: there is a NUL in it"),
        ({"model_path": "a\0b"}, "model_path: there is a NUL in it"),
        ({"python": "\0"}, "python: there is a NUL in it"),
        ({"command": [""]}, "command: its first word is empty, so there is nothing to start"),
        ({"command": ["x", "{handshak_port}"]}, "command: {handshak_port} means nothing here; the"),
    ],
)
def test_what_no_process_can_be_started_with_is_refused(engine: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        planned({}, {"backend": "sim"} | engine)
    assert str(caught.value).startswith(f"engines[1].{said}")
    assert "sec" not in str(caught.value)


def test_all_that_no_process_can_be_started_with_is_told() -> None:
    with pytest.raises(ConfigError) as caught:
        planned({"env": {"": "", "=": ""}, "args": ["\0"]}, {"command": [""]})
    keys = [text.partition(":")[0] for text in str(caught.value).splitlines()]
    assert keys == ["engines[0].env", "engines[0].env", "engines[0].args", "engines[1].command"]


def test_a_socket_directory_whose_path_is_too_long_is_refused() -> None:
    with pytest.raises(ConfigError, match="Linux allows 107"):
        planned({}, on=host(SMGD_ZMQ_SOCKET_DIR=f"/{'x' * 100}"))


def test_engines_cannot_be_kept_where_the_service_manager_ends_them() -> None:
    keep = {"keep_engines": True}
    with pytest.raises(ConfigError, match=r"under systemd: .* \(KillMode=\)"):
        planned({}, on=host(has_terminal=False, INVOCATION_ID="1"), launch=keep)
    assert planned({}, on=host(has_terminal=True, INVOCATION_ID="1"), launch=keep).engines
    assert planned({}, on=host(has_terminal=False), launch=keep).engines
    assert planned({}, on=host(has_terminal=False, INVOCATION_ID="1")).engines


def test_ports_end_somewhere() -> None:
    with pytest.raises(ConfigError, match="no ports left for engine-65018: lower --worker-base-po"):
        planned({"replicas": 1000}, launch={"worker_base_port": 65000})


# ------------------------------------------------------------------------------- ports and GPUs


@pytest.mark.parametrize("base", [19700, 19767, 20000, 25000, 29766, 29999, 31000])
def test_stores_have_blocks_of_ports_outside_the_handshakes(base: int) -> None:
    ports = [
        store_port(base, index) + offset
        for index in range(200)
        for offset in range(module.STORE_BLOCK)
    ]
    assert len(set(ports)) == len(ports)
    assert not set(ports) & set(HANDSHAKE_PORTS)


def devices(result: Plan) -> list[str | None]:
    return [spec.env.get("CUDA_VISIBLE_DEVICES") for spec in result.engines]


def test_gpus_are_divided_in_slices_of_the_parallel_size() -> None:
    assert devices(planned({"replicas": 3})) == ["0", "1", "2"]
    assert devices(planned({"replicas": 2, "args": ["-tp", "2"]}, {})) == ["0,1", "2,3", "4"]


def test_gpus_that_are_visible_to_smgd_are_those_that_are_divided() -> None:
    visible = host(CUDA_VISIBLE_DEVICES="GPU-a,5,7,6")
    result = planned({"replicas": 2, "args": ["--tensor-parallel-size=2"]}, on=visible)
    assert devices(result) == ["GPU-a,5", "7,6"]
    with pytest.raises(
        ConfigError, match=r"take 6 GPUs \(2 \+ 2 \+ 2\), .*DEVICES=GPU-a,5,7,6 has 4"
    ):
        planned({"replicas": 3, "args": ["-tp", "2"]}, on=visible)


def test_an_engine_that_has_all_gpus_to_itself_is_told_nothing() -> None:
    assert devices(planned({"args": ["-tp", "4"]}, {"backend": "sim", "replicas": 2})) == [None] * 3


def test_gpus_of_an_engines_own_environment_are_divided_among_its_replicas() -> None:
    own = {"env": {"CUDA_VISIBLE_DEVICES": "6,7"}}
    assert devices(planned({"replicas": 2} | own, {"replicas": 2})) == ["6", "7", "0", "1"]
    assert devices(planned(own, own)) == ["6,7", "6,7"]


def test_names_of_gpus_may_have_blanks_around_them_and_none_is_empty() -> None:
    assert devices(planned({"replicas": 2}, on=host(CUDA_VISIBLE_DEVICES=" 3, 5"))) == ["3", "5"]
    for visible in ("0,,1,2", "0,1,", ","):
        with pytest.raises(ConfigError, match=f"DEVICES={visible} has an empty name in it"):
            planned({"replicas": 2}, on=host(CUDA_VISIBLE_DEVICES=visible))
        with pytest.raises(ConfigError, match="has an empty name in it"):
            planned({"replicas": 2, "env": {"CUDA_VISIBLE_DEVICES": visible}})


@pytest.mark.parametrize("visible", ["", "-1", " "])
def test_where_no_gpu_is_visible_none_is_divided(visible: str) -> None:
    assert shares([1, 1], visible) == ["", ""]


# ------------------------------------------------------------------------------- the host


def test_the_facts_about_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMGD_ZMQ_SOCKET_DIR", "/x")
    here = Host.here()
    assert here.socket_directory == "/x"
    assert here.environ["SMGD_ZMQ_SOCKET_DIR"] == "/x"
    assert here.python
