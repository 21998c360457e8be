"""Estimates with intervals, for samples that depend on each other.

Latencies of neighbouring requests resemble each other (they shared a queue), and so do the gaps of one request. A
formula for independent samples would promise too much. Each request is therefore one *cluster* of samples, and
clusters are taken in the order of time: how much their sums vary, and how long that variation persists, gives the
number of independent samples that would know as much, `n_effective`. All intervals are of 95%.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

CONFIDENCE: Final = 0.95
_Z: Final = 1.959963984540054
_MAX_EXACT: Final = 200_000
"""Samples up to which a binomial distribution is added up; beyond, it is normal to more digits than matter."""


@dataclass(frozen=True, slots=True)
class Estimate:
    value: float | None
    """None where there are too few samples to say."""
    low: float | None = None
    high: float | None = None
    """None where the samples are too few to bound the value on both sides."""
    n: int = 0
    n_effective: float = 0.0


NOTHING: Final = Estimate(None)


@dataclass(frozen=True, slots=True)
class Samples:
    """Values in clusters that follow each other in time: `sizes[i]` values belong to cluster i."""

    values: Floats
    sizes: NDArray[np.int64]

    @classmethod
    def single(cls, values: Sequence[float] | Floats) -> Samples:
        """Each value a cluster of its own."""
        array = np.asarray(values, dtype=np.float64)
        return cls(array, np.ones(len(array), dtype=np.int64))

    @classmethod
    def grouped(cls, groups: Sequence[Sequence[float] | Floats]) -> Samples:
        arrays = [np.asarray(group, dtype=np.float64) for group in groups]
        values = np.concatenate(arrays) if arrays else np.zeros(0)
        return cls(values, np.array([len(array) for array in arrays], dtype=np.int64))

    def sums(self, values: Floats) -> Floats:
        """The sum over each cluster that is not empty."""
        sizes = self.sizes[self.sizes > 0]
        if not len(sizes):
            return np.zeros(0)
        return np.add.reduceat(values, np.concatenate(([0], np.cumsum(sizes)[:-1])))


def percentile(samples: Samples, p: float) -> Estimate:
    """The p-quantile, 0 < p < 1, with an interval of order statistics: free of assumptions on the distribution.

    None where fewer than one sample is expected beyond it (p99 needs 100), and no interval where even the largest
    sample does not bound it with 95% (p99 needs about 370 independent ones).
    """
    n = len(samples.values)
    if n == 0 or n * min(p, 1 - p) < 1 - 1e-9:
        return Estimate(None, n=n)
    ordered = np.sort(samples.values)
    value = _quantile(ordered, p)
    below = (samples.values <= value).astype(np.float64)
    effective = effective_size(samples, below)
    levels = _levels(p, effective)
    if levels is None:
        return Estimate(value, n=n, n_effective=effective)
    return Estimate(value, _quantile(ordered, levels[0]), _quantile(ordered, levels[1]), n, effective)


def mean(samples: Samples) -> Estimate:
    """The mean; its interval needs at least five effective samples."""
    n = len(samples.values)
    if n == 0:
        return NOTHING
    value = float(samples.values.mean())
    effective = effective_size(samples, samples.values)
    if n < 5 or effective < 5:
        return Estimate(value, n=n, n_effective=effective)
    half = _student(effective - 1) * float(samples.values.std(ddof=1)) / math.sqrt(effective)
    return Estimate(value, value - half, value + half, n, effective)


def proportion(successes: Sequence[bool] | NDArray[np.bool_]) -> Estimate:
    """A share, with Wilson's interval over the effective number of samples."""
    n = len(successes)
    if n == 0:
        return NOTHING
    values = np.asarray(successes, dtype=np.float64)
    value, effective = float(values.mean()), effective_size(Samples.single(values), values)
    square = _Z**2 / effective
    center = (value + square / 2) / (1 + square)
    half = _Z / (1 + square) * math.sqrt(value * (1 - value) / effective + square / (4 * effective))
    return Estimate(value, max(0.0, center - half), min(1.0, center + half), n, effective)


def rate(times: Floats, weights: Floats, begin: float, end: float, blocks: int = 20) -> Estimate:
    """Σ weights of `times` within [begin, end], a second. The interval is that of the means of consecutive blocks
    of time; none with fewer than 20 events."""
    span = end - begin
    if span <= 0:
        return NOTHING
    inside = (times >= begin) & (times <= end)
    n = int(inside.sum())
    counts, _ = np.histogram(times[inside], bins=blocks, range=(begin, end), weights=weights[inside])
    rates = counts / (span / blocks)
    value = float(counts.sum() / span)
    if n < 20:
        return Estimate(value, n=n)
    effective = effective_size(Samples.single(rates), rates)
    half = _student(max(1.0, effective - 1)) * float(rates.std(ddof=1)) / math.sqrt(effective)
    return Estimate(value, max(0.0, value - half), value + half, n, effective)


def effective_size(samples: Samples, values: Floats) -> float:
    """How many independent samples would know the mean of `values` as well, 1 to their number.

    The variance of the mean is that of the clusters' sums of residuals, times 1 + 2 Σ ρ over the autocorrelations of
    successive clusters, as far as sums of neighbouring pairs are positive, and without letting them
    grow (Geyer 1992, initial monotone sequence).
    """
    n = len(values)
    spread = float(values.var()) if n else 0.0
    if n < 2 or spread <= 0:
        return float(max(n, 1))
    residuals = samples.sums(values - values.mean())
    variance = float(np.dot(residuals, residuals)) * autocorrelation_time(residuals) / n**2
    return float(min(n, max(1.0, spread / variance))) if variance > 0 else float(n)


def autocorrelation_time(series: Floats) -> float:
    """1 + 2 Σ ρ, at least 1. The series need not have mean 0; clusters' residuals have it all together."""
    n = len(series)
    if n < 8:
        return 1.0
    centered = series - series.mean()
    size = 1 << (2 * n - 1).bit_length()
    spectrum = np.fft.rfft(centered, size)
    covariance = np.fft.irfft(spectrum * np.conj(spectrum), size)[: n // 2]
    if covariance[0] <= 0:
        return 1.0
    rho = covariance / covariance[0]
    # 1 + 2 Σ ρ = -1 + 2 Σ over pairs (ρ(0) + ρ(1), ρ(2) + ρ(3), …), whose true values fall and are positive.
    total, largest = -1.0, math.inf
    for lag in range(0, len(rho) - 1, 2):
        largest = min(largest, float(rho[lag] + rho[lag + 1]))
        if largest <= 0:
            break
        total += 2 * largest
    return max(1.0, total)


def _quantile(ordered: Floats, level: float) -> float:
    """Type 7 of Hyndman & Fan 1996, numpy's and everybody's default."""
    return float(np.quantile(ordered, min(1.0, max(0.0, level)))) if len(ordered) else math.nan


def _levels(p: float, effective: float) -> tuple[float, float] | None:
    """Between which quantiles of n samples the true p-quantile lies with 95%, equal parts on both sides."""
    n = max(1, int(effective + 1e-6))
    if n > _MAX_EXACT:
        half = _Z * math.sqrt(p * (1 - p) / n)
        return p - half, p + half
    tail = (1 - CONFIDENCE) / 2
    k = np.arange(1, n + 1, dtype=np.float64)
    logs = np.concatenate(([0.0], np.cumsum(np.log(n - k + 1) - np.log(k))))
    counts = np.arange(n + 1)
    masses = np.exp(logs + counts * math.log(p) + (n - counts) * math.log1p(-p))
    cumulative = np.cumsum(masses)
    # The order statistics X(l) and X(u) hold the quantile with probability P(l <= B < u), B binomial.
    lower = int(np.searchsorted(cumulative, tail, side="right"))
    upper = int(np.searchsorted(cumulative, 1 - tail, side="left")) + 1
    if lower < 1 or upper > n:
        return None
    return (lower - 1) / (n - 1), (upper - 1) / (n - 1)


def _student(freedom: float) -> float:
    """Student's 97.5% quantile: Cornish and Fisher's expansion, within 1% from 3 degrees of freedom on."""
    z, v = _Z, max(freedom, 1.0)
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )
