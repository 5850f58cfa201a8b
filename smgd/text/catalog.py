"""The models that this daemon serves, by every name a client may use."""

from __future__ import annotations

from collections.abc import Iterable

from smgd.errors import ApiError, ModelError, invalid_request, model_not_found
from smgd.samples import LookupSample
from smgd.text.model import Model


class Catalog:
    """Loaded models and those still awaited. A name is matched exactly and case-sensitively."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._models: dict[str, Model | ModelError | None] = {}

    def expect(self, model_id: str, aliases: Iterable[str] = ()) -> None:
        """Announce a model before its files are loaded; its names are these from now on.

        One that is served goes on with the files that it has.
        """
        if not isinstance(self._models.get(model_id), Model):
            self._models[model_id] = None
        self.rename(model_id, aliases)

    def rename(self, model_id: str, aliases: Iterable[str] = ()) -> None:
        """Let clients ask for a model by these names, and no others."""
        self._forget_names(model_id)
        for name in (model_id, *aliases):
            self._names[name] = model_id

    def forget(self, model_id: str) -> None:
        """Serve a model no more."""
        self._models.pop(model_id, None)
        self._forget_names(model_id)

    def _forget_names(self, model_id: str) -> None:
        self._names = {name: owner for name, owner in self._names.items() if owner != model_id}

    def loaded(self, model: Model) -> None:
        """Serve a model from now on."""
        self._models[model.id] = model

    def failed(self, model_id: str, error: ModelError) -> None:
        """Note why a model cannot be served; a later `loaded` makes it good.

        One that is served goes on: it is its new files that could not be loaded.
        """
        if not isinstance(self._models[model_id], Model):
            self._models[model_id] = error

    @property
    def ids(self) -> list[str]:
        """The ids of all models, loaded or not."""
        return list(self._models)

    @property
    def missing(self) -> list[str]:
        """The ids of the models whose tokenizer is not there (yet)."""
        return [i for i, model in self._models.items() if not isinstance(model, Model)]

    def resolve(self, name: str) -> str:
        """Return the id behind a name or alias. Raises `ApiError` 404."""
        try:
            return self._names[name]
        except KeyError:
            raise model_not_found(name) from None

    def get(self, name: str | None) -> Model:
        """Return the model a client asks for; an absent name means the only model there is.

        Raises `ApiError`: 404 for an unknown name, 400 for none among several models, 503 while
        the tokenizer is not loaded.
        """
        if not name:
            if len(self._models) != 1:
                text = "Missing required parameter: 'model'. This server has several models."
                raise invalid_request("missing_required_parameter", text, "model")
            name = next(iter(self._models))
        model_id = self.resolve(name)
        model = self._models[model_id]
        if isinstance(model, Model):
            return model
        text = self.why_missing(model_id)
        raise ApiError(503, "tokenizer_not_found", text, retry_after=1) from model

    def vocab_size(self, model_id: str) -> int | None:
        """Return the size of a model's vocabulary, None while it is not loaded."""
        model = self._models.get(model_id)
        return model.files.vocab_size if isinstance(model, Model) else None

    def lookups(self) -> list[LookupSample]:
        """Return how the caches of tokenized pieces fare, for the metrics."""
        caches = [
            (model.id, model.tokenizer.segments)
            for model in self._models.values()
            if isinstance(model, Model)
        ]
        return [LookupSample(i, cache.hits, cache.misses) for i, cache in caches if cache]

    def why_missing(self, model_id: str) -> str:
        """Say why a model that is not loaded is not."""
        error = self._models[model_id]
        reason = f": {error}" if error is not None else " yet"
        return f"The tokenizer of model '{model_id}' is not loaded{reason}"
