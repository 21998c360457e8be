"""The arithmetic of a controller's two loops over drafts, as one call each: which are verified, and what came of them.

It is a fifth of a controller's code and, in Python, four fifths of its time. `PythonArithmetic` says what is computed;
`sol.speculation.native` has the same from C++, with the same sums in the same order, so that the numbers agree to the
last bit and nobody decides otherwise for having a compiler.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from sol.speculation.plan.acceptance import Habit
from sol.speculation.plan.costs import CostModel
from sol.speculation.plan.hand import Hand
from sol.speculation.plan.regime import Regime
from sol.speculation.plan.types import StepShape

CHOOSE_FIELDS, LEARN_FIELDS = 4, 7
LENGTHS: Final = 64
"""Of the list of drafts, that are compared"""


@dataclass(slots=True, kw_only=True)
class Choice:
    """What drafts are chosen by, beside what they promise."""

    shape: StepShape
    """Without any draft"""
    max_tokens: int
    """Drafts, over all requests"""
    least: float
    """Survival below which a draft is not looked at"""
    margin: float
    """Share of the plain goodput that drafts have to promise on top of it"""
    nearly: float
    """Share of the best goodput that is enough"""
    paid: float
    """Seconds of the round that passed already, drafts or not"""
    deciding: float
    """Seconds that only a step with drafts takes"""


class Arithmetic(Protocol):
    def choose(
        self, hand: Hand, regime: Regime, costs: CostModel, choice: Choice, items: list[int]
    ) -> tuple[list[int], float, int]:
        """How many drafts are verified for each request, the least survival among them, 0 where there are none, and
        how many drafts there were to choose from.

        `items` has `CHOOSE_FIELDS` numbers for each request: its slot; who drafted; how many drafts in the slot have
        yet to be judged, -1 if that was done; how many may be verified.
        """
        ...

    def learn(self, hand: Hand, regime: Regime, items: list[int], *, least: float, price: float) -> list[float]:
        """[request] tokens that its drafts gain where each costs `price`.

        `items` has `LEARN_FIELDS` numbers for each request: its slot; who drafted; how many drafts have yet to be
        judged, as above, with `least`; how many were right, known to be right or wrong, and verified; whether it is
        learned from, 0 or 1.
        """
        ...


class PythonArithmetic:
    """Where the library of kernels is not there, and to compare that with."""

    def choose(
        self, hand: Hand, regime: Regime, costs: CostModel, choice: Choice, items: list[int]
    ) -> tuple[list[int], float, int]:
        survivals: list[float] = []
        lengths: list[int] = []
        for slot, drafter, length, limit in _records(items, CHOOSE_FIELDS):
            if length >= 0:
                _judge(hand, regime, slot, drafter, length, choice.least)
            start, count = slot * hand.width, min(hand.counts[slot], limit)
            survivals += hand.expected[start : start + count]
            lengths.append(count)
        count = min(len(survivals), choice.max_tokens)
        if not count:
            return [0] * len(lengths), 0.0, len(survivals)
        order: Sequence[int] = range(count)
        if len(lengths) > 1:  # stable: of equal drafts of a request the first come first
            order = np.argsort(-np.array(survivals), kind="stable")[:count].tolist()
        stride = (count + LENGTHS - 1) // LENGTHS
        rows = float(max(choice.shape.num_logits_rows, 1))
        emitted = list(itertools.accumulate(map(survivals.__getitem__, order), initial=rows))
        seconds = costs.curve(choice.shape, count, stride)
        enough = (1.0 + choice.margin) * rows / (seconds[0] + choice.paid)
        paid = choice.paid + choice.deciding
        goodputs = [tokens / (time + paid) for tokens, time in zip(emitted[::stride], seconds, strict=True)]
        best = max(goodputs)
        if best < enough:
            return [0] * len(lengths), 0.0, len(survivals)
        enough = max(enough, choice.nearly * best)
        chosen = stride * next(length for length, goodput in enumerate(goodputs) if goodput >= enough)
        if not chosen:
            return [0] * len(lengths), 0.0, len(survivals)
        owners = np.repeat(np.arange(len(lengths)), lengths)[order[:chosen]]
        return np.bincount(owners, minlength=len(lengths)).tolist(), survivals[order[chosen - 1]], len(survivals)

    def learn(self, hand: Hand, regime: Regime, items: list[int], *, least: float, price: float) -> list[float]:
        gains = []
        for slot, drafter, length, right, known, verified, teaches in _records(items, LEARN_FIELDS):
            if length >= 0:
                _judge(hand, regime, slot, drafter, length, least)
            start, count = slot * hand.width, hand.counts[slot]
            gain = 0.0
            for survival in hand.expected[start : start + count]:
                if survival <= price:
                    break
                gain += survival - price
            gains.append(gain)
            if not teaches:
                continue
            scores = hand.scores[start : start + known]
            scored = None if scores and scores[0] < 0 else scores
            place = hand.habit(slot, drafter)
            habit = Habit(*hand.habits[place : place + 2])
            hand.acceptance[drafter].observe(scored, right, known, habit)
            hand.habits[place : place + 2] = array("d", (habit.log_odds, habit.precision))
            if verified:
                regime.observe_drafts(drafter, hand.predicted[start : start + min(verified, count)], right)
            elif known and count:
                regime.observe_unverified(drafter, hand.predicted[start], right > 0)
        return gains


def _records(items: list[int], fields: int) -> zip[tuple[int, ...]]:
    return zip(*[iter(items)] * fields, strict=True)


def _judge(hand: Hand, regime: Regime, slot: int, drafter: int, length: int, least: float) -> None:
    """Let the slot have the survivals of its first `length` drafts, as far as their drafter is believed."""
    start, acceptance = slot * hand.width, hand.acceptance[drafter]
    # A drafter that nobody knows may promise anything, and what it promises at first is all that is known of it: it is
    # believed as far as it has been right.
    length = min(length, 1 + acceptance.num_right)
    scores = hand.scores[start : start + length]
    scored = None if scores and scores[0] < 0 else scores
    log_odds = hand.habits[hand.habit(slot, drafter)]
    predicted, expected = acceptance.survivals(scored, length, log_odds, regime.kept(drafter), least)
    count = len(predicted)
    hand.counts[slot] = count
    hand.predicted[start : start + count] = array("d", predicted)
    hand.expected[start : start + count] = array("d", expected)
