"""What tokens cost at a price an hour."""

from __future__ import annotations

from dataclasses import dataclass

from sol.bench.metrics import Summary
from sol.bench.statistics import NOTHING, Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """In the price's currency, for a million tokens."""

    price_per_hour: float
    output: Estimate
    """All of the price, on output tokens alone."""
    total: Estimate
    """On input and output tokens alike."""
    good: Estimate
    """On output tokens of requests that met the SLO; nothing without one."""


def cost(summary: Summary, price_per_hour: float | None) -> Cost | None:
    """None without a price."""
    if price_per_hour is None:
        return None
    output, prompt = summary.output_tokens_per_second, summary.input_tokens_per_second
    return Cost(
        price_per_hour=price_per_hour,
        output=_per_million(price_per_hour, output),
        total=_per_million(price_per_hour, _sum(output, prompt)),
        good=NOTHING if summary.slo is None else _per_million(price_per_hour, summary.slo.good_tokens),
    )


def _per_million(price: float, tokens: Estimate) -> Estimate:
    """The interval's ends change places: many tokens are cheap ones. No upper end where there may be none at all."""

    def convert(value: float | None) -> float | None:
        return price / 3600 / value * 1e6 if value else None

    low, high = convert(tokens.high), convert(tokens.low)
    if low is None or high is None:
        low = high = None
    return Estimate(convert(tokens.value), low, high, tokens.n, tokens.n_effective)


def _sum(first: Estimate, second: Estimate) -> Estimate:
    """Of two rates that rise and fall together, so that their intervals add up."""

    def add(a: float | None, b: float | None) -> float | None:
        return None if a is None or b is None else a + b

    return Estimate(
        add(first.value, second.value), add(first.low, second.low), add(first.high, second.high), first.n,
        min(first.n_effective, second.n_effective),
    )  # fmt: skip
