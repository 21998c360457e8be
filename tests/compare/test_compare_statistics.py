"""The statistics of a comparison, against published tables and against chance."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sol.compare.statistics import (
    average_ranks,
    bootstrap_interval,
    detectable_effect,
    mean_interval,
    more_often,
    rank_sum,
    required_blocks,
    sign_test,
    signed_rank,
    student_quantile,
    student_tail,
)


@pytest.mark.parametrize(
    ("p", "freedom", "table"),
    [
        (0.975, 1, 12.706),
        (0.975, 9, 2.262),
        (0.975, 30, 2.042),
        (0.9, 5, 1.476),
        (0.995, 4, 4.604),
        (0.975, 1e6, 1.960),
    ],
)
def test_student_quantiles_are_those_of_the_tables(p: float, freedom: float, table: float) -> None:
    found = student_quantile(p, freedom)
    assert found == pytest.approx(table, abs=6e-4)
    assert student_tail(found, freedom) == pytest.approx(1 - p, rel=1e-6)
    assert student_tail(-found, freedom) == pytest.approx(p, rel=1e-6)


def test_the_signed_rank_test_counts_all_sign_patterns() -> None:
    # All of one sign: two of 2^n patterns are as extreme.
    assert signed_rank(np.array([1.0, 2.0, 3.0, 4.0, 5.0])) == pytest.approx(2 / 32)
    assert signed_rank(np.array([-1.0, -2.0, -3.0, -4.0, -5.0, -6.0])) == pytest.approx(2 / 64)
    # Wilcoxon's table: of 10 values, a sum of 8 is the largest with p <= 0.05.
    signs = np.array([-1, -1, 1, 1, -1, 1, 1, 1, 1, 1])  # ranks 1 + 2 + 5
    assert signed_rank(signs * np.arange(1.0, 11.0)) == pytest.approx(0.048828125)
    assert signed_rank(np.array([0.0, 0.0])) == 1.0


def test_the_signed_rank_test_with_ties_enumerates_what_it_says() -> None:
    values = np.array([1.0, 1.0, -1.0, 2.0, 2.0, 3.0, -0.5])
    ranks = average_ranks(np.abs(values))
    positive = ranks[values > 0].sum()
    smaller = min(positive, ranks.sum() - positive)
    patterns = [[(n >> bit) & 1 for bit in range(7)] for n in range(128)]
    as_small = sum(float(np.dot(pattern, ranks)) <= smaller for pattern in patterns)
    assert signed_rank(values) == pytest.approx(2 * as_small / 128)


def test_the_approximation_for_many_values_agrees_with_the_exact_test(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    samples = [rng.normal(0.3, 1.0, size=60) for _ in range(20)]
    exact = [signed_rank(values) for values in samples]
    monkeypatch.setattr("sol.compare.statistics._EXACT_SIGNED_RANK", 10)
    assert [signed_rank(values) for values in samples] == pytest.approx(exact, abs=0.005)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(3)
    student = resampled = 0
    for seed in range(300):
        values = rng.normal(0.1, 1.0, size=12)
        low, high = mean_interval(values) or (0.0, 0.0)
        student += low <= 0.1 <= high
        low, high = bootstrap_interval(values, seed) or (0.0, 0.0)
        resampled += low <= 0.1 <= high
    assert 0.92 * 300 <= student <= 0.98 * 300
    assert 0.90 * 300 <= resampled <= 0.98 * 300


def test_of_equal_values_there_is_no_interval_but_a_point() -> None:
    values = np.full(8, 0.05)
    assert mean_interval(values) == pytest.approx((0.05, 0.05))
    assert bootstrap_interval(values) == pytest.approx((0.05, 0.05))
    assert mean_interval(values[:1]) is None
    assert bootstrap_interval(values[:4]) is None


def test_sample_size_and_detectable_effect_are_each_others_inverse() -> None:
    # Stein with a pilot of 10: (t(.975, 9) + t(.85, 9))² σ² / δ²
    expected = ((2.262157 + 1.099716) * 0.2 / math.log(1.05)) ** 2
    assert required_blocks(0.2, 0.05, 10) == math.ceil(expected)
    assert required_blocks(0.001, 0.05, 10) == 10
    assert required_blocks(0.0, 0.05, 10) == 10
    number = required_blocks(0.2, 0.05, 60)
    assert number > 60
    found = detectable_effect(0.2, number)
    assert found == pytest.approx(0.05, rel=0.05)
    assert detectable_effect(0.2, 1) is None


def test_the_announced_sample_size_finds_the_effect() -> None:
    """Two stages, as `sol compare --effect` runs them: the pilot chooses how many blocks there are."""
    rng = np.random.default_rng(5)
    found = dict.fromkeys((0.0, math.log(1.05)), 0)
    for shift in found:
        for _ in range(400):
            pilot = rng.normal(shift, 0.07, size=10)
            total = required_blocks(float(pilot.std(ddof=1)), 0.05, 10)
            values = np.append(pilot, rng.normal(shift, 0.07, size=total - 10))
            low, high = mean_interval(values) or (0.0, 0.0)
            found[shift] += not low <= 0 <= high and signed_rank(values) <= 0.05
    false, true = found.values()
    assert false <= 0.075 * 400
    assert true >= 0.8 * 400


def test_exact_tests_of_counts() -> None:
    assert sign_test(0, 7) == pytest.approx(2 / 128)
    assert sign_test(3, 3) == 1.0
    assert sign_test(0, 0) == 1.0
    # Fisher's lady tasting tea: 3 of 4 against 1 of 4.
    assert more_often(3, 4, 1, 4) == pytest.approx(17 / 70)
    assert more_often(4, 4, 0, 4) == pytest.approx(1 / 70)
    assert more_often(0, 10, 0, 10) == 1.0


def test_the_rank_sum_test_tells_shifted_samples_apart() -> None:
    rng = np.random.default_rng(7)
    same = sum(rank_sum(rng.exponential(size=30), rng.exponential(size=30)) <= 0.05 for _ in range(300))
    assert same <= 0.08 * 300
    assert rank_sum(rng.normal(size=40), rng.normal(1.5, 1.0, size=40)) < 1e-4
    assert rank_sum(np.ones(5), np.ones(5)) == 1.0
    assert rank_sum(np.zeros(0), np.ones(5)) == 1.0
