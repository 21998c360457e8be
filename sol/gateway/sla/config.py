"""The section `sla` of gateway.yaml."""

from __future__ import annotations

import itertools
from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from sol.gateway.queue.config import ClassName
from sol.gateway.section import Section

_Seconds = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]


class Percentiles(Section):
    """Seconds that so many percent of requests may take at most."""

    p50: _Seconds | None = None
    p95: _Seconds | None = None
    p99: _Seconds | None = None

    @model_validator(mode="after")
    def _rise(self) -> Self:
        given = self.bounds()
        if not given:
            raise ValueError("needs p50, p95 or p99")
        if any(low > high for (_, low), (_, high) in itertools.pairwise(given)):
            raise ValueError("p50, p95 and p99 must not fall")
        return self

    def bounds(self) -> tuple[tuple[float, float], ...]:
        """(share of requests, seconds), rising."""
        pairs = ((0.5, self.p50), (0.95, self.p95), (0.99, self.p99))
        return tuple((share, seconds) for share, seconds in pairs if seconds is not None)

    def most_wanted(self) -> float:
        """The bound that most requests should keep, which a single one is compared with: p95, or the nearest to it."""
        value = self.p95 or self.p50 or self.p99
        assert value is not None
        return value


class ServiceLevel(Section):
    """What requests for a model and of a class are promised."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    model: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """None: each model, for itself."""
    class_name: ClassName | None = Field(default=None, alias="class")
    """None: each class, for itself."""
    ttft: Percentiles | None = None
    """Time to first token of streams, from the request's arrival at the gateway, its waiting included."""
    itl: Percentiles | None = None
    """Inter-token latency: of each stream the mean time between two of its tokens."""
    tokens_per_second: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None = None
    """Tokens of each answer over its whole time, its waiting included, that 95% of requests have to reach."""
    errors: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] | None = None
    """The error budget: share of requests that may fail or be refused for want of capacity."""
    deadline: _Seconds | None = None
    """An answer that cannot begin within this time is not begun: the request is refused while it waits."""

    @property
    def has_objectives(self) -> bool:
        """Whether it promises what is measured, beside a deadline."""
        return (self.ttft, self.itl, self.tokens_per_second, self.errors) != (None,) * 4

    @model_validator(mode="after")
    def _promises_something(self) -> Self:
        if not self.has_objectives and self.deadline is None:
            raise ValueError("needs ttft, itl, tokens_per_second, errors or deadline")
        return self


class SlaConfig(Section):
    levels: tuple[ServiceLevel, ...] = ()
    """Of several that fit a request, the first that names both its model and class counts, then one with its model,
    then one with its class, then one with neither."""
    fast_window: _Seconds = 60.0
    """Seconds that burn rates react within …"""
    slow_window: _Seconds = 3600.0
    """… and those over which attainment is reported."""

    @model_validator(mode="after")
    def _windows_differ(self) -> Self:
        if self.slow_window < 2 * self.fast_window:
            raise ValueError("slow_window must be at least twice fast_window")
        places = [(level.model, level.class_name) for level in self.levels]
        for place in places:
            if places.count(place) > 1:
                raise ValueError(f"levels: model {place[0]} and class {place[1]} are there twice; merge them")
        return self

    def level(self, model: str, class_name: str) -> ServiceLevel | None:
        """What a request for this model (by its own name) and of this class is promised."""
        best: tuple[int, ServiceLevel] | None = None
        for level in self.levels:
            if level.model in (None, model) and level.class_name in (None, class_name):
                fit = 2 * (level.model is not None) + (level.class_name is not None)
                if best is None or fit > best[0]:
                    best = fit, level
        return None if best is None else best[1]
