"""The statistics of a comparison: few values, one a block, that are differences of logarithms.

Everything here is a plain function of numbers. Quantiles are computed, not looked up, so that no package is needed for
them; the tests hold them against published tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

ALPHA: Final = 0.05
"""How often two equal sides may be told apart. All intervals hold the truth with 1 - ALPHA."""
POWER: Final = 0.85
"""How often an effect of the announced size is found, at least."""
_EXACT_SIGNED_RANK: Final = 60
_RESAMPLES: Final = 4000


def student_tail(t: float, freedom: float) -> float:
    """P(T > t) of Student's distribution."""
    tail = _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t)) / 2
    return tail if t > 0 else 1 - tail


@lru_cache(maxsize=4096)
def student_quantile(p: float, freedom: float) -> float:
    """The p-quantile, 0.5 <= p < 1, by bisection."""
    low, high = 0.0, 1.0
    while student_tail(high, freedom) > 1 - p:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        if student_tail(middle, freedom) > 1 - p:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def mean_interval(values: Floats) -> tuple[float, float] | None:
    """Student's interval of the mean; None for fewer than two values."""
    n = len(values)
    if n < 2:
        return None
    half = student_quantile(1 - ALPHA / 2, n - 1) * float(values.std(ddof=1)) / math.sqrt(n)
    mean = float(values.mean())
    return mean - half, mean + half


def bootstrap_interval(values: Floats, seed: int = 0) -> tuple[float, float] | None:
    """The interval of the mean by resampling blocks, studentised (Hall 1988, "Theoretical comparison of bootstrap
    confidence intervals"). It takes the skewness of the values from themselves, where Student's supposes none; None
    for fewer than five."""
    n = len(values)
    if n < 5:
        return None
    mean, error = float(values.mean()), float(values.std(ddof=1)) / math.sqrt(n)
    drawn = values[np.random.default_rng([seed, 0xB007]).integers(n, size=(_RESAMPLES, n))]
    errors = drawn.std(axis=1, ddof=1) / math.sqrt(n)
    useful = errors > 1e-12 * max(abs(mean), error, 1e-300)  # of a resample of one block again and again there is none
    if error <= 0 or useful.sum() < _RESAMPLES / 2:
        return mean, mean
    low, high = np.quantile((drawn.mean(axis=1)[useful] - mean) / errors[useful], [ALPHA / 2, 1 - ALPHA / 2])
    return mean - float(high) * error, mean - float(low) * error


def signed_rank(values: Floats) -> float:
    """The two-sided p of Wilcoxon's signed-rank test that values are symmetric about 0. Exact up to 60 values, ties
    included; zeros are left out."""
    values = values[values != 0]
    n = len(values)
    if n == 0:
        return 1.0
    ranks = average_ranks(np.abs(values))
    positive = float(ranks[values > 0].sum())
    total = float(ranks.sum())
    smaller = min(positive, total - positive)
    if n > _EXACT_SIGNED_RANK:
        deviation = math.sqrt(float((ranks**2).sum()) / 4)
        return min(1.0, 2 * _normal_tail((total / 2 - smaller - 0.5) / deviation))
    # Ranks may be halves where values tie; twice of them are whole. The sum of a random half of them, one by one.
    chances = np.zeros(round(2 * total) + 1)
    chances[0] = 1.0
    for rank in np.round(2 * ranks).astype(int):
        moved = np.zeros_like(chances)
        moved[rank:] = chances[: len(chances) - rank]
        chances = (chances + moved) / 2
    return min(1.0, 2 * float(chances[: round(2 * smaller) + 1].sum()))


def rank_sum(first: Floats, second: Floats) -> float:
    """The two-sided p of Mann and Whitney's test that two independent samples are of one distribution (normal
    approximation with ties)."""
    n, m = len(first), len(second)
    if not n or not m:
        return 1.0
    ranks = average_ranks(np.concatenate([first, second]))
    _, counts = np.unique(ranks, return_counts=True)
    size = n + m
    ties = float((counts.astype(np.float64) ** 3 - counts).sum())
    variance = n * m / 12 * ((size + 1) - ties / (size * (size - 1))) if size > 1 else 0.0
    if variance <= 0:
        return 1.0
    surplus = abs(float(ranks[:n].sum()) - n * (size + 1) / 2) - 0.5
    return min(1.0, 2 * _normal_tail(max(0.0, surplus) / math.sqrt(variance)))


def sign_test(first: int, second: int) -> float:
    """The two-sided p that of `first + second` events each falls on either side alike (McNemar's exact test where they
    are the discordant pairs)."""
    n, smaller = first + second, min(first, second)
    if n == 0:
        return 1.0
    return min(1.0, float(2 * sum(math.comb(n, k) for k in range(smaller + 1)) / 2**n))


def more_often(first: int, of_first: int, second: int, of_second: int) -> float:
    """The one-sided p of Fisher's exact test: how likely a share as large as `first` of `of_first` is, if it were
    the same as `second` of `of_second`."""
    total, hits = of_first + of_second, first + second
    if not of_first or not of_second or not hits:
        return 1.0
    ways = math.comb(total, of_first)
    most = min(hits, of_first)
    return sum(math.comb(hits, k) * math.comb(total - hits, of_first - k) for k in range(first, most + 1)) / ways


def required_blocks(deviation: float, effect: float, pilot: int) -> int:
    """How many blocks find a ratio of 1 + `effect` with `POWER`, if `deviation` is what `pilot` blocks say of their
    log ratios' standard deviation.

    Stein's two-stage rule (1945, "A two-sample test for a linear hypothesis whose power is independent of the
    variance"): the quantiles are those of the pilot's degrees of freedom, so that the promise holds although the
    deviation was estimated from few blocks. At least `pilot`.
    """
    if deviation <= 0:
        return pilot
    return max(pilot, math.ceil((_sum_of_quantiles(pilot) * deviation / math.log1p(effect)) ** 2))


def detectable_effect(deviation: float, blocks: int) -> float | None:
    """The smallest ratio less 1 that so many blocks find with `POWER`; None for fewer than two."""
    if blocks < 2:
        return None
    return math.expm1(min(50.0, _sum_of_quantiles(blocks) * deviation / math.sqrt(blocks)))


def average_ranks(values: Floats) -> Floats:
    """Ranks from 1; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts).astype(np.float64)
    ranks: Floats = (ends - (counts - 1) / 2)[inverse]
    return ranks


def geometric_mean(values: Sequence[float]) -> float | None:
    positive = [value for value in values if value > 0]
    return math.exp(sum(map(math.log, positive)) / len(positive)) if positive else None


def _sum_of_quantiles(blocks: int) -> float:
    return student_quantile(1 - ALPHA / 2, blocks - 1) + student_quantile(POWER, blocks - 1)


def _normal_tail(z: float) -> float:
    return math.erfc(z / math.sqrt(2)) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, by its continued fraction (Abramowitz & Stegun 26.5.8), evaluated
    forwards (Lentz 1976)."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    tiny = 1e-300
    numerator, denominator = 1.0, 1 / ((1 - (a + b) * x / (a + 1)) or tiny)
    value = denominator
    for m in range(1, 1000):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            denominator = 1 / ((1 + term * denominator) or tiny)
            numerator = (1 + term / numerator) or tiny
            step = numerator * denominator
            value *= step
        if abs(step - 1) < 1e-15:
            break
    return math.exp(log_front) * value / a
