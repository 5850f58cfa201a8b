"""How the daemon ends for whoever started it: its exit code, its last words, its errors."""

from __future__ import annotations

import pytest
import structlog

from smgd import daemon
from smgd.config import Config
from smgd.errors import ConfigError, SmgdError


def run(monkeypatch: pytest.MonkeyPatch, *errors: Exception) -> int:
    """Have the daemon end with a group of errors, nested as those of nurseries are."""

    async def end(_: object) -> None:
        raise ExceptionGroup("outer", [ExceptionGroup("inner", [error]) for error in errors])

    monkeypatch.setattr(daemon, "_main", end)
    return daemon.main_run(Config())


def test_every_error_that_was_foreseen_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with structlog.testing.capture_logs() as lines:
        monkeypatch.setattr("smgd.log.configure", lambda *_: None)
        assert run(monkeypatch, SmgdError("one"), SmgdError("two")) == 1
    assert [(line["event"], line["reason"]) for line in lines] == [
        ("smgd failed", "one"),
        ("smgd failed", "two"),
    ]


def test_a_mistake_in_the_configuration_keeps_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    cause = OSError("taken")
    mistake = ConfigError("cannot listen")
    mistake.__cause__ = cause
    with pytest.raises(ConfigError) as caught:
        run(monkeypatch, SmgdError("one"), mistake)
    assert caught.value is mistake
    assert caught.value.__cause__ is cause


def test_a_fault_of_ours_is_hidden_by_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = RuntimeError("nobody has foreseen it")
    with pytest.raises(ExceptionGroup) as caught:
        run(monkeypatch, SmgdError("one"), fault)
    assert caught.group_contains(RuntimeError, match="nobody has foreseen it")
