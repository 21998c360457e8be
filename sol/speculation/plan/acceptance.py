"""How probable it is that a draft is right, given that those before it are.

A logistic model, learned while it is used: the log-odds of a draft are those of the drafter's own score, plus what
experience says of such scores and of such positions with this drafter (all requests), plus what it says of this
request. Each part is a mean with a precision: few observations move it little (shrinkage towards what is known one
level up), and precision is capped, so that old observations fade. A drafter whose scores are honest is trusted before a
request has any history; one whose scores lie is found out for all requests at once.

What was learned lies in one array of doubles, on which `sol.speculation.plan.arithmetic` and its counterpart in C++
work.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_LEVELS: Final = 256
"""Scores are rounded to so many levels: finer than anybody's scores are true."""
BINS: Final = 12
"""Of scores, equally wide in log-odds between -4 and 4; one more is for drafts without a score."""
POSITIONS: Final = 16
"""Positions that have a correction of their own; later ones share the last one's."""
_LEAST_SCORE, _MOST_SCORE = 0.005, 0.995
_UNSCORED_LOG_ODDS: Final = 0.4
"""Three of five: drafts without scores come from models, and most of a fit model's are right."""
_FIRST_BIN_PRECISION, MOST_BIN_PRECISION = 1.0, 200.0
_FIRST_POSITION_PRECISION, MOST_POSITION_PRECISION = 8.0, 200.0
REQUEST_PRECISION, MOST_REQUEST_PRECISION = 6.0, 40.0
"""Of a cell: as if so much had been seen before the first observation, and at most. A draft that is as likely right as
wrong brings a quarter; a request's own past counts for some 150 of those, a drafter's for 800."""
LEAST_INFORMATION: Final = 0.02
"""What a draft brings that was nearly certain: an outcome against all expectation must not move a cell too far."""
CURVE_OBSERVATIONS: Final = 50.0


def _clipped_log_odds(level: int) -> float:
    score = min(max(level / _LEVELS, _LEAST_SCORE), _MOST_SCORE)
    return math.log(score / (1.0 - score))


LOG_ODDS: Final = (*(_clipped_log_odds(level) for level in range(_LEVELS + 1)), 0.0)
BIN_OF: Final = (*(min(max(int((o + 4.0) * (BINS / 8.0)), 0), BINS - 1) for o in LOG_ODDS[:-1]), BINS)
"""By level; the last one of both is for drafts without a score."""
UNSCORED: Final = _LEVELS + 1


# Where the parts of `Acceptance.state` begin; csrc/sol_cpu.h has the same numbers.
_BY_SCORE: Final = 0
_SCORE_PRECISION: Final = _BY_SCORE + BINS + 1
_BY_POSITION: Final = _SCORE_PRECISION + BINS + 1
_POSITION_PRECISION: Final = _BY_POSITION + POSITIONS
_CURVE: Final = _POSITION_PRECISION + POSITIONS
_CURVE_WEIGHT: Final = _CURVE + POSITIONS
_NUM_RIGHT: Final = _CURVE_WEIGHT + POSITIONS
_HAS_CURVE: Final = _NUM_RIGHT + 1


@dataclass(slots=True)
class Habit:
    """What a request's own drafts by one drafter say: log-odds to add, and their precision."""

    log_odds: float = 0.0
    precision: float = REQUEST_PRECISION


class Acceptance:
    """Of one drafter's drafts."""

    def __init__(self, *, has_curve: bool = True) -> None:
        """Without `has_curve`, `before_drafting` is never asked."""
        self.state = array("d", [0.0] * BINS + [_UNSCORED_LOG_ODDS])
        """Of each bin of scores and of each position the log-odds to add, and their precisions; of all drafts, whatever
        their scores, the conditional acceptance at each position (the curve) and its weight; `num_right`; whether there
        is a curve"""
        self.state.extend([_FIRST_BIN_PRECISION] * (BINS + 1))
        self.state.extend([0.0] * POSITIONS + [_FIRST_POSITION_PRECISION] * POSITIONS)
        self.state.extend([0.5] * POSITIONS + [1.0] * POSITIONS + [0.0, float(has_curve)])

    @property
    def num_right(self) -> int:
        """Drafts that were right, of those that `observe` was told of"""
        return int(self.state[_NUM_RIGHT])

    def survivals(
        self, scores: Sequence[float] | None, count: int, log_odds: float, kept: Sequence[float], least: float
    ) -> tuple[list[float], list[float]]:
        """How probable it is that each of the first `count` drafts and all before it are right, and what that is worth
        where it is chosen: the share `kept` of it, by survivals in equal parts. Never rises. Both lists end where it
        falls below `least`. `log_odds`: those of the request's habit."""
        predicted, expected = [], []
        survival = lowest = 1.0
        state = self.state
        by_score = state[_BY_SCORE:_SCORE_PRECISION].tolist()
        by_position = state[_BY_POSITION:_POSITION_PRECISION].tolist()
        log_odds_of, bin_of, exp, cells = LOG_ODDS, BIN_OF, math.exp, len(kept) - 1e-9
        if count > POSITIONS:
            by_position += by_position[-1:] * (count - POSITIONS)
        # It runs for each draft of each request and step, so nothing is looked up or called twice.
        for score, here in zip(scores or itertools.repeat(None, count), by_position[:count], strict=False):
            level = UNSCORED if score is None else int(score * _LEVELS)
            survival /= 1.0 + exp(-(log_odds_of[level] + by_score[bin_of[level]] + here + log_odds))
            worth = survival * kept[int(survival * cells)]
            if worth < lowest:
                lowest = worth
                if lowest < least:
                    break
            predicted.append(survival)
            expected.append(lowest)
        return predicted, expected

    def observe(self, scores: Sequence[float] | None, num_right: int, num_known: int, habit: Habit) -> None:
        """Of a proposal's first `num_known` drafts the first `num_right` were right, and the one after them wrong."""
        state = self.state
        state[_NUM_RIGHT] += num_right
        for place in range(num_known):
            level = UNSCORED if scores is None else int(scores[place] * _LEVELS)
            position, cell = place if place < POSITIONS else POSITIONS - 1, BIN_OF[level]
            log_odds = LOG_ODDS[level] + state[_BY_SCORE + cell] + state[_BY_POSITION + position] + habit.log_odds
            expected = 1.0 / (1.0 + math.exp(-log_odds))
            surprise = (place < num_right) - expected
            information = expected * (1.0 - expected)
            if information < LEAST_INFORMATION:
                information = LEAST_INFORMATION
            total = state[_SCORE_PRECISION + cell] + information
            state[_SCORE_PRECISION + cell] = total if total < MOST_BIN_PRECISION else MOST_BIN_PRECISION
            state[_BY_SCORE + cell] += surprise / total
            total = state[_POSITION_PRECISION + position] + information
            state[_POSITION_PRECISION + position] = (
                total if total < MOST_POSITION_PRECISION else MOST_POSITION_PRECISION
            )
            state[_BY_POSITION + position] += surprise / total
            total = habit.precision + information
            habit.precision = total if total < MOST_REQUEST_PRECISION else MOST_REQUEST_PRECISION
            habit.log_odds += surprise / total
            if state[_HAS_CURVE]:
                weight = min(state[_CURVE_WEIGHT + position] + 1.0, CURVE_OBSERVATIONS)
                state[_CURVE_WEIGHT + position] = weight
                state[_CURVE + position] += ((place < num_right) - state[_CURVE + position]) / weight

    def before_drafting(self, count: int, log_odds: float) -> list[float]:
        """How probable it is that so many drafts of a proposal are right, 1 to `count`, before there is one; `log_odds`
        are those of a request's habit."""
        result = []
        survival, factor = 1.0, math.exp(-log_odds)
        for position in range(count):
            usual = min(max(self.state[_CURVE + min(position, POSITIONS - 1)], _LEAST_SCORE), _MOST_SCORE)
            survival /= 1.0 + factor * (1.0 - usual) / usual
            result.append(survival)
        return result
