"""Decisions about drafts by chance, within what is allowed: whatever a controller does, the tokens are the same."""

from __future__ import annotations

import random
from collections.abc import Sequence

from sol.engine.types import DrafterStats, Drafting, ProposalPlan, SpeculationParams
from sol.speculation.plan.types import Candidate, Drafter, Emission, StepShape


class ArbitraryController:
    def __init__(self, seed: int, drafters: Sequence[str]) -> None:
        self._random = random.Random(seed)
        self._drafters = drafters
        self.open: set[str] = set()
        self.emissions: list[Emission] = []

    def add(self, request_id: str, wish: SpeculationParams | None) -> None:
        assert request_id not in self.open
        self.open.add(request_id)

    def remove(self, request_id: str) -> None:
        self.open.remove(request_id)

    def choose_drafts(self, shape: StepShape, candidates: Sequence[Candidate], *, max_tokens: int) -> list[int]:
        assert {candidate.request_id for candidate in candidates} <= self.open
        counts = []
        for candidate in candidates:
            assert 1 <= candidate.max_tokens <= len(candidate.draft.token_ids)
            assert not candidate.draft.sampled
            counts.append(self._random.randint(0, min(candidate.max_tokens, max_tokens)))
            max_tokens -= counts[-1]
        return counts

    def choose_proposals(self, shape: StepShape, rows: Sequence[Drafter]) -> list[ProposalPlan | None]:
        assert shape.num_logits_rows >= sum(1 + row.num_draft_tokens for row in rows)
        return [
            ProposalPlan(
                drafter=self._random.choice(self._drafters), max_tokens=self._random.randint(1, row.max_tokens)
            )
            if self._random.random() < 0.8
            else None
            for row in rows
        ]

    def observe_step(self, shape: StepShape, seconds: float, emissions: Sequence[Emission]) -> None:
        assert seconds >= 0.0
        for emission in emissions:
            assert emission.num_accepted_tokens == len(emission.new_token_ids) - 1
            assert 1 <= emission.num_new_tokens <= len(emission.new_token_ids)
        self.emissions += emissions

    def observe_drafting(self, drafting: Drafting) -> None:
        pass

    def speedup(self, request_id: str) -> float | None:
        assert request_id in self.open
        return None

    def take_stats(self) -> tuple[dict[str, DrafterStats], float, float]:
        return {}, 0.0, 0.0
