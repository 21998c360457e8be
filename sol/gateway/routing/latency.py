"""What time to first token to expect of an engine, learned from those it had.

Of each length class of prompts (powers of two) an exponentially weighted mean of times is kept, together with the mean
of the open requests they were measured under. How much one more open request costs is the slope of a regression over
all of them, so that an engine that batches well is not taken for a slow one because it is popular. What was learned
long ago loses its weight: an engine that was slow once is asked again.
"""

from __future__ import annotations

import math
from typing import Final

_ALPHA: Final = 0.1
"""Weight of a new sample."""
_NUM_CLASSES: Final = 24
_TAU: Final = 30.0
"""Seconds after which a mean has lost 1 - 1/e of its weight."""
_PRIOR_SECONDS: Final = 0.1
_PRIOR_DOUBLING: Final = 16
"""Open requests that double the time, until the slope is known."""


class _Mean:
    """Of one length class: times, and loads they were measured under."""

    __slots__ = ("load", "seconds", "updated")

    def __init__(self, seconds: float, load: float, now: float) -> None:
        self.seconds, self.load, self.updated = seconds, load, now


class LatencyModel:
    def __init__(self) -> None:
        self._classes: list[_Mean | None] = [None] * _NUM_CLASSES
        self._overall: _Mean | None = None
        self._variance = 1.0
        self._covariance: float | None = None
        self.num_samples = 0

    def observe(self, input_tokens: int, load: float, seconds: float, now: float) -> None:
        """A first token that came `seconds` after a request of `input_tokens` was sent, with `load` others open."""
        self.num_samples += 1
        index = _class_of(input_tokens)
        mean = self._classes[index]
        if mean is None:
            self._classes[index] = _Mean(seconds, load, now)
        else:
            more_load, more_seconds = load - mean.load, seconds - mean.seconds
            if self._covariance is None:
                self._covariance = self._prior_slope(mean.seconds)
            self._variance += _ALPHA * (more_load**2 - self._variance)
            self._covariance += _ALPHA * (more_load * more_seconds - self._covariance)
            _update(mean, seconds, load, now)
        if self._overall is None:
            self._overall = _Mean(seconds, load, now)
        else:
            _update(self._overall, seconds, load, now)

    def expect(self, input_tokens: int, load: float, now: float, usual: float | None = None) -> float:
        """Seconds; `usual`: what the engine's neighbours take, for one that nothing is known of, or was long ago."""
        base = usual if usual is not None else _PRIOR_SECONDS
        mean = self._nearest(_class_of(input_tokens))
        if mean is None:
            return base + self._prior_slope(base) * load
        learned = max(mean.seconds + self._slope(mean.seconds) * (load - mean.load), mean.seconds / 10)
        trust = math.exp(-(now - mean.updated) / _TAU)
        return trust * learned + (1 - trust) * (base + self._prior_slope(base) * load)

    def typical(self) -> float | None:
        """The mean of all times; None: there were none."""
        return None if self._overall is None else self._overall.seconds

    def _slope(self, seconds: float) -> float:
        """Seconds that one more open request costs."""
        if self._covariance is None or self._variance < 0.01:  # the load was always the same: it says nothing
            return self._prior_slope(seconds)
        return max(0.0, self._covariance / self._variance)

    @staticmethod
    def _prior_slope(seconds: float) -> float:
        return seconds / _PRIOR_DOUBLING

    def _nearest(self, index: int) -> _Mean | None:
        for distance in range(_NUM_CLASSES):
            for other in (index - distance, index + distance):
                if 0 <= other < _NUM_CLASSES and (mean := self._classes[other]) is not None:
                    return mean
        return None


def _class_of(input_tokens: int) -> int:
    return min(max(input_tokens, 1).bit_length() - 1, _NUM_CLASSES - 1)


def _update(mean: _Mean, seconds: float, load: float, now: float) -> None:
    # A mean that was not touched for long gives way to what is seen now.
    alpha = max(_ALPHA, 1 - math.exp(-(now - mean.updated) / _TAU))
    mean.seconds += alpha * (seconds - mean.seconds)
    mean.load += alpha * (load - mean.load)
    mean.updated = now
