"""Service levels as a stage: it stands near the beginning of the pipeline, so that it sees what became of every call,
those that others refused among them."""

from __future__ import annotations

from collections.abc import Mapping

from sol.gateway.call import Call, Outcome
from sol.gateway.sla.monitor import SlaMonitor

_NOT_GENERATING = ("/tokenize", "/detokenize", "/v1/embeddings")


class SlaStage:
    name = "sla"

    def __init__(self, monitor: SlaMonitor, canonical: Mapping[str, str]) -> None:
        self.monitor = monitor
        self._canonical = canonical
        self._open: dict[int, str] = {}
        """The model each open call asked for: another may answer it."""

    async def enter(self, call: Call) -> None:
        model = self._canonical.get(call.model)
        if model is None or call.path in _NOT_GENERATING:
            return
        self._open[id(call)] = model
        call.ttft_target = self.monitor.targets(model, call.class_name).ttft

    async def leave(self, call: Call, outcome: Outcome) -> None:
        model = self._open.pop(id(call), None)
        if model is not None:
            self.monitor.observe(model, call, outcome)
