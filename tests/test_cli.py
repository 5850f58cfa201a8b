"""Flags are keys, help says all of it, and every mistake is one clear line and an exit code."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from smgd import __version__
from smgd.cli import build_parser, configuration, main, parse_args
from smgd.config import Config, ModelConfig, WorkerConfig
from smgd.config.keys import FLAGS, all_keys
from smgd.wire.fnv import handshake_port
from tests.support import PATIENCE

URL = "ipc:///tmp/smg-zmq/engine-0"
PORT = handshake_port("/tmp/smg-zmq/engine-0")
SECOND = f'[[workers]]\nurl = "{URL}"'


def read(*argv: str) -> Config:
    return configuration(parse_args(["launch", *argv]))


def usage_error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def mistakes(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return what was found wrong, without notes: root has some."""
    lines = capsys.readouterr().err.splitlines()
    return [line for line in lines if not line.startswith("smgd: note: ")]


def launch_actions() -> dict[str, argparse.Action]:
    (commands,) = (
        action.choices for action in build_parser()._actions if isinstance(action.choices, dict)
    )
    launch = commands["launch"]
    assert isinstance(launch, argparse.ArgumentParser)
    return {flag: action for action in launch._actions for flag in action.option_strings}


# ------------------------------------------------------------------------------- help


def test_every_flag_says_what_its_key_says() -> None:
    actions, keys = launch_actions(), all_keys()
    assert set(actions) == {*FLAGS, "--config", "-h", "--help"}
    for flag, path in FLAGS.items():
        assert (actions[flag].help or "").startswith(keys[path].description)
        assert f"[{path}" in (actions[flag].help or "")


@pytest.mark.parametrize("command", [[], ["launch"], ["run"], ["check-config"], ["demo"]])
def test_every_command_has_help(command: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(" ".join(["usage: smgd", *command]))


def test_help_of_launch_has_every_flag_and_how_to_start_an_engine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["launch", "--help"])
    text = capsys.readouterr().out
    for flag in FLAGS:
        assert f"\n  {flag} " in text
    assert f"--data-parallel-rpc-port {PORT}" in text


def test_help_has_examples_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert "smgd launch --worker-urls" in text
    assert "exit codes: 0 " in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"smgd {__version__}\n"


# ------------------------------------------------------------------------------- flags


def test_no_flag_is_the_default() -> None:
    assert read() == Config()


def test_every_flag_reaches_its_key() -> None:
    config = read(
        *("--worker-urls", URL, "ipc:///b", "--worker-urls", "ipc:///c", "--backend", "vllm"),
        *("--model-path", "/models/m", "--tokenizer-path", "/t", "--chat-template", "c.jinja"),
        *("--served-model-name", "m", "default", "--policy", "round_robin"),
        *("--host", "::1", "--port", "1", "--prometheus-host", "::2", "--prometheus-port", "2"),
        *("--log-level", "warn", "--log-json", "--zmq-startup-timeout-secs", "1.5"),
        *("--api-key", "sk-1", "sk-2", "--api-key", "sk-3", "--max-payload-size", "9"),
        *("--cors-allowed-origins", "https://a", "https://b"),
        *("--max-concurrent-requests", "7", "--queue-size", "8", "--queue-timeout-secs", "0.5"),
    )
    assert [worker.url for worker in config.workers] == [URL, "ipc:///b", "ipc:///c"]
    assert config.workers[0] == WorkerConfig(url=URL, runtime_type="vllm")
    assert config.models == {
        "m": ModelConfig(
            path="/models/m", tokenizer_path="/t", chat_template="c.jinja", aliases=("default",)
        )
    }
    assert (config.server.host, config.server.port) == ("::1", 1)
    assert (config.metrics.host, config.metrics.port) == ("::2", 2)
    assert (config.log.level, config.log.json) == ("warn", True)
    assert config.timeouts.zmq_startup == 1.5
    assert config.auth.api_keys == ("sk-1", "sk-2", "sk-3")
    assert config.server.max_payload_size == 9
    assert config.server.cors_allowed_origins == ("https://a", "https://b")
    limits = config.limits
    assert (limits.max_concurrent_requests, limits.queue_size) == (7, 8)
    assert limits.queue_timeout_secs == 0.5
    assert config.routing.policy == "round_robin"


def test_a_key_in_the_environment_is_as_good_as_a_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "smgd.toml"
    file.write_text('[auth]\napi_keys = ["sk-file"]')
    monkeypatch.setenv("SMGD_API_KEY", "sk-env")
    assert read("--config", str(file)).auth.api_keys == ("sk-env",)
    assert read("--config", str(file), "--api-key", "sk-flag").auth.api_keys == ("sk-flag",)
    monkeypatch.setenv("SMGD_API_KEY", "")  # was meant to be one, so nobody is let in without
    assert main(["check-config", str(file)]) == 2
    assert "auth.api_keys: key 1 of 1 is empty" in capsys.readouterr().err
    monkeypatch.delenv("SMGD_API_KEY")
    assert read("--config", str(file)).auth.api_keys == ("sk-file",)


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        ([], "auto"),
        (["--log-json"], True),
        (["--log-json", "false"], False),
        (["--log-json=auto"], "auto"),
    ],
)
def test_log_json_with_and_without_a_value(argv: list[str], value: object) -> None:
    assert read(*argv, "--port", "1").log.json == value


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "smgd.toml"
    file.write_text("server.port = 1\nmetrics.port = 2\n[models.m]\npath = '/m'")
    config = read("--config", str(file), "--port", "3", "--worker-urls", URL)
    assert (config.server.port, config.metrics.port) == (3, 2)
    assert config.server.host == Config().server.host
    assert config.model_of(config.workers[0]) == "m"


# ------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "smgd: the following arguments are required: COMMAND (see smgd --help)"),
        (["lanch"], "smgd: argument COMMAND: invalid choice: 'lanch'"),
        (["run"], "smgd run: the following arguments are required: --config (see smgd run --help)"),
        (["run", "--config", "f", "x"], "smgd run: there is nothing to do with 'x' (see"),
        (["launch", "--prot", "1"], "smgd launch: there is no flag --prot; did you mean --port?"),
        (["launch", "--model=m"], "smgd launch: there is no flag --model=m; did you mean --model-"),
        (["launch", "--worker-url", "a"], "smgd launch: there is no flag --worker-url; did you "),
        (["launch", "--zzz"], "smgd launch: there is no flag --zzz (see smgd launch --help)"),
        (
            ["launch", "--port", "http"],
            "smgd launch: argument --port: found 'http', allowed is an integer from 0 to 65535",
        ),
        (["launch", "--log-level", "x"], "smgd launch: argument --log-level: found 'x', allowed"),
        (["launch", "--port"], "smgd launch: argument --port: expected one argument"),
    ],
)
def test_wrong_usage_is_one_line(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert usage_error(capsys, *argv).startswith(said)


def test_a_configuration_that_cannot_be_used_is_wrong_usage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ("--worker-urls", URL, "--model-path", "m", "--backend", "sglang")
    assert main(["launch", *flags]) == 2
    assert capsys.readouterr().err == (
        f"smgd: workers[0].runtime_type: ZMQ worker {URL} has unsupported runtime sglang: only vllm"
        " is supported over the ZMQ direct backend\n"
    )
    assert main(["launch", "--worker-urls", URL]) == 2
    assert "has no model identity: give --model-path" in capsys.readouterr().err
    assert main(["run", "--config", "/nonexistent.toml"]) == 2
    assert "smgd: /nonexistent.toml: cannot be read" in capsys.readouterr().err


# ------------------------------------------------------------------------------- check-config


def test_check_config_of_a_good_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "smgd.toml"
    file.write_text(f'[models."org/m"]\n[[workers]]\nurl = "{URL}"')
    assert main(["check-config", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: OK\n"


def test_check_config_tells_every_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "smgd.toml"
    file.write_text("[server]\nprot = 1\nbacklog = 0")
    assert main(["check-config", str(file)]) == 2
    first, second = mistakes(capsys)
    assert first.startswith(f"smgd: {file}: server.prot: there is no such key; did you mean port?")
    assert second == f"smgd: {file}: server.backlog: found 0, allowed is an integer from 1 up"


@pytest.mark.parametrize(
    ("worker", "said"),
    [
        ('url = "http://127.0.0.1:8000"', "ZMQ worker URL must be ipc://<path>"),
        (f'url = "{URL}"\nzmq_handshake_address = "ipc:///x"', "must be a tcp:// address"),
        (f'url = "ipc:///{"x" * 120}"', "Linux allows 107"),
        (
            'url = "ipc:///a"\nzmq_handshake_address = "tcp://127.0.0.1:29000"',
            "would bind handshake address tcp://127.0.0.1:29000, already claimed by this daemon",
        ),
        (
            f'url = "ipc:///a"\nzmq_handshake_address = "tcp://127.0.0.1:{PORT}"\n{SECOND}',
            f"would bind handshake address tcp://127.0.0.1:{PORT}, already claimed by worker ipc:///a",
        ),
    ],
)
def test_check_config_finds_addresses_that_cannot_be(
    worker: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "smgd.toml"
    file.write_text(f"[models.m]\n[[workers]]\n{worker}")
    assert main(["check-config", str(file)]) == 2
    assert said in capsys.readouterr().err


def test_check_config_of_a_file_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check-config", str(tmp_path / "none")]) == 2
    assert "none: cannot be read: No such file" in capsys.readouterr().err


# ------------------------------------------------------------------------------- as a process


def smgd(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "smgd.cli", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_exit_codes_of_the_program(tmp_path: Path) -> None:
    file = tmp_path / "smgd.toml"
    file.write_text("")
    good = smgd("check-config", str(file))
    assert (good.returncode, good.stdout) == (0, f"{file}: OK\n")
    assert all(line.startswith("smgd: note: ") for line in good.stderr.splitlines())
    bad = smgd("launch", "--prot", "1")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert "did you mean --port?" in bad.stderr


def test_help_and_checks_load_no_engine(tmp_path: Path) -> None:
    """What answers at once must not import the daemon, trio or ZMQ."""
    file = tmp_path / "smgd.toml"
    file.write_text(f'[models."org/m"]\n[[workers]]\nurl = "{URL}"')
    script = (
        "import sys; from smgd.cli import main; code = main(['check-config', sys.argv[1]]);"
        "print(sorted({'trio', 'zmq', 'quart', 'tokenizers', 'structlog'} & sys.modules.keys()))"
    )
    command = [sys.executable, "-c", script, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
