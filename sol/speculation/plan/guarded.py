"""A controller that fails costs its drafts and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sol.engine.types import DrafterStats, Drafting, ProposalPlan, SpeculationParams
from sol.speculation.plan.types import Candidate, Controller, Drafter, Emission, StepShape

logger = logging.getLogger(__name__)


class GuardedController:
    """A `sol.speculation.plan.types.Controller` around another one, which is never asked again once it has failed.

    What it has learned may be half written by then, so the engine decodes plainly until it is started anew. Tokens do
    not depend on a controller, so requests notice nothing but their speed.
    """

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self.failure: Exception | None = None

    def add(self, request_id: str, wish: SpeculationParams | None) -> None:
        if self.failure is None:
            try:
                self._controller.add(request_id, wish)
            except Exception as error:
                self._give_up(error)

    def remove(self, request_id: str) -> None:
        if self.failure is None:
            try:
                self._controller.remove(request_id)
            except Exception as error:
                self._give_up(error)

    def choose_drafts(self, shape: StepShape, candidates: Sequence[Candidate], *, max_tokens: int) -> list[int]:
        if self.failure is None:
            try:
                counts = self._controller.choose_drafts(shape, candidates, max_tokens=max_tokens)
                _check_counts(counts, candidates, max_tokens)
                return counts
            except Exception as error:
                self._give_up(error)
        return [0] * len(candidates)

    def choose_proposals(self, shape: StepShape, rows: Sequence[Drafter]) -> list[ProposalPlan | None]:
        if self.failure is None:
            try:
                plans = self._controller.choose_proposals(shape, rows)
                if len(plans) != len(rows):
                    raise ValueError(f"{len(plans)} proposals are planned for {len(rows)} requests")
                return plans
            except Exception as error:
                self._give_up(error)
        return [None] * len(rows)

    def observe_step(self, shape: StepShape, seconds: float, emissions: Sequence[Emission]) -> None:
        if self.failure is None:
            try:
                self._controller.observe_step(shape, seconds, emissions)
            except Exception as error:
                self._give_up(error)

    def observe_drafting(self, drafting: Drafting) -> None:
        if self.failure is None:
            try:
                self._controller.observe_drafting(drafting)
            except Exception as error:
                self._give_up(error)

    def speedup(self, request_id: str) -> float | None:
        if self.failure is None:
            try:
                return self._controller.speedup(request_id)
            except Exception as error:
                self._give_up(error)
        return None

    def take_stats(self) -> tuple[dict[str, DrafterStats], float, float]:
        if self.failure is None:
            try:
                return self._controller.take_stats()
            except Exception as error:
                self._give_up(error)
        return {}, 0.0, 0.0

    def _give_up(self, error: Exception) -> None:
        self.failure = error
        logger.error(
            "deciding about drafts failed: the engine decodes plainly until it is started anew", exc_info=error
        )


def _check_counts(counts: Sequence[int], candidates: Sequence[Candidate], max_tokens: int) -> None:
    if len(counts) != len(candidates):
        raise ValueError(f"{len(counts)} numbers of drafts for {len(candidates)} requests")
    for count, candidate in zip(counts, candidates, strict=True):
        if not 0 <= count <= candidate.max_tokens:
            raise ValueError(f"{count} drafts of {candidate.request_id!r}, which has {candidate.max_tokens}")
    if sum(counts) > max_tokens:
        raise ValueError(f"{sum(counts)} drafts in a step that has room for {max_tokens}")
