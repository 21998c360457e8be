"""The controller that drafts where, and as much as, it pays.

Goodput is emitted tokens a second. Before a step, drafts at hand are sorted by the probability that they come out
(their survival), and all lengths of that list are compared, none included: a kernel's stairs make the price of the next
token zero and then high, so the best length need not be where the price first exceeds the worth. After a step, a
drafter is asked for a request if the tokens it is expected to gain are worth more than its time.

Looking text up costs microseconds, computing a model milliseconds. A lookup's worth to a request is the mean gain of
its recent proposals, empty ones counted. A model's worth follows from its acceptance by position, and its price decides
how many tokens it drafts.

What does not pay is tried again, from a budget: a fixed share of the time that passes may go to proposals that are
expected to lose, each request waiting longer after each vain one. Drafts that are at hand but not verified are compared
with what the target says (`Emission.draft`), so trying costs a drafter's time and nothing of the target's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from sol.engine.types import DrafterStats, Drafting, ProposalPlan, SpeculationParams
from sol.speculation.plan.acceptance import Acceptance, Floats, Ints, probability
from sol.speculation.plan.costs import CostModel, DraftingCost
from sol.speculation.plan.fixed import allowed
from sol.speculation.plan.ledger import Ledger, decoding_only, without_drafts
from sol.speculation.plan.types import Candidate, Drafter, Emission, StepShape

_LOOKUPS: Final = frozenset({"ngram", "suffix"})
_PROBE_SHARE: Final = 0.006
"""Of the time that passes: what may go to proposals that are expected to lose"""
_SAVED_STEPS: Final = 1.0
"""As many steps' time is the most that the budget of probes saves up."""
_PROBE_TOKENS: Final = 3
_ROW_PROBE_SHARE: Final = 0.002
"""Of the time: what one request's probes may take when none of them finds anything"""
_LONGEST_WAIT: Final = 64
"""Steps between two probes of one request"""
_MARGIN: Final = 1.005
"""A plan with drafts has to promise so many times the goodput of the plain step."""
_LEAST_TRUST: Final = 0.05
_FIRST_GAIN: Final = 0.5
_GAIN_RATE, _MEAN_GAIN_RATE = 0.1, 0.02
_FIRST_RETRY, _LAST_RETRY = 16, 1024
"""Steps for which a drafter that failed is left out, doubling from one failure to the next"""


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
        self._is_lookup = [name in _LOOKUPS for name in self._drafters]
        one = StepShape(num_tokens=1, num_requests=1, num_logits_rows=1, num_context_tokens=1)
        plain = self._costs.seconds(one)
        self._prices = [
            DraftingCost(1e-5, 1e-5, 5e-7) if lookup else DraftingCost(0.02 * plain, 0.02 * plain, 0.1 * plain)
            for lookup in self._is_lookup
        ]
        self._absent_until = [0] * len(self._drafters)
        self._retry_after = [_FIRST_RETRY] * len(self._drafters)

        self._slots: dict[str, int] = {}
        self._free_slots: list[int] = []
        self._allowed: list[tuple[int, ...]] = []
        self._restricted = 0
        """Requests that not all drafters may draft for"""
        shape = (len(self._drafters), 0)
        self._gain = np.zeros(shape)
        """[drafter, slot] accepted tokens less what verifying cost in tokens, of a proposal"""
        self._gain_count = np.zeros(shape)
        self._mean_gain = np.full(len(self._drafters), _FIRST_GAIN)
        self._wait = np.ones(shape, dtype=np.int64)
        self._next_probe = np.zeros(shape, dtype=np.int64)
        self._asked = np.full(0, -1, dtype=np.int64)
        """[slot] who was asked last and has not been heard of"""
        self._step = 0
        self._credit = 0.0
        self._advantage = 1.0
        """How many times the plain goodput recent steps had"""
        self._plans: dict[tuple[int, int], ProposalPlan] = {}

    def add(self, request_id: str, wish: SpeculationParams | None) -> None:
        self._ledger.add(request_id)
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot = len(self._allowed)
            self._allowed.append(())
            if slot >= len(self._asked):
                self._grow(max(16, 2 * slot))
        self._slots[request_id] = slot
        self._allowed[slot] = tuple(self._index[name] for name in allowed(self._drafters, wish))
        self._restricted += len(self._allowed[slot]) < len(self._drafters)
        self._acceptance.reset(slot)
        self._gain[:, slot] = self._mean_gain
        self._gain_count[:, slot] = 0
        self._wait[:, slot] = 1
        self._next_probe[:, slot] = self._step
        self._asked[slot] = -1

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
        slots = np.array([self._slots[c.request_id] for c in candidates])[owners]
        scores: list[float] = []
        for candidate, count in zip(candidates, counts, strict=True):
            own = candidate.draft.scores
            scores += [math.nan] * count if own is None else own[:count]
        own_log_odds, bins = self._acceptance.features(np.array(scores))
        log_odds = self._acceptance.log_odds(drafters, slots, positions, own_log_odds, bins)
        survivals = _survivals(log_odds, ends, lengths)

        order = np.argsort(-survivals, kind="stable")[:max_tokens]
        accepted = np.concatenate([[0.0], np.cumsum(survivals[order])])
        seconds = self._costs.curve(shape, len(order))
        rows = max(shape.num_logits_rows, 1)
        if shape.num_tokens > rows:
            # Chunks of prompts take their time either way: tokens are worth what they are worth in a step without.
            seconds = seconds - (seconds[0] - min(self._costs.seconds(decoding_only(shape, rows)), seconds[0]))
        goodputs = (rows + accepted) / seconds
        best = int(np.argmax(goodputs))
        if goodputs[best] < _MARGIN * goodputs[0]:
            return [0] * len(candidates)
        chosen: list[int] = np.bincount(owners[order[:best]], minlength=len(counts)).tolist()
        return chosen

    # ── who drafts ───────────────────────────────────────────────────────────────────────────────────────────────

    def choose_proposals(self, shape: StepShape, rows: Sequence[Drafter]) -> list[ProposalPlan | None]:
        self._step += 1
        present = [i for i, until in enumerate(self._absent_until) if until <= self._step]
        if not present or not rows:
            return [None] * len(rows)
        slots = np.array([self._slots[row.request_id] for row in rows])
        most = np.minimum(np.array([row.max_tokens for row in rows]), self._num_tokens)
        plain = decoding_only(shape, len(rows))
        seconds = self._costs.seconds(plain)
        rate = self._advantage * len(rows) / seconds
        """What a second is worth, in tokens"""
        lookup = _Choice(len(rows))
        model = _Choice(len(rows))
        for i in present:
            price, may = self._prices[i], self._may_draft(i, slots)
            if self._is_lookup[i]:
                net, lengths = self._gain[i, slots] - rate * price.per_request, most
            else:
                net, lengths = self._model_worth(i, slots, most, plain)
            worth = (net > 0) & may
            if net[worth].sum() <= rate * price.base:
                worth[:] = False
            choice = lookup if self._is_lookup[i] else model
            if worth.any():
                choice.improve(i, worth, net, lengths)
                self._wait[i, slots[worth]] = 1
                self._next_probe[i, slots[worth]] = self._step + 1
            due = may & (choice.drafters != i) & (self._next_probe[i, slots] <= self._step)
            if due.any():
                lost = np.maximum(choice.net - np.maximum(net, 0.0), 0.0) / rate
                self._probe(i, slots, due, choice, most, lost, seconds)
        if not (lookup.chosen or model.chosen):
            return [None] * len(rows)
        return self._plans_of(slots, lookup, model)

    def _model_worth(self, i: int, slots: Ints, most: Ints, plain: StepShape) -> tuple[Floats, Ints]:
        """The tokens that drafter `i` is expected to gain each row, less what verifying them and its own time cost in
        tokens (but for its call's base), and how many it should draft for that."""
        price, rows = self._prices[i], len(slots)
        longest = int(most.max())
        survivals = self._acceptance.survival(i, slots, longest)
        survivals[np.arange(longest) >= most[:, None]] = 0.0
        flat = survivals.reshape(-1)
        order = np.argsort(-flat, kind="stable")[: int(np.count_nonzero(flat))]
        gained = np.concatenate([[0.0], np.cumsum(flat[order])])
        asked = np.concatenate([[0], np.cumsum(order % longest == 0)])
        seconds = self._costs.curve(plain, len(order)) + price.per_token * np.arange(len(order) + 1)
        seconds += price.per_request * asked
        seconds[1:] += price.base
        goodputs = (rows + gained) / seconds
        best = int(np.argmax(goodputs))
        if goodputs[best] < _MARGIN * goodputs[0]:
            return np.zeros(rows), np.zeros(rows, dtype=np.int64)
        owners: Ints = (order[:best] // longest).astype(np.int64)
        lengths = np.bincount(owners, minlength=rows).astype(np.int64)
        net: Floats = np.bincount(owners, flat[order[:best]], minlength=rows).astype(np.float64)
        net -= goodputs[best] * (seconds[best] - seconds[0] - price.base) * lengths / best
        return net, lengths

    def _may_draft(self, i: int, slots: Ints) -> npt.NDArray[np.bool_]:
        if not self._restricted:
            return np.ones(len(slots), dtype=np.bool_)
        return np.array([i in self._allowed[slot] for slot in slots.tolist()])

    def _probe(
        self,
        i: int,
        slots: Ints,
        due: npt.NDArray[np.bool_],
        choice: _Choice,
        most: Ints,
        lost: Floats,
        seconds: float,
    ) -> None:
        """Ask drafter `i` for some of the rows that are `due`, those first that wait longest, as the budget allows."""
        price = self._prices[i]
        tokens = int(most.max()) if self._is_lookup[i] else _PROBE_TOKENS
        each = price.per_request + price.per_token * tokens
        left = self._credit - (0.0 if choice.asks(i) else price.base)
        if left < each:
            return
        rows = np.flatnonzero(due)
        rows = rows[np.argsort(self._next_probe[i, slots[rows]], kind="stable")]
        spent = np.cumsum(lost[rows] + each)
        rows = rows[: int(np.searchsorted(spent, left, side="right"))]
        if not len(rows):
            return
        self._credit = left - float(spent[len(rows) - 1])
        probed = slots[rows]
        longest = min(max(1, int((price.base + each) / (_ROW_PROBE_SHARE * seconds))), _LONGEST_WAIT)
        self._next_probe[i, probed] = self._step + np.minimum(self._wait[i, probed], longest)
        self._wait[i, probed] = np.minimum(2 * self._wait[i, probed], longest)
        choice.drafters[rows] = i
        choice.lengths[rows] = np.minimum(most[rows], tokens)
        choice.net[rows] = 0.0
        choice.chosen = True

    def _plans_of(self, slots: Ints, lookup: _Choice, model: _Choice) -> list[ProposalPlan | None]:
        """A lookup is asked first where both are worth it, or one of them is tried: it costs next to nothing."""
        plans: list[ProposalPlan | None] = []
        asked = self._asked
        for row, (slot, i, j) in enumerate(
            zip(slots.tolist(), lookup.drafters.tolist(), model.drafters.tolist(), strict=True)
        ):
            asked[slot] = i
            if j < 0:
                plans.append(None if i < 0 else self._plan(i, int(lookup.lengths[row])))
            elif i < 0:
                plans.append(ProposalPlan(drafter=self._drafters[j], max_tokens=int(model.lengths[row])))
            else:
                plans.append(
                    ProposalPlan(
                        drafter=self._drafters[i],
                        max_tokens=int(lookup.lengths[row]),
                        fallback=self._drafters[j],
                        fallback_max_tokens=int(model.lengths[row]),
                        trust=max(float(model.net[row]), _LEAST_TRUST),
                    )
                )
        return plans

    def _plan(self, i: int, max_tokens: int) -> ProposalPlan:
        plan = self._plans.get((i, max_tokens))
        if plan is None:
            plan = self._plans[i, max_tokens] = ProposalPlan(drafter=self._drafters[i], max_tokens=max_tokens)
        return plan

    # ── learning ─────────────────────────────────────────────────────────────────────────────────────────────────

    def observe_step(self, shape: StepShape, seconds: float, emissions: Sequence[Emission]) -> None:
        self._ledger.observe_step(shape, seconds, emissions)
        self._costs.observe(shape, seconds)
        if not emissions or not (seconds > 0 and math.isfinite(seconds)):
            return
        expected = self._costs.seconds(shape)
        self._credit = min(self._credit + _PROBE_SHARE * min(seconds, 3 * expected), _SAVED_STEPS * expected)
        num_drafts = sum(emission.num_draft_tokens for emission in emissions)
        price = 0.0
        """Tokens that verifying a draft cost"""
        goodput = 1.0
        if num_drafts:
            plain = self._costs.seconds(without_drafts(shape, num_drafts))
            num_new = sum(emission.num_new_tokens for emission in emissions)
            price = max(0.0, num_new * (1.0 - plain / expected)) / num_drafts
            goodput = num_new / len(emissions) * plain / expected
        self._advantage += 0.1 * (max(goodput, 1.0) - self._advantage)
        self._observe_gains(emissions, price)
        self._observe_drafts([emission for emission in emissions if emission.draft is not None])

    def _observe_gains(self, emissions: Sequence[Emission], price: float) -> None:
        """What each lookup that was asked gained its request."""
        cells: list[tuple[int, int, float]] = []
        for emission in emissions:
            slot = self._slots.get(emission.request_id)
            if slot is None:
                continue
            asked = int(self._asked[slot])
            if asked < 0:
                continue
            self._asked[slot] = -1
            gain = 0.0
            if emission.drafter == self._drafters[asked]:
                gain = max(emission.num_accepted_tokens - price * emission.num_draft_tokens, -_FIRST_GAIN)
            cells.append((asked, slot, gain))
        if not cells:
            return
        drafters, slots, gains = (np.array(column) for column in zip(*cells, strict=True))
        counts = self._gain_count[drafters, slots] + 1.0
        self._gain_count[drafters, slots] = counts
        self._gain[drafters, slots] += np.maximum(_GAIN_RATE, 1.0 / (counts + 2.0)) * (
            gains - self._gain[drafters, slots]
        )
        for i in set(drafters.tolist()):
            own = gains[drafters == i]
            keep = (1.0 - _MEAN_GAIN_RATE) ** len(own)
            self._mean_gain[i] = keep * self._mean_gain[i] + (1.0 - keep) * own.mean()

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
        i = self._index[drafting.drafter]
        if drafting.error is not None:
            self._absent_until[i] = self._step + self._retry_after[i]
            self._retry_after[i] = min(2 * self._retry_after[i], _LAST_RETRY)
            return
        self._retry_after[i] = _FIRST_RETRY
        self._prices[i].observe(drafting.num_requests, drafting.num_tokens, drafting.seconds)

    def speedup(self, request_id: str) -> float | None:
        return self._ledger.speedup(request_id)

    def take_stats(self) -> tuple[dict[str, DrafterStats], float, float]:
        return self._ledger.take_stats()

    def _grow(self, num_slots: int) -> None:
        missing = ((0, 0), (0, num_slots - len(self._asked)))
        self._acceptance.grow(num_slots)
        self._gain = np.pad(self._gain, missing)
        self._gain_count = np.pad(self._gain_count, missing)
        self._wait = np.pad(self._wait, missing)
        self._next_probe = np.pad(self._next_probe, missing)
        self._asked = np.pad(self._asked, missing[1], constant_values=-1)


class _Choice:
    """For each row the drafter that is to be asked, or -1; how many tokens it drafts, and what that gains."""

    def __init__(self, num_rows: int) -> None:
        self.drafters = np.full(num_rows, -1)
        self.lengths = np.zeros(num_rows, dtype=np.int64)
        self.net = np.zeros(num_rows)
        self.chosen = False

    def improve(self, i: int, worth: npt.NDArray[np.bool_], net: Floats, lengths: Ints) -> None:
        better = worth & (net > self.net)
        self.drafters[better] = i
        self.lengths[better] = lengths[better]
        self.net[better] = net[better]
        self.chosen = True

    def asks(self, i: int) -> bool:
        return bool((self.drafters == i).any())


def _survivals(log_odds: Floats, ends: Ints, lengths: Ints) -> Floats:
    """Of drafts in one flat list, request after request: how probable it is that one and all before it are right."""
    total = np.cumsum(-np.logaddexp(0.0, -log_odds))
    starts = ends - lengths
    before = np.where(starts > 0, total[np.maximum(starts - 1, 0)], 0.0)
    result: Floats = np.exp(total - np.repeat(before, lengths))
    return result
