"""As many drafts as possible at every step, whatever they cost: what most engines do, and a measure for the other."""

from __future__ import annotations

from collections.abc import Sequence

from sol.engine.types import DrafterStats, Drafting, ProposalPlan, SpeculationParams
from sol.speculation.plan.costs import CostModel
from sol.speculation.plan.ledger import Ledger
from sol.speculation.plan.types import Candidate, Drafter, Emission, StepShape

_TRUST = 1.0
"""Accepted tokens that a lookup has to expect, or the drafter after it is asked."""


class FixedController:
    """A `sol.speculation.plan.types.Controller` that drafts always. Costs are only used to say what it gained."""

    def __init__(
        self,
        drafters: Sequence[str],
        num_speculative_tokens: int,
        *,
        measured: Sequence[tuple[StepShape, float]] = (),
    ) -> None:
        """The first of `drafters` drafts, the second where the first expects too little of its drafts; with
        `num_speculative_tokens` 0 nobody does."""
        self._drafters = tuple(drafters)
        self._num_tokens = num_speculative_tokens
        self._wishes: dict[str, SpeculationParams | None] = {}
        self._costs = CostModel(measured)
        self._ledger = Ledger(self._costs)

    def add(self, request_id: str, wish: SpeculationParams | None) -> None:
        self._wishes[request_id] = wish
        self._ledger.add(request_id)

    def remove(self, request_id: str) -> None:
        self._wishes.pop(request_id, None)
        self._ledger.remove(request_id)

    def choose_drafts(self, shape: StepShape, candidates: Sequence[Candidate], *, max_tokens: int) -> list[int]:
        counts = [min(candidate.max_tokens, self._num_tokens) for candidate in candidates]
        excess = sum(counts) - max_tokens
        while excess > 0:  # the longest give first
            longest = max(counts)
            for i, count in enumerate(counts):
                if count == longest and excess > 0:
                    counts[i] -= 1
                    excess -= 1
        return counts

    def choose_proposals(self, shape: StepShape, rows: Sequence[Drafter]) -> list[ProposalPlan | None]:
        return [self._plan(row) for row in rows]

    def observe_step(self, shape: StepShape, seconds: float, emissions: Sequence[Emission]) -> None:
        self._ledger.observe_step(shape, seconds, emissions)
        self._costs.observe(shape, seconds)

    def observe_drafting(self, drafting: Drafting) -> None:
        self._ledger.observe_drafting(drafting)

    def speedup(self, request_id: str) -> float | None:
        return self._ledger.speedup(request_id)

    def take_stats(self) -> tuple[dict[str, DrafterStats], float, float]:
        return self._ledger.take_stats()

    def _plan(self, row: Drafter) -> ProposalPlan | None:
        drafters = allowed(self._drafters, self._wishes.get(row.request_id))
        count = min(row.max_tokens, self._num_tokens)
        if not drafters or count < 1:
            return None
        if len(drafters) == 1:
            return ProposalPlan(drafter=drafters[0], max_tokens=count)
        return ProposalPlan(
            drafter=drafters[0], max_tokens=count, fallback=drafters[1], fallback_max_tokens=count, trust=_TRUST
        )


def allowed(drafters: tuple[str, ...], wish: SpeculationParams | None) -> tuple[str, ...]:
    """Who may draft for a request."""
    if wish is None:
        return drafters
    if not wish.enabled:
        return ()
    return drafters if wish.drafter is None else tuple(name for name in drafters if name == wish.drafter)
