"""The controller that drafts where, and as much as, it pays.

Goodput is emitted tokens a second. Before a step, drafts at hand are sorted by the probability that they come out
(their survival), and lengths of that list are compared, none included: a kernel's stairs make the price of the next
token zero and then high, so the best length need not be where the price first exceeds the worth. What comes of it is
measured, and corrects what is expected of drafts and demanded of them (`sol.speculation.plan.regime`).

After a step, a drafter is asked for a request if the tokens it is expected to gain are worth more than its time
(`sol.speculation.plan.asking`).

Drafts that are at hand but not verified are compared with what the target says (`Emission.draft`), so trying whether
drafting pays again costs a drafter's time and nothing of the target's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from sol.engine.types import Draft, DrafterStats, Drafting, ProposalPlan, SpeculationParams
from sol.speculation.plan.acceptance import Acceptance
from sol.speculation.plan.arithmetic import Arithmetic, Choice, PythonArithmetic
from sol.speculation.plan.asking import LOOKUPS, Asking
from sol.speculation.plan.costs import CostModel
from sol.speculation.plan.fixed import allowed
from sol.speculation.plan.hand import Hand
from sol.speculation.plan.ledger import Ledger
from sol.speculation.plan.regime import Regime, Regimes
from sol.speculation.plan.requests import Past, Request
from sol.speculation.plan.types import Candidate, Drafter, Emission, StepShape
from sol.speculation.usage import expected_accepted

_NEARLY: Final = 0.9925
"""Fewer drafts are verified where they promise so much of the best goodput: improbable ones promise more than they
keep, because those that were overrated come first."""
_LEAST_SURVIVAL: Final = 0.03
"""Less probable drafts do not matter, even where they cost nothing."""
_CUT: Final = 0.75
"""Nor do those less probable than so much of the last one that was verified in the step before: hundreds of long drafts
of which a few tokens are wanted need not be looked at to their ends. Where more are wanted, the cut is soon lower."""
_FEW: Final = 32
"""Drafts of which all are looked at in any case"""
_DECIDING_STEP, _DECIDING_ROW = 40e-6, 1e-6
"""Seconds of the host, for a step and for a request of it, in which a device waits whose steps are planned ahead unless
they verify drafts. Where the host and the device take turns anyway, it is too little to matter."""
_PUPILS: Final = 16
"""Requests of a step whose drafts teach what drafts are worth; with more, they take turns. All would take the host half
a millisecond, in which a GPU waits, and tell little more."""


class GoodputController:
    """A `sol.speculation.plan.types.Controller` that maximises emitted tokens a second, drafting included."""

    def __init__(
        self,
        drafters: Sequence[str],
        num_speculative_tokens: int,
        *,
        measured: Sequence[tuple[StepShape, float]] = (),
        arithmetic: Arithmetic | None = None,
    ) -> None:
        """`drafters` in the order in which they are asked; `measured`: what steps took at start-up, see
        `sol.speculation.plan.costs.shapes_to_measure`; `arithmetic`: nobody else's, Python's if left out."""
        self._drafters = tuple(drafters)
        self._costs = CostModel(measured)
        self._ledger = Ledger(self._costs)
        self._regimes = Regimes(len(self._drafters))
        self._index = {name: i for i, name in enumerate(self._drafters)}
        self._arithmetic = arithmetic or PythonArithmetic()
        acceptance = [Acceptance(has_curve=name not in LOOKUPS) for name in self._drafters]
        self._hand = Hand(acceptance, num_speculative_tokens)
        self._asking = Asking(self._drafters, self._costs, self._hand)
        self._requests: dict[str, Request] = {}
        self._num_steps = 0
        self._last_survival = 0.0
        """Of the least probable draft that was chosen lately; 0 if none was"""
        self._drafting_seconds = 0.0
        """That recur, of drafters' calls since the latest step …"""
        self._paid = 0.0
        """… and of those before it, which brought the drafts at hand"""

    def add(self, request_id: str, wish: SpeculationParams | None) -> None:
        self._ledger.add(request_id)
        may = allowed(self._drafters, wish)
        pasts = [Past() if name in may else None for name in self._drafters]
        self._requests[request_id] = Request(pasts, slot=self._hand.take())

    def remove(self, request_id: str) -> None:
        self._ledger.remove(request_id)
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._hand.give_back(request.slot)
            self._asking.forget(request)

    # ── how many drafts are verified ─────────────────────────────────────────────────────────────────────────────

    def choose_drafts(self, shape: StepShape, candidates: Sequence[Candidate], *, max_tokens: int) -> list[int]:
        regime = self._regimes.of(shape.num_logits_rows)
        if max_tokens < 1 or not candidates or regime.wants_plain_step:
            return [0] * len(candidates)
        hand, requests, index = self._hand, self._requests, self._index
        items: list[int] = []
        for candidate in candidates:
            request, draft = requests[candidate.request_id], candidate.draft
            slot, drafter = request.slot, index[draft.drafter]
            length = -1
            if request.draft is not draft:
                request.draft = draft
                if request.pasts[drafter] is not None:
                    length = hand.put(slot, draft)
                else:
                    hand.drop(slot)
            items += (slot, drafter, length, candidate.max_tokens)
        # The drafts have been paid for, but goodput is a matter of the whole round: it makes time a little cheaper.
        choice = Choice(
            shape=shape,
            max_tokens=max_tokens,
            least=self._least,
            margin=regime.margin,
            nearly=_NEARLY,
            paid=self._paid,
            deciding=_DECIDING_STEP + _DECIDING_ROW * max(shape.num_logits_rows, 1),
        )
        counts, last, looked_at = self._arithmetic.choose(hand, regime, self._costs, choice, items)
        self._last_survival = last if looked_at > _FEW else 0.0
        return counts

    @property
    def _least(self) -> float:
        """Survival below which drafts are not looked at"""
        return max(_LEAST_SURVIVAL, _CUT * self._last_survival)

    # ── who drafts ───────────────────────────────────────────────────────────────────────────────────────────────

    def choose_proposals(self, shape: StepShape, rows: Sequence[Drafter]) -> list[ProposalPlan | None]:
        return self._asking.plan(shape, rows, self._requests, self._regimes.of(len(rows)).asking_margin)

    # ── learning ─────────────────────────────────────────────────────────────────────────────────────────────────

    def observe_step(self, shape: StepShape, seconds: float, emissions: Sequence[Emission]) -> None:
        entry = self._ledger.observe_step(shape, seconds, emissions)
        self._costs.observe(shape, seconds)
        self._paid, self._drafting_seconds = self._drafting_seconds, 0.0
        if entry is None or not (seconds > 0 and math.isfinite(seconds)):
            self._asking.after_step(self._requests)
            return
        expected = self._costs.seconds(shape)
        # What the step should have taken, not what it took: a pause says nothing of drafts.
        gain = entry.plain_seconds / seconds if entry.num_drafts else 1.0
        whole_gain = gain * expected / (expected + entry.drafting_seconds)
        regime = self._regimes.of(len(emissions))
        regime.observe_step(len(emissions), entry.num_drafts, gain - 1.0, whole_gain - 1.0)
        self._asking.observe_step(seconds, expected, whole_gain, entry.num_drafts)
        self._num_steps += 1
        self._observe_drafts(emissions, regime)
        self._asking.after_step(self._requests)

    def _observe_drafts(self, emissions: Sequence[Emission], regime: Regime) -> None:
        """Which drafts were right, for pupils, and what proposals of lookups were worth, empty ones counted."""
        hand, requests, index = self._hand, self._requests, self._index
        items: list[int] = []
        place = -1
        pupils: list[tuple[int, int, Draft]] = []
        """Slot, drafter, drafts"""
        gains: list[tuple[int, Past, int]] = []
        """Lookup, request, number among `items`: -1 where there is nothing to gain"""
        stride = (len(emissions) + _PUPILS - 1) // _PUPILS
        for number, emission in enumerate(emissions, start=self._num_steps):
            request = requests.get(emission.request_id)
            if request is None:
                continue
            asked, draft = request.asked, emission.draft
            gain = -1
            if draft is not None:
                i = index[draft.drafter]
                teaches = number % stride == 0
                if (teaches or asked == i) and request.pasts[i] is not None:
                    slot = request.slot
                    length = -1 if request.draft is draft else hand.put(slot, draft)
                    place += 1
                    if teaches:
                        right, known = _known(emission, draft)
                        items += (slot, i, length, right, known, emission.num_draft_tokens, 1)
                        pupils.append((slot, i, draft))
                    else:
                        items += (slot, i, length, 0, 0, 0, 0)
                    if asked == i:
                        gain = place
                request.draft = None
            if asked >= 0:
                request.asked = -1
                past = request.pasts[asked]
                if past is not None:
                    gains.append((asked, past, gain))
        worth: list[float] = []
        if items:
            price = self._asking.draft_price
            worth = self._arithmetic.learn(hand, regime, items, least=self._least, price=price)
        if self._asking.has_model:
            for slot, i, draft in pupils:
                if draft.scores is not None:
                    promised, start = expected_accepted(draft.scores), slot * hand.width
                    kept = sum(hand.expected[start : start + hand.counts[slot]])
                    self._asking.observe_promise(i, promised, kept)
        self._asking.observe_gains(gains, worth)

    def observe_drafting(self, drafting: Drafting) -> None:
        self._ledger.observe_drafting(drafting)
        # What was read first is left out of the round: each token is read once, however it came about.
        i = self._index[drafting.drafter]
        self._drafting_seconds += drafting.seconds - self._asking.observe_drafting(i, drafting, self._requests)

    def speedup(self, request_id: str) -> float | None:
        return self._ledger.speedup(request_id)

    def take_stats(self) -> tuple[dict[str, DrafterStats], float, float]:
        return self._ledger.take_stats()


def _known(emission: Emission, draft: Draft) -> tuple[int, int]:
    """How many drafts were right, and how many are known to have been right or wrong: those that were verified up to
    the first wrong one, and the next one after them, which the target's own token tells whether it was asked for or
    not."""
    right = emission.num_accepted_tokens
    if right < emission.num_draft_tokens:
        return right, right + 1
    if right < min(len(draft.token_ids), len(emission.new_token_ids)) and not draft.sampled:
        return right + (draft.token_ids[right] == emission.new_token_ids[right]), right + 1
    return right, right
