"""Filters as a stage of the gateway's pipeline."""

from __future__ import annotations

from sol.gateway.call import Call, Outcome
from sol.gateway.filters.decisions import STAGE
from sol.gateway.filters.filters import Filters


class FilterStage:
    """A `sol.gateway.pipeline.Stage`: looks at the request, and has its answer looked at."""

    name = STAGE

    def __init__(self, filters: Filters) -> None:
        self.filters = filters

    async def start(self) -> None:
        """Everything was loaded when the filters were made, so that a wrong configuration never starts."""

    async def close(self) -> None:
        self.filters.close()

    async def enter(self, call: Call) -> None:
        output = self.filters.output(call)
        await self.filters.check(call)
        if output is not None:
            call.output_filters.append(output)

    async def leave(self, call: Call, outcome: Outcome) -> None:
        """Nothing was taken. What looked at the answer refers to the call: were it not let go of, each call would wait
        for the garbage collector."""
        call.output_filters.clear()
