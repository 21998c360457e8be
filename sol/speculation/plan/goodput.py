"""The controller that drafts where, and as much as, it pays.

Goodput is emitted tokens a second. Before a step, drafts at hand are sorted by the probability that they come out
(their survival), and all lengths of that list are compared, none included: a kernel's stairs make the price of the next
token zero and then high, so the best length need not be where the price first exceeds the worth. After a step, a
drafter is asked for a request if the tokens it is expected to gain are worth more than its time.

After a step, a drafter is asked for a request if the tokens it is expected to gain are worth more than its time
(`sol.speculation.plan.asking`).

Drafts that are at hand but not verified are compared with what the target says (`Emission.draft`), so trying whether
drafting pays again costs a drafter's time and nothing of the target's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from sol.engine.types import DrafterStats, Drafting, ProposalPlan, SpeculationParams
from sol.speculation.plan.acceptance import Acceptance, Floats, Ints, probability
from sol.speculation.plan.asking import Asking
from sol.speculation.plan.costs import CostModel
from sol.speculation.plan.fixed import allowed
from sol.speculation.plan.ledger import Ledger, without_drafts
from sol.speculation.plan.types import Candidate, Drafter, Emission, StepShape

_MARGIN: Final = 1.02
"""A step with drafts has to promise so many times the goodput of the plain one."""
_NEARLY: Final = 0.995
"""Fewer drafts are verified where they promise so much of the best goodput: improbable ones promise more than they
keep, because those that were overrated come first."""


class GoodputController:
    """A `sol.speculation.plan.types.Controller` that maximises emitted tokens a second, drafting included."""

    def __init__(
        self,
        drafters: Sequence[str],
        num_speculative_tokens: int,
        *,
        measured: Sequence[tuple[StepShape, float]] = (),
    ) -> None:
        """`drafters` in the order in which they are asked; `measured`: what steps took at start-up, see
        `sol.speculation.plan.costs.shapes_to_measure`."""
        self._drafters = tuple(drafters)
        self._num_tokens = num_speculative_tokens
        self._costs = CostModel(measured)
        self._ledger = Ledger(self._costs)
        self._acceptance = Acceptance(len(self._drafters))
        self._index = {name: i for i, name in enumerate(self._drafters)}
        self._asking = Asking(self._drafters, self._costs, self._acceptance, num_speculative_tokens)
        self._slots: dict[str, int] = {}
        self._free_slots: list[int] = []
        self._allowed: list[tuple[int, ...]] = []
        """[slot] who may draft for the request"""
        self._restricted = 0
        """Requests that not everybody may draft for"""

    def add(self, request_id: str, wish: SpeculationParams | None) -> None:
        self._ledger.add(request_id)
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot = len(self._allowed)
            self._allowed.append(())
        self._slots[request_id] = slot
        self._allowed[slot] = tuple(self._index[name] for name in allowed(self._drafters, wish))
        self._restricted += len(self._allowed[slot]) < len(self._drafters)
        self._asking.reset(slot)
        self._acceptance.reset(slot)

    def remove(self, request_id: str) -> None:
        self._ledger.remove(request_id)
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._restricted -= len(self._allowed[slot]) < len(self._drafters)
            self._free_slots.append(slot)

    # ── how many drafts are verified ─────────────────────────────────────────────────────────────────────────────

    def choose_drafts(self, shape: StepShape, candidates: Sequence[Candidate], *, max_tokens: int) -> list[int]:
        counts = [min(c.max_tokens, len(c.draft.token_ids), self._num_tokens) for c in candidates]
        if max_tokens < 1 or not any(counts):
            return [0] * len(candidates)
        lengths = np.array(counts)
        owners = np.repeat(np.arange(len(counts)), lengths)
        ends = np.cumsum(lengths)
        positions = np.arange(len(owners)) - (ends - lengths)[owners]
        drafters = np.array([self._index[c.draft.drafter] for c in candidates])[owners]
        slot_of = np.array([self._slots[c.request_id] for c in candidates])
        slots = slot_of[owners]
        scores: list[float] = []
        for candidate, count in zip(candidates, counts, strict=True):
            own = candidate.draft.scores
            scores += [math.nan] * count if own is None else own[:count]
        own_log_odds, bins = self._acceptance.features(np.array(scores))
        log_odds = self._acceptance.log_odds(drafters, slots, positions, own_log_odds, bins)
        survivals = _survivals(log_odds, ends, lengths)

        some = lengths > 0
        self._asking.observe_survivals(slot_of[some], survivals, (ends - lengths)[some])

        order = np.argsort(-survivals, kind="stable")[:max_tokens]
        accepted = np.concatenate([[0.0], np.cumsum(survivals[order])])
        seconds = self._costs.curve(shape, len(order))
        rows = max(shape.num_logits_rows, 1)
        # The drafts have been paid for, but goodput is a matter of the whole round: it makes time a little cheaper.
        goodputs = (rows + accepted) / (seconds + self._asking.latest_drafting_seconds)
        best = int(np.argmax(goodputs))
        if goodputs[best] < _MARGIN * goodputs[0]:
            return [0] * len(candidates)
        best = int(np.argmax(goodputs >= _NEARLY * goodputs[best]))
        chosen: list[int] = np.bincount(owners[order[:best]], minlength=len(counts)).tolist()
        return chosen

    # ── who drafts ───────────────────────────────────────────────────────────────────────────────────────────────

    def choose_proposals(self, shape: StepShape, rows: Sequence[Drafter]) -> list[ProposalPlan | None]:
        slots = [self._slots[row.request_id] for row in rows]
        may_draft = None
        if self._restricted:
            allowed_to = [self._allowed[slot] for slot in slots]
            may_draft = [np.array([i in them for them in allowed_to]) for i in range(len(self._drafters))]
        return self._asking.plan(
            shape,
            np.array(slots, dtype=np.int64),
            np.array([row.max_tokens for row in rows], dtype=np.int64),
            np.array([row.num_tokens for row in rows], dtype=np.int64),
            may_draft,
        )

    # ── learning ─────────────────────────────────────────────────────────────────────────────────────────────────

    def observe_step(self, shape: StepShape, seconds: float, emissions: Sequence[Emission]) -> None:
        self._ledger.observe_step(shape, seconds, emissions)
        self._costs.observe(shape, seconds)
        if not emissions or not (seconds > 0 and math.isfinite(seconds)):
            return
        expected = self._costs.seconds(shape)
        num_drafts = sum(emission.num_draft_tokens for emission in emissions)
        num_new = sum(emission.num_new_tokens for emission in emissions)
        plain = self._costs.seconds(without_drafts(shape, num_drafts)) if num_drafts else expected
        self._asking.observe_step(seconds, expected, plain, num_new / len(emissions), num_drafts)
        self._observe_drafts([emission for emission in emissions if emission.draft is not None])
        known = [(slot, e.draft is not None) for e in emissions if (slot := self._slots.get(e.request_id)) is not None]
        if known:
            slots, have_drafts = zip(*known, strict=True)
            self._asking.observe_emissions(np.array(slots), np.array(have_drafts))

    def _observe_drafts(self, emissions: Sequence[Emission]) -> None:
        """Which drafts were right: those that were verified up to the first wrong one, and the next one after them,
        which the target's own token tells whether it was asked for or not."""
        drafters: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        scores: list[float] = []
        right: list[bool] = []
        for emission in emissions:
            draft, slot = emission.draft, self._slots.get(emission.request_id)
            if draft is None or slot is None:
                continue
            accepted, verified = emission.num_accepted_tokens, emission.num_draft_tokens
            outcome = [True] * accepted
            if accepted < verified:
                outcome.append(False)
            elif accepted < min(len(draft.token_ids), len(emission.new_token_ids)) and not draft.sampled:
                outcome.append(draft.token_ids[accepted] == emission.new_token_ids[accepted])
            count = len(outcome)
            right += outcome
            drafters += [self._index[draft.drafter]] * count
            slots += [slot] * count
            positions += range(count)
            scores += [math.nan] * count if draft.scores is None else draft.scores[:count]
        if not right:
            return
        who, where, at = np.array(drafters), np.array(slots), np.array(positions)
        own, bins = self._acceptance.features(np.array(scores))
        expected = probability(self._acceptance.log_odds(who, where, at, own, bins))
        self._acceptance.observe(who, where, at, bins, expected, np.array(right))

    def observe_drafting(self, drafting: Drafting) -> None:
        self._ledger.observe_drafting(drafting)
        self._asking.observe_drafting(self._index[drafting.drafter], drafting)

    def speedup(self, request_id: str) -> float | None:
        return self._ledger.speedup(request_id)

    def take_stats(self) -> tuple[dict[str, DrafterStats], float, float]:
        return self._ledger.take_stats()


def _survivals(log_odds: Floats, ends: Ints, lengths: Ints) -> Floats:
    """Of drafts in one flat list, request after request: how probable it is that one and all before it are right."""
    total = np.cumsum(-np.logaddexp(0.0, -log_odds))
    starts = ends - lengths
    before = np.where(starts > 0, total[np.maximum(starts - 1, 0)], 0.0)
    result: Floats = np.exp(total - np.repeat(before, lengths))
    return result
