"""How probable it is that a draft is right, given that those before it are.

A logistic model, learned while it is used: the log-odds of a draft are those of the drafter's own score, plus what
experience says of such scores and of such positions with this drafter (all requests), plus what it says of this
request. Each part is a mean with a precision: few observations move it little (shrinkage towards what is known one
level up), and precision is capped, so that old observations fade. A drafter whose scores are honest is trusted before a
request has any history; one whose scores lie is found out for all requests at once.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_BINS: Final = 12
"""Of scores, equally wide in log-odds between -4 and 4; one more is for drafts without a score."""
_POSITIONS: Final = 16
"""Positions that have a correction of their own; later ones share the last one's."""
_LEAST_SCORE, _MOST_SCORE = 0.005, 0.995
_UNSCORED_LOG_ODDS: Final = 0.4
_BIN_PRECISION, _MOST_BIN_PRECISION = 1.0, 200.0
_POSITION_PRECISION, _MOST_POSITION_PRECISION = 8.0, 200.0
_REQUEST_PRECISION, _MOST_REQUEST_PRECISION = 6.0, 40.0
_LARGEST_MOVE: Final = 1.5
"""Of log-odds in one update: Newton's step on a logistic likelihood overshoots where all observations surprise."""


class Acceptance:
    """Of `num_drafters` drafters and of requests that are known by slots 0, 1, …"""

    def __init__(self, num_drafters: int) -> None:
        bins, positions = (num_drafters, _BINS + 1), (num_drafters, _POSITIONS)
        self._by_score = np.zeros(bins)
        self._by_score[:, _BINS] = _UNSCORED_LOG_ODDS
        self._score_precision = np.full(bins, _BIN_PRECISION)
        self._by_position = np.zeros(positions)
        self._position_precision = np.full(positions, _POSITION_PRECISION)
        self._by_request = np.zeros((num_drafters, 0))
        self._request_precision = np.zeros((num_drafters, 0))
        self._curve = np.full(positions, 0.5)
        """Of all drafts of a drafter, whatever their scores: the conditional acceptance at each position"""
        self._curve_weight = np.ones(positions)

    def grow(self, num_slots: int) -> None:
        """Room for slots up to `num_slots` - 1."""
        missing = num_slots - self._by_request.shape[1]
        if missing > 0:
            self._by_request = np.pad(self._by_request, ((0, 0), (0, missing)))
            self._request_precision = np.pad(
                self._request_precision, ((0, 0), (0, missing)), constant_values=_REQUEST_PRECISION
            )

    def reset(self, slot: int) -> None:
        """The slot is another request's from now on."""
        self._by_request[:, slot] = 0.0
        self._request_precision[:, slot] = _REQUEST_PRECISION

    def features(self, scores: Floats) -> tuple[Floats, Ints]:
        """Log-odds and bins of scores; NaN stands for a draft without one."""
        unscored = np.isnan(scores)
        clipped = np.clip(np.where(unscored, 0.5, scores), _LEAST_SCORE, _MOST_SCORE)
        log_odds = np.log(clipped / (1.0 - clipped))
        bins = np.clip((log_odds + 4.0) * (_BINS / 8.0), 0, _BINS - 1).astype(np.int64)
        bins[unscored] = _BINS
        return log_odds, bins

    def log_odds(self, drafters: Ints, slots: Ints, positions: Ints, own: Floats, bins: Ints) -> Floats:
        """Of drafts, each given by its drafter, its request's slot, its position (0 the first) and `features`."""
        return (
            own
            + self._by_score[drafters, bins]
            + self._by_position[drafters, np.minimum(positions, _POSITIONS - 1)]
            + self._by_request[drafters, slots]
        )

    def observe(
        self, drafters: Ints, slots: Ints, positions: Ints, bins: Ints, expected: Floats, right: npt.NDArray[np.bool_]
    ) -> None:
        """Drafts turned out right or wrong; those before them in their steps were right. `expected`: probabilities."""
        if not len(drafters):
            return
        positions = np.minimum(positions, _POSITIONS - 1)
        surprise = right - expected
        information = np.maximum(expected * (1.0 - expected), 0.02)
        for mean, precision, most, where in (
            (self._by_score, self._score_precision, _MOST_BIN_PRECISION, bins),
            (self._by_position, self._position_precision, _MOST_POSITION_PRECISION, positions),
            (self._by_request, self._request_precision, _MOST_REQUEST_PRECISION, slots),
        ):
            _move(mean, precision, most, drafters, where, surprise, information)
        for drafter, position, outcome in zip(drafters.tolist(), positions.tolist(), right.tolist(), strict=True):
            weight = min(self._curve_weight[drafter, position] + 1.0, 50.0)
            self._curve_weight[drafter, position] = weight
            self._curve[drafter, position] += (outcome - self._curve[drafter, position]) / weight

    def survival(self, drafter: int, slots: Ints, num_tokens: int) -> Floats:
        """[slots, num_tokens] how probable it is that so many drafts of one proposal are right, before there is one."""
        curve = np.clip(self._curve[drafter], _LEAST_SCORE, _MOST_SCORE)
        log_odds = np.log(curve / (1.0 - curve))[np.minimum(np.arange(num_tokens), _POSITIONS - 1)]
        odds = log_odds + self._by_request[drafter, slots][:, None]
        result: Floats = np.cumprod(probability(odds), axis=1, dtype=np.float64)
        return result


def probability(log_odds: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(-log_odds))


def _move(
    mean: Floats, precision: Floats, most: float, drafters: Ints, where: Ints, surprise: Floats, information: Floats
) -> None:
    """One Newton step of all cells that the observations touch."""
    width = mean.shape[1]
    cells = drafters * width + where
    touched, index = np.unique(cells, return_inverse=True)
    pull = np.bincount(index, surprise)
    gained = np.bincount(index, information)
    flat_mean, flat_precision = mean.reshape(-1), precision.reshape(-1)
    total = np.minimum(flat_precision[touched] + gained, most)
    flat_precision[touched] = total
    # A batch that brings more than the cap counts as much as it brings: its step is a mean, not a sum.
    flat_mean[touched] += np.clip(pull / np.maximum(total, gained), -_LARGEST_MOVE, _LARGEST_MOVE)
