"""Intervals hold the truth as often as they promise, also where samples depend on each other."""

from __future__ import annotations

import numpy as np
import pytest

from sol.bench.statistics import Samples, effective_size, mean, percentile, proportion, rate


def autoregressive(rng: np.random.Generator, n: int, rho: float) -> np.ndarray:
    noise = rng.normal(size=n) * np.sqrt(1 - rho**2)
    values = np.empty(n)
    values[0] = rng.normal()
    for i in range(1, n):
        values[i] = rho * values[i - 1] + noise[i]
    return values


def test_the_interval_of_a_median_has_the_tables_order_statistics() -> None:
    # Conover, Practical Nonparametric Statistics: of 100 values the 40th and the 61st hold the median with 95%.
    values = np.random.default_rng(0).permutation(np.arange(1.0, 101.0))
    found = percentile(Samples.single(values), 0.5)
    assert (found.value, found.low, found.high) == (50.5, 40.0, 61.0)


@pytest.mark.parametrize(("p", "n"), [(0.5, 60), (0.9, 200), (0.99, 1000)])
def test_intervals_of_percentiles_cover_the_truth(p: float, n: int) -> None:
    rng = np.random.default_rng(7)
    truth = -np.log(1 - p)
    covered = 0
    for _ in range(300):
        found = percentile(Samples.single(rng.exponential(size=n)), p)
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= truth <= found.high
    assert covered >= 0.92 * 300


def test_too_few_samples_have_no_percentile_and_no_interval() -> None:
    values = np.random.default_rng(1).exponential(size=1000)
    assert percentile(Samples.single(values[:99]), 0.99).value is None
    few = percentile(Samples.single(values[:300]), 0.99)
    assert few.value is not None
    assert few.low is few.high is None
    assert percentile(Samples.single(values), 0.99).high is not None
    assert percentile(Samples.single([]), 0.5).value is None


def test_dependent_samples_count_for_less() -> None:
    rng = np.random.default_rng(3)
    independent, dependent = rng.normal(size=4000), autoregressive(rng, 4000, 0.9)
    assert effective_size(Samples.single(independent), independent) > 3000
    # 1 + 2 Σ 0.9^k is 19.
    assert 100 < effective_size(Samples.single(dependent), dependent) < 420


def test_intervals_of_dependent_samples_cover_the_truth() -> None:
    rng = np.random.default_rng(5)
    covered = naive = 0
    for _ in range(200):
        values = autoregressive(rng, 600, 0.8)
        found = mean(Samples.single(values))
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 0 <= found.high
        naive += abs(values.mean()) < 1.96 * values.std() / np.sqrt(600)
    assert covered >= 0.85 * 200
    assert naive < 0.65 * 200  # what a formula for independent samples would have promised in vain


def test_samples_of_one_cluster_count_together() -> None:
    rng = np.random.default_rng(9)
    levels = rng.normal(size=100)
    groups = [level + 0.01 * rng.normal(size=50) for level in levels]
    assert mean(Samples.grouped(groups)).n == 5000
    assert 60 < mean(Samples.grouped(groups)).n_effective < 160
    shuffled = np.concatenate(groups)
    rng.shuffle(shuffled)
    assert mean(Samples.single(shuffled)).n_effective > 3000


def test_empty_clusters_do_no_harm() -> None:
    samples = Samples.grouped([[], [1.0, 2.0], [], [3.0], []])
    assert samples.sums(samples.values).tolist() == [3.0, 3.0]
    assert percentile(Samples.grouped([[], [1.0, 2.0, 3.0], []]), 0.5).value == 2.0


def test_equal_values_have_an_interval_of_no_width() -> None:
    found = percentile(Samples.single(np.full(500, 0.25)), 0.95)
    assert (found.value, found.low, found.high) == (0.25, 0.25, 0.25)


def test_shares_have_wilsons_interval() -> None:
    none = proportion([False] * 50)
    assert none.value == none.low == 0.0
    assert none.high == pytest.approx(0.0714, abs=0.001)
    assert proportion([]).value is None


def test_a_rate_counts_what_lies_within() -> None:
    times = np.arange(0, 20, 0.1) + 0.05
    found = rate(times, np.full(len(times), 3.0), 5.0, 15.0)
    assert found.value == pytest.approx(30.0)
    assert found.low == pytest.approx(30.0, rel=0.01)
    assert rate(times, np.ones(len(times)), 5.0, 5.0).value is None
    assert rate(times[:10], np.ones(10), 0.0, 1.0).low is None
