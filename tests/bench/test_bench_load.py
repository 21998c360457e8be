"""Schedules: what is due when, before anything is sent."""

from __future__ import annotations

import numpy as np
import pytest

from sol.bench.load import ClosedLoop, at_rate, replay
from sol.errors import ConfigError


def test_a_constant_rate_is_evenly_spaced() -> None:
    arrivals = at_rate(20, arrivals="constant", seconds=3).arrivals
    assert len(arrivals) == 60
    np.testing.assert_allclose(np.diff(arrivals), 0.05)
    assert arrivals[0] == 0


def test_poisson_gaps_are_exponential_and_their_number_is_random() -> None:
    counts = [len(at_rate(50, seconds=10, seed=seed).arrivals) for seed in range(200)]
    # A Poisson number has its mean as variance; gaps that are rescaled to fit would have none.
    assert np.mean(counts) == pytest.approx(500, rel=0.01)
    assert np.var(counts) == pytest.approx(500, rel=0.35)
    gaps = np.diff(at_rate(50, num_conversations=20_000, seed=1).arrivals)
    assert gaps.mean() == pytest.approx(0.02, rel=0.03)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03)


def test_the_seed_decides() -> None:
    first, again, other = (at_rate(5, seconds=20, seed=seed).arrivals for seed in (1, 1, 2))
    assert first.tolist() == again.tolist() != other.tolist()


def test_bursts_arrive_at_once_at_the_mean_rate() -> None:
    arrivals = at_rate(10, arrivals="burst", burst_size=5, seconds=2).arrivals
    assert arrivals.tolist() == [0.0] * 5 + [0.5] * 5 + [1.0] * 5 + [1.5] * 5


@pytest.mark.parametrize(("begin", "end"), [(2.0, 10.0), (10.0, 2.0)])
def test_a_ramp_follows_the_integral_of_its_rate(begin: float, end: float) -> None:
    arrivals = at_rate(begin, final_rate=end, arrivals="constant", seconds=30).arrivals
    reached = begin * arrivals + (end - begin) / 60 * arrivals**2
    np.testing.assert_allclose(reached, np.arange(len(arrivals)), atol=1e-6)
    assert len(arrivals) == 180


def test_the_lesser_of_number_and_duration_ends_a_load() -> None:
    assert len(at_rate(10, arrivals="constant", seconds=10, num_conversations=7).arrivals) == 7
    assert len(at_rate(10, arrivals="constant", seconds=0.5, num_conversations=70).arrivals) == 5


def test_a_trace_keeps_its_timestamps() -> None:
    times = [100.0, 100.5, 100.5, 107.25]
    assert replay(times).arrivals.tolist() == [0.0, 0.5, 0.5, 7.25]
    assert replay(times, speed=2).arrivals.tolist() == [0.0, 0.25, 0.25, 3.625]
    assert replay(times, seconds=7).arrivals.tolist() == [0.0, 0.5, 0.5]
    assert replay(times, num_conversations=2).arrivals.tolist() == [0.0, 0.5]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: at_rate(0, seconds=1), "rate must be a number of requests a second above 0, not 0"),
        (lambda: at_rate(1), "a load needs an end"),
        (lambda: at_rate(1, seconds=-1), "duration must be a number of seconds above 0, not -1"),
        (lambda: at_rate(1, seconds=1, num_conversations=0), "num_requests must be at least 1, not 0"),
        (lambda: at_rate(1, final_rate=2, num_conversations=5), "final_rate needs a duration"),
        (lambda: at_rate(1, arrivals="burst", burst_size=0, seconds=1), "burst_size must be at least 1, not 0"),
        (lambda: at_rate(9e5, seconds=1e6), "give a shorter duration or a lower rate"),
        (lambda: at_rate(0.001, seconds=0.001, seed=3), "the load has no arrivals"),
        (lambda: replay([]), "the load has no arrivals"),
        (lambda: replay([1.0], speed=0), "trace_speed must be above 0, not 0"),
        (lambda: ClosedLoop(concurrency=0, seconds=1), "concurrency must be at least 1, not 0"),
        (lambda: ClosedLoop(concurrency=1), "a load needs an end"),
    ],
)
def test_what_cannot_be_is_refused(make: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()  # type: ignore[operator]
