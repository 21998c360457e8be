"""What speculation did and what it gained: the same books for every controller."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from sol.engine.types import DrafterStats, Drafting
from sol.speculation.plan.costs import CostModel
from sol.speculation.plan.types import Emission, StepShape


@dataclass(slots=True)
class _Account:
    """Of one request."""

    seconds: float = 0.0
    """Of the steps that decoded it, and of the drafting between them"""
    plain_seconds: float = 0.0
    """That plain decoding would have taken for the same tokens"""


@dataclass(slots=True)
class Entry:
    """One step that decoded."""

    num_drafts: int
    seconds: float
    """With the drafting before it"""
    plain_seconds: float
    """That plain decoding would have taken for the same tokens"""
    drafting_seconds: float


class Ledger:
    """Counts drafts, and compares the time that passed with the time that plain decoding would have taken.

    A plain step would have taken the measured time times what the cost model says of the two shapes: a slow or a quick
    moment of the machine then cancels out. A step that emits m tokens for a request replaces m plain ones.
    """

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._accounts: dict[str, _Account] = {}
        self._drafters: dict[str, DrafterStats] = {}
        self._drafting_seconds = 0.0
        """Since the last step"""
        self._seconds = 0.0
        self._plain_seconds = 0.0

    def add(self, request_id: str) -> None:
        self._accounts[request_id] = _Account()

    def remove(self, request_id: str) -> None:
        self._accounts.pop(request_id, None)

    def observe_step(self, shape: StepShape, seconds: float, emissions: Sequence[Emission]) -> Entry | None:
        """None where nobody decoded."""
        drafting, self._drafting_seconds = self._drafting_seconds, 0.0
        if not emissions:
            self._seconds += drafting
            return None
        count = len(emissions)
        news = [emission.num_new_tokens for emission in emissions]
        num_emitted = sum(news)
        with_drafts = [emission for emission in emissions if emission.num_draft_tokens]
        num_drafts = self._count(with_drafts) if with_drafts else 0
        plain, next_plain = seconds, seconds
        beside = shape.num_tokens - num_drafts - count
        """Tokens of prompts: what plain decoding computes along with the first of its steps only"""
        if num_drafts or beside > 0:
            each = seconds / self._costs.seconds(shape)
            plain = next_plain = each * self._costs.seconds(without_drafts(shape, num_drafts))
            if beside > 0:
                next_plain = each * self._costs.seconds(decoding_only(shape, count))
        spent = seconds + drafting
        plain_seconds = plain + next_plain * max(num_emitted / count - 1.0, 0.0)
        self._seconds += spent
        self._plain_seconds += plain_seconds
        accounts = self._accounts
        for emission, new in zip(emissions, news, strict=True):
            account = accounts.get(emission.request_id)
            if account is not None and new:
                account.seconds += spent
                account.plain_seconds += plain if new == 1 else plain + next_plain * (new - 1)
        return Entry(num_drafts, spent, plain_seconds, drafting)

    def observe_drafting(self, drafting: Drafting) -> None:
        stats = self._stats(drafting.drafter)
        stats.seconds += drafting.seconds
        stats.num_proposed_tokens += drafting.num_tokens
        stats.num_failures += drafting.error is not None
        self._drafting_seconds += drafting.seconds

    def speedup(self, request_id: str) -> float | None:
        account = self._accounts.get(request_id)
        if account is None or account.seconds <= 0:
            return None
        return account.plain_seconds / account.seconds

    def take_stats(self) -> tuple[dict[str, DrafterStats], float, float]:
        """See `Controller.take_stats`."""
        for stats in self._drafters.values():
            for counts in (stats.num_drafted_per_position, stats.num_accepted_per_position):
                counts[:] = list(itertools.accumulate(reversed(counts)))[::-1]
        taken = self._drafters, self._seconds, self._plain_seconds
        self._drafters, self._seconds, self._plain_seconds = {}, 0.0, 0.0
        return taken

    def _count(self, emissions: Sequence[Emission]) -> int:
        """Drafts of these, each of which had some, by their drafters; how many there were of all."""
        total = 0
        name: str | None = None
        for emission in emissions:
            drafted, accepted = emission.num_draft_tokens, emission.num_accepted_tokens
            total += drafted
            if emission.drafter is None:
                continue
            if emission.drafter != name:
                name = emission.drafter
                stats = self._stats(name)
                drafted_at, accepted_at = stats.num_drafted_per_position, stats.num_accepted_per_position
            # Drafts behind an end were right, and nobody got them.
            if accepted > emission.num_new_tokens:
                accepted = emission.num_new_tokens
            stats.num_drafts += 1
            stats.num_draft_tokens += drafted
            stats.num_accepted_tokens += accepted
            missing = drafted - len(drafted_at)
            if missing > 0:
                drafted_at += [0] * missing
                accepted_at += [0] * missing
            # Of each length for now; `take_stats` adds up those that reach a position.
            drafted_at[drafted - 1] += 1
            if accepted:
                accepted_at[accepted - 1] += 1
        return total

    def _stats(self, drafter: str) -> DrafterStats:
        stats = self._drafters.get(drafter)
        if stats is None:
            stats = self._drafters[drafter] = DrafterStats()
        return stats


def without_drafts(shape: StepShape, num_drafts: int) -> StepShape:
    """The same step before `num_drafts` drafts were added to it."""
    return StepShape(
        num_tokens=shape.num_tokens - num_drafts,
        num_requests=shape.num_requests,
        num_logits_rows=shape.num_logits_rows - num_drafts,
        num_context_tokens=shape.num_context_tokens - num_drafts,
    )


def decoding_only(shape: StepShape, num_decoding: int) -> StepShape:
    """A step of `num_decoding` requests of this one, with one token each and an equal share of its context."""
    requests = max(shape.num_requests, 1)
    return StepShape(
        num_tokens=num_decoding,
        num_requests=num_decoding,
        num_logits_rows=num_decoding,
        num_context_tokens=shape.num_context_tokens * num_decoding // requests,
    )
