"""Where files come from. The hub is a cache in a directory, or a small server on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from smgd.errors import ModelError
from smgd.text import hub
from tests.text.make_model import write_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "some-org/tiny"


def write_cache(cache: Path, *names: str) -> Path:
    """Lay out a model in a cache as huggingface_hub does; `names` are all files if none given."""
    snapshot = cache / "models--some-org--tiny" / "snapshots" / COMMIT
    write_model(snapshot)
    for path in snapshot.iterdir():
        if names and path.name not in names:
            path.unlink()
    refs = cache / "models--some-org--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    return snapshot


def run_resolve(name: str, **environment: str) -> tuple[str, str]:
    """Resolve a name in a process of its own: huggingface_hub reads its variables when imported.

    Return the directory, or the error and its cause's type.
    """
    code = (
        "import sys; from smgd.errors import ModelError; from smgd.text.hub import resolve\n"
        "try: print(resolve(sys.argv[1]), '-', sep='\\n', end='')\n"
        "except ModelError as e: print(e, type(e.__cause__).__name__, sep='\\n', end='')"
    )
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, name],
        env=inherited | {"HF_HUB_DISABLE_TELEMETRY": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    answer, _, cause = done.stdout.rpartition("\n")
    return answer, cause


@contextmanager
def closed_port() -> Iterator[int]:
    """Give a port that refuses: bound, so that nobody else takes it, but not listening."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


# ------------------------------------------------------------------------- names and directories


def test_the_built_in_model_is_part_of_the_package() -> None:
    assert hub.resolve("smgd-sim") == hub.BUILTIN_DIRECTORY
    assert hub.BUILTIN_DIRECTORY.parent == Path(hub.__file__).parent


def test_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub.resolve(str(tmp_path)) == tmp_path
    assert hub.resolve("org/model") == Path("org/model")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve("~/org") == tmp_path / "org"


def test_the_built_in_name_does_not_depend_on_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "smgd-sim").mkdir()
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("smgd-sim") == hub.BUILTIN_DIRECTORY
    assert hub.resolve("./smgd-sim") == Path("smgd-sim")


@pytest.mark.parametrize("name", ["/no/such/model", "./nothing", "../nothing/here", "~/nothing"])
def test_a_directory_that_is_not_there(name: str) -> None:
    with pytest.raises(ModelError, match=f"there is no directory {name}"):
        hub.resolve(name)


def test_directories_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"cannot look for /x.*: .*too long") as error:
        hub.resolve("/" + 300 * "x")
    assert isinstance(error.value.__cause__, OSError)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read everything
    with pytest.raises(ModelError, match=f"this user may not read the directory {tmp_path}"):
        hub.resolve(str(tmp_path))


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    path = write_model(tmp_path) / "config.json"
    with pytest.raises(ModelError, match=f"is a file: give the model's directory, {tmp_path}"):
        hub.resolve(str(path))


@pytest.mark.parametrize("name", ["too/many/slashes", "spa ce", "org/", "-dash", "a..b"])
def test_a_name_that_cannot_be_an_id(name: str) -> None:
    with pytest.raises(ModelError, match="there is no such directory, and it cannot be an id"):
        hub.resolve(name)


# ---------------------------------------------------------------------------------- the cache


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_the_cache_serves(tmp_path: Path, variable: str) -> None:
    snapshot = write_cache(tmp_path)
    answer, _ = run_resolve(REPO, HF_HUB_CACHE=str(tmp_path), **{variable: "1"})
    assert answer == str(snapshot)


def test_offline_and_not_in_the_cache(tmp_path: Path) -> None:
    answer, cause = run_resolve(REPO, HF_HUB_CACHE=str(tmp_path), HF_HUB_OFFLINE="1")
    assert answer == (
        f"model '{REPO}': not in the cache {tmp_path}, and HF_HUB_OFFLINE forbids the network: "
        "fetch it first, or give a local directory"
    )
    assert cause == "LocalEntryNotFoundError"


def test_the_cache_comes_before_the_network(tmp_path: Path) -> None:
    snapshot = write_cache(tmp_path)
    with closed_port() as port:
        endpoint = f"http://127.0.0.1:{port}"
        answer, _ = run_resolve(REPO, HF_HUB_CACHE=str(tmp_path), HF_ENDPOINT=endpoint)
    assert answer == str(snapshot)


def test_part_of_a_model_in_the_cache_is_better_than_nothing(tmp_path: Path) -> None:
    snapshot = write_cache(tmp_path, "tokenizer.json")
    answer, _ = run_resolve(REPO, HF_HUB_CACHE=str(tmp_path), HF_HUB_OFFLINE="1")
    assert answer == str(snapshot)


def test_a_network_that_refuses(tmp_path: Path) -> None:
    with closed_port() as port:
        endpoint = f"http://127.0.0.1:{port}"
        answer, cause = run_resolve(REPO, HF_HUB_CACHE=str(tmp_path), HF_ENDPOINT=endpoint)
    assert answer.startswith(f"model '{REPO}': not in the cache {tmp_path}, and {endpoint}")
    assert "Connection refused" in answer
    assert answer.endswith("check the network, or give a local directory")
    assert cause == "LocalEntryNotFoundError"


# -------------------------------------------------------------------------------- the network


class FakeHub(ThreadingHTTPServer):
    """Serves one model; `asked` are the requests it got."""

    daemon_threads = True

    def __init__(self, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {p.relative_to(directory).as_posix(): p.read_bytes()
                      for p in directory.rglob("*") if p.is_file()}  # fmt: skip
        self.asked: list[str] = []
        self.endpoint = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """As much of the hub's API as a snapshot download uses."""

    server: FakeHub

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        siblings = [{"rfilename": name} for name in self.server.files]
        if path.startswith("/api/models/gated"):
            self.reply(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif not path.startswith((f"/api/models/{REPO}", f"/{REPO}/resolve/")):
            self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif path.startswith(f"/api/models/{REPO}/revision"):
            self.reply(200, json.dumps({"id": REPO, "sha": COMMIT, "siblings": siblings}).encode())
        elif path.startswith(f"/api/models/{REPO}/tree"):
            self.reply(200, json.dumps([self.entry(name) for name in self.server.files]).encode())
        else:
            content = self.server.files[path.removeprefix(f"/{REPO}/resolve/{COMMIT}/")]
            etag = hashlib.sha1(content).hexdigest()
            self.reply(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})

    def entry(self, name: str) -> dict[str, object]:
        content = self.server.files[name]
        oid = hashlib.sha1(content).hexdigest()
        return {"type": "file", "path": name, "size": len(content), "oid": oid}

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing."""


@pytest.fixture
def fake_hub(tmp_path: Path) -> Iterator[FakeHub]:
    directory = write_model(tmp_path / "remote", generation_config={"eos_token_id": 1})
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    for name in ("model.safetensors", "pytorch_model.bin", "README.md", "tokenizer.model"):
        (directory / name).write_bytes(b"large")
    with FakeHub(directory) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_only_small_files_are_fetched_and_only_once(fake_hub: FakeHub, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    environment = {"HF_HUB_CACHE": str(cache), "HF_ENDPOINT": fake_hub.endpoint}
    answer, _ = run_resolve(REPO, **environment)
    snapshot = cache / "models--some-org--tiny" / "snapshots" / COMMIT
    assert answer == str(snapshot)
    assert {p.relative_to(snapshot).as_posix() for p in snapshot.rglob("*") if p.is_file()} == {
        "additional_chat_templates/tool_use.jinja",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    fake_hub.asked.clear()
    assert run_resolve(REPO, **environment) == (answer, "-")
    assert fake_hub.asked == []


@pytest.mark.parametrize(
    ("name", "advice", "cause"),
    [
        ("some-org/typo", "not on the hub, or private: check the spelling, or set HF_TOKEN",
         "RepositoryNotFoundError"),
        ("gated/model", "access is restricted: accept its terms on the hub and set HF_TOKEN",
         "GatedRepoError"),
    ],
)  # fmt: skip
def test_what_the_hub_refuses(
    fake_hub: FakeHub, tmp_path: Path, name: str, advice: str, cause: str
) -> None:
    cache = str(tmp_path / "cache")
    answer = run_resolve(name, HF_HUB_CACHE=cache, HF_ENDPOINT=fake_hub.endpoint)
    assert answer == (f"model '{name}': {advice}", cause)


# ---------------------------------------------------------------------------------- read_json


def test_a_json_file_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert hub.read_json(tmp_path / "config.json") == {}


def test_json_as_python_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": Infinity, "b": "é"}', encoding="utf-8")
    assert hub.read_json(path) == {"a": float("inf"), "b": "é"}


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"[" * 100_000])
def test_json_that_is_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=f"cannot read {path}: "):
        hub.read_json(path)


def test_json_that_may_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="Is a directory"):
        hub.read_json(tmp_path)
