"""Whatever an engine tells a controller, it answers within bounds: clocks stand still or jump, prices are flat."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Sequence

import pytest

from sol.engine.types import Draft, Drafting, ProposalPlan, SpeculationParams
from sol.speculation.plan import (
    Candidate,
    Controller,
    Drafter,
    Emission,
    FixedController,
    GoodputController,
    StepShape,
)

DRAFTERS = (["suffix"], ["ngram", "suffix"], ["suffix", "draft_model"], ["draft_model"])


class Life:
    """An engine's calls of a controller, by chance."""

    def __init__(self, make: Callable[..., Controller], seed: int) -> None:
        self.random = random.Random(seed)
        self.drafters = self.random.choice(DRAFTERS)
        self.most = self.random.choice([1, 4, 16, 64])
        self.controller = make(self.drafters, self.most, measured=self.measured())
        self.lengths: dict[str, int] = {}
        self.num_requests = 0

    def measured(self) -> list[tuple[StepShape, float]]:
        price: Callable[[int], float] = self.random.choice(
            [lambda _: 1e-3, lambda n: 1e-3 * n, lambda _: self.seconds(), lambda _: math.nan]
        )
        counts = self.random.choice([(), (1,), (1, 2, 5, 17)])
        return [(self.shape(n, 1, n, 100), price(n)) for n in counts]

    def seconds(self) -> float:
        return self.random.choice([0.0, 1e-7, 1e-3, 1e-3, 1e-3, 60.0])

    @staticmethod
    def shape(tokens: int, requests: int, rows: int, context: int) -> StepShape:
        return StepShape(num_tokens=tokens, num_requests=requests, num_logits_rows=rows, num_context_tokens=context)

    def step(self) -> None:
        self.come_and_go()
        if not self.lengths:
            return
        candidates = [self.candidate(name) for name in self.lengths]
        count = len(candidates)
        beside = self.random.choice([0, 0, 100, 100_000])
        shape = self.shape(count + beside, count + 2 * bool(beside), count, sum(self.lengths.values()) + beside)
        most = self.random.choice([0, 1, 5, 1_000_000])
        chosen = self.controller.choose_drafts(shape, candidates, max_tokens=most)
        assert all(0 <= n <= one.max_tokens for n, one in zip(chosen, candidates, strict=True))
        assert sum(chosen) <= most
        rows = [
            Drafter(
                request_id=name, max_tokens=self.random.randint(1, self.most), num_tokens=length, num_draft_tokens=n
            )
            for (name, length), n in zip(self.lengths.items(), chosen, strict=True)
        ]
        plans = self.controller.choose_proposals(shape, rows)
        assert len(plans) == len(rows)
        for row, plan in zip(rows, plans, strict=True):
            if plan is not None:
                assert 1 <= plan.max_tokens <= row.max_tokens
                assert 0 <= plan.fallback_max_tokens <= row.max_tokens
                self.draft(plan)
        self.emit(shape, candidates, chosen)
        self.look()

    def come_and_go(self) -> None:
        if self.random.random() < 0.3 or not self.lengths:
            wishes = [None, SpeculationParams(enabled=False), SpeculationParams(drafter=self.drafters[-1])]
            name = str(self.num_requests)
            self.num_requests += 1
            self.controller.add(name, self.random.choice(wishes))
            self.lengths[name] = self.random.choice([1, 50, 100_000])
        if self.random.random() < 0.1:
            name = self.random.choice(list(self.lengths))
            del self.lengths[name]
            self.controller.remove(name)

    def candidate(self, name: str) -> Candidate:
        count = self.random.choice([1, self.most, 2 * self.most])
        scores = [self.random.choice([0.0, 1e-300, 0.5, 1.0]) for _ in range(count)]
        draft = Draft(
            drafter=self.random.choice(self.drafters),
            token_ids=[1] * count,
            scores=scores if self.random.random() < 0.6 else None,
        )
        return Candidate(
            request_id=name,
            draft=draft,
            max_tokens=self.random.randint(1, min(count, self.most)),
            num_tokens=self.lengths[name],
        )

    def draft(self, plan: ProposalPlan) -> None:
        if self.random.random() < 0.7:
            self.controller.observe_drafting(
                Drafting(
                    drafter=plan.fallback or plan.drafter,
                    num_requests=self.random.choice([1, 9]),
                    num_tokens=self.random.choice([0, 4, 100]),
                    seconds=self.seconds(),
                    error="it is broken" if self.random.random() < 0.2 else None,
                )
            )

    def emit(self, shape: StepShape, candidates: Sequence[Candidate], chosen: Sequence[int]) -> None:
        emissions = []
        for one, count in zip(candidates, chosen, strict=True):
            accepted = self.random.randint(0, count)
            kept = self.random.randint(1, accepted + 1)
            emissions.append(
                Emission(
                    request_id=one.request_id,
                    drafter=one.draft.drafter if count else None,
                    num_draft_tokens=count,
                    num_accepted_tokens=accepted,
                    num_new_tokens=kept,
                    draft=one.draft,
                    new_token_ids=[1] * (accepted + 1),
                )
            )
            self.lengths[one.request_id] += kept
        shape.num_tokens += sum(chosen)
        shape.num_logits_rows += sum(chosen)
        shape.num_context_tokens += sum(chosen)
        self.controller.observe_step(shape, self.seconds(), emissions)

    def look(self) -> None:
        for name in self.lengths:
            speedup = self.controller.speedup(name)
            assert speedup is None or 0.0 <= speedup < math.inf
        assert self.controller.speedup("nobody") is None
        _, seconds, plain_seconds = self.controller.take_stats()
        assert 0.0 <= seconds < math.inf
        assert 0.0 <= plain_seconds < math.inf


@pytest.mark.parametrize("make", [GoodputController, FixedController])
def test_answers_are_within_bounds(make: Callable[..., Controller]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # numpy's overflows and divisions by zero
        for seed in range(60):
            life = Life(make, seed)
            for _ in range(40):
                life.step()
