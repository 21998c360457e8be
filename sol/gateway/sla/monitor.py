"""What was kept of what is promised, over a fast and a slow window.

A promise about a percentile ("p95 of 0.5 s") is one about a share of requests: 95% take 0.5 s at most, and 5% are the
budget for those that do not. The burn rate is the share that missed, divided by this budget: at 1 the budget is used up
just as fast as it may be, at 10 ten times as fast (Google, *The Site Reliability Workbook*, ch. 5). A request that is
refused for want of capacity, or whose client left after the bound, missed it: shedding makes no figure better.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from sol.gateway.call import Call, Outcome
from sol.gateway.queue.config import CLASSES
from sol.gateway.sla.config import ServiceLevel, SlaConfig
from sol.gateway.sla.window import SlidingCounts, SlidingHistogram

_SPEED_SHARE: Final = 0.95
_ENOUGH: Final = 10
"""Requests in the fast window, before its burn rate makes anybody act."""
QUANTILES: Final = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Targets:
    """What one answer is compared with, in seconds; None: nothing is promised."""

    ttft: float | None = None
    itl: float | None = None
    deadline: float | None = None


NO_TARGETS: Final = Targets()


@dataclass(frozen=True, slots=True)
class Objective:
    name: str
    """ttft_p95, itl_p50, tokens_per_second, errors …"""
    bound: float
    """Seconds, or tokens a second, or for errors the share that is allowed."""
    budget: float
    """Share of requests that may miss it."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What became of an objective in a window."""

    num_requests: int
    attainment: float
    """Share of requests that kept it; 1 of none."""
    burn_rate: float


@dataclass(frozen=True, slots=True)
class ObjectiveReport:
    objective: Objective
    fast: Kept
    slow: Kept


@dataclass(frozen=True, slots=True)
class LevelReport:
    model: str
    class_name: str
    objectives: tuple[ObjectiveReport, ...]
    ttft: tuple[float, ...] | None
    itl: tuple[float, ...] | None
    """`QUANTILES` of the slow window, in seconds; None where there was nothing."""
    tokens_per_second: float
    """Of the class as a whole, over the fast window."""


class _Sample(msgspec.Struct, frozen=True):
    """One request: what was seen of it. `ttft` and `itl` are None where it has none, inf where it was not served."""

    failed: bool
    ttft: float | None
    itl: float | None
    speed: float | None
    tokens: int


class _Tracker:
    """Of one model and class."""

    def __init__(self, level: ServiceLevel | None, config: SlaConfig) -> None:
        self.objectives = _objectives(level)
        size = 1 + 2 * len(self.objectives)
        self._windows = (SlidingCounts(config.fast_window, size), SlidingCounts(config.slow_window, size))
        self._ttft = SlidingHistogram(config.slow_window)
        self._itl = SlidingHistogram(config.slow_window)
        self._fast_seconds = config.fast_window

    def add(self, sample: _Sample, now: float) -> None:
        if sample.ttft is not None and sample.ttft < float("inf"):
            self._ttft.add(sample.ttft, now)
        if sample.itl is not None and sample.itl < float("inf"):
            self._itl.add(sample.itl, now)
        for window in self._windows:
            if sample.tokens:
                window.add(0, now, sample.tokens)
            for index, objective in enumerate(self.objectives):
                missed = _missed(objective, sample)
                if missed is not None:
                    window.add(1 + 2 * index, now)
                    if missed:
                        window.add(2 + 2 * index, now)

    def kept(self, now: float, window: int) -> list[Kept]:
        totals = self._windows[window].totals(now)
        found = []
        for index, objective in enumerate(self.objectives):
            total, missed = totals[1 + 2 * index], totals[2 + 2 * index]
            share = missed / total if total else 0.0
            found.append(Kept(int(total), 1.0 - share, share / objective.budget))
        return found

    def report(self, model: str, class_name: str, now: float) -> LevelReport:
        fast, slow = self.kept(now, 0), self.kept(now, 1)
        seen = min(self._fast_seconds, self._windows[0].seconds_seen(now))
        return LevelReport(
            model=model,
            class_name=class_name,
            objectives=tuple(map(ObjectiveReport, self.objectives, fast, slow)),
            ttft=self._ttft.quantiles(QUANTILES, now),
            itl=self._itl.quantiles(QUANTILES, now),
            tokens_per_second=self._windows[0].totals(now)[0] / seen if seen > 0 else 0.0,
        )


class SlaMonitor:
    """`clock` gives seconds that only grow. Models are known by their own names, not by aliases."""

    def __init__(self, config: SlaConfig, models: Iterable[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        places = [(model, class_name) for model in models for class_name in CLASSES]
        levels = {place: config.level(*place) for place in places}
        self._trackers = {place: _Tracker(level, config) for place, level in levels.items()}
        self._targets = {place: _targets(level) for place, level in levels.items()}

    def targets(self, model: str, class_name: str) -> Targets:
        return self._targets.get((model, class_name), NO_TARGETS)

    def observe(self, model: str, call: Call, outcome: Outcome) -> None:
        """A call has ended. What its client did wrong itself, or asked beyond its limits, is not counted."""
        tracker = self._trackers.get((model, call.class_name))
        if tracker is None:
            return
        sample = _sample_of(call, outcome)
        if sample is not None:
            tracker.add(sample, self._clock())

    def burn_rate(self, model: str) -> float:
        """The worst of a model's objectives in the fast window; 0 where nothing is promised, or too little was seen."""
        now = self._clock()
        return max(
            (
                kept.burn_rate
                for class_name in CLASSES
                for kept in self._trackers[model, class_name].kept(now, 0)
                if kept.num_requests >= _ENOUGH
            ),
            default=0.0,
        )

    def kept(self) -> list[tuple[str, str, Objective, Kept, Kept]]:
        """Of every model, class and objective, in the fast window and in the slow one: `report` without distributions,
        which cost too much to be looked at every few seconds."""
        now = self._clock()
        return [
            (model, class_name, *each)
            for (model, class_name), tracker in self._trackers.items()
            for each in zip(tracker.objectives, tracker.kept(now, 0), tracker.kept(now, 1), strict=True)
        ]

    def report(self) -> list[LevelReport]:
        """Of every model and class."""
        now = self._clock()
        return [tracker.report(model, name, now) for (model, name), tracker in self._trackers.items()]


def _objectives(level: ServiceLevel | None) -> tuple[Objective, ...]:
    if level is None:
        return ()
    found = []
    for name, percentiles in (("ttft", level.ttft), ("itl", level.itl)):
        for share, seconds in percentiles.bounds() if percentiles is not None else ():
            found.append(Objective(f"{name}_p{round(share * 100)}", seconds, 1 - share))
    if level.tokens_per_second is not None:
        found.append(Objective("tokens_per_second", level.tokens_per_second, 1 - _SPEED_SHARE))
    if level.errors is not None:
        found.append(Objective("errors", level.errors, level.errors))
    return tuple(found)


def _targets(level: ServiceLevel | None) -> Targets:
    if level is None:
        return NO_TARGETS
    return Targets(
        ttft=level.ttft.most_wanted() if level.ttft is not None else None,
        itl=level.itl.most_wanted() if level.itl is not None else None,
        deadline=level.deadline,
    )


def _missed(objective: Objective, sample: _Sample) -> bool | None:
    """None: it says nothing about this request."""
    if objective.name == "errors":
        return sample.failed
    if objective.name == "tokens_per_second":
        return None if sample.speed is None else sample.speed < objective.bound
    value = sample.ttft if objective.name.startswith("ttft") else sample.itl
    return None if value is None else value > objective.bound


def _sample_of(call: Call, outcome: Outcome) -> _Sample | None:
    failed = outcome.status >= 500 or (outcome.status < 400 and outcome.error is not None)
    if 400 <= outcome.status < 500 and not outcome.client_left:
        return None
    usage, first = outcome.usage, outcome.first_byte_at
    tokens = 0 if usage is None else usage.completion_tokens
    seconds = outcome.ended_at - call.arrived
    ttft: float | None = None
    if call.stream:
        # Of a client that left before anything came, what is known is that it took longer than this.
        ttft = first - call.arrived if first is not None else seconds if outcome.client_left else float("inf")
    itl: float | None = None
    if call.stream and first is not None and tokens > 1:
        itl = (outcome.ended_at - first) / (tokens - 1)
    speed = 0.0 if failed else tokens / seconds if tokens and seconds > 0 and not outcome.client_left else None
    return _Sample(failed=failed, ttft=ttft, itl=itl, speed=speed, tokens=tokens)
