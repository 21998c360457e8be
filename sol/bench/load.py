"""Loads: when requests are due. All of them are known before the first is sent.

An open loop has an absolute schedule: a late answer, or a late client, moves no other request. A closed loop keeps a
number of requests in flight, and the next is due when the one before has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from sol.errors import ConfigError

Arrivals = Literal["poisson", "constant", "burst"]

MAX_REQUESTS: Final = 10_000_000


@dataclass(frozen=True, kw_only=True)
class ClosedLoop:
    """`concurrency` conversations at a time, until `num_conversations` were begun or `seconds` have passed."""

    concurrency: int
    num_conversations: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1, not {self.concurrency}", param="concurrency")
        check_limits(self.num_conversations, self.seconds)

    @property
    def name(self) -> str:
        return f"{self.concurrency} at a time"

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "concurrency",
            "concurrency": self.concurrency,
            "num_conversations": self.num_conversations,
            "seconds": self.seconds,
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenLoop:
    """A conversation begins at each of `arrivals`: seconds from the beginning, ascending."""

    arrivals: NDArray[np.float64]
    name: str
    description: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not len(self.arrivals):
            raise ConfigError(
                "the load has no arrivals: give a longer duration, more requests or a higher rate", param="rate"
            )

    def describe(self) -> dict[str, Any]:
        return {**self.description, "num_conversations": len(self.arrivals)}


Load = ClosedLoop | OpenLoop


def at_rate(
    rate: float,
    *,
    arrivals: Arrivals = "poisson",
    final_rate: float | None = None,
    burst_size: int = 1,
    num_conversations: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
) -> OpenLoop:
    """Conversations at `rate` a second on average, or at a rate that grows linearly from `rate` to `final_rate`.

    `constant` spaces them evenly, `poisson` draws the gaps from an exponential distribution (not rescaled to fit: the
    number in a given time is random, as a Poisson process has it), `burst` lets `burst_size` arrive at once.
    A changing rate is the same process on a stretched clock: arrivals are where the integral of the rate reaches those
    of the process with rate 1 (Lewis & Shedler 1979 give this as the inversion method).
    """
    for name, value in (("rate", rate), ("final_rate", final_rate)):
        if value is not None and not 0 < value < 1e6:
            raise ConfigError(f"{name} must be a number of requests a second above 0, not {value}", param=name)
    if burst_size < 1:
        raise ConfigError(f"burst_size must be at least 1, not {burst_size}", param="burst_size")
    check_limits(num_conversations, seconds)
    if final_rate is not None and seconds is None:
        raise ConfigError("final_rate needs a duration in which to get there", param="final_rate")
    end = rate if final_rate is None else final_rate
    horizon = None if seconds is None else (rate + end) / 2 * seconds
    """What the integral of the rate comes to: the expected number."""
    limit = min(
        MAX_REQUESTS + 1 if num_conversations is None else num_conversations,
        MAX_REQUESTS + 1 if horizon is None else _ample(horizon),
    )
    if limit > MAX_REQUESTS:
        raise ConfigError(
            f"the load has more than {MAX_REQUESTS:,} requests: give a shorter duration or a lower rate",
            param="rate",
        )
    if arrivals == "poisson":
        unit = np.cumsum(np.random.default_rng([seed, 0xA771]).exponential(size=limit))
    elif arrivals == "constant":
        unit = np.arange(limit, dtype=np.float64)
    else:
        unit = (np.arange(limit) // burst_size * burst_size).astype(np.float64)
    if horizon is not None:
        unit = unit[unit < horizon]
    if final_rate is None or final_rate == rate:
        times = unit / rate
    else:
        assert seconds is not None
        slope = (end - rate) / seconds
        times = (np.sqrt(rate**2 + 2 * slope * unit) - rate) / slope
    shape = f"{rate:g}/s" if final_rate is None else f"{rate:g} to {final_rate:g}/s"
    return OpenLoop(
        arrivals=times,
        name=f"{shape}, {f'bursts of {burst_size}' if arrivals == 'burst' else arrivals}",
        description={
            "kind": "rate",
            "rate": rate,
            "final_rate": final_rate,
            "arrivals": arrivals,
            "burst_size": burst_size if arrivals == "burst" else None,
            "seconds": seconds,
            "seed": seed,
        },
    )


def replay(
    timestamps: Sequence[float],
    *,
    speed: float = 1.0,
    num_conversations: int | None = None,
    seconds: float | None = None,
) -> OpenLoop:
    """Arrivals as a trace has them, the first at 0, `speed` times as fast. Seconds, ascending."""
    if not speed > 0:
        raise ConfigError(f"trace_speed must be above 0, not {speed}", param="trace_speed")
    if num_conversations is not None or seconds is not None:
        check_limits(num_conversations, seconds)
    times = np.asarray(timestamps, dtype=np.float64)
    if len(times):
        times = (times - times[0]) / speed
    if seconds is not None:
        times = times[times < seconds]
    times = times[:num_conversations]
    return OpenLoop(
        arrivals=times,
        name="trace" if speed == 1 else f"trace, {speed:g} times as fast",
        description={"kind": "trace", "speed": speed, "seconds": seconds},
    )


def check_limits(num_conversations: int | None, seconds: float | None) -> None:
    if num_conversations is None and seconds is None:
        raise ConfigError("a load needs an end: give a number of requests, a duration or both", param="duration")
    if num_conversations is not None and num_conversations < 1:
        raise ConfigError(f"num_requests must be at least 1, not {num_conversations}", param="num_requests")
    if seconds is not None and not 0 < seconds < 1e7:
        raise ConfigError(f"duration must be a number of seconds above 0, not {seconds}", param="duration")


def _ample(expected: float) -> int:
    """More arrivals than a Poisson process with this mean has, but for once in 10^20."""
    return int(expected + 10 * expected**0.5 + 50)
