"""The controllers in a closed loop with a target and drafters that are no more than probabilities and prices."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
    shapes_to_measure,
)

MOST = 8
RIGHT, WRONG = 1, 2


def gpu_like(shape: StepShape) -> float:
    """Flat up to 64 tokens, then linear."""
    return 4e-3 + max(0, shape.num_tokens - 64) * 5e-5


def cpu_like(shape: StepShape) -> float:
    return 15e-3 + max(0, shape.num_tokens - 2) * 2e-3


@dataclass
class FakeDrafter:
    """Proposes `length` tokens of which each is right with probability `right`, and says so, or `score`."""

    right: float
    length: int = MOST
    seconds: Callable[[int, int], float] = lambda requests, tokens: 8e-6 * requests
    score: float | None = None
    error: str | None = None
    silent: float = 0.0
    """How often it finds nothing"""
    num_calls: int = 0
    spent: float = 0.0


@dataclass
class Loop:
    controller: Controller
    drafters: dict[str, FakeDrafter]
    target: Callable[[StepShape], float]
    requests: list[str]
    context: int = 200
    now: float = 0.0
    tokens: int = 0
    verified: int = 0
    steps: int = 0
    noise: Callable[[], float] = lambda: 1.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    _at_hand: dict[str, Draft] = field(default_factory=dict)

    def run(self, steps: int) -> float:
        """Tokens a second of these steps."""
        start, before = self.now, self.tokens
        for _ in range(steps):
            self.step()
        return (self.tokens - before) / (self.now - start)

    def replace(self, index: int, name: str) -> None:
        """A request ends and another one comes."""
        self.controller.remove(self.requests[index])
        self._at_hand.pop(self.requests[index], None)
        self.requests[index] = name
        self.controller.add(name, None)

    def step(self) -> None:
        n = len(self.requests)
        shape = StepShape(num_tokens=n, num_requests=n, num_logits_rows=n, num_context_tokens=n * self.context)
        candidates = [
            Candidate(request_id=name, draft=draft, max_tokens=len(draft.token_ids), num_tokens=self.context)
            for name, draft in self._at_hand.items()
        ]
        counts = self.controller.choose_drafts(shape, candidates, max_tokens=10_000) if candidates else []
        chosen = {c.request_id: count for c, count in zip(candidates, counts, strict=True)}
        extra = sum(counts)
        shape.num_tokens += extra
        shape.num_logits_rows += extra
        shape.num_context_tokens += extra
        rows = [
            Drafter(request_id=r, max_tokens=MOST, num_tokens=self.context, num_draft_tokens=chosen.get(r, 0))
            for r in self.requests
        ]
        plans = dict(zip(self.requests, self.controller.choose_proposals(shape, rows), strict=True))
        emissions = [self._emit(name, chosen.get(name, 0)) for name in self.requests]
        seconds = self.target(shape)
        self.now += seconds
        draftings = self._draft({name: plan for name, plan in plans.items() if plan is not None})
        for drafting in draftings:
            self.controller.observe_drafting(drafting)
        self.controller.observe_step(shape, seconds * self.noise(), emissions)
        self.steps += 1
        self.verified += extra

    def _emit(self, name: str, count: int) -> Emission:
        draft = self._at_hand.pop(name, None)
        accepted = 0
        while draft is not None and accepted < count and draft.token_ids[accepted] == RIGHT:
            accepted += 1
        self.tokens += accepted + 1
        return Emission(
            request_id=name,
            drafter=draft.drafter if draft and count else None,
            num_draft_tokens=count,
            num_accepted_tokens=accepted,
            num_new_tokens=accepted + 1,
            draft=draft,
            new_token_ids=[RIGHT] * (accepted + 1),
        )

    def _draft(self, plans: dict[str, ProposalPlan]) -> list[Drafting]:
        asked: dict[str, list[tuple[str, int]]] = {}
        for name, plan in plans.items():
            asked.setdefault(plan.drafter, []).append((name, plan.max_tokens))
        result = []
        while asked:
            drafter_name, rows = asked.popitem()
            drafter = self.drafters[drafter_name]
            total = 0
            for name, most in rows:
                length = 0 if drafter.error or self.rng.random() < drafter.silent else min(most, drafter.length)
                total += length
                score = drafter.right if drafter.score is None else drafter.score
                if length:
                    ids = [RIGHT if self.rng.random() < drafter.right else WRONG for _ in range(length)]
                    self._at_hand[name] = Draft(drafter=drafter_name, token_ids=ids, scores=[score] * length)
                plan = plans[name]
                promised = sum(score**k for k in range(1, length + 1))
                if plan.fallback is not None and drafter_name == plan.drafter and promised < plan.trust:
                    asked.setdefault(plan.fallback, []).append((name, plan.fallback_max_tokens))
            seconds = drafter.seconds(len(rows), total)
            drafter.num_calls += 1
            drafter.spent += seconds
            self.now += seconds
            result.append(
                Drafting(
                    drafter=drafter_name,
                    num_requests=len(rows),
                    num_tokens=total,
                    seconds=seconds,
                    error=drafter.error,
                    request_ids=[name for name, _ in rows],
                    num_request_tokens=[self.context] * len(rows),
                )
            )
        return result


def measured(target: Callable[[StepShape], float], streams: int) -> list[tuple[StepShape, float]]:
    shapes = shapes_to_measure(
        max_num_seqs=streams, max_num_batched_tokens=4096, max_model_len=2048, num_speculative_tokens=MOST
    )
    return [(shape, target(shape)) for shape in shapes]


def goodput_loop(
    drafters: dict[str, FakeDrafter],
    target: Callable[[StepShape], float],
    streams: int = 1,
    wishes: Sequence[SpeculationParams | None] = (),
) -> Loop:
    controller = GoodputController(tuple(drafters), MOST, measured=measured(target, streams))
    names = [f"r{i}" for i in range(streams)]
    for i, name in enumerate(names):
        controller.add(name, wishes[i] if i < len(wishes) else None)
    return Loop(controller, drafters, target, names)


def plain_rate(target: Callable[[StepShape], float], streams: int) -> float:
    shape = StepShape(num_tokens=streams, num_requests=streams, num_logits_rows=streams, num_context_tokens=0)
    return streams / target(shape)


def model_seconds(requests: int, tokens: int) -> float:
    return 0.3e-3 * tokens / requests + 0.1e-3


@pytest.mark.parametrize("target", [gpu_like, cpu_like])
@pytest.mark.parametrize("streams", [1, 16])
def test_drafts_that_are_always_wrong_cost_next_to_nothing(target: Callable[[StepShape], float], streams: int) -> None:
    loop = goodput_loop({"suffix": FakeDrafter(right=0.0, score=0.9)}, target, streams)
    assert loop.run(300) >= 0.98 * plain_rate(target, streams)
    late = loop.verified
    loop.run(300)
    assert loop.verified - late <= 3


@pytest.mark.parametrize("target", [gpu_like, cpu_like])
@pytest.mark.parametrize("streams", [1, 8, 16, 32])
def test_a_drafter_that_lies_costs_little_from_its_first_step_on(
    target: Callable[[StepShape], float], streams: int
) -> None:
    loop = goodput_loop({"suffix": FakeDrafter(right=0.0, score=0.9)}, target, streams)
    assert loop.run(64) >= 0.98 * plain_rate(target, streams)


@pytest.mark.parametrize("target", [gpu_like, cpu_like])
def test_a_drafter_that_lies_is_found_out_for_requests_to_come_as_well(target: Callable[[StepShape], float]) -> None:
    loop = goodput_loop({"suffix": FakeDrafter(right=0.0, score=0.9)}, target, 8)
    loop.run(64)
    for turn in range(16):  # each request has 64 steps, and another one comes
        loop.replace(turn % 8, f"later {turn}")
        assert loop.run(8) >= 0.98 * plain_rate(target, 8)


def test_scores_that_promise_too_much_do_not_keep_a_better_model_from_drafting() -> None:
    drafters = {
        "suffix": FakeDrafter(right=0.5, score=0.95),
        "draft_model": FakeDrafter(right=0.9, seconds=lambda requests, tokens: 0.1e-3 + 0.1e-3 * tokens / requests),
    }
    loop = goodput_loop(drafters, gpu_like)
    loop.run(300)
    assert loop.run(200) >= 3.0 * plain_rate(gpu_like, 1)


def test_a_lookup_is_asked_first_and_the_model_where_it_finds_nothing() -> None:
    drafters = {
        "suffix": FakeDrafter(right=0.95, score=0.95, silent=0.5),
        "draft_model": FakeDrafter(right=0.8, seconds=lambda requests, tokens: 0.2e-3 + 0.1e-3 * tokens / requests),
    }
    both = goodput_loop(drafters, gpu_like)
    alone = goodput_loop({"draft_model": drafters["draft_model"]}, gpu_like)
    both.run(300)
    alone.run(300)
    calls = drafters["suffix"].num_calls
    assert both.run(300) >= 1.1 * alone.run(300)
    assert drafters["suffix"].num_calls - calls > 200


@pytest.mark.parametrize("target", [gpu_like, cpu_like])
def test_sure_drafts_are_verified_as_far_as_they_pay(target: Callable[[StepShape], float]) -> None:
    loop = goodput_loop({"suffix": FakeDrafter(right=0.97)}, target)
    assert loop.run(200) >= 2.0 * plain_rate(target, 1)


def test_a_price_that_is_a_stair_is_looked_past() -> None:
    def stair(shape: StepShape) -> float:
        return 1e-3 * (1 + 0.2 * ((shape.num_tokens - 1) // 4))

    loop = goodput_loop({"suffix": FakeDrafter(right=0.95)}, stair)
    loop.run(100)
    assert loop.verified / loop.steps > 4  # the fifth token costs a fifth of a step, the three after it nothing


def test_drafting_comes_back_when_acceptance_does() -> None:
    loop = goodput_loop({"suffix": FakeDrafter(right=0.0, score=0.8)}, cpu_like)
    loop.run(300)
    loop.drafters["suffix"] = FakeDrafter(right=0.95, score=0.8)
    loop.run(60)
    assert loop.run(100) >= 1.5 * plain_rate(cpu_like, 1)


def test_a_model_drafter_is_used_alone_and_left_alone_in_a_large_batch() -> None:
    def seconds(requests: int, tokens: int) -> float:
        return 0.2e-3 + 0.1e-3 * tokens / max(requests, 1) + 1e-5 * tokens

    alone = goodput_loop({"draft_model": FakeDrafter(right=0.8, seconds=seconds)}, gpu_like)
    assert alone.run(400) >= 1.5 * plain_rate(gpu_like, 1)

    def crowded(shape: StepShape) -> float:
        return 4e-3 + shape.num_tokens * 1e-4

    batch = goodput_loop({"draft_model": FakeDrafter(right=0.5, seconds=seconds)}, crowded, 128)
    batch.run(100)
    before = batch.drafters["draft_model"].spent
    start = batch.now
    batch.run(300)
    assert batch.drafters["draft_model"].spent - before <= 0.01 * (batch.now - start)


def test_probes_of_a_useless_model_stay_within_their_budget_and_find_out_when_it_has_become_useful() -> None:
    drafter = FakeDrafter(right=0.02, seconds=lambda requests, tokens: 0.2e-3 + 0.2e-3 * tokens)
    loop = goodput_loop({"draft_model": drafter}, gpu_like)
    loop.run(200)
    spent, start = drafter.spent, loop.now
    loop.run(1000)
    assert 0 < drafter.spent - spent <= 0.01 * (loop.now - start)
    drafter.right = 0.9
    loop.run(1500)
    assert loop.run(200) >= 1.3 * plain_rate(gpu_like, 1)


def test_what_a_request_wishes_is_obeyed() -> None:
    drafters = {"ngram": FakeDrafter(right=0.9), "suffix": FakeDrafter(right=0.9)}
    wishes = [SpeculationParams(enabled=False), SpeculationParams(drafter="ngram"), SpeculationParams(drafter="suffix")]
    loop = goodput_loop(drafters, gpu_like, 3, wishes)
    controller = loop.controller
    shape = StepShape(num_tokens=3, num_requests=3, num_logits_rows=3, num_context_tokens=600)
    rows = [Drafter(request_id=r, max_tokens=4, num_tokens=200, num_draft_tokens=0) for r in loop.requests]
    for _ in range(50):
        loop.step()
        off, first, second = controller.choose_proposals(shape, rows)
        assert off is None
        assert first is None or (first.drafter, first.fallback) == ("ngram", None)
        assert second is None or (second.drafter, second.fallback) == ("suffix", None)
    assert drafters["ngram"].num_calls > 25
    assert drafters["suffix"].num_calls > 25


def test_a_failing_drafter_is_left_out_for_longer_and_longer() -> None:
    drafter = FakeDrafter(right=0.9, error="RuntimeError: broken")
    loop = goodput_loop({"suffix": drafter}, gpu_like)
    loop.run(600)
    assert 1 <= drafter.num_calls <= 8
    assert loop.controller.take_stats()[0]["suffix"].num_failures == drafter.num_calls
    drafter.error = None
    loop.run(1100)
    assert loop.run(100) >= 1.5 * plain_rate(gpu_like, 1)


def test_a_noisy_clock_does_not_make_it_slower_than_plain() -> None:
    rng = random.Random(1)
    loop = goodput_loop({"suffix": FakeDrafter(right=0.3)}, cpu_like, 4)
    loop.noise = lambda: rng.lognormvariate(0.0, 0.1) * (10.0 if rng.random() < 0.01 else 1.0)
    assert loop.run(500) >= 0.98 * plain_rate(cpu_like, 4)


def test_limits_are_kept() -> None:
    controller = GoodputController(("suffix",), 4, measured=measured(gpu_like, 8))
    for i in range(8):
        controller.add(str(i), None)
    shape = StepShape(num_tokens=8, num_requests=8, num_logits_rows=8, num_context_tokens=72)

    def choose(most: int) -> list[int]:
        draft = Draft(drafter="suffix", token_ids=[RIGHT] * 6, scores=[0.99] * 6)
        candidates = [Candidate(request_id=str(i), draft=draft, max_tokens=1 + i % 6, num_tokens=9) for i in range(8)]
        counts = controller.choose_drafts(shape, candidates, max_tokens=most)
        assert sum(counts) <= most
        assert all(0 <= n <= min(c.max_tokens, 4) for n, c in zip(counts, candidates, strict=True))
        controller.observe_step(
            shape, 4e-3, [_all_right(candidate, count) for candidate, count in zip(candidates, counts, strict=True)]
        )
        return counts

    assert choose(100) == [1] * 8  # as long as nothing is known but what it promises
    for most in (0, 1, 7):
        choose(most)
    assert choose(100) == [1, 2, 3, 4, 4, 4, 1, 2]
    rows = [Drafter(request_id="0", max_tokens=2, num_tokens=9, num_draft_tokens=0)]
    assert [plan.max_tokens for plan in controller.choose_proposals(shape, rows) if plan] == [2]


def _all_right(candidate: Candidate, count: int) -> Emission:
    return Emission(
        request_id=candidate.request_id,
        drafter="suffix" if count else None,
        num_draft_tokens=count,
        num_accepted_tokens=count,
        num_new_tokens=count + 1,
        draft=candidate.draft,
        new_token_ids=[RIGHT] * (count + 1),
    )


def test_speedup_and_stats_add_up() -> None:
    drafter = FakeDrafter(right=1.0)
    loop = goodput_loop({"suffix": drafter}, gpu_like)
    assert loop.controller.speedup("r0") is None
    rate = loop.run(100)
    real = rate / plain_rate(gpu_like, 1)
    assert loop.controller.speedup("r0") == pytest.approx(real, rel=0.05)
    by_drafter, seconds, plain_seconds = loop.controller.take_stats()
    stats = by_drafter["suffix"]
    assert seconds == pytest.approx(loop.now, rel=1e-6)
    assert plain_seconds / seconds == pytest.approx(real, rel=0.05)
    assert stats.num_accepted_tokens == stats.num_draft_tokens == sum(stats.num_drafted_per_position) == loop.verified
    assert stats.seconds == pytest.approx(drafter.spent)
    assert loop.controller.take_stats() == ({}, 0.0, 0.0)
    loop.controller.remove("r0")
    assert loop.controller.speedup("r0") is None


def test_the_fixed_controller_drafts_always_and_shares_what_there_is_room_for() -> None:
    controller = FixedController(("suffix", "draft_model"), 3)
    controller.add("a", None)
    controller.add("b", SpeculationParams(enabled=False))
    shape = StepShape(num_tokens=2, num_requests=2, num_logits_rows=2, num_context_tokens=20)
    rows = [Drafter(request_id=name, max_tokens=5, num_tokens=10, num_draft_tokens=0) for name in "ab"]
    plan, nothing = controller.choose_proposals(shape, rows)
    assert nothing is None
    assert plan is not None
    assert (plan.drafter, plan.max_tokens, plan.fallback, plan.fallback_max_tokens) == ("suffix", 3, "draft_model", 3)
    draft = Draft(drafter="suffix", token_ids=[RIGHT] * 5, scores=None)
    candidates = [
        Candidate(request_id=name, draft=draft, max_tokens=most, num_tokens=10) for name, most in (("a", 5), ("b", 1))
    ]
    assert controller.choose_drafts(shape, candidates, max_tokens=100) == [3, 1]
    assert controller.choose_drafts(shape, candidates, max_tokens=2) == [1, 1]
    assert controller.choose_drafts(shape, candidates, max_tokens=0) == [0, 0]
