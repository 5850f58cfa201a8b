"""Loads models in the background, once each, until it works.

A model that cannot be loaded (the hub does not answer, its files are not there yet) is tried again,
and the catalog says meanwhile what is missing. Whatever its files bring about, be it a fault of
ours, is the failure of that one model. A model whose source has changed is served as it was until
the new one is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
import structlog
import trio

from smgd.errors import ModelError
from smgd.text.catalog import Catalog
from smgd.text.model import Model, load_model
from smgd.text.stage import TextStage

log = structlog.get_logger("smgd.text")

RETRY_SECONDS = 30.0


class ModelSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where a model comes from, and the names by which clients may ask for it.

    `path` and `tokenizer_path` are directories or ids of the hub; empty is not set. `configured`
    models stay when their last worker leaves.
    """

    id: str
    path: str
    tokenizer_path: str = ""
    chat_template: str = ""
    aliases: tuple[str, ...] = ()
    configured: bool = False

    @property
    def names(self) -> set[str]:
        """All names of the model."""
        return {self.id, *self.aliases}

    def load(self) -> Model:
        """Load the model; blocks. Raises `ModelError`."""
        return load_model(
            self.path,
            tokenizer_path=self.tokenizer_path or None,
            chat_template=self.chat_template or None,
            served_model_name=self.id,
        )


class ModelLoader:
    """Owns the tasks that load; those who asked with `on_loaded` hear of every model that was."""

    def __init__(self, catalog: Catalog, stage: TextStage) -> None:
        self.sources: dict[str, ModelSource] = {}
        self._listeners: list[Callable[[Model], None]] = []
        self._catalog = catalog
        self._stage = stage
        self._scopes: dict[str, trio.CancelScope] = {}
        self._nursery: trio.Nursery

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Load what was and will be added, until cancelled."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            await trio.sleep_forever()

    def on_loaded(self, listener: Callable[[Model], None]) -> None:
        """Have a function called after every model that was loaded."""
        self._listeners.append(listener)

    def add(self, source: ModelSource) -> None:
        """Load a model. Raises `ModelError` if another one has one of its names."""
        if self.sources.get(source.id) != source:
            self._check_names(source, self.sources.values())
            self._start(source)

    def change(self, source: ModelSource) -> None:
        """Load a model, again if it is there but comes from elsewhere now; as `add` otherwise."""
        if self.sources.get(source.id) != source:
            self._check_names(source, [s for s in self.sources.values() if s.id != source.id])
            self._start(source)

    def unpin(self, model_id: str) -> None:
        """Let a configured model go with its last worker; its aliases are free at once."""
        source = self.sources.get(model_id)
        if source is not None:
            source = msgspec.structs.replace(source, configured=False, aliases=())
            self.sources[model_id] = source
            self._catalog.rename(model_id)

    def forget(self, model_id: str) -> None:
        """Serve a model no more."""
        self._cancel(model_id)
        del self.sources[model_id]
        self._catalog.forget(model_id)
        log.info("model removed", model=model_id)

    def find(self, name: str) -> ModelSource | None:
        """Return the model that has this name, or else this path."""
        return self.named(name) or self.at(name)

    def named(self, name: str) -> ModelSource | None:
        """Return the model that has this id or alias."""
        return next((s for s in self.sources.values() if name in s.names), None)

    def at(self, path: str) -> ModelSource | None:
        """Return the model that is at this path, the first of several."""
        return next((s for s in self.sources.values() if s.path == path), None)

    def _check_names(self, source: ModelSource, others: Iterable[ModelSource]) -> None:
        for other in others:
            for name in sorted(source.names & other.names):
                raise ModelError(f"the name {name!r} belongs to the model at {other.path} already")

    def _start(self, source: ModelSource) -> None:
        self._cancel(source.id)
        self.sources[source.id] = source
        self._catalog.expect(source.id, source.aliases)
        scope = self._scopes[source.id] = trio.CancelScope()
        self._nursery.start_soon(self._load, source, scope)

    def _cancel(self, model_id: str) -> None:
        scope = self._scopes.pop(model_id, None)
        if scope is not None:
            scope.cancel()

    async def _load(self, source: ModelSource, scope: trio.CancelScope) -> None:
        log.info("loading model", model=source.id, path=source.path)
        with scope:
            while True:
                try:
                    model = await self._stage.load(lambda: _load(source))
                except ModelError as error:
                    self._failed(source, scope, error)
                else:
                    return self._loaded(model, source, scope)
                await trio.sleep(RETRY_SECONDS)

    # A load whose thread has just ended is heard of even if its model was removed or changed since:
    # then there is nothing more to say, and nobody to say it of.

    def _failed(self, source: ModelSource, scope: trio.CancelScope, error: ModelError) -> None:
        if scope.cancel_called:
            return
        self._catalog.failed(source.id, error)
        log.error("model not loaded; will retry", model=source.id, reason=str(error))

    def _loaded(self, model: Model, source: ModelSource, scope: trio.CancelScope) -> None:
        if scope.cancel_called:
            return
        self._catalog.loaded(model)
        for listener in self._listeners:
            listener(model)
        eos = model.files.eos_token_ids
        log.info("model loaded", model=source.id, path=source.path, eos=eos)


def _load(source: ModelSource) -> Model:
    """Load a model; blocks. Raises `ModelError`, and nothing else.

    Runs in a thread, so that no cancellation and no Ctrl-C comes here. A panic of the tokenizers'
    library is no `Exception`. Whatever it is, it must not end the daemon.
    """
    try:
        return source.load()
    except ModelError:
        raise
    except BaseException as error:
        log.exception("loading a model failed", model=source.id, path=source.path)
        text = f"smgd has failed to load it, and its log has how: {type(error).__name__}: {error}"
        raise ModelError(text) from error
