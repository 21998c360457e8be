"""Who is asked for drafts after a step: drafters whose drafts are worth more than the time they take, and now and then
others, to see whether that has changed.

Looking text up costs microseconds, computing a model milliseconds. A lookup's worth to a request is the mean gain of
its recent proposals, empty ones counted; as long as it has few, the mean of other requests' first proposals. A model's
worth follows from its acceptance by position, and its price decides how many tokens it drafts.

What is not worth it, or not known to be, is tried from a budget: a fixed share of the time that passes. A request's
turn comes the later the more of its tries were vain and the more they cost, but in that the share of a single request
is bounded as well: where a try is cheap compared with a step, it is made at every step.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from sol.engine.types import Drafting, ProposalPlan
from sol.speculation.plan.acceptance import Acceptance, Floats, Ints
from sol.speculation.plan.costs import CostModel, DraftingCost
from sol.speculation.plan.ledger import decoding_only
from sol.speculation.plan.types import StepShape

Bools = npt.NDArray[np.bool_]

_LOOKUPS: Final = frozenset({"ngram", "suffix"})
_PROBE_SHARE: Final = 0.006
"""Of the time that passes: what may go to proposals that are not expected to pay"""
_MOST_CREDIT: Final = 3.0
"""Steps' time that the budget of probes saves up at most"""
_FIRST_CREDIT: Final = 3.0
_CREDIT_AT_ONCE: Final = 0.25
_PROBE_TOKENS: Final = 3
_REQUEST_PROBE_SHARE: Final = 0.002
_LONGEST_WAIT: Final = 64
"""Steps between two probes of one request"""
_MARGIN: Final = 1.005
_HORIZON: Final = 96
"""Proposals over which what a drafter has to read first (a prompt) is spread"""
_FRESH_TOKENS: Final = 4
"""What a request gains between two proposals, at a guess: that much is read anew for each"""
_GAIN_RATE: Final = 0.06
_MEAN_RATE: Final = 0.002
_MEAN_PRIOR: Final = 8.0
"""As if so many proposals had gained nothing"""
_PRICES: Final = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Of verifying a draft, in tokens, for which gains are kept: prices change with the batch and with who else drafts."""
_FIRST_PROPOSALS: Final = 48
_PRIOR_PROPOSALS: Final = 8.0
_MEMORY_TOKENS: Final = 48.0
"""What a request yielded so many of its tokens ago says little of what it yields by now."""
_CAUTION, _MEAN_CAUTION = 0.25, 1.0
"""Standard errors that yields are taken to be smaller than they were seen to be: of a request, of all"""
_LEAST_TRUST: Final = 0.05
_FIRST_RETRY, _LAST_RETRY = 16, 1024
"""Steps for which a drafter that failed is left out, doubling from one failure to the next"""


class Asking:
    """Decides for requests that are known by slots 0, 1, …"""

    def __init__(self, drafters: Sequence[str], costs: CostModel, acceptance: Acceptance, num_tokens: int) -> None:
        self._drafters = tuple(drafters)
        self._costs, self._acceptance = costs, acceptance
        self._num_tokens = num_tokens
        self._is_lookup = [name in _LOOKUPS for name in drafters]
        one = StepShape(num_tokens=1, num_requests=1, num_logits_rows=1, num_context_tokens=1)
        plain = costs.seconds(one)
        self._prices = [
            DraftingCost(5e-6, 1e-5, 1e-7, 3e-6)
            if lookup
            else DraftingCost(0.02 * plain, 0.02 * plain, 0.1 * plain, 0.01 * plain)
            for lookup in self._is_lookup
        ]
        self._calls: list[deque[tuple[int, int]]] = [deque(maxlen=4) for _ in drafters]
        """Requests and unread tokens of calls that were planned and have not been heard of"""
        self._absent_until = [0] * len(drafters)
        self._retry_after = [_FIRST_RETRY] * len(drafters)
        shape = (len(drafters), 0)
        self._gains = np.zeros((*shape, len(_PRICES)))
        """[drafter, slot, price] tokens that a lookup's proposal gains where verifying one of them costs `_PRICES`"""
        self._gain_count = np.zeros(shape)
        self._mean_gain = np.zeros((len(drafters), len(_PRICES)))
        self._mean_square = np.ones((len(drafters), len(_PRICES)))
        self._at_hand = np.zeros((0, len(_PRICES)))
        """[slot, price] of the drafts that are at hand"""
        self._mean_count = [_MEAN_PRIOR] * len(drafters)
        self._drafting_seconds = 0.0
        """Since the last step"""
        self.latest_drafting_seconds = 0.0
        """Beside the last step that decoded"""
        self._num_drafts = 0.0
        """That recent steps verified"""
        self._read = np.zeros(shape, dtype=np.int64)
        """[drafter, slot] tokens of the request that the drafter has seen"""
        self._wait = np.ones(shape, dtype=np.int64)
        self._next_probe = np.zeros(shape, dtype=np.int64)
        self._planned = np.full(0, -1, dtype=np.int64)
        """[slot] the lookup that the latest plan asks; -1 for none …"""
        self._asked = np.full(0, -1, dtype=np.int64)
        """… and the one that the plan before asked, whose drafts the latest step may have verified"""
        self._step = 0
        self._credit = _FIRST_CREDIT * plain
        self._advantage = 1.0
        """How many times the plain goodput recent steps had"""
        self._plans: dict[tuple[int, int], ProposalPlan] = {}

    def reset(self, slot: int) -> None:
        """The slot is a new request's."""
        if slot >= len(self._asked):
            self._grow(max(16, 2 * slot))
        self._gains[:, slot] = 0.0
        self._gain_count[:, slot] = 0.0
        self._at_hand[slot] = 0.0
        self._read[:, slot] = 0
        self._wait[:, slot] = 1
        self._next_probe[:, slot] = self._step
        self._planned[slot] = self._asked[slot] = -1

    def plan(
        self, shape: StepShape, slots: Ints, most: Ints, num_tokens: Ints, may_draft: Sequence[Bools] | None
    ) -> list[ProposalPlan | None]:
        """[rows] of requests that a step of this shape samples: their slots, the most drafts they could use, their
        tokens; `may_draft` [drafters][rows], None for everybody."""
        self._step += 1
        rows = len(slots)
        self._asked[slots] = self._planned[slots]
        self._planned[slots] = -1
        present = [i for i, until in enumerate(self._absent_until) if until <= self._step]
        if not present or not rows:
            return [None] * rows
        most = np.minimum(most, self._num_tokens)
        plain = decoding_only(shape, rows)
        seconds = self._costs.seconds(plain)
        rate = self._advantage * rows / seconds
        """What a second is worth, in tokens"""
        # As if each had one at least: a price of none at all would have everybody asked at once, and then nobody.
        others = max(round(self._num_drafts), rows)
        curve = self._costs.curve(plain, others)
        draft_price = rate * float(curve[-1] - curve[0]) / others
        """What verifying a draft costs, in tokens: by now, not when a request's yields were seen"""
        lookup, model = _Choice(rows), _Choice(rows)
        for i in present:
            price, choice = self._prices[i], lookup if self._is_lookup[i] else model
            unread = num_tokens - self._read[i, slots]
            each = price.per_request + price.per_unread * (
                np.minimum(unread, _FRESH_TOKENS) + np.maximum(unread - _FRESH_TOKENS, 0) / _HORIZON
            )
            if self._is_lookup[i]:
                net, lengths = self._gain(i, slots, unread, draft_price) - rate * each, most
            else:
                net, lengths = self._model_worth(i, slots, most, plain, each)
            worth = net > 0
            if may_draft is not None:
                worth &= may_draft[i]
            if worth.any() and net[worth].sum() > rate * price.base:
                choice.improve(i, worth, net, lengths)
                self._wait[i, slots[worth]] = 1
                self._next_probe[i, slots[worth]] = self._step + 1
            due = (self._next_probe[i, slots] <= self._step) & (choice.drafters != i)
            if may_draft is not None:
                due &= may_draft[i]
            if due.any():
                self._probe(i, slots, due, choice, most, unread, seconds, rate)
        if not (lookup.chosen or model.chosen):
            return [None] * rows
        return self._plans_of(slots, lookup, model, num_tokens)

    def _gain(self, i: int, slots: Ints, unread: Ints, draft_price: float) -> Floats:
        """Tokens that a proposal of a lookup gains, on the cautious side: gains are many small ones and a few large
        ones, and who was lucky is not yet who is worth it. Where asking is cheap, caution only turns proposals into
        probes."""
        price = min(max(draft_price, _PRICES[0]), _PRICES[-1])
        above = max(bisect.bisect_left(_PRICES, price), 1)
        share = (price - _PRICES[above - 1]) / (_PRICES[above] - _PRICES[above - 1])

        def at_price(values: Floats) -> Floats:
            result: Floats = (1.0 - share) * values[..., above - 1] + share * values[..., above]
            return result

        mean = float(at_price(self._mean_gain[i]))
        spread = math.sqrt(max(float(at_price(self._mean_square[i])) - mean * mean, 0.0))
        usual = mean - _MEAN_CAUTION * spread / math.sqrt(min(self._mean_count[i], 1.0 / _MEAN_RATE))
        count = np.minimum(self._gain_count[i, slots], 1.0 / _GAIN_RATE)
        count *= np.exp(unread / -_MEMORY_TOKENS)
        own = at_price(self._gains[i, slots]) - _CAUTION * spread / np.sqrt(np.maximum(count, 1.0))
        result: Floats = (count * own + _PRIOR_PROPOSALS * usual) / (count + _PRIOR_PROPOSALS)
        return result

    def _model_worth(self, i: int, slots: Ints, most: Ints, plain: StepShape, each: Floats) -> tuple[Floats, Ints]:
        """The tokens that drafter `i` is expected to gain each row, less what verifying them and its own time cost in
        tokens (but for its call's base), and how many it should draft for that."""
        price, rows = self._prices[i], len(slots)
        longest = int(most.max())
        survivals = self._acceptance.survival(i, slots, longest)
        survivals[np.arange(longest) >= most[:, None]] = 0.0
        flat = survivals.reshape(-1)
        order = np.argsort(-flat, kind="stable")[: int(np.count_nonzero(flat))]
        gained = np.concatenate([[0.0], np.cumsum(flat[order])])
        asked = np.concatenate([[0.0], np.cumsum(np.where(order % longest == 0, each[order // longest], 0.0))])
        seconds = self._costs.curve(plain, len(order)) + price.per_token * np.arange(len(order) + 1) + asked
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

    def _probe(
        self,
        i: int,
        slots: Ints,
        due: Bools,
        choice: _Choice,
        most: Ints,
        unread: Ints,
        seconds: float,
        rate: float,
    ) -> None:
        """Ask drafter `i` for some of the rows that are `due`, as the budget allows."""
        price = self._prices[i]
        tokens = self._num_tokens if self._is_lookup[i] else _PROBE_TOKENS
        base = 0.0 if choice.asks(i) else price.base
        rows = np.flatnonzero(due)
        # In place of a drafter that pays, the other one also costs what the first would have gained.
        costs = price.per_request + price.per_token * tokens + price.per_unread * unread[rows] + choice.net[rows] / rate
        budget = _PROBE_SHARE * seconds
        order = np.argsort(self._next_probe[i, slots[rows]] + costs / budget, kind="stable")
        spent = np.cumsum(costs[order]) + base
        # Not all at once: to try somebody again costs less than the first time, and it takes several tries to know.
        most_now = max(_CREDIT_AT_ONCE * self._credit, min(self._credit, float(spent[0])))
        count = int(np.searchsorted(spent, most_now, side="right"))
        if not count:
            return
        self._credit -= float(spent[count - 1])
        rows, costs = rows[order[:count]], costs[order[:count]]
        probed = slots[rows]
        longest = np.clip((price.base + costs) / (_REQUEST_PROBE_SHARE * seconds), 1, _LONGEST_WAIT).astype(np.int64)
        self._next_probe[i, probed] = self._step + np.minimum(self._wait[i, probed], longest)
        self._wait[i, probed] = np.minimum(2 * self._wait[i, probed], longest)
        choice.drafters[rows] = i
        choice.lengths[rows] = np.minimum(most[rows], tokens)
        choice.net[rows] = 0.0
        choice.chosen = True

    def _plans_of(self, slots: Ints, lookup: _Choice, model: _Choice, num_tokens: Ints) -> list[ProposalPlan | None]:
        """A lookup is asked first where both are worth it, or one of them is tried: it costs next to nothing."""
        for choice in (lookup, model):
            for i in set(choice.drafters.tolist()) - {-1}:
                asked = choice.drafters == i
                read = self._read[i, slots[asked]]
                self._calls[i].append((int(asked.sum()), int((num_tokens[asked] - read).sum())))
                self._read[i, slots[asked]] = num_tokens[asked]
        self._planned[slots] = lookup.drafters
        plans: list[ProposalPlan | None] = []
        for i, length, j, other_length, net in zip(
            lookup.drafters.tolist(),
            lookup.lengths.tolist(),
            model.drafters.tolist(),
            model.lengths.tolist(),
            model.net.tolist(),
            strict=True,
        ):
            if i < 0 and j < 0:
                plans.append(None)
            elif j < 0:
                plan = self._plans.get((i, length))
                if plan is None:
                    plan = self._plans[i, length] = ProposalPlan(drafter=self._drafters[i], max_tokens=length)
                plans.append(plan)
            elif i < 0:
                plans.append(ProposalPlan(drafter=self._drafters[j], max_tokens=other_length))
            else:
                plans.append(
                    ProposalPlan(
                        drafter=self._drafters[i],
                        max_tokens=length,
                        fallback=self._drafters[j],
                        fallback_max_tokens=other_length,
                        trust=max(net, _LEAST_TRUST),
                    )
                )
        return plans

    # ── learning ─────────────────────────────────────────────────────────────────────────────────────────────────

    def observe_step(
        self, seconds: float, expected: float, plain: float, mean_new_tokens: float, num_drafts: int
    ) -> None:
        """A step that decoded took `seconds` instead of `expected`, or of `plain` without its drafts."""
        drafting, self._drafting_seconds = self._drafting_seconds, 0.0
        self.latest_drafting_seconds = drafting
        goodput = mean_new_tokens * plain / (expected + drafting)
        self._credit = min(self._credit + _PROBE_SHARE * min(seconds, 3 * expected), _MOST_CREDIT * expected)
        self._advantage += 0.1 * (max(goodput, 1.0) - self._advantage)
        self._num_drafts += 0.1 * (num_drafts - self._num_drafts)

    def observe_survivals(self, slots: Ints, survivals: Floats, starts: Ints) -> None:
        """How probable each of the drafts that are at hand is to come out, in one flat list that has those of each slot
        from `starts` on."""
        surplus = np.maximum(survivals[:, None] - np.array(_PRICES), 0.0)
        self._at_hand[slots] = np.add.reduceat(surplus, starts, axis=0)

    def observe_emissions(self, slots: Ints, have_drafts: Bools) -> None:
        """Requests that have just decoded, and which of them had drafts at hand: what asking a lookup has gained."""
        drafters = self._asked[slots]
        known = drafters >= 0
        if not known.any():
            return
        values = np.where(have_drafts[:, None], self._at_hand[slots], 0.0)[known]
        slots, drafters = slots[known], drafters[known]
        self._asked[slots] = -1
        self._at_hand[slots] = 0.0
        counts = self._gain_count[drafters, slots] + 1.0
        self._gain_count[drafters, slots] = counts
        rates = np.maximum(_GAIN_RATE, 1.0 / counts)[:, None]
        self._gains[drafters, slots] += rates * (values - self._gains[drafters, slots])
        for i in set(drafters.tolist()):
            # Later proposals would favour requests that are asked because they do well.
            first = values[(drafters == i) & (counts <= _FIRST_PROPOSALS)]
            if len(first):
                self._mean_count[i] += len(first)
                rate = min(1.0, max(len(first) / self._mean_count[i], 1 - (1 - _MEAN_RATE) ** len(first)))
                self._mean_gain[i] += rate * (first.mean(axis=0) - self._mean_gain[i])
                self._mean_square[i] += rate * ((first**2).mean(axis=0) - self._mean_square[i])

    def observe_drafting(self, i: int, drafting: Drafting) -> None:
        calls = self._calls[i]
        num_requests, num_unread = calls.popleft() if calls else (drafting.num_requests, 0)
        if drafting.error is not None:
            self._absent_until[i] = self._step + self._retry_after[i]
            self._retry_after[i] = min(2 * self._retry_after[i], _LAST_RETRY)
            return
        self._drafting_seconds += drafting.seconds
        self._retry_after[i] = _FIRST_RETRY
        # Some of those who were to be asked may have failed in the step, or been content with the first drafter.
        num_unread = num_unread * drafting.num_requests // max(num_requests, 1)
        self._prices[i].observe(drafting.num_requests, drafting.num_tokens, num_unread, drafting.seconds)

    def _grow(self, num_slots: int) -> None:
        missing = ((0, 0), (0, num_slots - len(self._asked)))
        self._acceptance.grow(num_slots)
        self._gains = np.pad(self._gains, (*missing, (0, 0)))
        self._gain_count = np.pad(self._gain_count, missing)
        self._at_hand = np.pad(self._at_hand, (missing[1], (0, 0)))
        self._read = np.pad(self._read, missing)
        self._wait = np.pad(self._wait, missing)
        self._next_probe = np.pad(self._next_probe, missing)
        self._planned = np.pad(self._planned, missing[1], constant_values=-1)
        self._asked = np.pad(self._asked, missing[1], constant_values=-1)


class _Choice:
    """For each row the drafter that is to be asked, or -1; how many tokens it drafts, and what that gains."""

    def __init__(self, num_rows: int) -> None:
        self.drafters = np.full(num_rows, -1)
        self.lengths = np.zeros(num_rows, dtype=np.int64)
        self.net = np.zeros(num_rows)
        self.chosen = False

    def improve(self, i: int, worth: Bools, net: Floats, lengths: Ints) -> None:
        better = worth & (net > self.net)
        self.drafters[better] = i
        self.lengths[better] = lengths[better]
        self.net[better] = net[better]
        self.chosen = True

    def asks(self, i: int) -> bool:
        return bool((self.drafters == i).any())
