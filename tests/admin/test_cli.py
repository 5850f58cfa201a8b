"""smgctl without a daemon: help, usage, and why nobody is reached."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from smgd import __version__
from smgd.admin import client
from smgd.admin.cli import COMMANDS, main
from smgd.admin.commands import COMMANDS as ON_THE_WIRE


@contextmanager
def answering(path: Path, reply: bytes) -> Iterator[list[bytes]]:
    """Be a daemon that gives one answer to whatever is asked once."""
    heard: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                heard.append(connection.recv(65536))
                connection.sendall(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        yield heard
        thread.join()


def test_every_command_of_the_daemon_has_one_here() -> None:
    assert [command.name for command in COMMANDS] == list(ON_THE_WIRE)


@pytest.mark.parametrize("name", ["", "workers", *(command.name for command in COMMANDS)])
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*name.split(), "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(" ".join(["usage: smgctl", *name.split()]))
    assert "--socket PATH" in text
    assert "--json" in text


def test_help_has_examples_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert "exit codes: 0 done, 1 smgd said no, 2 wrong usage, 3 no smgd was reached" in text
    assert "smgctl workers show ipc:///run/smgd/engines/0" in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"smgctl {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "smgctl: the following arguments are required: COMMAND (see smgctl --help)"),
        (["dance"], "smgctl: argument COMMAND: invalid choice: 'dance'"),
        (["workers"], "smgctl workers: the following arguments are required: COMMAND"),
        (["workers", "show"], "smgctl workers show: the following arguments are required: WORKER"),
        (["workers", "add", "u", "--label", "x"], "smgctl workers add: argument --label: found "),
        *(
            (
                [*command, option, value],
                f"smgctl {' '.join(command[:2])}: argument {option}: found ",
            )
            for command in (["workers", "patch", "w"], ["workers", "add", "u"])
            for option in ("--drain-settle-secs", "--cost")
            for value in ("inf", "nan", "-1", "1e999", "soon")
        ),
        (["abort"], "smgctl abort: the following arguments are required: ID"),
        (["status", "--jsn"], "smgctl: unrecognized arguments: --jsn"),
    ],
)
def test_wrong_usage_is_one_line(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(said)


@pytest.mark.parametrize(
    "argv",
    [
        ["--socket", "PATH", "--json", "loglevel"],
        ["loglevel", "--socket", "PATH", "--json"],
        ["--json", "loglevel", "--socket=PATH"],
    ],
)
def test_options_before_and_behind_the_command(
    argv: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s"
    with answering(path, b'{"result":{"level":"info"}}\n') as heard:
        assert main([word.replace("PATH", str(path)) for word in argv]) == 0
    assert heard == [b'{"command":"loglevel","args":{"level":null}}\n']
    assert capsys.readouterr().out == '{\n  "level": "info"\n}\n'


def test_the_arguments_of_workers_add(tmp_path: Path) -> None:
    path = tmp_path / "s"
    argv = [
        *("--socket", str(path), "workers", "add", "ipc:///e", "--model", "m"),
        *("--model-path", "/m", "--dp-size", "2", "--runtime-type", "vllm", "--label", "a=b=c"),
        *("--zmq-handshake-address", "tcp://127.0.0.1:1", "--drain-settle-secs", "1.5"),
    ]
    with answering(path, b'{"error":"no","kind":"failed"}\n') as heard:
        assert main(argv) == 1
    assert msgspec.json.decode(heard[0])["args"] == {
        "url": "ipc:///e",
        "dp_size": 2,
        "runtime_type": "vllm",
        "zmq_handshake_address": "tcp://127.0.0.1:1",
        "labels": {"a": "b=c", "model": "m", "model_path": "/m"},
        "health": {"drain_settle_secs": 1.5},
    }


# ------------------------------------------------------------------- nobody takes the answer


def smgctl(path: Path, *argv: str, stdout: int) -> subprocess.CompletedProcess[bytes]:
    """Run smgctl as a program, whose daemon answers with more than a pipe takes."""
    command = [sys.executable, "-m", "smgd.admin.cli", "--socket", str(path), *argv]
    reply = msgspec.json.encode({"result": {"server": {"host": "x" * 200_000}}}) + b"\n"
    with answering(path, reply):
        return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, check=False)


@pytest.mark.parametrize("argv", [["config", "show"], ["config", "show", "--json"]])
def test_an_answer_that_nobody_reads_to_its_end(argv: list[str], tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = smgctl(tmp_path / "s", *argv, stdout=write)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("argv", [["config", "show"], ["config", "show", "--json"], ["--help"]])
def test_an_answer_that_cannot_be_written(argv: list[str], tmp_path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        if argv == ["--help"]:
            command = [sys.executable, "-m", "smgd.admin.cli", *argv]
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
        else:
            done = smgctl(tmp_path / "s", *argv, stdout=full)
    finally:
        os.close(full)
    text = b"smgctl: cannot write the answer: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, text)


# ------------------------------------------------------------------------- nobody is reached


def test_no_socket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--socket", str(tmp_path / "none")]) == 3
    assert capsys.readouterr().err == (
        f"smgctl: there is no socket {tmp_path}/none: start smgd (systemctl start smgd.socket"
        " smgd), or say where its socket is: smgctl --socket PATH, smgd --admin-socket PATH\n"
    )


def test_the_socket_of_a_daemon_that_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    assert main(["status", "--socket", str(path)]) == 3
    assert f"nobody listens at {path}: smgd has ended; start it" in capsys.readouterr().err


def test_a_daemon_that_hangs(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        with pytest.raises(client.UnreachableError, match=r"has not answered for 0\.05 s: it hang"):
            client.ask(str(path), "status", {}, timeout=0.05)


@pytest.mark.parametrize(
    ("reply", "code", "said"),
    [
        (b"", 3, "has closed the connection: it stops or cannot start (systemctl"),
        (b"HTTP/1.1 400 Bad Request\n", 3, "is not smgd: JSON is malformed"),
        (b'{"result":' + b"[" * 100_000 + b"\n", 3, "is not smgd: maximum recursion depth"),
        (b'{"error":"go away","kind":"denied"}\n', 3, "smgctl: go away"),
        (b'{"error":"no","kind":"failed"}\n', 1, "smgctl: no"),
        (b'{"error":"what?","kind":"usage"}\n', 2, "smgctl: what?"),
    ],
)
def test_answers_that_are_no_result(
    reply: bytes, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s"
    with answering(path, reply):
        assert main(["status", "--socket", str(path)]) == code
    assert said in capsys.readouterr().err


def test_every_command_is_in_the_operations_guide() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    missing = [c.name for c in COMMANDS if f"| `{c.name}" not in guide]
    assert missing == []
