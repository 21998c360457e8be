"""Waiting is left off where it was seen to bring less than not waiting, and tried again later."""

from __future__ import annotations

from sol.engine.pace import Pace


def steps(pace: Pace, count: int, *, gain: float) -> list[bool]:
    """Steps of 8 requests: 10 ms when planned ahead; when waited for, `gain` times the tokens a second of that."""
    waited = []
    for _ in range(count):
        waits = pace.may_wait(8)
        pace.observe(8, 8, 0.01 / gain if waits else 0.01, ahead=not waits)
        waited.append(waits)
    return waited


def test_waiting_goes_on_where_it_brings_more() -> None:
    pace = Pace()
    pace.observe(8, 8, 0.01, ahead=True)
    assert all(steps(pace, 100, gain=1.3))


def test_waiting_that_brings_less_becomes_rare() -> None:
    pace = Pace()
    pace.observe(8, 8, 0.01, ahead=True)
    waited = steps(pace, 3000, gain=0.6)
    assert 4 <= sum(waited[:40]) <= 12
    assert sum(waited[1000:]) <= 0.02 * 2000
    assert any(waited[1000:])  # it is tried again


def test_waiting_comes_back_when_it_brings_more() -> None:
    pace = Pace()
    pace.observe(8, 8, 0.01, ahead=True)
    steps(pace, 500, gain=0.6)
    assert all(steps(pace, 1200, gain=1.5)[1100:])


def test_numbers_of_requests_are_judged_apart() -> None:
    pace = Pace()
    for count in (1, 64):
        pace.observe(count, count, 0.01, ahead=True)
    for _ in range(4):
        pace.observe(64, 64, 0.02, ahead=False)
    assert not pace.may_wait(64)
    assert pace.may_wait(1)
    pace.observe(1, 1, 0.0, ahead=False)  # a clock that stood still says nothing
    assert pace.may_wait(1)
