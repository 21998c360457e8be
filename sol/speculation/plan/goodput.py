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

import itertools
import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from sol.engine.types import Draft, DrafterStats, Drafting, ProposalPlan, SpeculationParams
from sol.speculation.plan.acceptance import Acceptance
from sol.speculation.plan.asking import LOOKUPS, Asking
from sol.speculation.plan.costs import CostModel
from sol.speculation.plan.fixed import allowed
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
_LENGTHS: Final = 64
"""Of the list of drafts, that are compared"""
_FEW: Final = 32
"""Requests that are judged one by one, and drafts of which all are looked at in any case"""
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
    ) -> None:
        """`drafters` in the order in which they are asked; `measured`: what steps took at start-up, see
        `sol.speculation.plan.costs.shapes_to_measure`."""
        self._drafters = tuple(drafters)
        self._num_tokens = num_speculative_tokens
        self._costs = CostModel(measured)
        self._ledger = Ledger(self._costs)
        self._acceptance = [Acceptance(has_curve=name not in LOOKUPS) for name in self._drafters]
        self._regimes = Regimes(len(self._drafters))
        self._index = {name: i for i, name in enumerate(self._drafters)}
        self._asking = Asking(self._drafters, self._costs, self._acceptance, num_speculative_tokens)
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
        self._requests[request_id] = Request([Past() if name in may else None for name in self._drafters])

    def remove(self, request_id: str) -> None:
        self._ledger.remove(request_id)
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._asking.forget(request)

    # ── how many drafts are verified ─────────────────────────────────────────────────────────────────────────────

    def choose_drafts(self, shape: StepShape, candidates: Sequence[Candidate], *, max_tokens: int) -> list[int]:
        counts = [0] * len(candidates)
        regime = self._regimes.of(shape.num_logits_rows)
        if max_tokens < 1 or regime.wants_plain_step:
            return counts
        survivals: list[float] = []
        lengths: list[int] = []
        requests = self._requests
        if len(candidates) > _FEW:
            self._judge_many(candidates, regime)
        for candidate in candidates:
            request = requests[candidate.request_id]
            if request.draft is not candidate.draft:
                self._judge(request, candidate.draft, regime)
            expected = request.expected
            if len(expected) > candidate.max_tokens:
                expected = expected[: candidate.max_tokens]
            survivals += expected
            lengths.append(len(expected))
        count = min(len(survivals), max_tokens)
        self._last_survival = 0.0
        if not count:
            return counts
        one = len(candidates) == 1
        order: Sequence[int] = range(count)
        if not one:  # stable: of equal drafts of a request the first come first
            order = np.argsort(-np.array(survivals), kind="stable")[:count].tolist()
        stride = (count + _LENGTHS - 1) // _LENGTHS
        rows = float(max(shape.num_logits_rows, 1))
        emitted = list(itertools.accumulate(map(survivals.__getitem__, order), initial=rows))
        # The drafts have been paid for, but goodput is a matter of the whole round: it makes time a little cheaper.
        paid = self._paid
        seconds = self._costs.curve(shape, count, stride)
        enough = (1.0 + regime.margin) * rows / (seconds[0] + paid)
        paid += _DECIDING_STEP + _DECIDING_ROW * rows
        goodputs = [tokens / (time + paid) for tokens, time in zip(emitted[::stride], seconds, strict=True)]
        best = max(goodputs)
        if best < enough:
            return counts
        enough = max(enough, _NEARLY * best)
        chosen = stride * next(length for length, goodput in enumerate(goodputs) if goodput >= enough)
        self._last_survival = survivals[order[chosen - 1]] if len(survivals) > _FEW else 0.0
        if one:
            return [chosen]
        owners = np.repeat(np.arange(len(lengths)), lengths)[order[:chosen]]
        return np.bincount(owners, minlength=len(lengths)).tolist()  # type: ignore[no-any-return]

    def _judge(self, request: Request, draft: Draft, regime: Regime) -> None:
        """Let `request` have the survivals of these drafts."""
        i = self._index[draft.drafter]
        past = request.pasts[i]
        request.draft = draft
        if past is None:
            request.predicted = request.expected = []
            return
        least = self._least
        count = min(len(draft.token_ids), self._longest(i))
        request.predicted, request.expected = self._acceptance[i].survivals(
            draft.scores, count, past.habit, regime.kept[i], least
        )

    def _judge_many(self, candidates: Sequence[Candidate], regime: Regime) -> None:
        """The same for those of these that are new and have scores."""
        groups: dict[str, list[tuple[Request, Past, Draft]]] = {}
        for candidate in candidates:
            request, draft = self._requests[candidate.request_id], candidate.draft
            if request.draft is not draft and draft.scores:
                past = request.pasts[self._index[draft.drafter]]
                if past is not None:
                    groups.setdefault(draft.drafter, []).append((request, past, draft))
        for name, group in groups.items():
            i = self._index[name]
            most = self._longest(i)
            scores = [draft.scores[:most] for _, _, draft in group if draft.scores]
            habits = [past.habit for _, past, _ in group]
            judged = self._acceptance[i].survivals_of_many(scores, habits, regime.kept[i], self._least)
            for (request, _, draft), (predicted, expected) in zip(group, judged, strict=True):
                request.draft, request.predicted, request.expected = draft, predicted, expected

    def _longest(self, i: int) -> int:
        """Drafts of a proposal that are believed at all. A drafter that nobody knows may promise anything, and what it
        promises at first is all that is known of it: it is believed as far as it has been right."""
        return min(self._num_tokens, 1 + self._acceptance[i].num_right)

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
        stride = (len(emissions) + _PUPILS - 1) // _PUPILS
        for number, emission in enumerate(emissions, start=self._num_steps):
            if emission.draft is not None:
                self._observe_draft(emission, emission.draft, regime, teaches=number % stride == 0)
                continue
            request = self._requests.get(emission.request_id)
            if request is not None and request.asked >= 0:
                self._observe_gain(request, ())
        self._asking.after_step(self._requests)

    def _observe_draft(self, emission: Emission, draft: Draft, regime: Regime, *, teaches: bool) -> None:
        """Which drafts were right: those that were verified up to the first wrong one, and the next one after them,
        which the target's own token tells whether it was asked for or not."""
        request = self._requests.get(emission.request_id)
        if request is None:
            return
        i = self._index[draft.drafter]
        past = request.pasts[i]
        if request.draft is not draft:
            self._judge(request, draft, regime)
        request.draft = None
        if request.asked >= 0:
            self._observe_gain(request, request.expected if request.asked == i else ())
        if past is None or not teaches:
            return
        right, verified = emission.num_accepted_tokens, emission.num_draft_tokens
        known = right
        if right < verified:
            known += 1
        elif right < min(len(draft.token_ids), len(emission.new_token_ids)) and not draft.sampled:
            known += 1
            right += draft.token_ids[right] == emission.new_token_ids[right]
        if self._asking.has_model and draft.scores is not None:
            self._asking.observe_promise(i, expected_accepted(draft.scores), sum(request.expected))
        self._acceptance[i].observe(draft.scores, right, known, past.habit)
        if verified:
            regime.observe_drafts(i, request.predicted[:verified], right)
        elif known and request.predicted:
            regime.observe_unverified(i, request.predicted[0], right > 0)

    def _observe_gain(self, request: Request, survivals: Sequence[float]) -> None:
        i, request.asked = request.asked, -1
        past = request.pasts[i]
        if past is not None:
            self._asking.observe_gain(past, i, survivals)

    def observe_drafting(self, drafting: Drafting) -> None:
        self._ledger.observe_drafting(drafting)
        # What was read first is left out of the round: each token is read once, however it came about.
        i = self._index[drafting.drafter]
        self._drafting_seconds += drafting.seconds - self._asking.observe_drafting(i, drafting, self._requests)

    def speedup(self, request_id: str) -> float | None:
        return self._ledger.speedup(request_id)

    def take_stats(self) -> tuple[dict[str, DrafterStats], float, float]:
        return self._ledger.take_stats()
