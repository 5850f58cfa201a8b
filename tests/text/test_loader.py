"""Loading in the background: whatever becomes of one model, the others and the daemon go on."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio
import trio.testing

from smgd.text import loader as module
from smgd.text.catalog import Catalog
from smgd.text.loader import ModelLoader, ModelSource
from smgd.text.model import Model, load_model
from smgd.text.stage import TextStage
from tests.flows.house import LogLine, captured_log, until
from tests.support import no_collector
from tests.text.make_model import write_model

T = TypeVar("T")

SIM = ModelSource(id="sim", path="smgd-sim")
DEEP = "[" * 100_000


class PanicError(BaseException):
    """What a library in another language raises when it has lost its head: no `Exception`."""


class Desk:
    """A loader with its catalog, and the log."""

    def __init__(self, lines: list[LogLine], stage: TextStage) -> None:
        self.catalog = Catalog()
        self.loader = ModelLoader(self.catalog, stage)
        self.lines = lines
        self.heard: list[str] = []
        self.loader.on_loaded(lambda model: self.heard.append(model.id))

    def why(self, model_id: str) -> str:
        return self.catalog.why_missing(model_id)

    async def until_failed(self, model_id: str) -> str:
        await until(lambda: not self.why(model_id).endswith(" yet"))
        return self.why(model_id)

    async def still_loads(self) -> None:
        """Another model is loaded as if nothing had been."""
        self.loader.add(SIM)
        await until(lambda: "sim" in self.heard)

    def logged(self, event: str) -> list[LogLine]:
        return [line for line in self.lines if line["event"] == event]


@pytest.fixture
async def desk(nursery: trio.Nursery) -> AsyncIterator[Desk]:
    with captured_log() as lines:
        desk = Desk(lines, TextStage())
        await nursery.start(desk.loader.run)
        yield desk
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"path": "/" + "x" * 5000}, "File name too long"),
        ({"path": "x" * 5000}, "it cannot be an id of the hub"),
        ({"path": "~nobody-is-called-so/x"}, "Could not determine home directory"),
        ({"path": "/a\0b"}, "there is no directory /a\0b"),
        ({"path": "a\0b"}, "it cannot be an id of the hub"),
        ({"path": "smgd-sim", "tokenizer_path": "y/" * 5000}, "it cannot be an id of the hub"),
        ({"path": "smgd-sim", "chat_template": "x" * 5000}, "File name too long"),
        ({"path": "smgd-sim", "chat_template": "~nobody-is-called-so"}, "home directory"),
        ({"path": "smgd-sim", "chat_template": "a\0b"}, "no such file, and no template"),
    ],
)
async def test_names_that_are_none_fail_their_model_alone(
    desk: Desk, fields: dict[str, Any], said: str
) -> None:
    desk.loader.add(ModelSource(id="m", **fields))
    assert said in await desk.until_failed("m")
    await desk.still_loads()
    assert desk.logged("loading a model failed") == []


@pytest.mark.parametrize(
    "name", ["config", "generation_config", "tokenizer_config", "chat_template", "tokenizer"]
)
async def test_files_that_are_nested_without_end(desk: Desk, name: str, tmp_path: Path) -> None:
    (write_model(tmp_path) / f"{name}.json").write_text(DEEP)
    desk.loader.add(ModelSource(id="m", path=str(tmp_path)))
    assert f"cannot read {tmp_path}/{name}.json" in await desk.until_failed("m")
    await desk.still_loads()


@pytest.mark.parametrize(
    "error", [ValueError("no"), RecursionError("no"), MemoryError("no"), PanicError("no")]
)
async def test_what_nobody_has_thought_of_fails_its_model_alone(
    desk: Desk, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(path: str, **options: Any) -> Model:
        if path == "cursed":
            raise error
        return load_model(path, **options)

    monkeypatch.setattr(module, "load_model", load)
    desk.loader.add(ModelSource(id="m", path="cursed"))
    reason = await desk.until_failed("m")
    kind = type(error).__name__
    assert reason.endswith(f"smgd has failed to load it, and its log has how: {kind}: no")
    [line] = desk.logged("loading a model failed")
    assert (line["model"], line["log_level"], line["exc_info"]) == ("m", "error", True)
    [line] = desk.logged("model not loaded; will retry")
    assert kind in line["reason"]
    await desk.still_loads()


# ------------------------------------------------------------- removed or changed meanwhile


Change = Callable[[ModelLoader], None]


def _removed(loader: ModelLoader) -> None:
    loader.forget("m")


def _moved(loader: ModelLoader) -> None:
    loader.change(ModelSource(id="m", path="/elsewhere"))


class Gate(TextStage):
    """Lets loads end when it is told to: their tasks are woken, and have not run yet then."""

    def __init__(self) -> None:
        super().__init__()
        self.open = trio.Event()

    async def load(self, fn: Callable[[], T]) -> T:
        await self.open.wait()
        return fn()


@pytest.mark.parametrize("change", [_removed, _moved])
@pytest.mark.parametrize("path", ["smgd-sim", "/nowhere"])
async def test_a_load_that_ends_just_when_its_model_goes_is_not_heard(
    nursery: trio.Nursery, change: Change, path: str
) -> None:
    gate = Gate()
    with captured_log() as lines:
        desk = Desk(lines, gate)
        await nursery.start(desk.loader.run)
        desk.loader.add(ModelSource(id="m", path=path))
        await trio.testing.wait_all_tasks_blocked()
        gate.open.set()
        change(desk.loader)
        await trio.testing.wait_all_tasks_blocked()
        assert desk.heard == []
        if change is _removed:
            assert desk.catalog.ids == []
            assert desk.logged("model not loaded; will retry") == []
        else:
            assert "there is no directory /elsewhere" in desk.why("m")
        nursery.cancel_scope.cancel()


async def test_a_model_that_is_not_configured_any_more_is_still_loaded(desk: Desk) -> None:
    desk.loader.add(ModelSource(id="m", path="smgd-sim", aliases=("n",), configured=True))
    desk.loader.unpin("m")
    await until(lambda: desk.heard == ["m"])
    assert desk.catalog.get("m").id == "m"
    assert desk.loader.named("n") is None


async def test_a_model_that_is_served_no_more_is_freed(desk: Desk) -> None:
    """A tokenizer is megabytes, and full collections are rare: no cycle may keep it."""
    desk.loader.add(SIM)
    await until(lambda: "sim" in desk.heard)
    tokenizer = desk.catalog.get("sim").tokenizer
    assert tokenizer.only_token("a") is not None
    assert tokenizer.vocabulary.escape_table(True)[65]
    parts = (tokenizer, tokenizer.vocabulary, tokenizer.segments, tokenizer.words)
    refs = [weakref.ref(part) for part in parts if part is not None]
    assert len(refs) == 4
    del tokenizer, parts
    with no_collector():
        desk.loader.forget("sim")
        await trio.testing.wait_all_tasks_blocked()
        assert [ref() for ref in refs] == [None] * 4


async def test_an_error_is_forgotten_when_the_model_is_to_come_from_elsewhere(desk: Desk) -> None:
    desk.loader.add(ModelSource(id="m", path="/nowhere"))
    assert "there is no directory /nowhere" in await desk.until_failed("m")
    desk.loader.change(ModelSource(id="m", path="smgd-sim"))
    assert desk.why("m") == "The tokenizer of model 'm' is not loaded yet"
    await until(lambda: desk.heard == ["m"])


def test_names_come_before_paths() -> None:
    loader = ModelLoader(Catalog(), TextStage())
    loader.sources = {
        "a": ModelSource(id="a", path="b"),
        "b": ModelSource(id="b", path="c", aliases=("d",)),
    }
    found = {name: loader.find(name) for name in "abcd"}
    assert {name: source and source.id for name, source in found.items()} == {
        "a": "a", "b": "b", "c": "b", "d": "b",
    }  # fmt: skip
    at = loader.at("b")
    assert at is not None
    assert (at.id, loader.named("c"), loader.at("a")) == ("a", None, None)
