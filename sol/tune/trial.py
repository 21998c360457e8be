"""What a search measures, and who measures it: `Probe`, `Trial`, and the protocol of a `Runner`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

from sol.bench.metrics import SloResult
from sol.bench.slo import Slo, parse_slo
from sol.errors import ConfigError
from sol.tune.space import Config

Outcome = Literal["finished", "stopped", "misses", "crashed", "excluded", "interrupted"]
"""Of a trial.

`finished`     measured with loads of every length.
`stopped`      measured until it was clear that others do better.
`misses`       it misses the SLO with one request at a time, or at any rate worth the name.
`crashed`      it did not start, or died.
`excluded`     it was never started: a model of the machine, a crash of its like or its divergence speaks against it.
`interrupted`  it was measured in part when the search was stopped; it is tried again when the search goes on.
"""


_MOST_ERRORS: Final = 0.01


class TrialCrash(Exception):
    """The engine did not start, or died under load. The message says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What is best. Raises `ConfigError`."""

    slo: Slo
    price_per_hour: float | None = None
    """With it, the least cost per million good tokens; without it, the greatest goodput in requests a second."""
    kl_bound: float = 0.02
    """Mean Kullback-Leibler divergence from the lossless configuration, nats a token, that lossy ones may have."""
    allow_lossy: bool = False
    """Let lossy ones in whose divergence nobody can measure."""

    def __post_init__(self) -> None:
        if self.price_per_hour is not None and not 0 < self.price_per_hour < math.inf:
            raise ConfigError(
                f"price_per_hour must be a number above 0, not {self.price_per_hour}", param="price_per_hour"
            )
        if not 0 <= self.kl_bound < math.inf:
            raise ConfigError(f"kl_bound must be a number from 0, not {self.kl_bound}", param="kl_bound")

    @classmethod
    def of(cls, slo: str, **options: Any) -> Goal:
        return cls(slo=parse_slo(slo), **options)

    @property
    def least_requests(self) -> int:
        """So many must be measured for the SLO's percentiles to have a value."""
        shares = [1 - clause.p for clause in self.slo.clauses if clause.p is not None]
        return math.ceil(2 / min(shares, default=0.5) - 1e-6)

    def score(self, probe: Probe) -> float:
        """More is better: good requests a second, or good tokens for a unit of the price's currency."""
        if self.price_per_hour is None:
            return probe.goodput
        return probe.good_tokens_per_second * 3600 / self.price_per_hour

    def cost_per_million(self, probe: Probe) -> float | None:
        """Of good tokens, in the price's currency."""
        if self.price_per_hour is None or not probe.good_tokens_per_second:
            return None
        return self.price_per_hour / 3600 / probe.good_tokens_per_second * 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One load and what came of it."""

    rate: float
    """Requests a second that arrived; 0: one request at a time."""
    num_requests: int
    """That were measured."""
    meets: bool
    """Every clause of the SLO, by the percentiles' values, and at most 1% errors where no clause says otherwise."""
    goodput: float
    """Requests a second that were good in every clause."""
    good_tokens_per_second: float
    """Output tokens of those."""
    attainment: float
    """Share of requests that were good."""
    clauses: Mapping[str, float | None]
    """The SLO's percentiles, in seconds, tokens a second or a share; None: too few samples."""
    mean_e2e: float | None
    """Seconds."""
    client_limited: bool = False
    seconds: float = 0.0
    """How long it took."""

    @classmethod
    def of(
        cls,
        judged: SloResult,
        *,
        rate: float,
        seconds: float,
        error_rate: float,
        mean_e2e: float | None,
        client_limited: bool = False,
    ) -> Probe:
        """`error_rate` is a share; a load without a good request meets nothing."""
        values = {result.clause.text: result.estimate.value for result in judged.clauses}
        meets = [
            result.estimate.value is not None and result.clause.holds(result.estimate.value)
            for result in judged.clauses
        ]
        if not any(result.clause.metric == "error_rate" for result in judged.clauses):
            # Errors are in no latency: without this, a server that refuses most requests would be the fastest.
            meets.append(error_rate <= _MOST_ERRORS)
        return cls(
            rate=rate,
            num_requests=judged.attainment.n,
            meets=bool(judged.attainment.value) and all(meets),
            goodput=judged.goodput.value or 0.0,
            good_tokens_per_second=judged.good_tokens.value or 0.0,
            attainment=judged.attainment.value or 0.0,
            clauses=values,
            mean_e2e=mean_e2e,
            client_limited=client_limited,
            seconds=seconds,
        )


@dataclass(slots=True, kw_only=True)
class Trial:
    """A configuration and what is known of it."""

    number: int
    config: Config
    outcome: Outcome
    score: float = 0.0
    """`Goal.score` of `best`; 0 without it."""
    best: Probe | None = None
    """At the greatest rate that meets the SLO, with the longest loads that it was given."""
    rung: int = -1
    """Of those loads; -1: none."""
    reason: str = ""
    """Why it is not `finished`."""
    kl: float | None = None
    """Nats a token, of a lossy one that was measured."""
    probes: list[Probe] = field(default_factory=list)
    seconds: float = 0.0
    """Start, loads and stop."""

    @property
    def started(self) -> bool:
        return self.outcome != "excluded"


class Running(Protocol):
    """A server that runs a configuration."""

    async def one_at_a_time(self, num_requests: int) -> Probe: ...

    async def at_rate(self, rate: float, num_requests: int) -> Probe:
        """Poisson arrivals at `rate` a second, the same for every configuration up to that factor.

        Both raise `TrialCrash` if the server dies.
        """
        ...


class Runner(Protocol):
    """Who can start configurations."""

    @property
    def slo(self) -> Slo:
        """What its servers' loads are judged by."""
        ...

    def refuses(self, config: Config) -> str | None:
        """Why this one cannot run or cannot reach the goal, known without starting it."""
        ...

    def most(self, config: Config) -> float:
        """An upper bound of its score from a model of the machine; infinity where there is none."""
        ...

    def start(self, config: Config) -> AbstractAsyncContextManager[Running]:
        """A server, started and warm. Raises `TrialCrash` if it does not start."""
        ...

    async def divergence(self, config: Config) -> float | None:
        """Mean KL divergence from the lossless configuration, nats a token; None where nobody can measure it.

        Raises `TrialCrash` if it cannot be loaded.
        """
        ...
