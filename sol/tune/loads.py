"""The greatest rate at which a server meets the SLO: a bracket, then bisection, on loads of growing length.

Whether a rate is met is taken to be monotone in it, which a queue makes true for all but noise; every probe asks the
same requests with arrivals that differ by a factor alone (common random numbers), so that the noise of two probes, and
of two configurations, is much the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from sol.errors import ConfigError
from sol.tune.trial import Goal, Probe, Running

_LEAST_SHARE: Final = 1 / 16
"""Of the rate of one request at a time. A server that misses the SLO below that is no use at any rate."""
_MOST_RATE: Final = 1e5
_COARSE: Final = 0.1
"""The tolerance of all loads but the longest."""
_SPAN: Final = 4.0
"""Mean latencies that a load has to last at least. Shorter ones are a burst that ends before its queue is felt, at
whatever rate it came; and only one that meets the SLO has to be long: what a short load misses, a longer one does."""
_MOST_REQUESTS: Final = 200_000


@dataclass(frozen=True, slots=True)
class Rung:
    """A length of loads."""

    num_requests: int
    tolerance: float
    """The rate is known to this part of itself."""

    def __post_init__(self) -> None:
        if self.num_requests < 1 or not 0 < self.tolerance < 1:
            raise ConfigError(f"a rung needs requests and a tolerance between 0 and 1, not {self}", param="rungs")


def rungs_of(longest: int, *, least: int, tolerance: float = 0.01, factor: int = 3) -> tuple[Rung, ...]:
    """Loads of `longest` requests, of a third as many, and so on, but of no fewer than `least`; short ones are searched
    less finely. The shortest comes first."""
    if longest < least:
        raise ConfigError(
            f"num_requests must be at least {least} for the percentiles of this SLO, not {longest}",
            param="num_requests",
        )
    rungs = [Rung(longest, tolerance)]
    while rungs[0].num_requests // factor >= least and len(rungs) < 3:
        rungs.insert(0, Rung(rungs[0].num_requests // factor, _COARSE))
    return tuple(rungs)


@dataclass(slots=True)
class RateSearch:
    """Of one server. `probes` are appended to as they come."""

    running: Running
    goal: Goal
    probes: list[Probe]
    on_probe: Callable[[Probe], None]
    latency: float = 0.0
    """Mean seconds of a request alone, once that is known."""

    async def alone(self, num_requests: int) -> Probe:
        """One request at a time, before any load."""
        probe = self._note(await self.running.one_at_a_time(num_requests))
        self.latency = probe.mean_e2e or 0.0
        return probe

    async def greatest(
        self, rung: Rung, *, start: float, factor: float, least: float, beat: float = 0.0
    ) -> Probe | None:
        """The probe at the greatest rate that meets the SLO, within the rung's tolerance; None: it is below `least`.

        The bracket grows from `start` by `factor`, then its square, and so on. Once it is clear that the rate is less
        than `beat`, the rung's tolerance does not matter any more.
        """
        low: Probe | None = None
        high = math.inf
        rate, step = start, factor
        while low is None or high == math.inf:
            probe = await self._at(rate, rung)
            if probe.meets:
                if low is None or probe.rate > low.rate:
                    low = probe
                if high < math.inf:
                    break
                rate *= step
                if rate > _MOST_RATE:
                    return low
            else:
                high = rate
                if low is not None:
                    break
                if rate <= least:
                    return None
                rate = max(rate / step, least)
            step = min(step * step, 4.0)
        assert low is not None
        while high / low.rate > 1 + (rung.tolerance if high > beat else max(rung.tolerance, _COARSE)):
            probe = await self._at(math.sqrt(low.rate * high), rung)
            if probe.meets:
                low = probe
            else:
                high = probe.rate
        return low

    async def _at(self, rate: float, rung: Rung) -> Probe:
        num_requests = max(rung.num_requests, math.ceil(rate * _SPAN * self.latency))
        while True:
            probe = self._note(await self.running.at_rate(rate, min(num_requests, _MOST_REQUESTS)))
            needed = math.ceil(rate * _SPAN * (probe.mean_e2e or 0.0))
            if not probe.meets or num_requests >= min(needed, _MOST_REQUESTS):
                return probe
            num_requests = math.ceil(1.2 * needed)

    def _note(self, probe: Probe) -> Probe:
        self.probes.append(probe)
        self.on_probe(probe)
        return probe


def rate_alone(alone: Probe) -> float:
    """Requests a second of one at a time."""
    return 1 / alone.mean_e2e if alone.mean_e2e else 1.0


def least_rate(alone: Probe) -> float:
    return rate_alone(alone) * _LEAST_SHARE
