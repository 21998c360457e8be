"""Who is asked for drafts after a step: drafters whose drafts are worth more than the time they take, and now and then
others, to see whether that has changed.

Looking text up costs microseconds, computing a model milliseconds. A lookup's worth to a request is the mean gain of
its recent proposals, empty ones counted; as long as it has few, the mean of other requests' first proposals. A model's
worth follows from its acceptance by position, and its price decides how many tokens it drafts.

What is not worth it, or not known to be, is tried from a budget: a fixed share of the time that passes. A request's
turn comes the later the more of its tries were vain. A request whose turn has not come costs a look at one number.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Final

from sol.engine.types import Drafting, ProposalPlan
from sol.speculation.plan.costs import CostModel, DraftingCost
from sol.speculation.plan.hand import Hand
from sol.speculation.plan.ledger import decoding_only
from sol.speculation.plan.requests import Past, Request
from sol.speculation.plan.types import Drafter, StepShape

LOOKUPS: Final = frozenset({"ngram", "suffix"})
_PROBE_SHARE: Final = 0.006
"""Of the time that passes: what may go to proposals that are not expected to pay"""
_MOST_CREDIT: Final = 3.0
"""Steps' time that the budget of probes saves up at most: a model's probe may take longer than a step."""
_FIRST_CREDIT: Final = 4.0
_CREDIT_AT_ONCE: Final = 1.0
"""Of the budget, in one step: to try again costs less than the first time, and it takes several tries to know."""
_PROBE_TOKENS: Final = 3
"""That a model is asked for: enough to see how it does, and each costs a pass of it."""
_REQUEST_PROBE_SHARE: Final = 0.002
"""Of the time that passes: below that, a request is tried at every step"""
_LONGEST_WAIT: Final = 64
"""Steps between two probes of one request"""
_NO_CREDIT_STEPS: Final = 4
"""Until who found the budget empty has another look"""
_DECIDING: Final = 6e-6
"""Seconds that the host spends on a request with drafts at hand, beside the drafter"""
_MARGIN: Final = 1.005
_FIRST_HORIZON, _HORIZON_RATE = 48.0, 0.05
"""Proposals over which what a drafter has to read first (a prompt) is spread: as many as requests turn out to have"""
_FRESH_TOKENS: Final = 4
"""What a request gains between two proposals, at a guess: that much is read anew for each"""
_GAIN_RATE: Final = 0.06
_MEAN_RATE: Final = 0.002
_MEAN_PRIOR: Final = 4.0
"""As if so many proposals had gained nothing"""
_FIRST_PROPOSALS: Final = 48
"""Of a request tell what to expect of others; later ones would favour requests that are asked because they do well."""
_PRIOR_PROPOSALS: Final = 24.0
_CAUTION, _MEAN_CAUTION = 0.25, 1.0
"""Standard errors that gains are taken to be smaller than they were seen to be, of a request and of all: they are many
small ones and a few large ones, and who was lucky is not yet who is worth it."""
_MODEL_LENGTHS: Final = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
_NEWS: Final = 0.1
"""Tokens by which the usual gain has to rise before those who are not asked hear of it"""
_LEAST_TRUST: Final = 0.05
_FIRST_RETRY, _LAST_RETRY = 16, 1024
"""Steps for which a drafter that failed is left out, doubling from one failure to the next"""
_HABITS: Final = 2.0
"""Requests are alike to a model whose habits differ by less than the inverse of this, in log-odds."""


class _Usual:
    """Gains of a lookup's proposals to requests that it does not know yet, at one number of requests."""

    def __init__(self) -> None:
        self._mean, self._square, self._count = 0.0, 1.0, _MEAN_PRIOR

    @property
    def spread(self) -> float:
        return math.sqrt(max(self._square - self._mean * self._mean, 0.0))

    @property
    def gain(self) -> float:
        """To expect, on the cautious side"""
        return self._mean - _MEAN_CAUTION * self.spread / math.sqrt(min(self._count, 1.0 / _MEAN_RATE))

    def observe(self, gain: float) -> None:
        self._count += 1.0
        rate = 1.0 / self._count
        if rate < _MEAN_RATE:
            rate = _MEAN_RATE
        self._mean += rate * (gain - self._mean)
        self._square += rate * (gain * gain - self._square)


class _Member:
    """A drafter."""

    def __init__(self, name: str, plain_seconds: float) -> None:
        self.name = name
        self.is_lookup = name in LOOKUPS
        if self.is_lookup:
            self.price = DraftingCost(5e-6, 1e-5, 1e-7, 3e-6)
        else:
            part = 0.01 * plain_seconds
            self.price = DraftingCost(2 * part, 2 * part, 10 * part, part)
        self.absent_until = 0
        self.retry_after = _FIRST_RETRY
        self.usual: dict[int, _Usual] = {}
        """By octave of numbers of requests"""
        self.hope = -math.inf
        """The usual gain when all requests last thought about it"""
        self.honesty = 1.0
        """How much of the accepted tokens that its scores promise comes true"""


class Asking:
    def __init__(self, drafters: Sequence[str], costs: CostModel, hand: Hand) -> None:
        self._costs, self._hand, self._acceptance = costs, hand, hand.acceptance
        self._num_tokens = hand.width
        one = StepShape(num_tokens=1, num_requests=1, num_logits_rows=1, num_context_tokens=1)
        plain = costs.seconds(one)
        self._members = [_Member(name, plain) for name in drafters]
        self.has_model = not all(member.is_lookup for member in self._members)
        self._step = 0
        self._credit = _FIRST_CREDIT * plain
        self._advantage = 1.0
        """How many times the plain goodput recent steps had"""
        self._num_drafts = 0.0
        """That recent steps verified"""
        self.draft_price = 0.0
        """What verifying one costs, in tokens"""
        self._horizon = _FIRST_HORIZON
        self._octave = 0
        self._usual_requests = 1
        self._recent: deque[tuple[int, Sequence[str]]] = deque(maxlen=4 * max(len(self._members), 1))
        """Who was asked for whom after the latest step"""
        self._plans: dict[tuple[int, int], ProposalPlan] = {}

    def forget(self, request: Request) -> None:
        """It is over."""
        proposals = max((past.num_proposals for past in request.pasts if past is not None), default=0)
        if proposals > _PRIOR_PROPOSALS:
            self._horizon += _HORIZON_RATE * (proposals - self._horizon)

    def plan(
        self, shape: StepShape, rows: Sequence[Drafter], requests: dict[str, Request], margin: float
    ) -> list[ProposalPlan | None]:
        """[rows] of requests that a step of this shape samples; `margin`: tokens that a proposal has to gain beyond its
        costs."""
        self._step += 1
        step, count = self._step, len(rows)
        plans: list[ProposalPlan | None] = [None] * count
        if self._has_news(count):
            for request in requests.values():
                request.turn = 0
        turns: list[Request] = []
        for index, row in enumerate(rows):
            request = requests[row.request_id]
            if request.turn <= step:
                request.index, request.num_tokens, request.max_tokens = index, row.num_tokens, row.max_tokens
                request.lookup = request.model = -1
                request.net = 0.0
                turns.append(request)
        present = [i for i, member in enumerate(self._members) if member.absent_until <= step]
        if not turns or not present:
            return plans
        plain = decoding_only(shape, count)
        others = max(round(self._num_drafts), count)
        # As if each had one at least: a price of none at all would have everybody asked at once, and then nobody.
        seconds, more = self._costs.curve(plain, others, others)
        rate = self._advantage * count / seconds
        """What a second is worth, in tokens"""
        self.draft_price = rate * (more - seconds) / others
        for i in present:
            if self._members[i].is_lookup:
                self._consider_lookup(i, turns, rate, margin)
        for i in present:
            if not self._members[i].is_lookup:
                self._consider_model(i, turns, plain, rate, margin)
        later = step + _LONGEST_WAIT
        for request in turns:
            request.turn = 0 if request.net > 0.0 else later
        for i in present:
            self._probe(i, turns, count, seconds, rate)
        known = self._plans
        for request in turns:
            if request.model >= 0:
                plans[request.index] = self._plan_of(request)
            elif request.lookup >= 0:
                plan = known.get((request.lookup, request.length))
                plans[request.index] = plan if plan is not None else self._plan_of(request)
        return plans

    def _has_news(self, num_requests: int) -> bool:
        """Whether what was vain may be worth it: with other prices, or where others did better than was expected."""
        news = False
        if not (self._usual_requests / 2 < num_requests < 2 * self._usual_requests):
            self._usual_requests, self._octave = max(num_requests, 1), max(num_requests, 1).bit_length()
            news = True
        for member in self._members:
            if member.is_lookup:
                gain = self._usual(member).gain
                if news or gain > member.hope + _NEWS:
                    member.hope, news = gain, True
                member.hope = min(member.hope, gain)
        return news

    def _consider_lookup(self, i: int, turns: Sequence[Request], rate: float, margin: float) -> None:
        member = self._members[i]
        price = member.price
        usual = self._usual(member)
        gain, caution = usual.gain, _CAUTION * usual.spread
        per_request = rate * (_DECIDING + price.per_request + price.base / len(turns)) + margin
        per_unread, horizon = rate * price.per_unread, self._horizon
        most, next_step = self._num_tokens, self._step + 1
        prior, sqrt = _PRIOR_PROPOSALS * gain, math.sqrt
        # It runs for each request and step, so nothing is looked up or called twice.
        for request in turns:
            past = request.pasts[i]
            if past is None:
                continue
            unread: float = request.num_tokens - past.num_read
            if unread > _FRESH_TOKENS:
                unread = _FRESH_TOKENS + (unread - _FRESH_TOKENS) / horizon
            net = gain
            seen = past.num_gains
            if seen:
                net = (seen * (past.gain - caution / sqrt(seen)) + prior) / (seen + _PRIOR_PROPOSALS)
            net -= per_request + per_unread * unread
            if net > request.net:
                request.net, request.lookup = net, i
                longest = request.max_tokens
                request.length = longest if longest < most else most
                past.wait = 1
                past.next_probe = next_step

    def _consider_model(self, i: int, turns: Sequence[Request], plain: StepShape, rate: float, margin: float) -> None:
        """Requests with like habits are one group; the best groups may draft, all of them equally far (a model drafts
        for a batch token by token), if that beats drafting nothing."""
        price, hand = self._members[i].price, self._hand
        groups: dict[int, list[Request]] = {}
        for request in turns:
            past = request.pasts[i]
            if past is not None:
                groups.setdefault(round(_HABITS * hand.habits[hand.habit(request.slot, i)]), []).append(request)
        if not groups:
            return
        longest = min(max(request.max_tokens for request in turns), self._num_tokens)
        lengths = [n for n in _MODEL_LENGTHS if n < longest] + [longest]
        rows, plain_seconds = plain.num_logits_rows, self._costs.seconds(plain)
        usual = rows / plain_seconds
        best, best_groups, best_length = (_MARGIN + margin) * usual, 0, 0
        order = sorted(groups, reverse=True)
        survivals = {habit: self._acceptance[i].before_drafting(longest, habit / _HABITS) for habit in order}
        asked, unread = 0, 0.0
        gained = [0.0] * len(lengths)
        for number, habit in enumerate(order, start=1):
            members = groups[habit]
            asked += len(members)
            unread += sum(self._unread(i, request) for request in members)
            for at, length in enumerate(lengths):
                gained[at] += len(members) * sum(survivals[habit][:length])
                drafts = asked * length
                drafting = price.base + price.per_request * asked + price.per_token * drafts + price.per_unread * unread
                seconds = self._costs.curve(plain, drafts, drafts)[-1] + drafting
                goodput = (rows + gained[at]) / seconds
                if goodput > best:
                    best, best_groups, best_length = goodput, number, length
        for habit in order[:best_groups]:
            net = sum(survivals[habit][:best_length]) - best_length * (self.draft_price + rate * price.per_token)
            for request in groups[habit]:
                past = request.pasts[i]
                if past is None:
                    continue
                if request.lookup < 0:  # else it is asked only where that finds little, which need not be ever
                    past.wait = 1
                    past.next_probe = self._step + 1
                if request.model < 0 or net > request.net:
                    request.model, request.model_length = i, min(best_length, request.max_tokens)
                request.net = max(request.net, net, 1e-6)

    def _unread(self, i: int, request: Request) -> float:
        past = request.pasts[i]
        unread = request.num_tokens - past.num_read if past is not None else 0
        return unread if unread <= _FRESH_TOKENS else _FRESH_TOKENS + (unread - _FRESH_TOKENS) / self._horizon

    def _probe(self, i: int, turns: Sequence[Request], num_requests: int, seconds: float, rate: float) -> None:
        """Ask drafter `i` for some of those whose turn it is and who do not ask it anyway, as the budget allows."""
        member, step = self._members[i], self._step
        price = member.price
        tokens = self._num_tokens if member.is_lookup else _PROBE_TOKENS
        base = price.base
        spent, most = 0.0, max(_CREDIT_AT_ONCE * self._credit, 0.0)
        for request in turns:
            if request.lookup == i:
                continue
            past = request.pasts[i]
            if past is None or (request.model == i and request.lookup < 0):
                continue
            if past.next_probe > step:
                request.turn = min(request.turn, past.next_probe)
                continue
            unread = request.num_tokens - past.num_read
            cost = price.per_request + price.per_token * tokens + price.per_unread * unread
            # In place of a drafter that pays, this one also costs what that would have gained.
            total = cost + base + max(request.net, 0.0) / rate
            if spent + total > most and (spent or total > self._credit):
                request.turn = min(request.turn, step + _NO_CREDIT_STEPS)
                continue
            spent += total
            # As many are waiting as the budget has room for, and a request's own share is bounded as well.
            share = max(price.base + cost, num_requests * cost * _REQUEST_PROBE_SHARE / _PROBE_SHARE)
            longest = min(max(int(share / (_REQUEST_PROBE_SHARE * seconds)), 1), _LONGEST_WAIT)
            past.next_probe = step + min(past.wait, longest)
            past.wait = min(2 * past.wait, longest)
            request.turn = min(request.turn, past.next_probe)
            base = 0.0
            length = min(request.max_tokens, tokens)
            if member.is_lookup:
                request.lookup, request.length = i, length
            else:
                request.lookup, request.model, request.model_length = -1, i, length
        self._credit -= spent

    def _plan_of(self, request: Request) -> ProposalPlan:
        """A lookup is asked first where both are worth it, or one of them is tried: it costs next to nothing."""
        lookup, model = request.lookup, request.model
        if lookup < 0 or model < 0:
            key = (lookup, request.length) if lookup >= 0 else (model, request.model_length)
            plan = self._plans.get(key)
            if plan is None:
                plan = self._plans[key] = ProposalPlan(drafter=self._members[key[0]].name, max_tokens=key[1])
            return plan
        first, second = self._members[lookup], self._members[model]
        # The first one's scores are compared with this, and they are not calibrated.
        trust = request.net / max(first.honesty, _LEAST_TRUST)
        return ProposalPlan(
            drafter=first.name,
            max_tokens=request.length,
            fallback=second.name,
            fallback_max_tokens=request.model_length,
            trust=max(trust, _LEAST_TRUST),
        )

    # ── learning ─────────────────────────────────────────────────────────────────────────────────────────────────

    def observe_step(self, seconds: float, expected: float, gain: float, num_drafts: int) -> None:
        """A step that decoded took `seconds` instead of `expected`, and had so many times the plain goodput."""
        self._credit = min(self._credit + _PROBE_SHARE * min(seconds, 3 * expected), _MOST_CREDIT * expected)
        self._advantage += 0.1 * (min(max(gain, 1.0), 1e3) - self._advantage)
        self._num_drafts += 0.1 * (num_drafts - self._num_drafts)

    def observe_gains(self, gains: Sequence[tuple[int, Past, int]], worth: Sequence[float]) -> None:
        """What proposals of lookups came to: by whom, for whom, and where in `worth` their tokens are; -1 for none."""
        most = 1.0 / _GAIN_RATE
        usual = [self._usual(member) if member.is_lookup else None for member in self._members]
        for i, past, place in gains:
            gain = worth[place] if place >= 0 else 0.0
            number = past.num_gains + 1.0
            past.num_gains = number = number if number < most else most
            past.gain += (gain - past.gain) / number
            past.num_proposals += 1
            here = usual[i]
            if past.num_proposals <= _FIRST_PROPOSALS and here is not None:
                here.observe(gain)

    def observe_promise(self, i: int, promised: float, expected: float) -> None:
        """Drafts that are at hand promise so many accepted tokens by their scores, and experience expects so many."""
        if promised > 0.0:
            member = self._members[i]
            member.honesty += _GAIN_RATE * (min(expected / promised, 1.0) - member.honesty)

    def observe_drafting(self, i: int, drafting: Drafting, requests: dict[str, Request]) -> float:
        """Seconds of the call that went to tokens which the drafter had not seen"""
        member = self._members[i]
        if drafting.error is not None:
            member.absent_until = self._step + member.retry_after
            member.retry_after = min(2 * member.retry_after, _LAST_RETRY)
            return 0.0
        member.retry_after = _FIRST_RETRY
        num_unread = 0
        for request_id, num_tokens in zip(drafting.request_ids, drafting.num_request_tokens, strict=True):
            request = requests.get(request_id)
            past = request.pasts[i] if request is not None else None
            if past is not None:
                unread = num_tokens - past.num_read
                past.num_read = num_tokens
                if unread > 0:
                    num_unread += unread
        member.price.observe(drafting.num_requests, drafting.num_tokens, num_unread, drafting.seconds)
        if member.is_lookup:
            self._recent.append((i, drafting.request_ids))
        return min(num_unread * member.price.per_unread, drafting.seconds)

    def after_step(self, requests: dict[str, Request]) -> None:
        """What was drafted after the step is for the next one to judge."""
        while self._recent:
            i, request_ids = self._recent.popleft()
            for request_id in request_ids:
                request = requests.get(request_id)
                if request is not None:
                    request.asked = i

    def _usual(self, member: _Member) -> _Usual:
        usual = member.usual.get(self._octave)
        if usual is None:
            usual = member.usual[self._octave] = _Usual()
        return usual
