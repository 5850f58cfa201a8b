"""What a host says of a configuration: every mistake is told, and nothing is bound to find it."""

from __future__ import annotations

import grp
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from smgd.checks import judged
from smgd.cli import configuration, main, parse_args
from smgd.config.findings import Findings
from smgd.errors import ConfigError
from smgd.wire.fnv import handshake_port
from tests.support import PATIENCE, unmeasured

ROOT = Path(__file__).parent.parent
NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can play another user")


@pytest.fixture
def place() -> Iterator[Path]:
    """Give a directory of our own, in which paths of sockets are short enough."""
    with tempfile.TemporaryDirectory(prefix="smgd-") as directory:
        yield Path(directory)


def judge(text: str, place: Path, *, outside: bool = False, binds: bool = True) -> Findings:
    file = place / "smgd.toml"
    file.write_text(text)
    found = Findings(outside=outside)
    judged(file, {}, found, binds=binds)
    return found


def wrong(text: str, place: Path, *, binds: bool = True) -> list[str]:
    """Return the mistakes without the name of the file before each."""
    found = judge(text, place, binds=binds).mistakes
    return [line.removeprefix(f"{place}/smgd.toml: ") for line in found]


def workers(*tables: str) -> str:
    return "[models.m]\n" + "\n".join(f"[[workers]]\n{table}" for table in tables)


def test_the_example_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-config", str(ROOT / "smgd.toml.example")]) == 0
    assert capsys.readouterr().out.endswith("smgd.toml.example: OK\n")


# ------------------------------------------------------------------------------- TLS


class Pem(NamedTuple):
    """Files of a certificate, of its key, of another key, and of the key with a password."""

    certificate: Path
    key: Path
    other: Path
    locked: Path


@pytest.fixture
def pem(tmp_path: Path) -> Pem:
    authority = trustme.CA()
    leaf, other = authority.issue_cert("localhost"), authority.issue_cert("localhost")
    files = Pem(*(tmp_path / name for name in Pem._fields))
    leaf.private_key_and_cert_chain_pem.write_to_path(files.certificate)
    leaf.private_key_pem.write_to_path(files.key)
    other.private_key_pem.write_to_path(files.other)
    key = load_pem_private_key(leaf.private_key_pem.bytes(), None)
    sealed = BestAvailableEncryption(b"secret")
    files.locked.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, sealed))
    return files


def tls(certificate: object, key: object) -> str:
    return f'[tls]\ncert_path = "{certificate}"\nkey_path = "{key}"'


def test_a_pair_that_can_be_used(pem: Pem, place: Path) -> None:
    assert wrong(tls(pem.certificate, pem.key), place) == []


def test_a_half_of_a_pair(pem: Pem, place: Path) -> None:
    both = "must be given: TLS needs both tls.cert_path and tls.key_path"
    assert wrong(tls("", pem.key), place) == [f"tls.cert_path: {both}"]
    assert wrong(f'[tls]\ncert_path = "{pem.certificate}"', place) == [f"tls.key_path: {both}"]
    assert wrong('[tls]\ncert_path = "/x"', place) == [
        "tls.cert_path: /x cannot be read: No such file or directory",
        f"tls.key_path: {both}",
    ]


def test_both_files_are_looked_for(place: Path) -> None:
    assert wrong(tls("/x", place), place) == [
        "tls.cert_path: /x cannot be read: No such file or directory",
        f"tls.key_path: {place} cannot be read: Is a directory",
    ]


def test_a_pair_that_does_not_belong_together(pem: Pem, place: Path) -> None:
    [line] = wrong(tls(pem.certificate, pem.other), place)
    assert line.startswith(f"tls.cert_path: cannot use the TLS files {pem.certificate}, ")
    assert "KEY_VALUES_MISMATCH" in line


def test_a_key_with_a_password_is_refused_and_nobody_is_asked(pem: Pem, place: Path) -> None:
    [line] = wrong(tls(pem.certificate, pem.locked), place)
    assert line.endswith("the key is encrypted; smgd needs one without a password")


# ------------------------------------------------------------------------------- other listeners


def test_the_group_has_to_exist(place: Path) -> None:
    text = f'[admin]\nsocket = "{place}/s"\ngroup = "nogrpx"'
    assert wrong(text, place) == ["admin.group: there is no group 'nogrpx'"]
    for unused in ('[admin]\ngroup = "nogrpx"', '[admin]\nsocket = ""\ngroup = "nogrpx"'):
        assert wrong(unused, place) == []
    assert wrong(text, place, binds=False) == [], "systemd has made the socket"
    own = grp.getgrgid(os.getegid()).gr_name
    assert wrong(f'[admin]\ngroup = "{own}"\nsocket = "{place}/s"', place) == []


def test_the_admin_socket_needs_a_place(place: Path) -> None:
    (place / "file").touch()
    for path, said in {
        f"{place}/no/s": f"there is no directory {place}/no, or this user may not write to it",
        f"{place}/file": f"{place}/file is there, and is not a socket",
        f"/{'x' * 107}": "the path has 108 bytes; Linux allows 107, and no NUL",
        "/a\\u0000": "the path has 3 bytes; Linux allows 107, and no NUL",
    }.items():
        assert wrong(f'[admin]\nsocket = "{path}"', place) == [f"admin.socket: {said}"]


def test_a_directory_that_comes_with_the_service_is_a_note_from_outside(place: Path) -> None:
    text = '[admin]\nsocket = "/run/smgd-none/s"\n[server]\nhost = "[::1]"'
    found = judge(text, place, outside=True)
    assert found.mistakes == []
    assert [note.partition(":")[0] for note in found.notes][:2] == ["admin.socket", "server.host"]
    assert "there is no directory /run/smgd-none yet" in found.notes[0]
    assert [line.partition(":")[0] for line in wrong(text, place)] == [
        "admin.socket",
        "server.host",
    ]


def test_the_socket_of_a_daemon_that_runs_is_no_mistake(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(f"{place}/s")
        daemon.listen()
        assert wrong(f'[admin]\nsocket = "{place}/s"', place) == []


@pytest.mark.parametrize("host", ["", "[::1]", "256.1.1.1", "127.0.0.1 ", "a\\u0000b", "x" * 70])
def test_a_host_that_none_can_listen_on(host: str, place: Path) -> None:
    text = f'[server]\nhost = "{host}"\n[metrics]\nhost = "::1"'
    [line] = wrong(text, place)
    assert line.startswith("server.host: ")
    assert "cannot be listened on: " in line
    assert wrong(text, place, binds=False) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::1", "localhost", "*"])
def test_hosts_to_listen_on(host: str, place: Path) -> None:
    assert wrong(f'[server]\nhost = "{host}"', place) == []


# ------------------------------------------------------------------------------- workers


def test_every_worker_is_judged(place: Path) -> None:
    text = workers(
        'url = "http://127.0.0.1:1"\nzmq_handshake_address = "ipc:///x"',
        'url = "relative"',
        f'url = "ipc://{place}/a"\nzmq_handshake_address = "tcp://127.0.0.1:29000"',
        f'url = "ipc://{place}/b"\nzmq_handshake_address = "tcp://*:29500"',
        f'url = "ipc://{place}/c"\nzmq_handshake_address = "tcp://127.0.0.1:29500"',
        f'url = "ipc://{place}/../{place.name}/b"',
    )
    assert [line.partition(": ")[0] for line in wrong(text, place)] == [
        "workers[0].zmq_handshake_address",
        "workers[0].url",
        "workers[1].url",
        "workers[5].url",
        "workers[2].zmq_handshake_address",
        "workers[4].zmq_handshake_address",
    ]


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:0", "127.0.0.1:65536", ":29500", "[::1]:29500", "::1:29500", "a b:1", "a:1/x"],
)
def test_a_handshake_address_that_cannot_be_bound(address: str, place: Path) -> None:
    table = f'url = "ipc://{place}/a"\nzmq_handshake_address = "tcp://{address}"'
    [line] = wrong(workers(table), place)
    assert "must be a tcp:// address with a port, such as tcp://127.0.0.1:29500" in line


def test_two_urls_of_one_file(place: Path) -> None:
    (place / "link").symlink_to(place)
    (place / "sub").mkdir()
    urls = f"ipc://{place}/sub/a", f"ipc://{place}/link/sub/a", f"ipc://{place}/link/link/sub/a"
    found = wrong(workers(*(f'url = "{url}"' for url in urls)), place)
    assert found == [
        f"workers[{number}].url: {place}/sub/a-in.sock belongs to {urls[0]}, too"
        for number in (1, 2)
    ]


def test_the_admin_socket_is_no_workers(place: Path) -> None:
    text = f'[admin]\nsocket = "{place}/a-out.sock"\n' + workers(f'url = "ipc://{place}/a"')
    [line] = wrong(text, place)
    assert line == f"workers[0].url: {place}/a-out.sock belongs to admin.socket, too"


def test_a_directory_that_cannot_be_one(place: Path) -> None:
    (place / "file").touch()
    [one, two] = wrong(
        workers(f'url = "ipc://{place}/file/a"', f'url = "ipc://{place}/file/sub/b"'), place
    )
    assert one.startswith(f"workers[0].url: ipc socket dir {place}/file exists but is not a dir")
    assert two == f"workers[1].url: {place}/file/sub cannot be used: Not a directory"


def test_engines_that_cannot_be_started_are_told_with_all_else(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMGD_ZMQ_SOCKET_DIR", str(place))
    text = """
    [models.m]
    [[engines]]
    backend = "sglang"
    [[engines]]
    backend = "sim"
    model = "n"
    replicas = 60000
    [admin]
    socket = "/run/smgd.sock"
    group = "nogrpx"
    """
    assert [line.partition(": ")[0] for line in wrong(text, place)] == [
        "admin.group",
        "engines[0].backend",
        "engines[1].model",
        "launch.worker_base_port",
    ]


# ------------------------------------------------------------------------------- who is asked


def test_a_credential_of_systemd_is_not_judged_from_outside(place: Path) -> None:
    path = "/run/credentials/smgd.service/none"
    text = f'[auth]\napi_key_files = ["{path}"]'
    found = judge(text, place, outside=True)
    assert found.mistakes == []
    assert f"auth.api_key_files: {path} is there for its service only, so it is" in found.notes[0]
    assert wrong(text, place) == [
        f"auth.api_key_files: {path} cannot be read: No such file or directory"
    ]


@needs_root
def test_root_hears_what_it_cannot_judge(place: Path) -> None:
    key, open_key = place / "key", Path("/tmp") / f"{place.name}-key"
    key.write_text("sk-1")
    try:
        open_key.write_text("sk-1")
        found = judge(f'auth.api_key_files = ["{key}", "{open_key}"]', place, outside=True)
    finally:
        open_key.unlink()
    assert found.mistakes == []
    [note] = found.notes
    assert note == (
        f"judged as user root, who may read and write everything, also {place}/smgd.toml, {key};"
        " to judge as the user that runs smgd: runuser -u USER -- smgd check-config FILE"
    )


@needs_root
def test_a_directory_of_another_user_is_judged_by_the_service_alone(place: Path) -> None:
    (place / "e").mkdir()
    os.chown(place / "e", NOBODY, -1)
    text = workers(f'url = "ipc://{place}/e/a"')
    found = judge(text, place, outside=True)
    assert found.mistakes == []
    assert f"{place}/e" in found.notes[0]
    [line] = wrong(text, place)
    assert "is owned by uid 65534, not by uid 0 which this daemon runs as" in line


# Checked as root first, so that all is imported by who can: an interpreter may lie in root's home.
AS_NOBODY = f"""
import contextlib, io, os, sys
from smgd.cli import main
command = ["check-config", sys.argv[1]]
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    main(command)
os.setgroups([])
os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
sys.exit(main(command))
"""


@needs_root
def test_what_another_user_may_not_do_is_a_mistake(place: Path) -> None:
    place.chmod(0o755)
    key = place / "key"
    key.write_text("sk-1")
    key.chmod(0o400)
    file = place / "smgd.toml"
    file.write_text(
        f'auth.api_key_files = ["{key}"]\nadmin.socket = "{place}/s"\nadmin.group = "root"\n'
        + workers(f'url = "ipc://{place}/a"', f'url = "ipc://{place}/new/a"')
    )
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, str(file)],
        capture_output=True, text=True, timeout=PATIENCE, check=False, env=unmeasured(),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    note, *found = done.stderr.splitlines()
    owned = (
        f"ipc socket dir {place} is owned by uid 0, not by uid {NOBODY} which this daemon runs as:"
        " use a directory of its own"
    )
    assert note.startswith("smgd: note: judged as user nobody, who may not use ")
    assert [line.removeprefix(f"smgd: {file}: ") for line in found] == [
        f"auth.api_key_files: {key} cannot be read: Permission denied",
        "admin.group: this user is not in the group 'root'",
        f"admin.socket: there is no directory {place}, or this user may not write to it",
        f"workers[0].url: {owned}",
        f"workers[1].url: {place}/new cannot be made: this user may not write to {place}",
    ]


def test_kept_engines_and_programs_that_are_not_there_are_notes(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMGD_ZMQ_SOCKET_DIR", str(place))
    text = "[models.m]\n[launch]\nkeep_engines = true\n[[engines]]\npython = '/none/python'"
    found = judge(text, place, outside=True)
    assert found.mistakes == []
    assert found.notes[:2] == [
        "launch.keep_engines: not possible in a systemd service, which is not judged",
        "engines: there is no program /none/python to start engine-31000 with",
    ]
    assert judge(text, place).notes == []


# ------------------------------------------------------------------------------- who asks


def test_every_command_refuses_what_check_config_refuses(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = place / "smgd.toml"
    admin = '[admin]\nsocket = "/run/smgd.sock"\ngroup = "nogrpx"\n'
    file.write_text(f'[tls]\ncert_path = "/x"\n{admin}[server]\nprot = 1')
    said = []
    for command in (["check-config", str(file)], *([c, "--config", str(file)] for c in COMMANDS)):
        assert main(command) == 2
        lines = capsys.readouterr().err.splitlines()
        said.append([line for line in lines if ": note: " not in line])
    assert len(said[0]) == 4
    assert said == [said[0]] * 4
    with pytest.raises(ConfigError, match=r"tls\.key_path: must be given"):
        configuration(parse_args(["run", "--config", str(file)]), starts=False)


COMMANDS = ("run", "launch", "serve")


def test_launch_is_refused_before_anything_is_bound(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Were anything bound, the first complaint would be that its port is taken."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        flags = ["--host", "127.0.0.1", "--port", str(port), "--tls-cert-path", "/x"]
        assert main(["launch", *flags, "--worker-urls", f"ipc://{place}/a"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in lines] == [
        "workers[0].model", "tls.cert_path", "tls.key_path",
    ]  # fmt: skip
    assert list(place.iterdir()) == []


def test_names_are_not_looked_up_where_sockets_are_handed_over_or_read_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = parse_args(["launch", "--host", "256.1.1.1"])
    with pytest.raises(ConfigError, match=r"server\.host: '256\.1\.1\.1' cannot be listened on"):
        configuration(args)
    assert configuration(args, starts=False).server.host == "256.1.1.1"
    monkeypatch.setenv("LISTEN_FDS", "1")
    assert configuration(args).server.host == "256.1.1.1"


def test_our_own_ipv6_address_is_written_as_that_of_a_worker(place: Path) -> None:
    port = handshake_port(f"{place}/a")
    text = f'[server]\nhost = "::"\nport = {port}\n' + workers(f'url = "ipc://{place}/a"')
    [line] = wrong(text, place)
    assert "already claimed by this daemon itself" in line
