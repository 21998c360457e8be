"""Service levels: windows, attainment, burn rates, and what scaling is told."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sol.errors import ConfigError
from sol.gateway.call import Call, Outcome, Usage
from sol.gateway.config import make_config
from sol.gateway.errors import NoCapacityError, RateLimitError
from sol.gateway.sla.autoscaling import desired_engines
from sol.gateway.sla.config import SlaConfig
from sol.gateway.sla.monitor import SlaMonitor
from sol.gateway.sla.window import SlidingCounts, SlidingHistogram


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def monitor(*levels: dict[str, Any], **options: Any) -> tuple[SlaMonitor, Clock]:
    clock = Clock()
    config = SlaConfig.model_validate({"levels": levels, "fast_window": 60, "slow_window": 600, **options})
    return SlaMonitor(config, ["m", "other"], clock), clock


def ended(
    monitor_: SlaMonitor, clock: Clock, ttft: float | None, *, seconds: float = 2.0, tokens: int = 11,
    class_name: str = "realtime", stream: bool = True, **outcome: Any,
) -> None:  # fmt: skip
    arrived = clock.now - seconds
    call = Call(
        id="x", path="/v1/completions", method="POST", headers={}, body=b"", json={}, model="m", stream=stream,
        arrived=arrived, class_name=class_name,
    )  # fmt: skip
    usage = Usage(prompt_tokens=1, completion_tokens=tokens) if ttft is not None else None
    first = None if ttft is None else arrived + ttft
    outcome = {"status": 200, "usage": usage, "first_byte_at": first, "ended_at": clock.now, **outcome}
    monitor_.observe("m", call, Outcome(**outcome))


def report_of(monitor_: SlaMonitor, class_name: str = "realtime") -> Any:
    return next(each for each in monitor_.report() if (each.model, each.class_name) == ("m", class_name))


def test_counts_leave_the_window_with_their_time() -> None:
    counts = SlidingCounts(60.0, 2)
    counts.add(0, 100.0)
    counts.add(1, 130.0, 5)
    assert counts.totals(150.0) == [1, 5]
    assert counts.totals(165.0) == [0, 5]
    counts.add(0, 100.0)  # late, and too old by now? its slice is still there to be asked for
    assert counts.totals(195.0) == [0, 0]
    counts.add(0, 1000.0)
    assert counts.totals(1000.0) == [1, 0]
    assert counts.seconds_seen(1004.0) <= 9.0


def test_quantiles_are_exact_to_half_a_bucket() -> None:
    histogram, random_ = SlidingHistogram(600.0), random.Random(3)
    values = sorted(random_.lognormvariate(-2, 1) for _ in range(5000))
    for value in values:
        histogram.add(value, 10.0)
    found = histogram.quantiles((0.5, 0.95, 0.99), 20.0)
    assert found is not None
    for share, quantile in zip((0.5, 0.95, 0.99), found, strict=True):
        assert quantile == pytest.approx(values[int(share * 5000)], rel=0.03)
    assert histogram.quantiles((0.5,), 700.0) is None
    histogram.add(0.0, 700.0)
    histogram.add(1e9, 700.0)
    assert histogram.quantiles((0.5, 1.0), 700.0) is not None


def test_attainment_and_burn_rate_follow_from_the_share_that_missed() -> None:
    kept, clock = monitor({"model": "m", "class": "realtime", "ttft": {"p50": 0.2, "p95": 0.5}})
    for number in range(100):
        ended(kept, clock, 0.1 if number < 90 else 1.0)
    p50, p95 = report_of(kept).objectives
    assert (p50.objective.name, p95.objective.name) == ("ttft_p50", "ttft_p95")
    assert p95.fast.attainment == pytest.approx(0.9)
    assert p95.fast.burn_rate == pytest.approx(2.0)
    assert p50.slow.burn_rate == pytest.approx(0.2)
    assert kept.burn_rate("m") == pytest.approx(2.0)
    assert kept.burn_rate("other") == 0.0
    clock.now += 120  # out of the fast window, not of the slow one
    assert kept.burn_rate("m") == 0.0
    assert report_of(kept).objectives[1].slow.num_requests == 100


def test_few_requests_are_no_reason_to_act() -> None:
    kept, clock = monitor({"ttft": {"p95": 0.1}})
    for _ in range(9):
        ended(kept, clock, 1.0)
    assert kept.burn_rate("m") == 0.0
    ended(kept, clock, 1.0)
    assert kept.burn_rate("m") == pytest.approx(20.0)


def test_refusing_and_being_left_make_no_figure_better() -> None:
    kept, clock = monitor({"ttft": {"p95": 0.5}, "errors": 0.1})
    ended(kept, clock, 0.1)
    refusal = NoCapacityError("full")
    ended(kept, clock, None, status=503, error=refusal)
    ended(kept, clock, None, status=499, client_left=True, seconds=2.0)  # gave up after two seconds
    ended(kept, clock, None, status=499, client_left=True, seconds=0.1)  # might have been served in time
    ended(kept, clock, None, status=429, error=RateLimitError("slow down"))  # its own fault
    ended(kept, clock, None, status=400)
    ttft, errors = report_of(kept).objectives
    assert (ttft.fast.num_requests, ttft.fast.attainment) == (4, 0.5)
    assert (errors.fast.num_requests, errors.fast.attainment) == (4, 0.75)


def test_a_stream_that_broke_failed_whatever_its_status() -> None:
    kept, clock = monitor({"errors": 0.5})
    ended(kept, clock, 0.1, error=RuntimeError("cut"))
    assert report_of(kept).objectives[0].fast.attainment == 0.0


def test_times_between_tokens_and_speeds() -> None:
    kept, clock = monitor({"itl": {"p95": 0.1}, "tokens_per_second": 8})
    ended(kept, clock, 0.5, seconds=1.5, tokens=11)  # ten gaps in a second; 7.3 tokens a second
    ended(kept, clock, 0.5, seconds=2.0, tokens=11)  # 0.15 s a token
    ended(kept, clock, 0.9, seconds=1.0, tokens=11, stream=False)  # a whole answer has no gaps
    itl, speed = report_of(kept).objectives
    assert (itl.fast.num_requests, itl.fast.attainment) == (2, 0.5)
    assert (speed.fast.num_requests, speed.fast.attainment) == (3, pytest.approx(1 / 3))
    clock.now += 4
    assert report_of(kept).tokens_per_second == pytest.approx(33 / 4)


def test_the_level_that_names_most_counts() -> None:
    config = SlaConfig.model_validate({"levels": [
        {"deadline": 4}, {"class": "batch", "deadline": 3}, {"model": "m", "deadline": 2},
        {"model": "m", "class": "batch", "deadline": 1},
    ]})  # fmt: skip
    found = {(model, name): config.level(model, name) for model in ("m", "o") for name in ("batch", "realtime")}
    assert [level.deadline for level in found.values() if level is not None] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("level", "says"),
    [
        ({"class": "realtime"}, "needs ttft"),
        ({"ttft": {"p50": 2, "p95": 1}}, "must not fall"),
        ({"ttft": {}}, "needs p50"),
        ({"model": "nobody", "errors": 0.1}, "there is no model 'nobody'"),
        ({"class": "gold", "errors": 0.1}, "class"),
    ],
)
def test_levels_that_say_nothing_are_refused(level: dict[str, Any], says: str) -> None:
    data = {"models": [{"name": "m", "engines": ["a"]}], "engines": [{"name": "a", "url": "http://x:1"}]}
    with pytest.raises(ConfigError, match=says):
        make_config({**data, "sla": {"levels": [level]}})


@pytest.mark.parametrize(
    ("engines", "demand", "credits_", "burn", "kv", "wanted"),
    [
        (4, 100, 200, 0.0, [], 3), (4, 400, 200, 0.0, [], 10), (4, 10, 200, 3.0, [], 5), (4, 0, 200, 0.0, [], 1),
        (4, 10, 200, 0.0, [0.95], 4), (4, 10, None, 0.0, [], None), (4, 10, None, 2.0, [], 5),
        (0, 10, 0, 5.0, [], None),
    ],
)  # fmt: skip
def test_engines_that_it_would_take(
    engines: int, demand: int, credits_: int | None, burn: float, kv: list[float], wanted: int | None
) -> None:
    assert desired_engines(engines, demand, credits_, burn, kv) == wanted
