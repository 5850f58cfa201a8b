"""Which model a worker serves, and which models are served only for workers.

A model that is not configured is there for the workers that have brought it: it goes with the last
of them, and while one has it for itself, it is what that worker says.
"""

from __future__ import annotations

from collections.abc import Mapping

from smgd.text.catalog import Catalog
from smgd.text.loader import ModelLoader, ModelSource
from smgd.text.model import Model
from smgd.workers.record import Record
from smgd.workers.registry import Registry
from smgd.workers.spec import WorkerSpec, load, model_of


class WorkerModels:
    """The models of the workers in `records`, which belong to somebody else."""

    def __init__(
        self,
        records: Mapping[str, Record],
        registry: Registry,
        catalog: Catalog,
        loader: ModelLoader,
    ) -> None:
        self._records = records
        self._registry = registry
        self._catalog = catalog
        self._loader = loader
        loader.on_loaded(self._loaded)

    def find(self, name: str) -> ModelSource | None:
        """Return the model that has a name, loaded or not."""
        return self._loader.find(name)

    def of(self, spec: WorkerSpec, before: Record | None) -> ModelSource:
        """Return the model of a worker that takes the place of another. Raises `WorkerError`."""

        def holder(model: ModelSource) -> str | None:
            if model.configured:
                return "is configured"
            for record in self._records.values():
                is_other = record is not before and not record.leaving
                if is_other and record.worker.model_id == model.id:
                    return f"is also that of worker {record.spec.url}"
            return None

        return model_of(spec, self._loader, holder)

    def load(self, spec: WorkerSpec, model: ModelSource) -> None:
        """Load a worker's model, if it is not known as it is to be. Raises `WorkerError`."""
        load(spec, model, self._loader)

    def vocab_size(self, model: ModelSource) -> int | None:
        """Return how many token ids a model has, None until it is loaded."""
        return self._catalog.vocab_size(model.id)

    def rename(self, record: Record, model: ModelSource) -> None:
        """Let an engine go on under another name for what it serves. Raises `WorkerError`."""
        self.load(record.spec, model)
        before, record.model = record.model, model
        record.worker.model_id = model.id
        record.worker.vocab_size = self.vocab_size(model)
        self._registry.changed(record.worker)
        self.forget_unused(before.id)

    def release(self, model_id: str) -> None:
        """Serve a model that is not configured any more as long as it has workers."""
        self._loader.unpin(model_id)
        self.forget_unused(model_id)

    def forget_unused(self, model_id: str) -> None:
        """Forget a model that nobody has."""
        source = self._loader.sources.get(model_id)
        used = any(record.worker.model_id == model_id for record in self._records.values())
        if source is not None and not source.configured and not used:
            self._loader.forget(model_id)

    def _loaded(self, model: Model) -> None:
        for record in self._records.values():
            if record.worker.model_id == model.id:
                record.worker.vocab_size = model.files.vocab_size
