"""A worker that says what a test wants, for those who only ask workers."""

from __future__ import annotations

from smgd.core import (
    EngineCounts,
    EngineInfo,
    EngineLoad,
    EngineWork,
    GenerationRequest,
    Receiver,
    WorkerState,
)


class FakeWorker:
    """Has every attribute of a `Worker`, and runs nothing."""

    def __init__(
        self,
        name: str,
        model_id: str = "m",
        state: WorkerState = "ready",
        load: EngineLoad = EngineLoad(),  # noqa: B008 - it is frozen
        max_model_len: int | None = None,
        requests_active: int = 0,
    ) -> None:
        self.id = name
        self.url = f"ipc:///{name}"
        self.model_id = model_id
        self.state: WorkerState = state
        self.load = load
        self.rank_loads = [load]
        self.rank_work = [EngineWork()]
        self.usable = [0] if state == "ready" else []
        self.counts = EngineCounts()
        self.info = None if max_model_len is None else EngineInfo(max_model_len=max_model_len)
        self.requests_active = requests_active

    def check(self, request: GenerationRequest) -> None:
        raise NotImplementedError

    def submit_nowait(self, request: GenerationRequest, receiver: Receiver) -> None:
        raise NotImplementedError

    def abort_nowait(self, request_id: str) -> None:
        raise NotImplementedError
