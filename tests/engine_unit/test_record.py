"""Records of engines: what is written comes back, and nothing else is taken for it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from smgd.core import EngineCounts
from smgd.engine import paths
from smgd.engine.dialects.vllm import VllmDialect
from smgd.engine.handshake import Said
from smgd.engine.record import Memory, RecordError, RecordFile
from smgd.engine.roster import Roster
from tests.engine_unit.scripted import registration

SAID = [Said(0, registration(), lockstep=True), Said(1, registration(max_model_len=7))]


def record(directory: Path, name: str = "e0", dialect: str = "vllm", count: int = 2) -> RecordFile:
    return RecordFile(paths.derive(f"ipc://{directory}/{name}"), dialect, count)


def test_what_was_said_comes_back(tmp_path: Path) -> None:
    assert record(tmp_path).load() == []
    record(tmp_path).save(SAID)
    assert record(tmp_path).load() == SAID
    assert [path.name for path in tmp_path.iterdir()] == ["e0.engine.json"]
    assert (tmp_path / "e0.engine.json").stat().st_mode & 0o777 == 0o600
    record(tmp_path).save(SAID[1:])
    assert record(tmp_path).load() == SAID[1:]
    record(tmp_path).save([])
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_was_interrupted_changes_nothing(tmp_path: Path) -> None:
    record(tmp_path).save(SAID)
    (tmp_path / "e0.engine.json.new").write_bytes(b"half")
    assert record(tmp_path).load() == SAID
    record(tmp_path).save(SAID[:1])
    assert record(tmp_path).load() == SAID[:1]


def test_a_record_of_another_kind_is_refused_by_what_differs(tmp_path: Path) -> None:
    record(tmp_path).save(SAID)
    with pytest.raises(RecordError, match="its count is 2, not 4"):
        record(tmp_path, count=4).load()
    with pytest.raises(RecordError, match="its dialect is vllm, not other"):
        record(tmp_path, dialect="other").load()
    elsewhere = RecordFile(paths.derive(f"ipc://{tmp_path}/e0"), "vllm", 2, "/models/other")
    with pytest.raises(RecordError, match="its model is , not /models/other"):
        elsewhere.load()
    (tmp_path / "e0.engine.json").rename(tmp_path / "e1.engine.json")
    with pytest.raises(RecordError, match="its handshake is tcp://"):
        record(tmp_path, "e1").load()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"uid": 12345}, "its uid is 12345, not"),
        ({"format": 2}, "its format is 2, not 1"),
        ({"engines": [{"index": 2, "registration": ""}]}, r"its engines are \[2\]"),
        ({"engines": [{"index": 0, "registration": ""}] * 2}, r"its engines are \[0, 0\]"),
        ({"engines": [{"index": 0, "registration": "?"}]}, "base64"),
        ({"engines": 1}, "Expected `array`"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    record(tmp_path).save(SAID)
    path = tmp_path / "e0.engine.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(RecordError, match=text):
        record(tmp_path).load()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b"null"])
def test_damage_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "e0.engine.json").write_bytes(content)
    with pytest.raises(RecordError):
        record(tmp_path).load()


def test_only_a_file_of_our_own_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path).save(SAID)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(RecordError, match=f"it belongs to uid {uid}, not to {uid + 1}"):
        record(tmp_path).load()
    monkeypatch.undo()
    path = tmp_path / "e0.engine.json"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RecordError, match="symbolic links"):
        record(tmp_path).load()
    path.unlink()
    path.mkdir()
    with pytest.raises(RecordError):
        record(tmp_path).load()


def test_what_is_set_aside_is_not_met_again(tmp_path: Path) -> None:
    (tmp_path / "e0.engine.json").write_bytes(b"{")
    assert record(tmp_path).set_aside() == tmp_path / "e0.engine.json.bad"
    assert record(tmp_path).load() == []
    with pytest.raises(RecordError):
        record(tmp_path).set_aside()


def test_a_directory_that_cannot_be_written_is_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="No such file"):
        record(tmp_path / "gone").save(SAID)


# ----------------------------------------------------------------------- from life to life


def memory(file: RecordFile) -> tuple[Memory, Roster]:
    """Return the memory of a new life of the daemon, and its engines."""
    roster = Roster(VllmDialect(), b"INIT", 2, 1, EngineCounts(), lambda *_: [])
    return Memory(file, roster, structlog.get_logger()), roster


def test_what_one_life_remembers_the_next_recalls(tmp_path: Path) -> None:
    first, engines = memory(record(tmp_path))
    with capture_logs() as logs:
        first.recall()
    assert (logs, engines.said) == ([], [])
    for identity in (b"\x00\x00", b"\x01\x00"):
        engines.registration(identity, registration())
    first.remember()
    second, found = memory(record(tmp_path))
    with capture_logs() as logs:
        second.recall()
    assert found.said == engines.said
    assert (logs[0]["event"], logs[0]["engines"]) == (
        "looking for engines of a former life",
        [0, 1],
    )


@pytest.mark.parametrize("content", [b"{", None])
def test_a_record_that_does_not_fit_is_set_aside(tmp_path: Path, content: bytes | None) -> None:
    file = record(tmp_path)
    if content is None:  # the file is in order, but not what an engine has said
        file.save([Said(0, registration()), Said(1, b"\x80")])
    else:
        file.path.write_bytes(content)
    recalling, engines = memory(file)
    with capture_logs() as logs:
        recalling.recall()
    assert engines.said == []
    assert logs[0]["event"].startswith("engine record set aside")
    assert logs[0]["now"] == str(tmp_path / "e0.engine.json.bad")
    assert not file.path.exists()


def test_a_record_that_cannot_be_handled_is_logged_and_survived(tmp_path: Path) -> None:
    file = record(tmp_path)
    file.path.mkdir()
    keeping, engines = memory(file)
    engines.registration(b"\x00\x00", registration())
    with capture_logs() as logs:
        keeping.remember()
    assert [log["event"] for log in logs] == [
        "engine record not written: should smgd be restarted, so must the engine"
    ]
    tmp_path.joinpath("e0.engine.json.bad").write_bytes(b"")  # a directory cannot replace it
    with capture_logs() as logs:
        keeping.recall()
    assert logs[0]["now"].startswith("where it was (")
