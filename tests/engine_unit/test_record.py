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
from smgd.engine.record import Former, Memory, RecordError, RecordFile
from smgd.engine.roster import Roster
from tests.engine_unit.scripted import registration

SAID = [Said(0, registration(), lockstep=True), Said(1, registration(max_model_len=7))]
KNOWN = Former(SAID, first_wave=5)
NOTHING = Former([])


def record(directory: Path, name: str = "e0", dialect: str = "vllm", count: int = 2) -> RecordFile:
    return RecordFile(paths.derive(f"ipc://{directory}/{name}"), dialect, count)


def test_what_was_said_comes_back(tmp_path: Path) -> None:
    assert record(tmp_path).load() == NOTHING
    record(tmp_path).save(KNOWN)
    assert record(tmp_path).load() == KNOWN
    assert [path.name for path in tmp_path.iterdir()] == ["e0.engine.json"]
    assert (tmp_path / "e0.engine.json").stat().st_mode & 0o777 == 0o600
    record(tmp_path).save(Former(SAID[1:]))
    assert record(tmp_path).load() == Former(SAID[1:])
    record(tmp_path).save(NOTHING)
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_was_interrupted_changes_nothing(tmp_path: Path) -> None:
    record(tmp_path).save(KNOWN)
    (tmp_path / "e0.engine.json.new").write_bytes(b"half")
    assert record(tmp_path).load() == KNOWN
    record(tmp_path).save(Former(SAID[:1]))
    assert record(tmp_path).load() == Former(SAID[:1])


def test_a_record_without_waves_is_read(tmp_path: Path) -> None:
    """As the first versions wrote it."""
    record(tmp_path).save(KNOWN)
    change(tmp_path, first_wave=None)
    assert record(tmp_path).load() == Former(SAID, first_wave=0)


def change(directory: Path, **fields: Any) -> None:
    """Change fields of the record that is there; None takes one out."""
    path = directory / "e0.engine.json"
    content = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def test_a_record_of_another_kind_is_refused_by_what_differs(tmp_path: Path) -> None:
    record(tmp_path).save(KNOWN)
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
    ("changes", "text"),
    [
        ({"uid": 12345}, "its uid is 12345, not"),
        ({"format": 2}, "its format is 2, not 1"),
        ({"engines": [{"index": 2, "registration": ""}]}, r"its engines are \[2\]"),
        ({"engines": [{"index": 0, "registration": ""}] * 2}, r"its engines are \[0, 0\]"),
        ({"engines": [{"index": 0, "registration": "?"}]}, "base64"),
        ({"engines": 1}, "Expected `array`"),
        ({"first_wave": -1}, "Expected `int` >= 0"),
        ({"first_wave": 2**62}, "Expected `int` <= "),
        ({"first_wave": "1"}, "Expected `int`, got `str`"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    record(tmp_path).save(KNOWN)
    change(tmp_path, **changes)
    with pytest.raises(RecordError, match=text):
        record(tmp_path).load()


DEEP = b'{"q":' + b"[" * 100_000


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b"null", DEEP])
def test_damage_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "e0.engine.json").write_bytes(content)
    with pytest.raises(RecordError):
        record(tmp_path).load()


def test_only_a_file_of_our_own_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path).save(KNOWN)
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
    os.mkfifo(path)
    with pytest.raises(RecordError, match="it is no regular file"):
        record(tmp_path).load()
    path.unlink()
    path.mkdir()
    with pytest.raises(RecordError):
        record(tmp_path).load()


def test_what_is_set_aside_is_not_met_again(tmp_path: Path) -> None:
    (tmp_path / "e0.engine.json").write_bytes(b"{")
    assert record(tmp_path).set_aside() == tmp_path / "e0.engine.json.bad"
    assert record(tmp_path).load() == NOTHING
    with pytest.raises(RecordError):
        record(tmp_path).set_aside()


def test_a_directory_that_cannot_be_written_is_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="No such file"):
        record(tmp_path / "gone").save(KNOWN)


# ----------------------------------------------------------------------- from life to life


def memory(file: RecordFile, now: int = 1000) -> tuple[Memory, Roster]:
    """Return the memory of a new life of the daemon that begins at a time, and its engines."""
    roster = Roster(VllmDialect(), b"INIT", 2, 1, EngineCounts(), lambda *_: [])
    return Memory(file, roster, structlog.get_logger(), first_wave=now), roster


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
        file.save(Former([Said(0, registration()), Said(1, b"\x80")]))
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


def test_a_failure_to_write_is_told_once_and_tried_again(tmp_path: Path) -> None:
    file = record(tmp_path / "dir")
    keeping, engines = memory(file)
    engines.registration(b"\x00\x00", registration())
    with capture_logs() as logs:
        keeping.remember()
        keeping.keep()
        keeping.remember()
        assert [log["log_level"] for log in logs] == ["warning"]
        file.path.parent.mkdir()
        keeping.keep()
        assert file.load().engines == engines.said
        keeping.keep()
        assert len(logs) == 1


def test_a_record_that_is_removed_is_written_anew(tmp_path: Path) -> None:
    file = record(tmp_path)
    keeping, engines = memory(file)
    with capture_logs() as logs:
        keeping.keep()  # there is nothing to be kept
        engines.registration(b"\x00\x00", registration())
        keeping.remember()
        before = file.path.read_bytes()
        keeping.keep()
        assert logs == []
        file.path.unlink()
        keeping.keep()
        keeping.keep()
    assert file.path.read_bytes() == before
    [line] = logs
    assert (line["event"], line["record"], line["log_level"]) == (
        "engine record was removed; writing it anew",
        str(file.path),
        "error",
    )


# ----------------------------------------------------------------------------------- waves

LIFE = 10**12  # more requests than one life has


@pytest.mark.parametrize("step", [-10 * LIFE, -1, 0, 1, LIFE, 10 * LIFE])
def test_waves_begin_above_those_of_every_former_life(tmp_path: Path, step: int) -> None:
    """Whatever the clock does between two lives, also if one of them sends nothing."""
    now = 100 * LIFE
    first, engines = memory(record(tmp_path), now)
    for index in range(2):
        engines.registration(bytes([index, 0]), registration(data_parallel_size=2))
    first.remember()
    assert (first.first_wave, record(tmp_path).load().first_wave) == (now, now)
    floor = now + LIFE
    for _ in range(5):
        now += step
        later, _ = memory(record(tmp_path), now)
        later.recall()
        assert later.first_wave == max(now, floor)
        assert record(tmp_path).load().first_wave == later.first_wave, "before it is used"
        floor = later.first_wave + LIFE


def test_records_of_engines_without_waves_are_not_written_at_a_start(tmp_path: Path) -> None:
    record(tmp_path).save(Former([Said(0, registration())], first_wave=5))
    before = record(tmp_path).path.stat()
    later, _ = memory(record(tmp_path), 7)
    later.recall()
    assert later.first_wave == 7
    assert record(tmp_path).path.stat() == before
