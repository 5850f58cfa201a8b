"""`smgd serve`: engines and gateway in one command, with simulated engines as real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import trio
from msgspec import structs

from smgd.admin import show
from smgd.admin.commands import Reloaded
from smgd.cli import configuration, main, parse_args
from smgd.config import Config, EngineConfig, ModelConfig
from smgd.config.keys import FLAGS, SERVE_FLAGS, all_keys
from smgd.daemon import Daemon
from smgd.errors import WorkerError
from smgd.launch import wedged
from smgd.wire.fnv import handshake_port
from tests.admin.conftest import raw
from tests.flows.client import HOST, fetch
from tests.flows.house import House, short_directory
from tests.flows.house import until as until_async
from tests.launch.families import marked, members, until
from tests.support import PATIENCE

Build = Callable[..., House]


def read(*argv: str) -> Config:
    return configuration(parse_args(["serve", *argv]))


# ------------------------------------------------------------------------------- flags


def test_the_quick_start() -> None:
    config = read(
        *("--backend", "vllm", "--connection-mode", "zmq"),
        *("--model", "meta-llama/Llama-3.1-8B-Instruct"),
        *("--router-model-path", "meta-llama/Llama-3.1-8B-Instruct"),
        *("--host", "0.0.0.0", "--port", "30000"),
    )
    name = "meta-llama/Llama-3.1-8B-Instruct"
    assert config == Config(
        engines=(EngineConfig(backend="vllm", model_path=name),),
        models={name: ModelConfig(path=name)},
    )


def test_what_the_engine_loads_is_the_model_unless_another_is_named() -> None:
    assert read("--model", "org/m").models == {"org/m": ModelConfig(path="org/m")}
    assert read("--model", "/q", "--model-path", "org/m").models == {
        "org/m": ModelConfig(path="org/m")
    }
    assert read("--model-path", "org/m").engines == (EngineConfig(),)


def test_every_flag_reaches_its_key() -> None:
    config = read(
        *("--model", "m", "--data-parallel-size", "2", "--engine-python", "/v/python"),
        *("--worker-base-port", "40000", "--keep-engines", "--policy", "round_robin"),
    )
    assert config.engines == (EngineConfig(model_path="m", replicas=2, python="/v/python"),)
    assert (config.launch.worker_base_port, config.launch.keep_engines) == (40000, True)
    assert config.routing.policy == "round_robin"
    assert set(SERVE_FLAGS.values()) <= all_keys().keys()
    assert SERVE_FLAGS.keys() - FLAGS.keys() == {
        *("--model", "--data-parallel-size", "--engine-python"),
        *("--worker-base-port", "--keep-engines"),
    }


def test_flags_may_be_spelled_as_for_smg() -> None:
    config = read("--model", "m", "--dp-size", "3", "--router-policy", "round_robin")
    assert config.engines[0].replicas == 3
    assert config.routing.policy == "round_robin"


def test_every_other_flag_goes_to_the_engine() -> None:
    args = ["--max-model-len", "2048", "-tp", "2", "--hf-overrides", '{"a b": -1}', "-1", "--x=y"]
    config = read("--model", "m", *args[:4], "--port", "1", *args[4:], "--", "--port", "2", "w")
    assert config.engines[0].args == (*args, "--port", "2", "w")
    assert config.server.port == 1


def test_the_simulated_engine_needs_no_model() -> None:
    assert read("--backend", "sim").models == {"smgd-sim": ModelConfig(path="smgd-sim")}
    assert read("--backend", "sim", "--model-path", "m").models == {"m": ModelConfig(path="m")}


def test_flags_change_the_only_engine_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "smgd.toml"
    file.write_text('[models.m]\n[[engines]]\nargs = ["-x"]\nreplicas = 2')
    assert read("--config", str(file)).engines == (EngineConfig(args=("-x",), replicas=2),)
    [engine] = read("--config", str(file), "--data-parallel-size", "3").engines
    assert engine == EngineConfig(args=("-x",), replicas=3)
    assert read("--config", str(file), "--seed", "1").engines[0].args == ("--seed", "1")


# ------------------------------------------------------------------------------- mistakes


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return what `smgd serve` says when it does not start."""
    try:
        code = main(["serve", *argv])
    except SystemExit as exc:
        code = exc.code  # type: ignore[assignment]
    assert code == 2
    return capsys.readouterr().err


def test_help_needs_no_engine_and_says_where_flags_go(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "every other flag goes to the engine" in text
    for flag in SERVE_FLAGS:
        assert f"\n  {flag} " in text


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--router-cache-threshold", "1"], "there is no flag --router-cache-threshold"),
        (["--x", "1", "--router-zmq-engine-count=2"], "no flag --router-zmq-engine-count=2"),
        (["org/m"], "smgd serve: there is nothing to do with 'org/m' (see smgd serve --help)"),
        (["--connection-mode", "grpc"], "argument --connection-mode: invalid choice: 'grpc'"),
        (["--backend", "mlx"], 'allowed is "sglang", "sim", "tokenspeed", "vllm"'),
        (["--data-parallel-size", "0"], "found '0', allowed is an integer from 1 to 65535"),
        ([], "has no model identity: give --model-path (smgd serve: --model) or [models.ID]"),
    ],
)
def test_wrong_usage(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refusal(capsys, *argv)


def test_a_file_without_engines_or_with_too_many_for_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "smgd.toml"
    file.write_text("[models.m]")
    assert "there is no [[engines]]" in refusal(capsys, "--config", str(file))
    file.write_text("[models.m]\n[[engines]]\n[[engines]]")
    text = refusal(capsys, "--config", str(file), "--data-parallel-size", "2")
    assert "flags describe one engine, and the file has 2 tables [[engines]]" in text


def test_check_config_finds_what_engines_collide_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMGD_ZMQ_SOCKET_DIR", str(tmp_path))
    file = tmp_path / "smgd.toml"
    file.write_text('[models.m]\n[[engines]]\nreplicas = 900\nbackend = "sim"')
    assert main(["check-config", str(file)]) == 2
    assert "ZMQ handshake port collision on tcp://127.0.0.1:2" in capsys.readouterr().err
    worker = f'[[workers]]\nurl = "ipc://{tmp_path}/engine-31000"'
    file.write_text(f'[models.m]\n[[engines]]\nbackend = "sim"\n{worker}')
    assert main(["check-config", str(file)]) == 2
    assert "already claimed by worker ipc://" in capsys.readouterr().err


def test_a_mistake_in_a_table_of_engines_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "smgd.toml"
    wrong_kind = '[[engines]]\nbackend = "mlx"\nenv = { A = 1 }'
    file.write_text(f"[models.m]\n{wrong_kind}\n[[engines]]\nreplica = 2")
    assert main(["check-config", str(file)]) == 2
    lines = capsys.readouterr().err.splitlines()
    wrong = [line for line in lines if not line.startswith("smgd: note: ")]
    assert [line.split(": ", 2)[2] for line in wrong] == [
        'engines[0].backend: found "mlx", allowed is "sglang", "sim", "tokenspeed", "vllm"',
        'engines[0].env: found {"A":1}, allowed is a table of text',
        "engines[1].replica: there is no such key; did you mean replicas? There are: "
        + ", ".join(EngineConfig.__struct_fields__),
    ]


# ------------------------------------------------------------------------------- engines at work


class Place(NamedTuple):
    """Where the engines of a test live: short paths, free ports, a word by which to find them."""

    directory: Path
    base_port: int
    mark: str

    @property
    def args(self) -> list[str]:
        """Return arguments of an engine: one that says much, and the word, as a file's name."""
        return ["--log-level", "info", "--replies", str(self.directory / self.mark)]

    def left(self) -> list[str]:
        """Return which files are left in the directory of the sockets, save for adoption's."""
        own = (self.mark, "smgd.log", "smgd.toml")
        names = sorted(file.name for file in self.directory.iterdir())
        return [name for name in names if name not in own and not name.endswith(".engine.json")]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with short_directory() as directory, marked() as mark:
        monkeypatch.setenv("SMGD_ZMQ_SOCKET_DIR", str(directory))
        (directory / mark).touch()
        for base in range(31000, 32000, 2):
            paths = [f"{directory}/engine-{number}" for number in (base, base + 1)]
            if all(map(is_free, map(handshake_port, paths))):
                yield Place(directory, base, mark)
                return


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) != 0


def children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


async def test_a_killed_engine_is_started_again_and_served_again(
    build: Build, place: Place
) -> None:
    tables: Any = {
        "engines": [{"backend": "sim", "replicas": 2, "args": place.args}],
        "launch": {"worker_base_port": place.base_port},
    }
    house = build(workers=0, **tables)
    await house.open()
    await house.ready(2)
    engines = list(house.daemon.engines.engines.values())
    guardians = [engine.life.pid for engine in engines]
    assert (await house.ask("hello")).status == 200

    [process] = children(engines[0].life.pid or 0)
    os.kill(process, signal.SIGKILL)
    await until_async(lambda: house.daemon.registry.ready_count() == 1)
    assert (await house.ask("still here")).status == 200
    await house.ready(2)
    assert [engine.life.starts for engine in engines] == [2, 1]
    assert engines[0].life.pid not in guardians
    assert (await house.ask("hello again")).status == 200

    [told] = [line for line in house.lines if line["event"].startswith("engine was ended by")]
    assert told["log_level"] == "warning"
    ready = [line["event"] for line in house.lines if line["event"].endswith("sim ready engine 0")]
    names = [engine.spec.name for engine in engines]
    assert sorted(ready) == [f"[{name}] sim ready engine 0" for name in (names[0], *names)]
    await house.stop()
    assert members(place.mark) == []
    assert place.left() == []


def tables(place: Place, **engine: Any) -> dict[str, Any]:
    """Return the tables of a house with an engine; by default one that works."""
    return {
        "engines": [{"backend": "sim", "args": place.args, **engine}],
        "launch": {"worker_base_port": place.base_port},
    }


async def test_an_engine_ends_with_its_worker_and_who_asks_for_a_reload_brings_both_back(
    build: Build, place: Place
) -> None:
    house = build(workers=0, **tables(place, replicas=2))
    [(model, table)] = house.config.models.items()
    renamed = {model: structs.replace(table, aliases=("other",))}
    wanted = structs.replace(house.config, models=renamed)
    daemon = house.daemon = Daemon(house.config, reread=lambda: wanted)
    await house.open()
    await house.ready(2)
    [engine, _] = daemon.engines.engines.values()
    record = daemon.fleet.by_url(engine.spec.url)
    assert record is not None

    daemon.fleet.remove(record.id)
    await until_async(lambda: engine.life.state == "stopped")
    assert len(members(place.mark)) == 2  # guardian and engine
    assert (await house.ask("hello")).status == 200

    assert daemon.reload() == Reloaded([], [])  # as by SIGHUP
    assert daemon.fleet.by_url(engine.spec.url) is None
    assert daemon.reload(revive=True) == Reloaded([], [])
    await house.ready(2)
    assert (await house.ask("hello", model="other", max_tokens=1)).status == 200
    assert (engine.life.state, engine.life.starts, engine.life.restarts) == ("running", 2, 0)
    await house.stop()
    assert members(place.mark) == []
    assert not house.logged("engine session ended")
    with pytest.raises(WorkerError, match="cannot be added: smgd is stopping"):
        daemon.fleet.add(structs.replace(record.spec, url=f"{record.spec.url}x"))


async def test_a_reload_while_an_engine_is_being_ended_waits_for_its_end(
    build: Build, place: Place, tmp_path: Path
) -> None:
    may_end = tmp_path / "may-end"
    lives = f"kill -0 $! 2>/dev/null || ! test -e {may_end}"
    stubborn = f"trap '' TERM; \"$@\" & while {lives}; do sleep 0.02; done"
    command = ["sh", "-c", stubborn, "sh", sys.executable, "-m", "smgd.sim.cli"]
    dials = ["--handshake", "{handshake_address}", "--model-path", "{model}"]
    house = build(workers=0, **tables(place, command=[*command, *dials]))
    daemon = house.daemon = Daemon(house.config, reread=lambda: house.config)
    await house.open()
    await house.ready(1)
    [engine] = daemon.engines.engines.values()
    record = daemon.fleet.by_url(engine.spec.url)
    assert record is not None
    before = engine.life.pid

    daemon.fleet.remove(record.id)
    await until_async(
        lambda: house.logged("its worker was removed or has failed; ending the engine")
    )
    daemon.reload(revive=True)
    following = daemon.fleet.by_url(engine.spec.url)
    assert following is not None
    await trio.sleep(0.3)
    assert (engine.life.pid, engine.life.state) == (before, "running")
    assert daemon.registry.workers == {}
    may_end.touch()
    await house.ready(1)
    assert engine.life.pid != before
    assert (engine.life.starts, engine.life.restarts) == (2, 0)
    assert (await house.ask("hello")).status == 200
    await house.stop()


async def test_no_engine_is_started_for_a_worker_whose_path_another_smgd_has(
    build: Build, place: Place
) -> None:
    house = build(workers=0, **tables(place))
    await house.open()
    await house.ready(1)
    daemon = house.daemon
    [engine] = daemon.engines.engines.values()
    record = daemon.fleet.by_url(engine.spec.url)
    assert record is not None
    daemon.fleet.remove(record.id)
    await until_async(lambda: engine.life.state == "stopped")
    await until_async(lambda: daemon.fleet.by_url(engine.spec.url) is None)

    with Smgd(place) as other:
        other.wait_until_said("ZMQ worker ready")
        theirs = members(place.mark)
        added = daemon.fleet.add(record.spec)
        await until_async(lambda: added.state == "failed")
        await trio.sleep(0.2)
        assert (engine.life.state, engine.life.starts) == ("stopped", 1)
        assert members(place.mark) == theirs
        other.process.terminate()
        assert await trio.to_thread.run_sync(other.process.wait) == 0
    again = daemon.fleet.add(record.spec)
    await house.ready(1)
    assert (again.state, engine.life.state, engine.life.starts) == ("ready", "running", 2)
    house.take_errors()
    await house.stop()


async def test_an_engine_in_a_crash_loop_is_seen_and_its_worker_is_not_given_up(
    build: Build, place: Place, tmp_path: Path
) -> None:
    health = {"remove_unhealthy_workers": True, "check_interval": 0.01, "failure_threshold": 1}
    admin = {"socket": str(tmp_path / "smgd.sock")}
    command = {"command": ["sh", "-c", "exit 3"], "args": []}
    house = build(workers=0, health=health, admin=admin, **tables(place, **command))
    await house.open()
    [engine] = house.daemon.engines.engines.values()
    await until_async(lambda: engine.life.restarts == 2)
    record = house.daemon.fleet.by_url(engine.spec.url)
    assert record is not None
    assert record.state == "pending"

    shown = await fetch(house.port, f"/workers/{record.id}")
    process = shown.json["engine_process"]
    assert process.pop("last_end").startswith("ended with status 3 after 0.")
    assert process == {"state": "waiting", "starts": 2, "restarts": 2}
    [line] = await raw(
        admin["socket"],
        b'{"command": "workers show", "args": {"worker": "%s"}}' % engine.spec.path.encode(),
    )
    assert line["result"]["engine_process"]["starts"] == 2
    assert "connect" not in line["result"]
    assert "engine process  waiting, started 2 times, restarts: 2; the last one ended with" in (
        show.worker(line["result"])
    )
    assert await house.metric("smg_engine_restarts_total", worker=engine.spec.url) == 2


async def test_an_engine_that_was_kept_and_cannot_be_adopted_is_started_again(
    build: Build, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Smgd(place, "--keep-engines") as first:
        first.wait_until_said("ZMQ worker ready")
        first.process.terminate()
        assert first.process.wait(PATIENCE) == 0
    (place.directory / f"engine-{place.base_port}.engine.json").unlink()
    kept = members(place.mark)
    monkeypatch.setattr(wedged, "WEDGED_SECONDS", 0.3)
    house = build(workers=0, **tables(place))
    await house.open()
    await house.ready(1)
    assert not set(kept) & set(members(place.mark))
    assert house.logged("engine found that was left running")
    assert house.logged("engine runs, and has not served for 0.3 s; ending it")
    await house.stop()


CONFIG = f"""
server = {{ host = "{HOST}", port = 0, drain_window = 0 }}
metrics.port = 0
[models.smgd-sim]
[[engines]]
backend = "sim"
"""


class Smgd:
    """`smgd serve` as a process; what it says is in a file."""

    def __init__(self, place: Place, *flags: str) -> None:
        self._log = place.directory / "smgd.log"
        config = place.directory / "smgd.toml"
        config.write_text(CONFIG)
        command = [
            *(sys.executable, "-m", "smgd.cli", "serve", "--config", str(config), "--log-json"),
            *("--worker-base-port", str(place.base_port), *flags, "--", *place.args),
        ]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stderr=log, start_new_session=True)

    def __enter__(self) -> Smgd:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)

    def said(self, event: str) -> list[dict[str, Any]]:
        """Return the log lines whose event begins so."""
        lines = self._log.read_bytes().splitlines()
        whole = [line for line in lines if line.startswith(b"{") and line.endswith(b"}")]
        decoded = [msgspec.json.decode(line, type=dict[str, Any]) for line in whole]
        return [line for line in decoded if line["event"].startswith(event)]

    def wait_until_said(self, event: str) -> None:
        until(lambda: self.said(event))


def test_stopped_in_order_it_leaves_no_process(place: Place) -> None:
    with Smgd(place) as smgd:
        smgd.wait_until_said("ZMQ worker ready")
        assert len(members(place.mark)) == 3  # smgd, guardian, engine
        smgd.process.terminate()
        assert smgd.process.wait(PATIENCE) == 0
        assert members(place.mark) == []
        assert smgd.said(f"[engine-{place.base_port}] sim hello engine 0 at ")
        assert smgd.said("engine stopped")
        assert smgd.said("session closed")
        assert not smgd.said("engine session ended")
    assert place.left() == []


def test_killed_it_leaves_no_process_either(place: Place) -> None:
    with Smgd(place) as smgd:
        smgd.wait_until_said("ZMQ worker ready")
        smgd.process.kill()
        smgd.process.wait(PATIENCE)
        until(lambda: members(place.mark) == [])


def test_an_engine_that_is_kept_is_there_for_the_next_start(place: Place) -> None:
    with Smgd(place, "--keep-engines") as first:
        first.wait_until_said("ZMQ worker ready")
        first.process.terminate()
        assert first.process.wait(PATIENCE) == 0
        assert first.said("engine left running")
    kept = members(place.mark)
    assert len(kept) == 2
    log = place.directory / f"engine-{place.base_port}.log"
    assert b"sim ready engine 0" in log.read_bytes()
    with Smgd(place) as second:
        second.wait_until_said("engine found that was left running")
        second.wait_until_said("ZMQ worker ready")
        assert set(kept) == set(members(place.mark)) - {second.process.pid}
        second.process.terminate()
        assert second.process.wait(PATIENCE) == 0
    assert members(place.mark) == []


def test_under_systemd_engines_cannot_be_kept(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INVOCATION_ID", "0123")
    command = [sys.executable, "-m", "smgd.cli", "serve", "--backend", "sim", "--keep-engines"]
    done = subprocess.run(
        command,
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("smgd: launch.keep_engines: --keep-engines (launch.keep_engine")
