"""Service-level objectives: `ttft_p95<500ms,tpot_p95<30ms`, or a preset.

A clause serves twice. The run *meets* it if the percentile of its requests does. A request is *good* if its own value
is within the bound; requests a second that are good in all clauses are the goodput (Zhong et al. 2024, DistServe).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from sol.errors import ConfigError

Metric = Literal["ttft", "tpot", "itl", "e2e", "tps", "error_rate"]

_UNITS: Final = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "%": 0.01, "tok/s": 1.0}

_ALLOWED: Final = {
    "ttft": ("us", "µs", "ms", "s"),
    "tpot": ("us", "µs", "ms", "s"),
    "itl": ("us", "µs", "ms", "s"),
    "e2e": ("us", "µs", "ms", "s"),
    "tps": ("", "tok/s"),
    "error_rate": ("", "%"),
}

_CLAUSE: Final = re.compile(r"(ttft|tpot|itl|e2e|tps|error_rate)(?:_p(\d{1,2}(?:\.\d+)?))?(<=?|>=?)([\d.]+)(\D*)")

_FORM: Final = (
    "ttft_p95<500ms,tpot_p95<30ms: ttft, tpot, itl or e2e with a percentile and a time in us, ms or s; tps_p95>30 "
    "(a request's tokens a second); error_rate<1%"
)


@dataclass(frozen=True, slots=True)
class Clause:
    metric: Metric
    p: float | None
    """Share of requests within the bound, 0 to 1; None for an error rate."""
    bound: float
    """Seconds, tokens a second or a share."""

    @property
    def text(self) -> str:
        if self.metric == "error_rate":
            return f"error rate < {self.bound:.4g}"
        assert self.p is not None
        name = f"{self.metric.upper()} p{100 * self.p:g}"
        return f"{name} > {self.bound:g} tokens/s" if self.metric == "tps" else f"{name} < {1000 * self.bound:g} ms"

    def holds(self, value: float) -> bool:
        return value > self.bound if self.metric == "tps" else value < self.bound


@dataclass(frozen=True, slots=True)
class Slo:
    text: str
    clauses: tuple[Clause, ...]

    @property
    def of_requests(self) -> tuple[Clause, ...]:
        """Clauses that a single request can meet or miss."""
        return tuple(clause for clause in self.clauses if clause.metric != "error_rate")


def _mlperf(ttft_ms: int, tpot_ms: int) -> str:
    return f"ttft_p99<{ttft_ms}ms,tpot_p99<{tpot_ms}ms"


PRESETS: Final[Mapping[str, str]] = {
    "mlperf-llama-3.1-8b-server": _mlperf(2000, 100),
    "mlperf-llama-3.1-8b-interactive": _mlperf(500, 30),
    "mlperf-llama-2-70b-server": _mlperf(2000, 200),
    "mlperf-llama-2-70b-interactive": _mlperf(450, 40),
    "mlperf-llama-3.1-405b-server": _mlperf(6000, 175),
    "mlperf-llama-3.1-405b-interactive": _mlperf(4500, 80),
    "mlperf-deepseek-r1-server": _mlperf(2000, 80),
    "mlperf-deepseek-r1-interactive": _mlperf(1500, 15),
    "mlperf-gpt-oss-120b-server": _mlperf(3000, 80),
    "mlperf-gpt-oss-120b-interactive": _mlperf(2000, 20),
    "agent-30": "ttft_p95<15s,tps_p95>30",
    "agent-100": "ttft_p95<15s,tps_p95>100",
    "agent-300": "ttft_p95<15s,tps_p95>300",
}
"""MLPerf Inference's limits, both at the 99th percentile, and tiers of agents by tokens a second."""


def parse_slo(text: str) -> Slo:
    """Raises `ConfigError` for what is neither a preset nor clauses."""
    clauses = []
    for part in PRESETS.get(text.strip(), text).split(","):
        found = _CLAUSE.fullmatch(re.sub(r"\s", "", part))
        if found is None:
            known = ", ".join(PRESETS)
            raise ConfigError(f"slo must be like {_FORM}; or one of {known}; not {part.strip()!r}", param="slo")
        metric, percent, operator, number, unit = found.groups()
        if unit not in _ALLOWED[metric]:
            units = " or ".join(unit or "none" for unit in _ALLOWED[metric])
            raise ConfigError(f"slo: the unit of {part.strip()!r} must be {units}", param="slo")
        if (operator[0] == ">") != (metric == "tps"):
            raise ConfigError(
                f"slo: {part.strip()!r} bounds {metric} from the wrong side; tps has a least value (>), all others a "
                "greatest (<)",
                param="slo",
            )
        try:
            bound = float(number) * _UNITS[unit]
        except ValueError:
            bound = math.nan
        p = float(percent) / 100 if percent else 0.95
        if not (bound > 0 and 0 < p < 1) or (metric == "error_rate" and (percent is not None or bound > 1)):
            raise ConfigError(
                f"slo: {part.strip()!r} must have a bound above 0 and a percentile between 0 and 100 (error_rate none)",
                param="slo",
            )
        clauses.append(Clause(metric, None if metric == "error_rate" else p, bound))  # type: ignore[arg-type]
    return Slo(text.strip(), tuple(clauses))
