"""The documentation says what is so: links, commands, ports and fields are checked."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from pathlib import Path

import pytest

from smgd.api.chat import ChatRequest, decode_chat
from smgd.api.completions import CompletionRequest
from smgd.api.fields import HARMLESS
from smgd.cli import main
from smgd.config.findings import Findings
from smgd.config.load import contradictions, parse
from smgd.wire.fnv import handshake_port

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
README = (ROOT / "README.md").read_text()
API = (ROOT / "docs/api.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_the_ports_in_readme_are_those_of_its_socket_paths() -> None:
    paths = set(re.findall(r"ipc://(/\S+/engine-0)", README))
    assert len(paths) == 1
    ports = set(re.findall(r"rpc-port (\d+)|127\.0\.0\.1:(2\d{4})", README))
    assert {port for pair in ports for port in pair if port} == {str(handshake_port(paths.pop()))}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(
        re.findall(r"^    make ([a-z-]+)|`make ([a-z-]+)", page.read_text(), re.MULTILINE)
    )
    makefile = (ROOT / "Makefile").read_text()
    named = {target for pair in targets for target in pair if target}
    assert [target for target in named if f"\n{target}:" not in makefile] == []


def tables(page: Path) -> list[str]:
    """Return the pieces of configuration files in a page."""
    blocks = re.findall(r"^(?:    .*\n|\n)+|^```toml\n[^`]*", page.read_text(), re.MULTILINE)
    plain = (textwrap.dedent(block.removeprefix("```toml")).strip() for block in blocks)
    return [block for block in plain if re.match(r"\[+[a-z]+", block)]


def test_there_are_pieces_of_configuration_files() -> None:
    assert sum(len(tables(page)) for page in PAGES) > 1


@pytest.mark.parametrize(
    ("page", "text"), [pytest.param(p, t, id=p.name) for p in PAGES for t in tables(p)]
)
def test_configuration_files_are_what_check_config_takes(page: Path, text: str) -> None:
    found = Findings()
    contradictions(parse(text, page.name), found)
    assert found.mistakes == []


def commands(program: str) -> list[list[str]]:
    """Return README's commands of a program, without what the shell adds."""
    text = README.replace("\\\n", " ")
    lines = re.findall(rf"^    ({program} .*?)(?: &)?$", text, re.MULTILINE)
    return [shlex.split(line)[1:] for line in lines]


@pytest.mark.parametrize("arguments", commands("smgd"), ids=lambda a: " ".join(a)[:40])
def test_the_commands_of_readme_are_understood(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--help"])
    assert stopped.value.code == 0
    known = capsys.readouterr().out
    assert [flag for flag in arguments if flag.startswith("--") and flag not in known] == []


def test_the_request_of_readme_is_a_request() -> None:
    [body] = re.findall(r"-d '(\{.*\})'", README)
    request, unknown = decode_chat(body.encode())
    assert (unknown, request.messages) == ([], json.loads(body)["messages"])


@pytest.mark.parametrize("struct", [ChatRequest, CompletionRequest])
def test_every_honoured_field_is_documented(struct: type[ChatRequest]) -> None:
    documented = set(re.findall(r"`([a-z_]+)", API))
    assert set(struct.__struct_fields__) - documented == set()


def test_every_harmless_field_is_documented() -> None:
    assert set(re.findall(r"`([a-z_]+)", API)) >= HARMLESS
