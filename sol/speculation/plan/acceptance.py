"""How probable it is that a draft is right, given that those before it are.

A logistic model, learned while it is used: the log-odds of a draft are those of the drafter's own score, plus what
experience says of such scores and of such positions with this drafter (all requests), plus what it says of this
request. Each part is a mean with a precision: few observations move it little (shrinkage towards what is known one
level up), and precision is capped, so that old observations fade. A drafter whose scores are honest is trusted before a
request has any history; one whose scores lie is found out for all requests at once.

Plain floats and lists: most steps bring a handful of drafts, and for those an array costs more than it saves. Arrays
judge the drafts of many requests at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

_LEVELS: Final = 256
"""Scores are rounded to so many levels: finer than anybody's scores are true."""
_BINS: Final = 12
"""Of scores, equally wide in log-odds between -4 and 4; one more is for drafts without a score."""
_POSITIONS: Final = 16
"""Positions that have a correction of their own; later ones share the last one's."""
_LEAST_SCORE, _MOST_SCORE = 0.005, 0.995
_UNSCORED_LOG_ODDS: Final = 0.4
"""Three of five: drafts without scores come from models, and most of a fit model's are right."""
_BIN_PRECISION, _MOST_BIN_PRECISION = 1.0, 200.0
_POSITION_PRECISION, _MOST_POSITION_PRECISION = 8.0, 200.0
_REQUEST_PRECISION, _MOST_REQUEST_PRECISION = 6.0, 40.0
"""Of a cell: as if so much had been seen before the first observation, and at most. A draft that is as likely right as
wrong brings a quarter; a request's own past counts for some 150 of those, a drafter's for 800."""
_LEAST_INFORMATION: Final = 0.02
"""What a draft brings that was nearly certain: an outcome against all expectation must not move a cell too far."""
_CURVE_OBSERVATIONS: Final = 50.0


def _clipped_log_odds(level: int) -> float:
    score = min(max(level / _LEVELS, _LEAST_SCORE), _MOST_SCORE)
    return math.log(score / (1.0 - score))


_LOG_ODDS: Final = [*(_clipped_log_odds(level) for level in range(_LEVELS + 1)), 0.0]
_BIN_OF: Final = [*(min(max(int((o + 4.0) * (_BINS / 8.0)), 0), _BINS - 1) for o in _LOG_ODDS[:-1]), _BINS]
"""By level; the last one of both is for drafts without a score."""
_UNSCORED: Final = _LEVELS + 1
_LOG_ODDS_ARRAY, _BIN_OF_ARRAY = np.array(_LOG_ODDS), np.array(_BIN_OF)


@dataclass(slots=True)
class Habit:
    """What a request's own drafts by one drafter say: log-odds to add, and their precision."""

    log_odds: float = 0.0
    precision: float = _REQUEST_PRECISION


class Acceptance:
    """Of one drafter's drafts."""

    def __init__(self, *, has_curve: bool = True) -> None:
        """Without `has_curve`, `before_drafting` is never asked."""
        self._has_curve = has_curve
        self.num_right = 0
        """Drafts that were right, of those that `observe` was told of"""
        self._by_score = [0.0] * _BINS + [_UNSCORED_LOG_ODDS]
        self._score_precision = [_BIN_PRECISION] * (_BINS + 1)
        self._by_position = [0.0] * _POSITIONS
        self._position_precision = [_POSITION_PRECISION] * _POSITIONS
        self._curve = [0.5] * _POSITIONS
        """Of all drafts, whatever their scores: the conditional acceptance at each position"""
        self._curve_weight = [1.0] * _POSITIONS

    def survivals(
        self, scores: Sequence[float] | None, count: int, habit: Habit, kept: Sequence[float], least: float
    ) -> tuple[list[float], list[float]]:
        """How probable it is that each of the first `count` drafts and all before it are right, and what that is worth
        where it is chosen: the share `kept` of it, by survivals in equal parts. Never rises. Both lists end where it
        falls below `least`."""
        predicted, expected = [], []
        survival = lowest = 1.0
        by_score, by_position, own = self._by_score, self._by_position, habit.log_odds
        log_odds_of, bin_of, exp, cells = _LOG_ODDS, _BIN_OF, math.exp, len(kept) - 1e-9
        if count > _POSITIONS:
            by_position = by_position + by_position[-1:] * (count - _POSITIONS)
        # It runs for each draft of each request and step, so nothing is looked up or called twice.
        for score, here in zip(scores or itertools.repeat(None, count), by_position[:count], strict=False):
            level = _UNSCORED if score is None else int(score * _LEVELS)
            survival /= 1.0 + exp(-(log_odds_of[level] + by_score[bin_of[level]] + here + own))
            worth = survival * kept[int(survival * cells)]
            if worth < lowest:
                lowest = worth
                if lowest < least:
                    break
            predicted.append(survival)
            expected.append(lowest)
        return predicted, expected

    def survivals_of_many(
        self, scores: Sequence[Sequence[float]], habits: Sequence[Habit], kept: Sequence[float], least: float
    ) -> list[tuple[list[float], list[float]]]:
        """`survivals` of many proposals that have scores, all their drafts counted."""
        lengths = np.array([len(one) for one in scores])
        width = int(lengths.max())
        there = np.arange(width) < lengths[:, None]
        levels = np.zeros(there.shape, dtype=np.int64)
        levels[there] = np.fromiter(itertools.chain.from_iterable(scores), np.float64) * _LEVELS
        positions = np.array(self._by_position)[np.minimum(np.arange(width), _POSITIONS - 1)]
        log_odds = (_LOG_ODDS_ARRAY + np.array(self._by_score)[_BIN_OF_ARRAY])[levels]
        log_odds += positions + np.array([habit.log_odds for habit in habits])[:, None]
        survivals = np.cumprod(1.0 / (1.0 + np.exp(-log_odds)), axis=1)
        cells = (survivals * (len(kept) - 1e-9)).astype(np.int64)
        worth = np.minimum.accumulate(np.minimum(survivals * np.array(kept)[cells], 1.0), axis=1)
        counts = np.count_nonzero(there & (worth >= least), axis=1)
        longest = int(counts.max())
        predicted, expected = survivals[:, :longest].tolist(), worth[:, :longest].tolist()
        return [(p[:n], e[:n]) for p, e, n in zip(predicted, expected, counts.tolist(), strict=True)]

    def observe(self, scores: Sequence[float] | None, num_right: int, num_known: int, habit: Habit) -> None:
        """Of a proposal's first `num_known` drafts the first `num_right` were right, and the one after them wrong."""
        self.num_right += num_right
        by_score, score_precision = self._by_score, self._score_precision
        by_position, position_precision = self._by_position, self._position_precision
        for place in range(num_known):
            level = _UNSCORED if scores is None else int(scores[place] * _LEVELS)
            position, cell = place if place < _POSITIONS else _POSITIONS - 1, _BIN_OF[level]
            log_odds = _LOG_ODDS[level] + by_score[cell] + by_position[position] + habit.log_odds
            expected = 1.0 / (1.0 + math.exp(-log_odds))
            surprise = (place < num_right) - expected
            information = expected * (1.0 - expected)
            if information < _LEAST_INFORMATION:
                information = _LEAST_INFORMATION
            total = score_precision[cell] + information
            score_precision[cell] = total if total < _MOST_BIN_PRECISION else _MOST_BIN_PRECISION
            by_score[cell] += surprise / total
            total = position_precision[position] + information
            position_precision[position] = total if total < _MOST_POSITION_PRECISION else _MOST_POSITION_PRECISION
            by_position[position] += surprise / total
            total = habit.precision + information
            habit.precision = total if total < _MOST_REQUEST_PRECISION else _MOST_REQUEST_PRECISION
            habit.log_odds += surprise / total
            if self._has_curve:
                weight = self._curve_weight[position] = min(self._curve_weight[position] + 1.0, _CURVE_OBSERVATIONS)
                self._curve[position] += ((place < num_right) - self._curve[position]) / weight

    def before_drafting(self, count: int, log_odds: float) -> list[float]:
        """How probable it is that so many drafts of a proposal are right, 1 to `count`, before there is one; `log_odds`
        are those of a request's habit."""
        result = []
        survival, factor = 1.0, math.exp(-log_odds)
        for position in range(count):
            usual = min(max(self._curve[min(position, _POSITIONS - 1)], _LEAST_SCORE), _MOST_SCORE)
            survival /= 1.0 + factor * (1.0 - usual) / usual
            result.append(survival)
        return result
